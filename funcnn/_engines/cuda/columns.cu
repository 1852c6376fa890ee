// im2col. A thread writes all taps of a pixel and channel, or of a word of channels that lie together.

struct Args {
    Count items;  // threads along x: pixels, times words of channels where those lie innermost
    Tiles tiles;  // of the pixels
    Axes axes;
    Index first;  // pixel of the image that the block begins with
    View x;       // from the block's first image on
    Columns columns;
};

__device__ inline void write_columns(const T* x, Wide* columns, const Args& args, Index pixel, int channel) {
    Count rest = Count(pixel + args.first);
    int start[RANK];
#pragma unroll
    for (int a = RANK - 1; a >= 0; --a)
        start[a] = take_digit(rest, args.tiles.axis[a]) * WINDOWS[a].stride - args.axes[a].lo;
    const int image = int(rest);  // 0, or the block begins at pixel 0
    x += image * args.x.image + channel * args.x.channel;
    columns += column_offset(args.columns, image, channel, pixel - image * args.tiles.cells);
#pragma unroll UNROLL
    for (int tap = 0; tap < TAPS; ++tap) {
        Index offset = 0;
        bool inside = true;
        int taps = tap;
#pragma unroll
        for (int a = RANK - 1; a >= 0; --a) {
            const Window window = WINDOWS[a];
            int cell = start[a] + taps % window.kernel * window.dilation;
            taps /= window.kernel;
            if (window.guarded) {
                const bool in_axis = unsigned(cell) < unsigned(args.axes[a].size);
                inside &= in_axis;
                cell = in_axis ? cell : 0;
            }
            offset += cell * args.x.axis[a];
        }
        T cell[LANES];
        Wide values[LANES];
        load_lanes<X_PACKED>(x + offset, args.x.channel, cell);
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) values[lane] = inside ? WIDEN(cell[lane]) : Wide{};
        store<LANES>(columns + slot_of(tap) * args.columns.tap, values);
    }
}

extern "C" __global__ void columns(const T* __restrict__ x, Wide* __restrict__ to, const Args args) {
    const Count item = item_of_thread();
    if (item >= args.items) return;
    if (CHANNELS_LAST) {
        Count pixel = item;
        const int channel = take_digit(pixel, args.tiles.words) * LANES;
        write_columns(x, to, args, Index(pixel), channel);
    } else {
        for (int channel = int(blockIdx.y); channel < args.tiles.channels; channel += int(gridDim.y))
            write_columns(x, to, args, Index(item), channel);
    }
}
