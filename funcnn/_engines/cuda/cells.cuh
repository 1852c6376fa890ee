// The walk of a pool over the cells of a tile's windows.
// A cell or window that is not there is read at place 0 instead and then not used: straight-line code, in which the loads
// of a whole window are in flight together, where a branch for each of them would wait for one after the other.

// visit(window of the tile, tap, a cell of LANES channels, whether it is a cell of the input) for the taps in row order.
// x: first channel of the tile. ROW_PACKED: windows lie side by side on the last axis, as 2x2 ones with stride 2 do, and a
// row of them is one aligned word. Otherwise a tile is one window.
template <class Visit>
__device__ inline void each_cell(const T* x, const View& view, const Axes& axes, const Place& place, Visit visit) {
    constexpr Window last = WINDOWS[LAST];
#pragma unroll UNROLL_ROWS
    for (int outer = 0; outer < OUTER_TAPS; ++outer) {
        const T* row = x;
        bool row_inside = true;
        int taps = outer;
#pragma unroll
        for (int a = LAST - 1; a >= 0; --a) {
            const Window window = WINDOWS[a];
            int cell = place.cell[a] * window.stride - axes[a].lo + taps % window.kernel * window.dilation;
            taps /= window.kernel;
            if (window.guarded) {
                const bool inside = unsigned(cell) < unsigned(axes[a].size);
                row_inside &= inside;
                cell = inside ? cell : 0;
            }
            row += cell * view.axis[a];
        }
        const int start = place.cell[LAST] * last.stride - axes[LAST].lo;
        if constexpr (ROW_PACKED) {
            T cells[LANES][TILE * last.kernel];
#pragma unroll
            for (int lane = 0; lane < LANES; ++lane) load<TILE * last.kernel>(row + start + lane * view.channel, cells[lane]);
#pragma unroll
            for (int i = 0; i < TILE * last.kernel; ++i) {
                T cell[LANES];
#pragma unroll
                for (int lane = 0; lane < LANES; ++lane) cell[lane] = cells[lane][i];
                visit(i / last.kernel, outer * last.kernel + i % last.kernel, cell, row_inside);
            }
        } else {
#pragma unroll UNROLL_TAPS
            for (int tap = 0; tap < last.kernel; ++tap) {
                int at = start + tap * last.dilation;
                bool inside = row_inside;
                if (last.guarded) {
                    const bool in_row = unsigned(at) < unsigned(axes[LAST].size);
                    inside &= in_row;
                    at = in_row ? at : 0;
                }
                T cell[LANES];
                load_lanes<X_PACKED>(row + at * view.axis[LAST], view.channel, cell);
                visit(0, outer * last.kernel + tap, cell, inside);
            }
        }
    }
}
