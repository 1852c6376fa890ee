// col2im as a gather: each cell of x adds up what the windows over it have for it, in one order. Where a block has but some
// pixels of an image, the sum goes on from what earlier blocks left.

struct Args {
    Count items;
    Tiles tiles;
    Axes axes;
    Index first, pixels;  // of an image's pixels those in the block
    Index accumulate;     // whether x holds a sum already
    Columns columns;
};

extern "C" __global__ void fold(const Wide* __restrict__ from, Wide* __restrict__ x, const Args args) {
    const Count item = item_of_thread();
    if (item >= args.items) return;
    const Place place = place_of(item, args.tiles);
    x += offset_of(place, args.tiles);
    Wide sum[1][LANES];
    fill<1>(sum, Wide{});
    if (args.accumulate) load_lanes<(LANES > 1)>(x, 1, sum[0]);
#pragma unroll UNROLL
    for (int j = 0; j < COVERS; ++j) {
        bool covers = true;
        int rest = j, tap = 0, taps = 1;
        Index pixel = 0, pixels = 1;
#pragma unroll
        for (int a = RANK - 1; a >= 0; --a) {
            const int count = cover_count(WINDOWS[a]);
            const Cover cover = cover_of(WINDOWS[a], args.axes[a], place.cell[a], rest % count);
            rest /= count;
            covers &= cover.covers;
            tap += cover.tap * taps;
            taps *= WINDOWS[a].kernel;
            pixel += cover.number * pixels;
            pixels *= args.axes[a].out;
        }
        pixel -= args.first;
        covers &= pixel >= 0 && pixel < args.pixels;
        Wide values[LANES];
        load_lanes<(LANES > 1)>(from + column_offset(args.columns, int(place.image), place.channel, covers ? pixel : 0) +
                                    slot_of(covers ? tap : 0) * args.columns.tap,
                                1, values);
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane)
            if (covers) sum[0][lane] += values[lane];
    }
    store_tile(x, args.tiles, sum);
}
