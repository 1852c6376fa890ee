// Columns: for each pixel of a block of y the cells of x that its window reads, as a matrix for cuBLAS. The block is whole
// images, or some pixels of one image from `first` on. The strides say how the matrix lies.

struct Columns {
    Index image, group, channel, tap, pixel;  // distance, in elements, from one to the next; channel: of a group
    Divisor channels;                         // of a group
};

__device__ inline Index column_offset(const Columns& columns, int image, int channel, Index pixel) {
    Count group = Count(channel);
    const int in_group = take_digit(group, columns.channels);
    return image * columns.image + Index(group) * columns.group + in_group * columns.channel + pixel * columns.pixel;
}

// Row of a tap in the matrix: as the weight has it, which a true convolution flips.
__device__ inline int slot_of(int tap) { return FLIP ? TAPS - 1 - tap : tap; }
