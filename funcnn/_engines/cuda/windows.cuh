// Windows over the spatial axes: window o of an axis covers the cells o * stride - lo + tap * dilation, tap < kernel.

// guarded: whether some window reads padding; where none does, the tests for it are compiled away.
struct Window {
    int kernel, stride, dilation;
    bool guarded;
};
__device__ constexpr Window WINDOWS[RANK] = {WINDOWS_OF_PLAN};
[[maybe_unused]] constexpr int LAST = RANK - 1;

struct Axis {
    int size, lo, out;
    int first, end;  // cells that count for the divisor of an average: those of the input, or the declared padding too
};
using Axes = Axis[RANK];

__device__ constexpr int span(const Window& window) { return window.dilation * (window.kernel - 1) + 1; }

__device__ constexpr int ceil_div_from_0(int a, int b) { return a <= 0 ? 0 : (a + b - 1) / b; }

// How many windows may cover one cell of an axis.
__device__ constexpr int cover_count(const Window& window) { return (span(window) + window.stride - 1) / window.stride; }

// The j-th window that may cover a cell; `covers`: it does, with `tap`.
struct Cover {
    int number, tap;
    bool covers;
};

__device__ inline Cover cover_of(const Window& window, const Axis& axis, int cell, int j) {
    const int number = ceil_div_from_0(cell + axis.lo - span(window) + 1, window.stride) + j;
    const int reach = cell + axis.lo - number * window.stride;
    const bool covers = reach >= 0 && number < axis.out && reach % window.dilation == 0;
    return {covers ? number : 0, covers ? reach / window.dilation : 0, covers};
}
