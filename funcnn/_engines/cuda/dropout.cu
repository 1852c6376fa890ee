// Dropout in one pass over x, y and the mask; _hash.py has the definition of the hash. What is hashed is the logical index
// of an element within its image in channels-first order, so that memory order changes nothing.

struct Args {
    Count items;
    Tiles tiles;
    unsigned seed_key, least;  // a hash that is kept is not less
    double scale;
    View x, mask;  // mask: of the backward
};

__device__ inline unsigned mix(unsigned v) {
    v = (v ^ v >> 16) * M1;
    v = (v ^ v >> 15) * M2;
    return v ^ v >> 16;
}

__device__ inline unsigned hashed(unsigned v, unsigned key) {
    v = (v ^ v >> 16) * M1 ^ key;
    v = (v ^ v >> 15) * M2;
    return v ^ v >> 16;
}

template <bool PACKED, class E> __device__ inline void load_tile(const E* from, const View& view, E (&to)[TILE][LANES]) {
    if constexpr (CHANNELS_LAST || TILE == 1) {
#pragma unroll
        for (int i = 0; i < TILE; ++i) load_lanes<PACKED>(from + i * view.axis[RANK - 1], view.channel, to[i]);
    } else {
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            E row[TILE];
            if constexpr (PACKED) {
                load<TILE>(from + lane * view.channel, row);
            } else {
#pragma unroll
                for (int i = 0; i < TILE; ++i) row[i] = from[lane * view.channel + i * view.axis[RANK - 1]];
            }
#pragma unroll
            for (int i = 0; i < TILE; ++i) to[i][lane] = row[i];
        }
    }
}

__device__ inline Index view_offset(const View& view, const Place& place) {
    Index offset = place.image * view.image + place.channel * view.channel;
#pragma unroll
    for (int axis = 0; axis < RANK; ++axis) offset += place.cell[axis] * view.axis[axis];
    return offset;
}

__device__ inline void select_tile(const T (&x)[TILE][LANES], const Keep (&keep)[TILE][LANES], T* y, const Args& args) {
    T values[TILE][LANES];
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane)
            values[i][lane] = KEEPS && keep[i][lane] ? NARROW(WIDEN(x[i][lane]) * Real(args.scale)) : T{};
    store_tile(y, args.tiles, values);
}

// step lies on the device and is read there: the host does not wait for it.
extern "C" __global__ void dropout(const T* __restrict__ x, const int* __restrict__ step, T* __restrict__ y,
                                   Keep* __restrict__ mask, const Args args) {
    const Count item = item_of_thread();
    if (item >= args.items) return;
    const Place place = place_of(item, args.tiles);
    T tile[TILE][LANES];
    load_tile<X_PACKED>(x + view_offset(args.x, place), args.x, tile);
    const unsigned first = mix(mix(args.seed_key + unsigned(*step)) + unsigned(place.image)), second = mix(first ^ SALT);
    const unsigned cells = unsigned(args.tiles.cells);
    const unsigned index = unsigned(place.channel) * cells + unsigned(cell_number(place, args.tiles)) + first;
    Keep keep[TILE][LANES];
#pragma unroll
    for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane)
            keep[i][lane] = KEEPS && hashed(index + unsigned(i) + unsigned(lane) * cells, second) >= args.least;
    const Index offset = offset_of(place, args.tiles);
    select_tile(tile, keep, y + offset, args);
    store_tile(mask + offset, args.tiles, keep);
}

extern "C" __global__ void dropout_backward(const T* __restrict__ dy, const Keep* __restrict__ mask, T* __restrict__ dx,
                                            const Args args) {
    const Count item = item_of_thread();
    if (item >= args.items) return;
    const Place place = place_of(item, args.tiles);
    T tile[TILE][LANES];
    Keep keep[TILE][LANES];
    load_tile<X_PACKED>(dy + view_offset(args.x, place), args.x, tile);
    load_tile<MASK_PACKED>(mask + view_offset(args.mask, place), args.mask, keep);
    select_tile(tile, keep, dx + offset_of(place, args.tiles), args);
}
