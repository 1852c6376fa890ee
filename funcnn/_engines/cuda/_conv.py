"""Convolution by im2col and cuBLAS, for what cuDNN does not do.

Legend: N batch, C = I or O channels, G groups, K = C/G * taps, P pixels of y of a block. All arrays have a channels-first
shape. Products are stacks of matrices (B, G, rows, P): channels-first B counts the images of a block, channels-last B is 1
and P runs over the pixels of all of them, for there they lie one after the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines import _gpu
from funcnn._engines._gpu import Array
from funcnn._engines._order import FIRST, LAST, memory_order, to_first, to_last
from funcnn._engines._protocol import ConvPlan
from funcnn._engines.cuda._kernels import (
    BLOCK,
    INDEX_LIMIT,
    ITEMSIZE,
    WORD,
    Tiling,
    View,
    aligned,
    axis_sizes,
    by_value,
    compiled,
    dense_view,
    divisors,
    dtype_types,
    empty_in_order,
    indices,
    lanes_of,
    reach,
    readable,
    view_of,
    wide,
    window_rows,
)
from funcnn._spec import REAL_OF_COMPLEX, ceil_div

__all__ = ["CudaConv"]

# Bytes, where Options.workspace_limit leaves it open. Not a share of the free memory: how sums are cut must not depend on it.
MOST_WORKSPACE = 1 << 28
UNROLLED_TAPS = 32
MOST_GRID_ROWS = 65535  # of a grid's second axis


class Block(NamedTuple):
    """Images n0 .. n1 and their pixels p0 .. p1; all pixels, or those of one image."""

    n0: int
    n1: int
    p0: int
    p1: int


class CudaConv(ConvPlan):
    """conv and conv_transpose for CuPy arrays."""

    engine = "cuda"

    def choose_algorithm(self) -> str:
        spec = self.spec
        limit = self.options.workspace_limit
        self._limit = MOST_WORKSPACE if limit is None else limit
        self._sum = np.dtype(wide(spec.y_dtype))
        self._pixels = math.prod(a.out for a in spec.axes)
        if self._real_weight:
            _ = self.real_plan  # made now, so that its errors are those of init
        elif spec.inputs:  # compile for arrays as they mostly come, so that an error is one of init
            block, steps = Block(0, 1, 0, self._pixels), (0, 0, 0, 0)
            x = dense_view((1, *spec.near), ITEMSIZE[spec.dtype], spec.layout)
            _column_launch(spec, self._sum.name, block, spec.layout, x, steps)
            _fold_launch(spec, self._sum.name, block, spec.layout, steps)
        if spec.taps == 1 and all(a.stride == 1 and a.lo == 0 and a.out == a.size for a in spec.axes):
            return "matmul"
        return "im2col"

    @property
    def workspace_bytes(self) -> int:
        """Columns and products of the largest block that the limit allows and of one pixel at least.

        Beside it lie copies of whole images where a block is but a part of one: of a y that is no dense array of the dtype of
        sums, and of the sums for x where x's dtype is another.
        """
        return max(self._limit, self._pixel_bytes)

    # ---- the three maps ----------------------------------------------------------------------------------------------

    def correlate(self, x: Array, weight: Array, bias: Array | None) -> Array:
        if self._real_weight:
            return self._by_parts(self.real_plan.correlate, x, weight, bias)
        spec = self.spec
        with _gpu.on_device(_gpu.device_of(x)):
            order = memory_order(x, spec.layout)
            y = empty_in_order((x.shape[0], *spec.far), spec.y_dtype, order)
            if y.size:
                self._multiply(self._weight_matrix(weight, order), x, bias, y, order)
        return y

    def adjoint(self, y: Array, weight: Array, bias: Array | None) -> Array:
        if self._real_weight:
            return self._by_parts(self.real_plan.adjoint, y, weight, bias)
        spec = self.spec
        with _gpu.on_device(_gpu.device_of(y)):
            order = memory_order(y, spec.layout)
            x = empty_in_order((y.shape[0], *spec.near), spec.y_dtype, order)
            if x.size:
                rows = self._weight_matrix(weight, order).swapaxes(1, 2)
                if self.algorithm == "matmul":
                    self._multiply(rows, y, bias, x, order)
                else:
                    self._scatter(rows, y, bias, x, order)
        return x

    def weight_gradient(self, x: Array, y: Array) -> Array:
        if self._real_weight:
            real = self.real_plan.weight_gradient
            with _gpu.on_device(_gpu.device_of(x)):
                return real(x.real, y.real) - real(x.imag, y.imag)
        spec = self.spec
        with _gpu.on_device(_gpu.device_of(x)):
            order = memory_order(x, spec.layout)
            o, k = spec.outputs // spec.groups, spec.inputs // spec.groups * spec.taps
            total = _gpu.empty((spec.groups, o, k), self._sum)
            if not (total.size and y.size):
                total[...] = 0
            else:
                part = total
                rows = self._reader(y, order)
                for block in self._blocks(x.shape[0]):
                    columns = self._columns(x, block, order, merge=True).swapaxes(2, 3)[0]  # (G, P, K)
                    _gpu.matmul(self._merged(rows(block)), columns, part)
                    if part is not total:
                        total += part
                    elif block.n1 < x.shape[0] or block.p1 < self._pixels:
                        part = _gpu.empty(total.shape, self._sum)
            return self._weight_of(total, order).astype(spec.weight_dtype, copy=False)

    def bias_gradient(self, dy: Array) -> Array:
        with _gpu.on_device(_gpu.device_of(dy)):
            sums = dy.sum(axis=(0, *range(2, dy.ndim)), dtype=self._sum)
            return sums.astype(self.spec.y_dtype, copy=False)

    def conjugate(self, a: Array) -> Array:
        if a.dtype.kind != "c":
            return a
        with _gpu.on_device(_gpu.device_of(a)):
            return a.conj()

    # ---- complex x with a real weight: two real convolutions -----------------------------------------------------------

    @property
    def _real_weight(self) -> bool:
        return self.spec.weight_dtype != self.spec.dtype

    @cached_property
    def real_plan(self) -> CudaConv:
        real = REAL_OF_COMPLEX[self.spec.dtype]
        spec = dataclasses.replace(self.spec, dtype=real, y_dtype=real)
        return CudaConv(spec, self.options, self.library, self.device, self.threads)

    def _by_parts(self, run: Any, x: Array, weight: Array, bias: Array | None) -> Array:
        real = run(x.real, weight, None if bias is None else bias.real)
        with _gpu.on_device(_gpu.device_of(x)):
            y = empty_in_order(real.shape, self.spec.y_dtype, memory_order(x, self.spec.layout))
            y.real[...] = real
            y.imag[...] = run(x.imag, weight, None if bias is None else bias.imag)
        return y

    # ---- products ----------------------------------------------------------------------------------------------------

    def _multiply(self, rows: Array, source: Array, bias: Array | None, target: Array, order: str) -> None:
        """target = rows (G, out channels / G, K) times the windows of source, plus bias."""
        if not rows.shape[-1]:
            target[...] = 0
        else:
            flat = _flattened(target, order)
            cells = self._reader(source, order)
            for block in self._blocks(len(source)):
                columns = cells(block) if self.algorithm == "matmul" else self._columns(source, block, order)
                out = self._matrices(flat[block.n0 : block.n1], block, order)
                if out.dtype == self._sum:
                    _gpu.matmul(rows, columns, out)
                else:
                    product = _matrices_like(out, order, self._sum)
                    _gpu.matmul(rows, columns, product)
                    self._add_bias(product.reshape(len(product), -1, product.shape[-1]), bias)
                    out[...] = product
        if target.dtype == self._sum or not rows.shape[-1]:
            self._add_bias(target, bias)

    def _scatter(self, rows: Array, y: Array, bias: Array | None, x: Array, order: str) -> None:
        """x = what rows (G, K, O/G) times y has for its cells, plus bias."""
        if not rows.shape[-1] or not y.size:
            x[...] = 0
            self._add_bias(x, bias)
            return
        cells = self._reader(y, order)
        sums: Array | None = None
        for block in self._blocks(len(y)):
            columns = self._column_scratch(block, order)
            _gpu.matmul(rows, cells(block), columns)
            images = x[block.n0 : block.n1]
            if x.dtype == self._sum:
                sums = images
            elif block.p0 == 0:
                sums = empty_in_order(images.shape, self._sum, order)
            self._fold(columns, sums, block, order)
            if block.p1 == self._pixels:
                self._add_bias(sums, bias)
                if sums is not images:
                    images[...] = sums

    def _add_bias(self, y: Array, bias: Array | None) -> None:
        if bias is not None:
            y += bias.astype(y.dtype, copy=False).reshape(-1, *(1,) * (y.ndim - 2))

    # ---- blocks ------------------------------------------------------------------------------------------------------

    @cached_property
    def _pixel_bytes(self) -> int:
        """Scratch for one pixel of y, at most: its column, its product or rows, copied twice, and its part of x's sums."""
        spec = self.spec
        cells = ceil_div(math.prod(a.size for a in spec.axes), self._pixels)
        return (spec.inputs * (spec.taps + cells) + 2 * spec.outputs) * self._sum.itemsize

    def _blocks(self, n: int) -> Iterator[Block]:
        """As many images as the limit allows, or parts of one."""
        pixels = max(1, self._limit // max(1, self._pixel_bytes))
        images = pixels // self._pixels
        if images:
            for n0 in range(0, n, images):
                yield Block(n0, min(n, n0 + images), 0, self._pixels)
            return
        for n0 in range(n):
            for p0 in range(0, self._pixels, pixels):
                yield Block(n0, n0 + 1, p0, min(self._pixels, p0 + pixels))

    # ---- matrices ----------------------------------------------------------------------------------------------------

    def _weight_matrix(self, weight: Array, order: str) -> Array:
        """(G, O/G, K), K in the order in which the columns lie: (c, t) channels-first, (t, c) channels-last."""
        spec = self.spec
        weight = weight.astype(self._sum, copy=False)
        if order == LAST:
            weight = to_last(weight)
        return weight.reshape(spec.groups, spec.outputs // spec.groups, spec.inputs // spec.groups * spec.taps)

    def _weight_of(self, rows: Array, order: str) -> Array:
        """The inverse of `_weight_matrix`."""
        o, i, *kernel = self.spec.weight_shape
        if order == FIRST:
            return rows.reshape(o, i, *kernel)
        return to_first(rows.reshape(o, *kernel, i))

    def _reader(self, y: Array, order: str) -> Callable[[Block], Array]:
        """Blocks of y (N, C, *spatial) as matrices (B, G, C/G, P): in place, or where the dtype of sums or the strides differ
        by a copy of the block's images.
        """
        in_place = y.dtype == self._sum and _is_dense(y, order)
        copy: Array | None = None

        def read(block: Block) -> Array:
            nonlocal copy
            images = y[block.n0 : block.n1]
            if in_place:
                return self._matrices(_flattened(images, order), block, order)
            if copy is None or block.p0 == 0:
                copy = empty_in_order(images.shape, self._sum, order)
                copy[...] = images
            return self._matrices(_flattened(copy, order), block, order)

        return read

    def _matrices(self, images: Array, block: Block, order: str) -> Array:
        """Images (n, C, pixels) of a block as matrices (B, G, C/G, P), in place."""
        n, channels, _ = images.shape
        groups, pixels = self.spec.groups, block.p1 - block.p0
        part = images[:, :, block.p0 : block.p1]
        if order == FIRST:
            return part.reshape(n, groups, channels // groups, pixels)
        part = part.transpose(0, 2, 1).reshape(1, n * pixels, groups, channels // groups)
        return part.transpose(0, 2, 3, 1)

    def _merged(self, matrices: Array) -> Array:
        """Matrices (B, G, C/G, P) as (G, C/G, B * P): by a copy, unless there is one image or channels lie innermost."""
        images, groups, channels, pixels = matrices.shape
        if images == 1:
            return matrices[0]
        copy = _gpu.empty((groups, channels, images, pixels), self._sum)
        copy[...] = matrices.transpose(1, 2, 0, 3)
        return copy.reshape(groups, channels, images * pixels)

    def _column_scratch(self, block: Block, order: str, merge: bool = False) -> Array:
        """Matrices (B, G, K, P) for the columns of a block; `merge`: B is 1 and P counts the pixels of all images."""
        spec = self.spec
        images, pixels = block.n1 - block.n0, block.p1 - block.p0
        k = spec.inputs // spec.groups * spec.taps
        if order == LAST:
            return _gpu.empty((1, images * pixels, spec.groups, k), self._sum).transpose(0, 2, 3, 1)
        if merge:
            return _gpu.empty((1, spec.groups, k, images * pixels), self._sum)
        return _gpu.empty((images, spec.groups, k, pixels), self._sum)

    def _columns(self, x: Array, block: Block, order: str, merge: bool = False) -> Array:
        """The windows of a block as matrices (B, G, K, P)."""
        columns = self._column_scratch(block, order, merge)
        part = readable(x[block.n0 : block.n1], self.spec.layout)
        kernel, grid, args = _column_launch(self.spec, self._sum.name, block, order, view_of(part), _steps(columns))
        _gpu.launch(kernel, grid, (BLOCK,), (part, columns, args))
        return columns

    def _fold(self, columns: Array, x: Array, block: Block, order: str) -> None:
        """Write x (n, I, *size), or add to it what a later part of its image has."""
        kernel, grid, args = _fold_launch(self.spec, self._sum.name, block, order, _steps(columns))
        _gpu.launch(kernel, grid, (BLOCK,), (columns, x, args))


def _is_dense(y: Array, order: str) -> bool:
    """Whether the pixels and channels of all images lie one after the other, in a memory order."""
    return bool((y if order == FIRST else to_last(y)).flags.c_contiguous)


def _flattened(y: Array, order: str) -> Array:
    """A dense y (N, C, *spatial) as (N, C, pixels), in place."""
    n, c = y.shape[:2]
    if order == FIRST:
        return y.reshape(n, c, math.prod(y.shape[2:]))
    return to_last(y).reshape(n, math.prod(y.shape[2:]), c).transpose(0, 2, 1)


def _matrices_like(out: Array, order: str, dtype: Any) -> Array:
    """Scratch for matrices (B, G, rows, P) that lie as `out` does in a memory order."""
    b, groups, rows, pixels = out.shape
    if order == FIRST:
        return _gpu.empty(out.shape, dtype)
    return _gpu.empty((b, pixels, groups, rows), dtype).transpose(0, 2, 3, 1)


# ---- launches --------------------------------------------------------------------------------------------------------


def _steps(columns: Array) -> tuple[int, int, int, int]:
    """Element strides of matrices (B, G, K, P), whose images are B or, merged, runs of P."""
    item = columns.itemsize
    b, g, k, p = (s // item for s in columns.strides)
    return b if columns.shape[0] > 1 else 0, g, k, p


def _constants(spec: Any) -> dict[str, Any]:
    return {
        "WINDOWS_OF_PLAN": window_rows(spec.axes),
        "FLIP": spec.flip,
        "TAPS": spec.taps,
    }


def _column_steps(spec: Any, block: Block, order: str, steps: tuple[int, int, int, int], big: bool) -> Any:
    """The kernels' `struct Columns`."""
    image, group, row, pixel = steps
    image = image or (block.p1 - block.p0) * pixel
    channels = spec.inputs // spec.groups
    channel, tap = (row * spec.taps, row) if order == FIRST else (row, row * channels)
    return by_value(indices((image, group, channel, tap, pixel), big), divisors((channels,), big))


@lru_cache(1024)
def _column_launch(
    spec: Any, sums: str, block: Block, order: str, x: View, steps: tuple[int, int, int, int]
) -> tuple[_gpu.Kernel, tuple[int, ...], Any]:
    images, pixels = block.n1 - block.n0, (block.n1 - block.n0) * (block.p1 - block.p0)
    itemsize = np.dtype(sums).itemsize
    lanes = lanes_of(spec.inputs // spec.groups, WORD // itemsize) if order == LAST else 1
    tiling = Tiling(order, spec.inputs, tuple(a.out for a in spec.axes), lanes, 1)
    constants = {
        **_constants(spec),
        "X_PACKED": lanes > 1 and aligned(x, 1, lanes),
        "UNROLL": min(spec.taps, UNROLLED_TAPS),
    }
    items = pixels * (spec.inputs // lanes if order == LAST else 1)
    shape = (images, *spec.near)
    big = max(items, math.prod(tiling.cells), pixels * spec.inputs * spec.taps, reach(shape, x.strides)) >= INDEX_LIMIT
    kernel = compiled("columns", dtype_types(spec.dtype, sums), {**tiling.constants, **constants}, big)["columns"]
    rows = min(spec.inputs, MOST_GRID_ROWS) if order == FIRST else 1
    args = by_value(
        indices((items,), big),
        tiling.sizes(big),
        axis_sizes(spec.axes),
        indices((block.p0, *x.strides), big),
        _column_steps(spec, block, order, steps, big),
    )
    return kernel, (ceil_div(items, BLOCK), rows), args


@lru_cache(1024)
def _fold_launch(
    spec: Any, sums: str, block: Block, order: str, steps: tuple[int, int, int, int]
) -> tuple[_gpu.Kernel, tuple[int, ...], Any]:
    images, pixels = block.n1 - block.n0, block.p1 - block.p0
    lanes = lanes_of(spec.inputs // spec.groups, WORD // np.dtype(sums).itemsize) if order == LAST else 1
    tiling = Tiling(order, spec.inputs, tuple(a.size for a in spec.axes), lanes, 1)
    covers = math.prod(ceil_div(a.span, a.stride) for a in spec.axes)
    constants = {**_constants(spec), "COVERS": covers, "UNROLL": min(covers, UNROLLED_TAPS)}
    items = tiling.items(images)
    outs = math.prod(a.out for a in spec.axes)
    big = max(items * lanes, outs, images * pixels * spec.inputs * spec.taps) >= INDEX_LIMIT
    kernel = compiled("fold", dtype_types(sums), {**tiling.constants, **constants}, big)["fold"]
    args = by_value(
        indices((items,), big),
        tiling.sizes(big),
        axis_sizes(spec.axes),
        indices((block.p0, pixels, block.p0 > 0), big),
        _column_steps(spec, block, order, steps, big),
    )
    return kernel, (ceil_div(items, BLOCK),), args
