// Average pooling. Moves x once and y once.

struct Args {
    Count items;
    Tiles tiles;
    Axes axes;
    View x;
};

extern "C" __global__ void avg_pool(const T* __restrict__ x, T* __restrict__ y, const Args args) {
    const Count item = item_of_thread();
    if (item >= args.items) return;
    const Place place = place_of(item, args.tiles);
    Wide sum[TILE][LANES];
    fill<TILE>(sum, Wide{});
    x += place.image * args.x.image + place.channel * args.x.channel;
    each_cell(x, args.x, args.axes, place, [&](int i, int, const T(&cell)[LANES], bool inside) {
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) sum[i][lane] += inside ? WIDEN(cell[lane]) : Wide{};
    });
    T values[TILE][LANES];
    Place window = place;
#pragma unroll
    for (int i = 0; i < TILE; ++i) {
        window.cell[LAST] = place.cell[LAST] + i;
        const Real count = divisor(args.axes, window.cell);
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) values[i][lane] = NARROW(sum[i][lane] / count);
    }
    store_tile(y + offset_of(place, args.tiles), args.tiles, values);
}
