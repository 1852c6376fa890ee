// Gradient of average pooling as a gather: each cell adds up dy / divisor of the windows over it, in one order.

struct Args {
    Count items;
    Tiles tiles;
    Axes axes;
    View dy;
};

extern "C" __global__ void avg_pool_backward(const T* __restrict__ dy, T* __restrict__ dx, const Args args) {
    constexpr Window last = WINDOWS[LAST];
    const Count item = item_of_thread();
    if (item >= args.items) return;
    const Place place = place_of(item, args.tiles);
    dy += place.image * args.dy.image + place.channel * args.dy.channel;
    Wide sum[TILE][LANES];
    fill<TILE>(sum, Wide{});
    each_window(args.axes, place, [&](const int(&window)[RANK], int, int start, bool there) {
        T gradient[LANES];
        load_lanes<DY_PACKED>(dy + window_offset(args.dy, window), args.dy.channel, gradient);
        const Real count = divisor(args.axes, window);
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            const Wide share = WIDEN(gradient[lane]) / count;
#pragma unroll
            for (int i = 0; i < TILE; ++i) {
                const int reach = i - start;
                if (there && reach >= 0 && reach < span(last) && reach % last.dilation == 0) sum[i][lane] += share;
            }
        }
    });
    T values[TILE][LANES];
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) values[i][lane] = NARROW(sum[i][lane]);
    store_tile(dx + offset_of(place, args.tiles), args.tiles, values);
}
