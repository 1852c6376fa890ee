// Windows over the spatial axes: window o of an axis covers the cells o * stride - lo + tap * dilation, tap < kernel.

struct Axis {
    int size, kernel, stride, dilation, lo, hi, out;
};
__device__ constexpr Axis AXES[RANK] = {AXES_OF_PLAN};
[[maybe_unused]] constexpr int LAST = RANK - 1;

__device__ constexpr int span(const Axis& axis) { return axis.dilation * (axis.kernel - 1) + 1; }

// Whether some window reads padding; where none does, the tests for it are compiled away.
__device__ constexpr bool guarded(const Axis& axis) {
    return axis.lo > 0 || (axis.out - 1) * axis.stride - axis.lo + span(axis) > axis.size;
}

__device__ constexpr int ceil_div_from_0(int a, int b) { return a <= 0 ? 0 : (a + b - 1) / b; }

// How many windows may cover one cell of an axis.
__device__ constexpr int cover_count(const Axis& axis) { return (span(axis) + axis.stride - 1) / axis.stride; }

// The j-th window that may cover a cell; `covers`: it does, with `tap`.
struct Cover {
    int window, tap;
    bool covers;
};

__device__ inline Cover cover_of(const Axis& axis, int cell, int j) {
    const int window = ceil_div_from_0(cell + axis.lo - span(axis) + 1, axis.stride) + j;
    const int reach = cell + axis.lo - window * axis.stride;
    const bool covers = reach >= 0 && window < axis.out && reach % axis.dilation == 0;
    return {covers ? window : 0, covers ? reach / axis.dilation : 0, covers};
}
