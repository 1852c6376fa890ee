// The divisor of an average: the window's cells that count, the declared padding among them if COUNT_PADDING. What a window
// has beyond that (ceil_mode) never counts. A window without cells has the sum 0 and any divisor.

__device__ inline int counted(const Axis& axis, int window) {
    if (!guarded(axis)) return axis.kernel;
    const int start = window * axis.stride - axis.lo;
    const int low = COUNT_PADDING ? -axis.lo : 0, high = axis.size + (COUNT_PADDING ? axis.hi : 0);
    const int first = ceil_div_from_0(low - start, axis.dilation), end = ceil_div_from_0(high - start, axis.dilation);
    const int count = (end < axis.kernel ? end : axis.kernel) - first;
    return count < 1 ? 1 : count;
}

__device__ inline Real divisor(const int (&window)[RANK]) {
    int count = 1;
#pragma unroll
    for (int a = 0; a < RANK; ++a) count *= counted(AXES[a], window[a]);
    return Real(count);
}
