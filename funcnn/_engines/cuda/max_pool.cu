// Max pooling. Moves x once, y once and one byte of argmax (for up to 256 taps) per window: 2x2 windows with stride 2 on
// float32 read 16 bytes and write 5 for each.

struct Args {
    Count items;
    Tiles tiles;
    Axes axes;
    View x;
};

__device__ inline Wide lowest() {
    const Bits bits = LOWEST_BITS;
    Wide value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// NaN beats every number and no other NaN, so that the first one of a window stays.
template <class V> __device__ inline bool beats(V value, V best) {
    if constexpr (FLOATING) {
        return !(value <= best) && best == best;
    } else {
        return value > best;
    }
}

// The first tap of a window that reads a cell of the input: it wins where all cells are the lowest number of the type, and
// so padding, read as that number, never does.
__device__ inline int first_tap(const Axes& axes, const Place& place) {
    int first = 0;
#pragma unroll
    for (int a = 0; a < RANK; ++a) {
        const Window window = WINDOWS[a];
        const int before = window.guarded ? axes[a].lo - place.cell[a] * window.stride : 0;
        first = first * window.kernel + ceil_div_from_0(before, window.dilation);
    }
    return first;
}

template <bool TRAIN> __device__ inline void max_pool_tile(const T* x, T* y, Argmax* argmax, const Args& args) {
    const Count item = item_of_thread();
    if (item >= args.items) return;
    const Place place = place_of(item, args.tiles);
    Wide best[TILE][LANES];
    int winner[TILE][LANES];
    fill<TILE>(best, lowest());
    fill<TILE>(winner, first_tap(args.axes, place));
    x += place.image * args.x.image + place.channel * args.x.channel;
    each_cell(x, args.x, args.axes, place, [&](int i, int tap, const T(&cell)[LANES], bool inside) {
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            const Wide value = inside ? WIDEN(cell[lane]) : lowest();
            if (beats(value, best[i][lane])) {
                best[i][lane] = value;
                winner[i][lane] = tap;
            }
        }
    });
    T values[TILE][LANES];
    Argmax taps[TILE][LANES];
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            values[i][lane] = NARROW(best[i][lane]);
            taps[i][lane] = Argmax(winner[i][lane]);
        }
    const Index offset = offset_of(place, args.tiles);
    store_tile(y + offset, args.tiles, values);
    if (TRAIN) store_tile(argmax + offset, args.tiles, taps);
}

extern "C" __global__ void max_pool(const T* __restrict__ x, T* __restrict__ y, const Args args) {
    max_pool_tile<false>(x, y, nullptr, args);
}

extern "C" __global__ void max_pool_train(const T* __restrict__ x, T* __restrict__ y, Argmax* __restrict__ argmax,
                                          const Args args) {
    max_pool_tile<true>(x, y, argmax, args);
}
