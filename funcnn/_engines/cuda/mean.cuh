// The divisor of an average: the window's cells that count. What a window has beyond the declared padding (ceil_mode) never
// does. A window without cells has the sum 0 and any divisor.

__device__ inline int counted(const Window& window, const Axis& axis, int number) {
    if (!window.guarded) return window.kernel;
    const int start = number * window.stride - axis.lo;
    const int first = ceil_div_from_0(axis.first - start, window.dilation);
    const int end = ceil_div_from_0(axis.end - start, window.dilation);
    const int count = (end < window.kernel ? end : window.kernel) - first;
    return count < 1 ? 1 : count;
}

__device__ inline Real divisor(const Axes& axes, const int (&window)[RANK]) {
    int count = 1;
#pragma unroll
    for (int a = 0; a < RANK; ++a) count *= counted(WINDOWS[a], axes[a], window[a]);
    return Real(count);
}
