// What all kernels share. Before it stands what the engine generates for one plan (see _source.py):
//   types      T of an array's elements, Wide of sums, Real of a component of Wide, Index of offsets (in elements) and
//              Count, the unsigned type of the same size;
//   constants  RANK spatial axes, CHANNELS, CHANNELS_LAST (whether they lie innermost in memory), and the part of an array
//              that one thread writes: TILE cells of the last axis times LANES channels. TILES: tiles along each axis.
// All sizes but that of the batch are constants, so that the compiler turns divisions by them into multiplications. Any
// input is read by strides; what a kernel writes is contiguous in the order that CHANNELS_LAST says.

template <int BYTES> struct Word;
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned int; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

// COUNT neighbours in memory, by words of up to 16 bytes, to which the address must be aligned.
template <int COUNT, class E> __device__ inline void load(const E* from, E (&to)[COUNT]) {
    constexpr int BYTES = COUNT * sizeof(E) < 16 ? COUNT * sizeof(E) : 16;
    using W = typename Word<BYTES>::type;
#pragma unroll
    for (int i = 0; i < int(COUNT * sizeof(E) / BYTES); ++i) {
        const W word = reinterpret_cast<const W*>(from)[i];
        memcpy(&to[i * (BYTES / int(sizeof(E)))], &word, BYTES);
    }
}

template <int COUNT, class E> __device__ inline void store(E* to, const E (&from)[COUNT]) {
    constexpr int BYTES = COUNT * sizeof(E) < 16 ? COUNT * sizeof(E) : 16;
    using W = typename Word<BYTES>::type;
#pragma unroll
    for (int i = 0; i < int(COUNT * sizeof(E) / BYTES); ++i) {
        W word;
        memcpy(&word, &from[i * (BYTES / int(sizeof(E)))], BYTES);
        reinterpret_cast<W*>(to)[i] = word;
    }
}

// Strides of an array, in elements.
struct View {
    Index image, channel, axis[RANK];
};

// A channel of each of LANES neighbours; PACKED: they are one word of memory.
template <bool PACKED, class E> __device__ inline void load_lanes(const E* from, Index channel, E (&to)[LANES]) {
    if constexpr (PACKED) {
        load<LANES>(from, to);
    } else {
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) to[lane] = from[lane * channel];
    }
}

// The tile of a thread: its image, first channel and first cell.
struct Place {
    Index image;
    int channel, cell[RANK];
};

__device__ inline Count item_of_thread() { return Count(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ inline Place place_of(Count item) {
    Place place;
    if (CHANNELS_LAST) {
        place.channel = int(item % (CHANNELS / LANES)) * LANES;
        item /= CHANNELS / LANES;
    }
#pragma unroll
    for (int axis = RANK - 1; axis >= 0; --axis) {
        place.cell[axis] = int(item % TILES[axis]);
        item /= TILES[axis];
    }
    place.cell[RANK - 1] *= TILE;
    if (!CHANNELS_LAST) {
        place.channel = int(item % (CHANNELS / LANES)) * LANES;
        item /= CHANNELS / LANES;
    }
    place.image = Index(item);
    return place;
}

// Of a cell among the cells of an image's channel, in row order.
__device__ inline Index cell_number(const int (&cell)[RANK]) {
    Index number = 0;
#pragma unroll
    for (int axis = 0; axis < RANK; ++axis) number = number * (axis < RANK - 1 ? TILES[axis] : TILES[axis] * TILE) + cell[axis];
    return number;
}

__device__ inline Index offset_of(const Place& place) {
    const Index cell = cell_number(place.cell);
    return CHANNELS_LAST ? (place.image * CELLS + cell) * CHANNELS + place.channel
                         : (place.image * CHANNELS + place.channel) * CELLS + cell;
}

// Write a tile of an array that is contiguous, `to` being its place there.
template <class E> __device__ inline void store_tile(E* to, const E (&tile)[TILE][LANES]) {
    if (CHANNELS_LAST) {
#pragma unroll
        for (int i = 0; i < TILE; ++i) store<LANES>(to + Index(i) * CHANNELS, tile[i]);
    } else {
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            E row[TILE];
#pragma unroll
            for (int i = 0; i < TILE; ++i) row[i] = tile[i][lane];
            store<TILE>(to + Index(lane) * CELLS, row);
        }
    }
}

template <int COUNT, class E> __device__ inline void fill(E (&to)[COUNT][LANES], E value) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) to[i][lane] = value;
}

template <class R> struct alignas(2 * sizeof(R)) Complex {
    R re, im;
    __device__ Complex& operator+=(const Complex& other) {
        re += other.re;
        im += other.im;
        return *this;
    }
    __device__ Complex operator*(R factor) const { return {re * factor, im * factor}; }
    __device__ Complex operator/(R divisor) const { return {re / divisor, im / divisor}; }
};
