// Gradient of max pooling as a gather: each cell asks the windows over it whether they chose it. Nothing is written twice,
// so no atomics are needed and the sums have one order.
// A cell reads dy and argmax of the ceil(span / stride) windows of each axis that may cover it, from cache but for the first
// time. For 3x3 windows with stride 2 these are 4, 20 bytes of float32 against some 9 bytes of memory that a cell moves. Caches
// deliver several times what memory does, so from about 16 windows on (5x5 with stride 1 has 25) they are the limit. A
// scatter, which reads every window once and adds to one cell, would then be better, at the price of atomics.

struct Args {
    Count items;
    Tiles tiles;
    Axes axes;
    View dy, argmax;
};

extern "C" __global__ void max_pool_backward(const T* __restrict__ dy, const Argmax* __restrict__ argmax,
                                             T* __restrict__ dx, const Args args) {
    constexpr Window last = WINDOWS[LAST];
    const Count item = item_of_thread();
    if (item >= args.items) return;
    const Place place = place_of(item, args.tiles);
    dy += place.image * args.dy.image + place.channel * args.dy.channel;
    argmax += place.image * args.argmax.image + place.channel * args.argmax.channel;
    Wide sum[TILE][LANES];
    fill<TILE>(sum, Wide(0));
    each_window(args.axes, place, [&](const int(&window)[RANK], int row, int start, bool there) {
        T gradient[LANES];
        Argmax winner[LANES];
        load_lanes<DY_PACKED>(dy + window_offset(args.dy, window), args.dy.channel, gradient);
        load_lanes<ARGMAX_PACKED>(argmax + window_offset(args.argmax, window), args.argmax.channel, winner);
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            const unsigned tap = unsigned(winner[lane]) - unsigned(row);  // on the last axis, if the window chose this row
            const bool chosen = there && tap < unsigned(last.kernel);
            const int cell = start + int(tap) * last.dilation;
#pragma unroll
            for (int i = 0; i < TILE; ++i)
                if (chosen && cell == i) sum[i][lane] += WIDEN(gradient[lane]);
        }
    });
    T values[TILE][LANES];
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) values[i][lane] = NARROW(sum[i][lane]);
    store_tile(dx + offset_of(place, args.tiles), args.tiles, values);
}
