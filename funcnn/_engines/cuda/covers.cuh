// The walk of a pool's gradient over the windows that cover the cells of a tile; see cells.cuh for what is not there.

__device__ inline Index window_offset(const View& view, const int (&window)[RANK]) {
    Index offset = 0;
#pragma unroll
    for (int axis = 0; axis < RANK; ++axis) offset += window[axis] * view.axis[axis];
    return offset;
}

// visit(window, its first tap that can lie in the tile's row, cell of the tile that this window's tap 0 on the last axis
// is, whether it is there) for all windows that cover cells of a tile, in row order of the windows.
template <class Visit> __device__ inline void each_window(const Axes& axes, const Place& place, Visit visit) {
    constexpr Window last = WINDOWS[LAST];
#pragma unroll UNROLL_ROWS
    for (int outer = 0; outer < OUTER_COVERS; ++outer) {
        int window[RANK], rest = outer, tap = 0, taps = last.kernel;
        bool covers = true;
#pragma unroll
        for (int a = LAST - 1; a >= 0; --a) {
            const int count = cover_count(WINDOWS[a]);
            const Cover cover = cover_of(WINDOWS[a], axes[a], place.cell[a], rest % count);
            rest /= count;
            covers &= cover.covers;
            window[a] = cover.number;
            tap += cover.tap * taps;
            taps *= WINDOWS[a].kernel;
        }
        const int cell = place.cell[LAST] + axes[LAST].lo;
        const int first = ceil_div_from_0(cell - span(last) + 1, last.stride);
#pragma unroll UNROLL_TAPS
        for (int j = 0; j < TILE_COVERS; ++j) {
            const int o = first + j;
            const bool there = o < axes[LAST].out && o * last.stride < cell + TILE;
            window[LAST] = there ? o : 0;
            visit(window, tap, o * last.stride - cell, covers && there);
        }
    }
}
