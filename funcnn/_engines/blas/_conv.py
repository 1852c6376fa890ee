"""Convolution by im2col in blocks and BLAS, and depthwise convolution by fused multiply-add passes.

Legend: N batch, C = I or O channels, G groups, K = C/G * taps, P = pixels of a block. All arrays have a channels-first
shape; memory order only decides how scratch is laid out: K x P (rows of pixels) for channels-first arrays, P x K for
channels-last ones. NumPy's matmul hands both to BLAS as they lie, so one code serves both orders.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from funcnn._engines._order import FIRST, LAST, Array, allocate, memory_order
from funcnn._engines._protocol import ConvPlan
from funcnn._engines.blas import _depthwise
from funcnn._engines.blas._memory import Block, blocks, matrix, put, scratch_in_order, strided
from funcnn._scratch import scratch
from funcnn._spec import FLOAT_DTYPES, HALF_DTYPES, REAL_OF_COMPLEX, Axis

__all__ = ["BlasConv"]

# Columns of one block. Large blocks keep the matrix product efficient: on 3x3 layers of 64 to 256 channels 12 MB took 20%
# less time than 3 MB and 8 MB nearly as little. BLAS works on a block with all its threads, so there is one at a time.
COLUMN_BYTES = 8 << 20
# An image of fewer pixels is multiplied together with its neighbours, though y then needs a copy.
SMALL_IMAGE = 1000
# A sum of products of 16-bit integers is exact in float64 up to 2**53.
_EXACT_TERMS = {"int8": 2**37, "uint8": 2**37, "int16": 2**21, "uint16": 2**21}


class BlasConv(ConvPlan):
    """conv and conv_transpose for NumPy arrays."""

    engine = "blas"

    def choose_algorithm(self) -> str:
        spec = self.spec
        if spec.inputs == spec.groups > 1 and spec.dtype in FLOAT_DTYPES:
            return "depthwise"
        if spec.taps == 1 and all(a.stride == 1 and a.lo == 0 and a.out == a.size for a in spec.axes):
            return "matmul"
        return "im2col"

    @cached_property
    def sum_dtype(self) -> np.dtype[Any]:
        """The dtype of products and sums."""
        spec = self.spec
        if spec.dtype in HALF_DTYPES:
            return np.dtype(np.float32)
        if spec.y_dtype in ("int32", "int64"):
            terms = max(spec.inputs, spec.outputs) // spec.groups * spec.taps
            return np.dtype(np.float64 if terms <= _EXACT_TERMS.get(spec.dtype, 0) else np.int64)
        return np.dtype(spec.y_dtype)

    @cached_property
    def block_pixels(self) -> int:
        row = self.spec.inputs * self.spec.taps * self.sum_dtype.itemsize
        return max(1, COLUMN_BYTES // max(row, 1))

    @property
    def workspace_bytes(self) -> int:
        """Columns and products of one block."""
        spec = self.spec
        pixels = self.block_pixels
        return pixels * (spec.inputs * spec.taps + spec.outputs) * self.sum_dtype.itemsize

    # ---- the three maps ----------------------------------------------------------------------------------------------

    def correlate(self, x: Array, weight: Array, bias: Array | None) -> Array:
        if self._real_weight:
            return self._by_parts(self.real_plan.correlate, x, weight, bias)
        spec = self.spec
        order = memory_order(x, spec.layout)
        y = allocate(np.empty, (x.shape[0], spec.outputs, *self._outs), spec.y_dtype, order)
        if self.algorithm == "depthwise":
            _depthwise.correlate(self, x, weight, bias, y, order)
            return y
        self._multiply(self._weight_matrix(weight, order), x, bias, y, order)
        return y

    def adjoint(self, y: Array, weight: Array, bias: Array | None) -> Array:
        if self._real_weight:
            return self._by_parts(self.real_plan.adjoint, y, weight, bias)
        spec, dtype = self.spec, self.sum_dtype
        order = memory_order(y, spec.layout)
        shape = (y.shape[0], spec.inputs, *self._sizes)
        if self.algorithm == "matmul":
            x = allocate(np.empty, shape, spec.y_dtype, order)
            self._multiply(self._weight_matrix(weight, order).swapaxes(1, 2), y, bias, x, order)
            return x
        x = allocate(np.zeros, shape, dtype, order)
        if bias is not None:
            x += bias.astype(dtype, copy=False).reshape(-1, *(1,) * len(spec.axes))
        # The depthwise way multiplies cells between rows too, which only a finite weight forgives.
        if self.algorithm == "depthwise" and np.isfinite(weight).all():
            _depthwise.adjoint(self, y, weight, x, order)
        else:
            self._scatter(self._weight_matrix(weight, order).swapaxes(1, 2), y, x, order)
        return x.astype(spec.y_dtype, copy=False)

    def _multiply(self, rows: Array, source: Array, bias: Array | None, target: Array, order: str) -> None:
        """target = rows times the windows of source, plus bias, block by block; `rows` is (G, out channels / G, K)."""
        bias = None if bias is None else bias.astype(self.sum_dtype, copy=False).reshape(self.spec.groups, -1, 1)
        for block in self._blocks(len(source), order):
            columns = self._columns(source, block, order)
            part = target[_index(block)]
            out = matrix(part, self.spec.groups) if part.dtype == self.sum_dtype else None
            product = self._scratch_rows("product", part, order) if out is None else out
            np.matmul(rows, columns, out=product)
            if bias is not None:
                np.add(product, bias, out=product)
            if out is None:
                np.copyto(part, _as_block(product, part), casting="unsafe")

    def _scatter(self, rows: Array, y: Array, x: Array, order: str) -> None:
        """x += rows (G, K, O/G) times y, tap by tap: only products that the convolution has."""
        for block in self._blocks(len(y), order):
            columns, windows = self._column_scratch(block, order)
            np.matmul(rows, self._rows(y[_index(block)], order), out=columns)
            images = x[slice(*block[0])]
            n, c, *sizes = images.shape
            cells = images.reshape(n, self.spec.groups, c // self.spec.groups, *sizes)
            for source, target in _tap_table(self.spec.axes, block[1:], self.spec.flip):
                part = cells[target]
                np.add(part, windows[source], out=part)

    def weight_gradient(self, x: Array, y: Array) -> Array:
        if self._real_weight:
            real = self.real_plan.weight_gradient
            return real(x.real, y.real) - real(x.imag, y.imag)
        spec, dtype = self.spec, self.sum_dtype
        order = memory_order(x, spec.layout)
        if self.algorithm == "depthwise":
            return _depthwise.weight_gradient(self, x, y, order)
        total: Array | None = None
        for block in self._blocks(x.shape[0], order):
            columns = self._columns(x, block, order).swapaxes(1, 2)  # (G, P, K)
            gradient = self._rows(y[_index(block)], order)
            if total is None:
                total = np.matmul(gradient, columns)
            else:
                part = scratch("weight", total.shape, dtype)
                np.add(total, np.matmul(gradient, columns, out=part), out=total)
        if total is None:
            return np.zeros(spec.weight_shape, spec.weight_dtype)
        return self._weight_of(total, order).astype(spec.weight_dtype, copy=False)

    def bias_gradient(self, dy: Array) -> Array:
        sums = _channel_sums(dy, memory_order(dy, self.spec.layout), self.sum_dtype)
        return sums.astype(self.spec.y_dtype, copy=False)

    def conjugate(self, a: Array) -> Array:
        return a.conj() if a.dtype.kind == "c" else a

    # ---- complex x with a real weight: two real convolutions -----------------------------------------------------------

    @property
    def _real_weight(self) -> bool:
        return self.spec.weight_dtype != self.spec.dtype

    @cached_property
    def real_plan(self) -> BlasConv:
        real = REAL_OF_COMPLEX[self.spec.dtype]
        spec = dataclasses.replace(self.spec, dtype=real, y_dtype=real)
        return BlasConv(spec, self.options, self.library, self.device, self.threads)

    def _by_parts(self, run: Any, x: Array, weight: Array, bias: Array | None) -> Array:
        real = run(x.real, weight, None if bias is None else bias.real)
        y = np.empty_like(real, self.spec.y_dtype)
        y.real = real
        y.imag = run(x.imag, weight, None if bias is None else bias.imag)
        return y

    # ---- pieces ------------------------------------------------------------------------------------------------------

    @cached_property
    def _outs(self) -> tuple[int, ...]:
        return tuple(a.out for a in self.spec.axes)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.spec.axes)

    def _blocks(self, n: int, order: str) -> Any:
        image = math.prod(self._outs)
        return blocks(n, self._outs, self.block_pixels, merge_images=order == LAST or image < SMALL_IMAGE)

    def _weight_matrix(self, weight: Array, order: str) -> Array:
        """(G, O/G, K), K in the order in which the columns lie: (c, t) channels-first, (t, c) channels-last."""
        spec = self.spec
        weight = weight.astype(self.sum_dtype, copy=False)
        if order == LAST:
            weight = np.moveaxis(weight, 1, -1)
        return weight.reshape(spec.groups, spec.outputs // spec.groups, spec.inputs // spec.groups * spec.taps)

    def _weight_of(self, rows: Array, order: str) -> Array:
        """The inverse of `_weight_matrix`."""
        o, i, *kernel = self.spec.weight_shape
        if order == FIRST:
            return rows.reshape(o, i, *kernel)
        return np.moveaxis(rows.reshape(o, *kernel, i), -1, 1)

    def _column_scratch(self, block: Block, order: str) -> tuple[Array, Array]:
        """Scratch for the columns of a block: as matrices (G, K, P), and as windows (n, G, C/G, *k, *b)."""
        spec = self.spec
        n, *b = (hi - lo for lo, hi in block)
        g, c, k = spec.groups, spec.inputs // spec.groups, spec.kernel
        pixels, rank = n * math.prod(b), len(b)
        if order == FIRST:
            memory = scratch("columns", (g, c, *k, n, *b), self.sum_dtype)
            windows = memory.transpose(rank + 2, *range(rank + 2), *range(rank + 3, memory.ndim))
            return memory.reshape(g, c * spec.taps, pixels), windows
        memory = scratch("columns", (g, n, *b, *k, c), self.sum_dtype)
        windows = memory.transpose(1, 0, memory.ndim - 1, *range(rank + 2, memory.ndim - 1), *range(2, rank + 2))
        return memory.reshape(g, pixels, c * spec.taps).swapaxes(1, 2), windows

    def _columns(self, x: Array, block: Block, order: str) -> Array:
        """The windows of a block of y as matrices (G, K, P): x itself where a matmul can read it, else in scratch."""
        if self.algorithm == "matmul":
            return self._rows(x[_index(block)], order, "columns")
        columns, windows = self._column_scratch(block, order)
        np.copyto(windows, self._windows(self._padded(x, block, order)))
        return columns

    def _padded(self, x: Array, block: Block, order: str) -> Array:
        """The cells (n, C, *) that a block reads, with zeros for padding: a part of x, or a copy in scratch."""
        images, *ranges = block
        cells, inside, sizes = _reach(self.spec.axes, tuple(ranges))
        part = x[(slice(*images), slice(None), *cells)]
        if inside is None and part.dtype == self.sum_dtype:
            return part
        padded = scratch_in_order("padded", (*part.shape[:2], *sizes), self.sum_dtype, order)
        put(padded, inside or [slice(0, size) for size in sizes], part)
        return padded

    def _windows(self, cells: Array) -> Array:
        """Every window of the cells (n, C, *) as (n, G, C/G, *k, *b), read in place."""
        spec = self.spec
        n, c, *sizes = cells.shape
        image, channel, *items = cells.strides
        taps = [a.dilation * s for a, s in zip(spec.axes, items, strict=True)]
        steps = [a.stride * s for a, s in zip(spec.axes, items, strict=True)]
        counts = [(size - a.span) // a.stride + 1 for a, size in zip(spec.axes, sizes, strict=True)]
        if spec.flip:
            last_taps: Any = (..., *(slice((a.kernel - 1) * a.dilation, None) for a in spec.axes))
            cells = cells[last_taps]
            taps = [-t for t in taps]
        g = spec.groups
        shape = (n, g, c // g, *spec.kernel, *counts)
        return strided(cells, shape, (image, c // g * channel, channel, *taps, *steps))

    def _rows(self, block: Array, order: str, name: str = "rows") -> Array:
        """A block of y (n, O, *b) as matrices (G, O/G, P), copied to scratch only where it must be."""
        if block.dtype == self.sum_dtype:
            ready = matrix(block, self.spec.groups)
            if ready is not None:
                return ready
        rows = self._scratch_rows(name, block, order)
        np.copyto(_as_block(rows, block), block, casting="unsafe")
        return rows

    def _scratch_rows(self, name: str, block: Array, order: str) -> Array:
        """Scratch for a block (n, C, *b) as matrices (G, C/G, P)."""
        g, c = self.spec.groups, block.shape[1] // self.spec.groups
        pixels = block.shape[0] * math.prod(block.shape[2:])
        if order == FIRST:
            return scratch(name, (g, c, pixels), self.sum_dtype)
        return scratch(name, (pixels, g, c), self.sum_dtype).transpose(1, 2, 0)


def _as_block(rows: Array, block: Array) -> Array:
    """Matrices (G, O/G, P) seen as the block (n, O, *b) that they hold; a view, for scratch is contiguous."""
    n, c, *b = block.shape
    if rows.strides[-1] == rows.itemsize or rows.shape[-1] == 1:
        return rows.reshape(c, n, *b).swapaxes(0, 1)
    return np.moveaxis(rows.transpose(2, 0, 1).reshape(n, *b, c), -1, 1)


def _index(block: Block) -> tuple[slice, ...]:
    (n0, n1), *ranges = block
    return (slice(n0, n1), slice(None), *(slice(lo, hi) for lo, hi in ranges))


@lru_cache(1024)
def _reach(
    axes: tuple[Axis, ...], ranges: tuple[tuple[int, int], ...]
) -> tuple[tuple[slice, ...], list[slice] | None, tuple[int, ...]]:
    """The cells of x that a block of windows reads; where they lie among those and padding (None: no padding); all sizes."""
    cells, inside, sizes = [], [], []
    for axis, (lo, hi) in zip(axes, ranges, strict=True):
        start = lo * axis.stride - axis.lo
        stop = start + (hi - lo - 1) * axis.stride + axis.span
        first = min(max(start, 0), axis.size)
        last = max(first, min(stop, axis.size))
        cells.append(slice(first, last))
        inside.append(slice(first - start, last - start) if first < last else slice(0, 0))
        sizes.append(stop - start)
    whole = all(part == slice(0, size) for part, size in zip(inside, sizes, strict=True))
    return tuple(cells), None if whole else inside, tuple(sizes)


@lru_cache(1024)
def _tap_table(
    axes: tuple[Axis, ...], ranges: tuple[tuple[int, int], ...], flip: bool
) -> tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]:
    """For every tap that reads x in a block: its windows, as an index of (n, G, C/G, *k, *b), and the cells of x."""
    table = []
    for taps in itertools.product(*(range(a.kernel) for a in axes)):
        slots, windows, cells = [], [], []
        for axis, tap, (lo, hi) in zip(axes, taps, ranges, strict=True):
            first, last = axis.windows_inside(tap)
            first, last = max(first, lo), min(last, hi)
            if first >= last:
                break
            start = axis.start(tap)
            slots.append(axis.kernel - 1 - tap if flip else tap)
            windows.append(slice(first - lo, last - lo))
            cells.append(slice(start + first * axis.stride, start + (last - 1) * axis.stride + 1, axis.stride))
        else:
            whole = (slice(None),) * 3
            table.append(((*whole, *slots, *windows), (*whole, *cells)))
    return tuple(table)


def _channel_sums(y: Array, order: str, dtype: Any) -> Array:
    """Sums of y (N, C, *spatial) over all but the channels, in a dtype."""
    spread = np.moveaxis(y, 1, -1)
    if order == LAST and spread.flags.c_contiguous and y.dtype == dtype and y.size:  # a product with ones reads once
        rows = spread.reshape(-1, y.shape[1])
        return np.matmul(np.ones(len(rows), dtype), rows)
    return y.sum(axis=(0, *range(2, y.ndim)), dtype=dtype)
