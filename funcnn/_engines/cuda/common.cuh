// What all kernels share. Before it stands what the engine generates (see _kernels.py), all that gives code its shape:
//   types      T of an array's elements, Wide of sums, Real of a component of Wide, Index of offsets (in elements) and
//              Count, the unsigned type of the same size;
//   constants  RANK spatial axes, CHANNELS_LAST (whether channels lie innermost in memory), and the part of an array that
//              one thread writes: TILE cells of the last axis times LANES channels.
// Sizes are arguments, so that one compiled kernel serves them all. Any input is read by strides; what a kernel writes is
// contiguous in the order that CHANNELS_LAST says.

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

// Division by a number that comes with the launch: the high half of a product and a shift, exact for the numbers below 2^31
// that 32 bits count (Granlund and Montgomery, Division by Invariant Integers using Multiplication, PLDI 1994).
struct Divisor {
    Count divisor;
    unsigned multiplier, shift;
};

__device__ inline Count quotient(Count number, const Divisor& by) {
    if (sizeof number > 4) return number / by.divisor;
    return Count(static_cast<unsigned long long>(2 * number) * by.multiplier >> 32) >> by.shift;
}

// Takes the last digit off a number whose digits count up to `base` each.
__device__ inline int take_digit(Count& number, const Divisor& base) {
    const Count rest = quotient(number, base), digit = number - rest * base.divisor;
    number = rest;
    return int(digit);
}

// An array in tiles: the cells of a channel, LANES channels at a time, and tiles along each axis.
struct Tiles {
    Index channels, cells;
    Divisor words, axis[RANK];
};

// The tile of a thread: its image, first channel and first cell.
struct Place {
    Index image;
    int channel, cell[RANK];
};

__device__ inline Count item_of_thread() { return Count(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ inline Place place_of(Count item, const Tiles& tiles) {
    Place place;
    if (CHANNELS_LAST) place.channel = take_digit(item, tiles.words) * LANES;
#pragma unroll
    for (int axis = RANK - 1; axis >= 0; --axis) place.cell[axis] = take_digit(item, tiles.axis[axis]);
    place.cell[RANK - 1] *= TILE;
    if (!CHANNELS_LAST) place.channel = take_digit(item, tiles.words) * LANES;
    place.image = Index(item);
    return place;
}

// Of a cell among the cells of an image's channel, in row order.
__device__ inline Index cell_number(const Place& place, const Tiles& tiles) {
    Index number = 0;
#pragma unroll
    for (int axis = 0; axis < RANK; ++axis)
        number = number * Index(tiles.axis[axis].divisor) * (axis < RANK - 1 ? 1 : TILE) + place.cell[axis];
    return number;
}

__device__ inline Index offset_of(const Place& place, const Tiles& tiles) {
    const Index cell = cell_number(place, tiles);
    return CHANNELS_LAST ? (place.image * tiles.cells + cell) * tiles.channels + place.channel
                         : (place.image * tiles.channels + place.channel) * tiles.cells + cell;
}

// Write a tile of an array that is contiguous, `to` being its place there.
template <class E> __device__ inline void store_tile(E* to, const Tiles& tiles, const E (&tile)[TILE][LANES]) {
    if (CHANNELS_LAST) {
#pragma unroll
        for (int i = 0; i < TILE; ++i) store<LANES>(to + i * tiles.channels, tile[i]);
    } else {
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            E row[TILE];
#pragma unroll
            for (int i = 0; i < TILE; ++i) row[i] = tile[i][lane];
            store<TILE>(to + lane * tiles.cells, row);
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
