"""Pools: the tiles that the kernels work in, chosen by sizes, memory order and alignment of the arrays at hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from funcnn._engines import _gpu
from funcnn._engines._gpu import Array
from funcnn._engines._order import LAST, memory_order
from funcnn._engines._protocol import AvgPoolPlan, MaxPoolPlan
from funcnn._engines.cuda._kernels import (
    C_TYPES,
    ITEMSIZE,
    WORD,
    Launch,
    Tiling,
    View,
    aligned,
    axis_sizes,
    dense_view,
    dtype_types,
    empty_in_order,
    lanes_of,
    prepared,
    readable,
    view_of,
    wide,
    window_rows,
)
from funcnn._spec import COMPLEX_DTYPES, FLOAT_DTYPES, AvgPoolSpec, Axis, MaxPoolSpec, ceil_div

__all__ = ["CudaAvgPool", "CudaMaxPool"]

# Results that one thread holds in registers: enough loads in flight, and no fewer threads for want of registers.
TILE_RESULTS = 16
# Cells that a thread's code reads without a loop; beyond, code grows and the loop costs little.
UNROLLED_CELLS = 256
# Planes that a thread of a channels-first array works on: the arithmetic of places is done once for them.
PLANES = 4
LAUNCHES = 64  # prepared, of one plan: (batch, strides) that come in turns


class _Pool:
    """What both pools share: tiles, unrolling, prepared launches."""

    spec: Any
    name: str
    types: dict[str, str]
    constants: dict[str, Any]

    def _start(self) -> None:
        """Compile for arrays as they mostly come, so that a source that does not compile is an error of init."""
        spec = self.spec
        self._windows = {"WINDOWS_OF_PLAN": window_rows(spec.axes)}
        self._members = (axis_sizes(spec.axes, isinstance(spec, AvgPoolSpec) and spec.count_include_pad),)
        self._forward: Callable[..., Launch] = lru_cache(LAUNCHES)(self._prepare_forward)
        self._backward: Callable[..., Launch] = lru_cache(LAUNCHES)(self._prepare_backward)
        if not spec.channels:
            return
        x, y = (dense_view((1, *shape), ITEMSIZE[spec.dtype], spec.layout) for shape in (spec.x_shape, spec.y_shape))
        self._forward(1, spec.layout, x)
        if spec.dtype not in FLOAT_DTYPES + COMPLEX_DTYPES:
            return
        winners = [y._replace(itemsize=ITEMSIZE[spec.argmax_dtype])] if isinstance(spec, MaxPoolSpec) else []
        self._backward(1, spec.layout, y, *winners)

    def _prepare_forward(self, n: int, order: str, x: View) -> Launch:
        spec = self.spec
        tiling, row_packed = _forward_tiling(spec, order, x)
        constants = {
            **self._windows,
            **self.constants,
            "ROW_PACKED": row_packed,
            "X_PACKED": _packed(tiling, x),
            "OUTER_TAPS": math.prod(spec.kernel[:-1]),
            **_unrolling(math.prod(spec.kernel[:-1]), spec.kernel[-1], tiling.lanes * tiling.tile),
        }
        return prepared(self.name, self.types, constants, self._members, tiling, n, (((n, *spec.x_shape), x.strides),))

    def _prepare_backward(self, n: int, order: str, *views: View) -> Launch:
        spec = self.spec
        tiling = _backward_tiling(spec, order, views[0].itemsize)
        outer = math.prod(ceil_div(a.span, a.stride) for a in spec.axes[:-1])
        covers = _tile_covers(spec.axes[-1], tiling.tile)
        constants = {
            **self._windows,
            **self.constants,
            **{f"{name}_PACKED": _packed(tiling, view) for name, view in zip(("DY", "ARGMAX"), views, strict=False)},
            "OUTER_COVERS": outer,
            "TILE_COVERS": covers,
            **_unrolling(outer, covers, tiling.lanes * tiling.tile),
        }
        shape = (n, *spec.y_shape)
        arrays = tuple((shape, view.strides) for view in views)
        return prepared(f"{self.name}_backward", self.types, constants, self._members, tiling, n, arrays)


class CudaMaxPool(_Pool, MaxPoolPlan):
    """max_pool for CuPy arrays."""

    engine = "cuda"
    name = "max_pool"

    def choose_algorithm(self) -> str:
        spec: MaxPoolSpec = self.spec
        bits = _lowest_bits(wide(spec.dtype))
        self.types = {**dtype_types(spec.dtype), "Argmax": C_TYPES[spec.argmax_dtype], "Bits": C_TYPES[bits.dtype.name]}
        self.constants = {"FLOATING": spec.dtype in FLOAT_DTYPES, "LOWEST_BITS": f"{bits:#x}ull"}
        self._start()
        return "direct"

    def forward(self, x: Array, train: bool) -> tuple[Array, Array | None]:
        spec = self.spec
        with _gpu.on_device(_gpu.device_of(x)):
            order = memory_order(x, spec.layout)
            shape = (x.shape[0], *spec.y_shape)
            y = empty_in_order(shape, spec.dtype, order)
            argmax = empty_in_order(shape, spec.argmax_dtype, order) if train else None
            if y.size:
                x = readable(x, spec.layout)
                launch = self._forward(x.shape[0], order, view_of(x))
                if argmax is None:
                    launch("max_pool", x, y)
                else:
                    launch("max_pool_train", x, y, argmax)
        return y, argmax

    def backward(self, dy: Array, argmax: Array) -> Array:
        spec = self.spec
        with _gpu.on_device(_gpu.device_of(dy)):
            order = memory_order(dy, spec.layout)
            dx = empty_in_order((dy.shape[0], *spec.x_shape), spec.dtype, order)
            if dx.size:
                dy, argmax = readable(dy, spec.layout), readable(argmax, spec.layout)
                launch = self._backward(dy.shape[0], order, view_of(dy), view_of(argmax))
                launch("max_pool_backward", dy, argmax, dx)
        return dx


class CudaAvgPool(_Pool, AvgPoolPlan):
    """avg_pool for CuPy arrays."""

    engine = "cuda"
    name = "avg_pool"

    def choose_algorithm(self) -> str:
        spec: AvgPoolSpec = self.spec
        self.types = dtype_types(spec.dtype)
        self.constants = {}
        self._start()
        return "direct"

    def forward(self, x: Array) -> Array:
        spec = self.spec
        with _gpu.on_device(_gpu.device_of(x)):
            order = memory_order(x, spec.layout)
            y = empty_in_order((x.shape[0], *spec.y_shape), spec.dtype, order)
            if y.size:
                x = readable(x, spec.layout)
                self._forward(x.shape[0], order, view_of(x))("avg_pool", x, y)
        return y

    def backward(self, dy: Array) -> Array:
        spec = self.spec
        with _gpu.on_device(_gpu.device_of(dy)):
            order = memory_order(dy, spec.layout)
            dx = empty_in_order((dy.shape[0], *spec.x_shape), spec.dtype, order)
            if dx.size:
                dy = readable(dy, spec.layout)
                self._backward(dy.shape[0], order, view_of(dy))("avg_pool_backward", dy, dx)
        return dx


def _lowest_bits(dtype: str) -> Any:
    """Bits of the lowest number of a real dtype: C++ has no word for infinity without a header."""
    kind = np.dtype(dtype)
    lowest = -math.inf if kind.kind == "f" else 0 if kind.kind == "b" else np.iinfo(kind).min
    return np.asarray(lowest, kind).view(f"u{kind.itemsize}")[()]


# ---- tiles -----------------------------------------------------------------------------------------------------------


def _packed(tiling: Tiling, view: View) -> bool:
    """Whether the lanes of a thread are one word of an input."""
    return tiling.order == LAST and tiling.lanes > 1 and aligned(view, 1, tiling.lanes)


def _forward_tiling(spec: Any, order: str, x: View) -> tuple[Tiling, bool]:
    """Tiles of y, and whether a row of the windows of a tile is one word of x.

    Channels-last: a word of channels. Channels-first: a pixel of several planes; where windows lie side by side, as 2x2
    ones with stride 2 do, as many windows as one word has: 4 halves at a time, where a load of each would be 2 bytes.
    """
    if order == LAST:
        return Tiling(order, spec.channels, spec.y_shape[1:], lanes_of(spec.channels, WORD // x.itemsize), 1), False
    last = spec.axes[-1]
    tile = _row_of_windows(last, x)
    lanes = lanes_of(spec.channels, min(PLANES, TILE_RESULTS // max(tile, 1)))
    return Tiling(order, spec.channels, spec.y_shape[1:], lanes, max(tile, 1)), tile > 0


def _row_of_windows(last: Axis, x: View) -> int:
    """How many windows one word of x holds, if windows lie side by side without padding; else 0."""
    adjacent = (
        last.kernel == last.stride and last.dilation == 1 and last.lo == 0 and last.out * last.kernel <= last.size
    )
    if not adjacent or last.kernel & (last.kernel - 1):
        return 0
    tile = lanes_of(last.out, WORD // (x.itemsize * last.kernel))
    while tile and tile * last.kernel * x.itemsize <= WORD:
        if aligned(x, len(x.strides) - 1, tile * last.kernel):
            return tile if tile * last.kernel > 1 else 0
        tile //= 2
    return 0


def _backward_tiling(spec: Any, order: str, itemsize: int) -> Tiling:
    """Tiles of dx: a word of channels of the cells of one stride, or a word of cells of several planes.

    Cells of one tile share the windows that they read.
    """
    last = spec.axes[-1]
    if order == LAST:
        lanes = lanes_of(spec.channels, WORD // itemsize)
        tile = 2 if last.stride % 2 == 0 and last.size % 2 == 0 and 2 * lanes <= TILE_RESULTS else 1
    else:
        tile = lanes_of(last.size, WORD // itemsize)
        lanes = lanes_of(spec.channels, min(PLANES, TILE_RESULTS // tile))
    return Tiling(order, spec.channels, spec.x_shape[1:], lanes, tile)


def _tile_covers(axis: Axis, tile: int) -> int:
    """Most windows that cover some cell of one tile of an axis of any size."""
    # Where tiles begin in the pattern that repeats with every stride; the padding is all that it depends on beside.
    cells = range(axis.lo, axis.lo + tile * axis.stride, tile)
    return max((cell + tile - 1) // axis.stride - ceil_div(cell - axis.span + 1, axis.stride) + 1 for cell in cells)


def _unrolling(rows: int, taps: int, results: int) -> dict[str, int]:
    """How far the loops over rows and over the cells of a row are unrolled, for a number of results at a time."""
    most = max(1, UNROLLED_CELLS // results)
    return {"UNROLL_ROWS": max(1, min(rows, most // taps)), "UNROLL_TAPS": min(taps, most)}
