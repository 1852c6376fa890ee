"""Winograd's minimal filtering F(2 x 2, 3 x 3), channels-last, for `numerics="fast"`.

Four outputs of a 3 x 3 kernel take 16 multiplications in place of 36: y = A^T ((G w G^T) * (B^T x B)) A for every square of
4 x 4 cells, summed over channels before the last step (Winograd, "Arithmetic Complexity of Computations", 1980; Lavin and Gray,
"Fast Algorithms for Convolutional Neural Networks", 2016, section 4.1). The 16 products are sums over channels, one matrix
product each: a convolution of single taps with 16 groups, whose pixels are the squares. A number that is not finite spreads
over all four outputs of a square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from funcnn._engines._order import LAST, Array
from funcnn._engines._threads import ranges, run_all
from funcnn._engines.jit._dense import Dense
from funcnn._engines.jit._ir import (
    constant,
    element,
    entry_of,
    first_lanes,
    gathered,
    masked_load,
    masked_store,
    plain_store,
)
from funcnn._engines.jit._kernels import kernel, njit
from funcnn._engines.jit._simd import (
    address,
    table,
)
from funcnn._engines.jit._view import address_of, steps_of
from funcnn._engines.jit._walk import Pass
from funcnn._scratch import scratch
from funcnn._spec import FLOAT_DTYPES, ConvSpec

__all__ = ["Winograd", "fits"]

# Numbers of a square.
SQUARE = 16
# Where it wins. The transforms of cells are work for each channel, not for each pair of channels; those of weights are work for
# each pair, to be shared by many squares.
LEAST_CHANNELS, MOST_PAIRS, LEAST_SQUARES = 96, 1 << 16, 256
# Of the transformed squares that are multiplied together: they and their products stay in the L2 cache.
SQUARES_BYTES = 1 << 20


def fits(spec: ConvSpec, dtype: str) -> bool:
    """Whether the convolution and its adjoint can go by squares."""
    return (
        dtype in FLOAT_DTYPES
        and spec.groups == 1
        and min(spec.inputs, spec.outputs) >= LEAST_CHANNELS
        and spec.inputs * spec.outputs <= MOST_PAIRS
        and [(a.kernel, a.stride, a.dilation) for a in spec.axes] == [(3, 1, 1)] * 2
    )


class Winograd(Dense):
    """Convolutions of 3 x 3 by squares where channels lie innermost, by tiles elsewhere."""

    def __init__(self, spec: ConvSpec, dtype: str, threads: int) -> None:
        super().__init__(spec, dtype, threads)
        self.to_squares, self.from_squares = kernel(transform_cells, dtype), kernel(transform_products, dtype)
        self.pack_squares = kernel(transform_weights, dtype, self.tile[LAST].nv)

    def _convolve(self, walks: Pass, x: Array, weight: Array, bias: Array, y: Array, order: str) -> None:
        innermost = x.strides[1] == y.strides[1] == self.item
        squares = len(x) * math.prod(-(-walk.windows // 2) for walk in walks)
        if order == LAST and innermost and squares >= LEAST_SQUARES:
            self._convolve_squares(walks, x, weight[0], bias, y)
        else:
            super()._convolve(walks, x, weight, bias, y, order)

    def _convolve_squares(self, walks: Pass, x: Array, weight: Array, bias: Array, y: Array) -> None:
        """weight (M, C, 3, 3)."""
        outputs, channels = weight.shape[:2]
        _, h, w = walks
        wide = self.tile[LAST].nv * self.lanes
        tiles = -(-outputs // wide)
        parts = self._parts(y.size * weight[0].size)
        packed = self._packed_squares(walks, weight, tiles, wide, parts)
        nothing = np.zeros(max(SQUARE * tiles * wide, channels), self.dtype)
        at, to = steps_of(x), steps_of(y)
        across = -(-w.windows // 2)
        rows = max(1, min(-(-h.windows // 2), SQUARES_BYTES // (across * SQUARE * max(channels, outputs) * self.item)))
        jobs = [(n, part) for n in range(len(x)) for part in ranges(-(-h.windows // 2), rows)]
        cells = np.array([(h.size, h.start, at.h), (w.size, w.start, at.w)])
        places = np.array([(h.windows, 0, to.h), (w.windows, 0, to.w)])
        single, x_at, y_at = np.zeros(1, int), address_of(x), address_of(y)
        multiply = self.convolve_last[self.tile[LAST].nv]

        def task(part: tuple[int, int]) -> None:
            # Square by square for each of the 16: numbers of neighbouring squares lie a few lines apart, not a page.
            v = scratch("squares", (SQUARE, rows * across * channels + self.lanes), self.dtype)
            m = scratch("products", (SQUARE, rows * across * outputs + self.lanes), self.dtype)
            dump = scratch("dump", (max(wide, outputs),), self.dtype)
            counter = np.zeros(1, int)
            v_at, m_at, dump_at, zeros = (address_of(a) for a in (v, m, dump, nothing))
            for n, (r0, r1) in jobs[slice(*part)]:
                squares = (r1 - r0) * across
                self.to_squares(x_at + n * at.n, cells, r0, r1, across, channels, zeros, v_at, v.strides[0])
                job, _ = _job(squares, channels * self.item, outputs * self.item)
                counter[0] = 0
                multiply(
                    SQUARE, job, address_of(counter), v_at, v.strides[0], single, single, channels, 0, 0,
                    address_of(packed), outputs, m_at, m.strides[0], 0, zeros, zeros, dump_at,
                )  # fmt: skip
                self.from_squares(
                    m_at, m.strides[0], places, r0, r1, across, outputs, address_of(bias), dump_at, y_at + n * to.n
                )

        run_all(task, ranges(len(jobs), -(-len(jobs) // (2 * parts))), parts)

    def _packed_squares(self, walks: Pass, weight: Array, tiles: int, wide: int, parts: int) -> Array:
        """weight (M, C, 3, 3) transformed, as a tile reads it: (16, tile, C, NR)."""
        outputs, channels = weight.shape[:2]
        packed = scratch("weights", (SQUARE, tiles, channels, wide), self.dtype)
        m_step, c_step, *k_steps = weight.strides
        taps = np.add.outer(
            *(np.array(walk.taps) * step for walk, step in zip(walks[1:], k_steps, strict=True))
        ).reshape(-1)

        def task(part: tuple[int, int]) -> None:
            self.pack_squares(address_of(weight), m_step, c_step, taps, outputs, channels, address_of(packed), *part)

        run_all(task, ranges(channels, -(-channels // parts)), parts)
        return packed


@lru_cache(1024)
def _job(count: int, x_step: int, y_step: int) -> tuple[Array, Array]:
    """Squares side by side as a job of `convolve_last`, and its table of pixels."""
    pixels = np.multiply.outer([x_step, y_step, 0], np.arange(count))
    return np.array([(0, 0, address_of(pixels), count)]), pixels


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _for_both(values: list[list[Any]], along: Any) -> list[list[Any]]:
    """A transform of vectors along the columns of a matrix and then along its rows."""
    columns = [along(column) for column in zip(*values, strict=True)]
    return [along(row) for row in zip(*columns, strict=True)]


@intrinsic(prefer_literal=True)
def _cells_transformed(
    typingctx: Any, cells: Any, shift: Any, count: Any, to: Any, step: Any, code: Any, lanes: Any
) -> Any:
    """B^T d B of 4 x 4 vectors d at addresses cells[i] + shift, written `step` bytes apart; the first `count` lanes."""
    number, n = element(code.literal_value), lanes.literal_value
    vector = ir.VectorType(number, n)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cells, shift, count, to, step = args[:5]
        mask = first_lanes(builder, count, n)

        def along(d: Sequence[Any]) -> list[Any]:
            add, sub = builder.fadd, builder.fsub
            return [sub(d[0], d[2]), add(d[1], d[2]), sub(d[2], d[1]), sub(d[1], d[3])]

        places = [builder.add(entry_of(builder, cells, constant(i)), shift) for i in range(SQUARE)]
        d = [masked_load(builder, place, vector, mask) for place in places]
        results = _for_both([d[4 * i : 4 * i + 4] for i in range(4)], along)
        for i, value in enumerate(v for row in results for v in row):
            masked_store(builder, builder.add(to, builder.mul(step, constant(i))), value, mask)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5, code, lanes), codegen


@intrinsic(prefer_literal=True)
def _products_transformed(
    typingctx: Any, m: Any, step: Any, count: Any, bias: Any, to: Any, shift: Any, code: Any, lanes: Any
) -> Any:  # fmt: skip
    """A^T m A + bias of 4 x 4 vectors m that lie `step` bytes apart, written to addresses to[i] + shift of 2 x 2 vectors."""
    number, n = element(code.literal_value), lanes.literal_value
    vector = ir.VectorType(number, n)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        m, step, count, bias, to, shift = args[:6]
        mask = first_lanes(builder, count, n)

        def along(v: Sequence[Any]) -> list[Any]:
            add, sub = builder.fadd, builder.fsub
            return [add(v[0], add(v[1], v[2])), sub(sub(v[1], v[2]), v[3])]

        places = [builder.add(m, builder.mul(step, constant(i))) for i in range(SQUARE)]
        values = [masked_load(builder, place, vector, mask) for place in places]
        results = _for_both([values[4 * i : 4 * i + 4] for i in range(4)], along)
        start = masked_load(builder, bias, vector, mask)
        for i, value in enumerate(v for row in results for v in row):
            place = builder.add(entry_of(builder, to, constant(i)), shift)
            masked_store(builder, place, builder.fadd(value, start), mask)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6, code, lanes), codegen


@intrinsic(prefer_literal=True)
def _weights_transformed(
    typingctx: Any, start: Any, taps: Any, step: Any, count: Any, to: Any, to_step: Any, code: Any, lanes: Any
) -> Any:  # fmt: skip
    """G g G^T of 3 x 3 vectors g: lanes of tap i lie at start + taps[i], `step` bytes apart; written `to_step` bytes apart."""
    number, n = element(code.literal_value), lanes.literal_value
    vector = ir.VectorType(number, n)
    half = ir.Constant(vector, [0.5] * n)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start, taps, step, count, to, to_step = args[:6]

        def along(g: Sequence[Any]) -> list[Any]:
            add, sub, mul = builder.fadd, builder.fsub, builder.fmul
            outer = add(g[0], g[2])
            return [g[0], mul(half, add(outer, g[1])), mul(half, sub(outer, g[1])), g[2]]

        places = [builder.add(start, entry_of(builder, taps, constant(i))) for i in range(9)]
        g = [gathered(builder, place, step, count, vector) for place in places]
        results = _for_both([g[3 * i : 3 * i + 3] for i in range(3)], along)
        for i, value in enumerate(v for row in results for v in row):
            plain_store(builder, builder.add(to, builder.mul(to_step, constant(i))), value)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6, code, lanes), codegen


def transform_cells(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: squares of cells of rows r0 .. r1 of squares of an image, transformed: (16, square, C)."""

    @njit("void(int64, int64[:, ::1], int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
    def transform(
        x: int, axes: Any, r0: int, r1: int, across: int, channels: int, zeros: int, to: int, step: int
    ) -> None:  # fmt: skip
        """axes: (cells, cell of the first tap of window 0, bytes from cell to cell) of h and w; zeros: a pixel of padding."""
        stamp  # noqa: B018
        cells = table(16)
        pixel = channels * item
        for r in range(r0, r1):
            for s in range(across):
                for i in range(16):
                    h, w = 2 * r + axes[0, 1] + i // 4, 2 * s + axes[1, 1] + i % 4
                    inside = 0 <= h < axes[0, 0] and 0 <= w < axes[1, 0]
                    cells[i] = x + h * axes[0, 2] + w * axes[1, 2] if inside else zeros
                for c in range(0, channels, lanes):
                    _cells_transformed(address(cells), c * item, channels - c, to + c * item, step, code, lanes)
                to += pixel

    return transform


def transform_products(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: products (16, square, M) of rows r0 .. r1 of squares of an image, transformed back to pixels of y."""

    @njit("void(int64, int64, int64[:, ::1], int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
    def transform(
        m: int, step: int, axes: Any, r0: int, r1: int, across: int, outputs: int, bias: int, dump: int, y: int
    ) -> None:  # fmt: skip
        """axes: (pixels, 0, bytes from pixel to pixel) of h and w; dump: scratch for a pixel that does not exist."""
        stamp  # noqa: B018
        places = table(4)
        pixel = outputs * item
        for r in range(r0, r1):
            for s in range(across):
                for i in range(4):
                    h, w = 2 * r + i // 2, 2 * s + i % 2
                    inside = h < axes[0, 0] and w < axes[1, 0]
                    places[i] = y + h * axes[0, 2] + w * axes[1, 2] if inside else dump
                for c in range(0, outputs, lanes):
                    _products_transformed(
                        m + c * item, step, outputs - c, bias + c * item, address(places), c * item, code, lanes
                    )
                m += pixel

    return transform


def transform_weights(code: int, item: int, lanes: int, nv: int, stamp: int) -> Any:
    """Kernel: channels first .. last of weights, transformed and packed for a tile: (16, tile, C, NR)."""
    wide = nv * lanes

    @njit("void(int64, int64, int64, int64[::1], int64, int64, int64, int64, int64)", nogil=True, cache=True)
    def transform(
        start: int, m_step: int, c_step: int, taps: Any, outputs: int, channels: int, to: int, first: int, last: int
    ) -> None:  # fmt: skip
        stamp  # noqa: B018
        tiles = (outputs + wide - 1) // wide
        for m in range(0, tiles * wide, lanes):
            for c in range(first, last):
                put = to + ((m // wide * channels + c) * wide + m % wide) * item
                _weights_transformed(
                    start + m * m_step + c * c_step, address(taps), m_step, outputs - m, put, tiles * channels * wide * item,
                    code, lanes,
                )  # fmt: skip

    return transform
