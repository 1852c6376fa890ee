"""The oracle: every op as plain loops in float64, complex128 or Python ints, written from its definition.

Nothing is shared with the package, not even an output size. Arrays are channels-first, (N, C, *spatial), of
any spatial rank. Integers are computed exactly: an object array stays exact, an integer dtype comes back as
int64, wrapped once at the end. Two rules decide what inf and NaN do. What is *gathered* over padding is a zero
that is multiplied (0 * inf is NaN); what is *scattered* has only the terms that exist. torch and jax do the same.

Symbols: a *tap* is an index into the kernel, a *cell* an index into the unpadded plane (negative or too large
over padding), a *pos* an index into the plane of windows; `cell = pos * stride + tap * dilation - lo`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Index = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]
PerAxis = int | Sequence[int]
Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]

_quiet = np.errstate(all="ignore")


# --- Sizes and windows ------------------------------------------------------------------------------------------


def _per_axis(value: PerAxis, rank: int) -> Index:
    """Repeat an int for each axis; take a sequence as it is."""
    values = (value,) * rank if isinstance(value, int) else tuple(value)
    assert len(values) == rank, (values, rank)
    return values


def pads(sizes: Sequence[int], kernel: PerAxis, stride: PerAxis, padding: Padding, dilation: PerAxis) -> Pairs:
    """Turn any form of padding into one (lo, hi) pair per axis.

    "same" pads just enough for ceil(size / stride) windows, the odd pixel at the end ("same_lower": at the start).
    """
    rank = len(sizes)
    k, s, d = (_per_axis(v, rank) for v in (kernel, stride, dilation))
    extent = [d[a] * (k[a] - 1) + 1 for a in range(rank)]
    if padding == "valid":
        return ((0, 0),) * rank
    if padding == "full":
        return tuple((e - 1, e - 1) for e in extent)
    if padding in ("same", "same_lower"):
        pairs = []
        for size, e, step in zip(sizes, extent, s, strict=True):
            windows = len(range(0, size, step))
            total = max(0, (windows - 1) * step + e - size)
            small, large = total // 2, total - total // 2
            pairs.append((small, large) if padding == "same" else (large, small))
        return tuple(pairs)
    assert not isinstance(padding, str), f"unknown padding {padding!r}"
    each: Sequence[Any] = (padding,) * rank if isinstance(padding, int) else tuple(padding)
    assert len(each) == rank, (padding, rank)
    return tuple((p, p) if isinstance(p, int) else (p[0], p[1]) for p in each)


def out_sizes(
    sizes: Sequence[int],
    kernel: PerAxis,
    stride: PerAxis,
    pads: Pairs,
    dilation: PerAxis,
    ceil_mode: bool = False,
) -> Index:
    """Count the windows per axis: those that lie wholly in the padded input.

    `ceil_mode` adds one where cells are left after the last window, unless it would start in the trailing padding.
    """
    rank = len(sizes)
    k, s, d = (_per_axis(v, rank) for v in (kernel, stride, dilation))
    counts = []
    for a in range(rank):
        lo, hi = pads[a]
        extent = d[a] * (k[a] - 1) + 1
        starts = range(-lo, sizes[a] + hi - extent + 1, s[a])
        cells_left = bool(starts) and starts[-1] + extent < sizes[a] + hi
        extra = ceil_mode and cells_left and starts[-1] + s[a] < sizes[a]
        counts.append(len(starts) + int(extra))
    return tuple(counts)


class Grid(NamedTuple):
    """Where the windows of an op lie: all that conv and pooling have in common."""

    sizes: Index
    kernel: Index
    stride: Index
    pads: Pairs
    dilation: Index
    outs: Index

    def taps(self, pos: Index) -> Iterator[tuple[Index, Index]]:
        """Give (tap, cell) for each tap of the window at `pos`, in row-major order."""
        for tap in np.ndindex(*self.kernel):
            yield (
                tap,
                tuple(
                    p * s + t * d - lo
                    for p, s, t, d, (lo, _) in zip(pos, self.stride, tap, self.dilation, self.pads, strict=True)
                ),
            )

    def walk(self) -> Iterator[tuple[Index, Index, Index]]:
        """Give (pos, tap, cell) for every window and tap."""
        for pos in np.ndindex(*self.outs):
            for tap, cell in self.taps(pos):
                yield pos, tap, cell

    def real(self, cell: Index) -> bool:
        """Tell whether a cell is one of the input's, not of padding or beyond it."""
        return all(0 <= c < size for c, size in zip(cell, self.sizes, strict=True))

    def padded(self, cell: Index) -> bool:
        """Tell whether a cell is the input's or the explicit padding's, not of the ceil overhang."""
        return all(-lo <= c < size + hi for c, size, (lo, hi) in zip(cell, self.sizes, self.pads, strict=True))


def _grid(
    sizes: Sequence[int],
    kernel: PerAxis,
    stride: PerAxis,
    padding: Padding,
    dilation: PerAxis,
    ceil_mode: bool = False,
) -> Grid:
    """Lay windows over a plane of `sizes`."""
    rank = len(sizes)
    k, s, d = (_per_axis(v, rank) for v in (kernel, stride, dilation))
    pairs = pads(sizes, k, s, padding, d)
    return Grid(tuple(sizes), k, s, pairs, d, out_sizes(sizes, k, s, pairs, d, ceil_mode))


# --- Number types -----------------------------------------------------------------------------------------------


def _wide(*arrays: Array) -> list[Array]:
    """Copy to the widest type: all to Python ints if all hold integers, else each to float64 or complex128."""
    if all(a.dtype.kind in "biuO" for a in arrays):
        return [a.astype(object) for a in arrays]
    return [a.astype(complex if a.dtype.kind == "c" else float) for a in arrays]


def _narrow(result: Array, *inputs: Array) -> Array:
    """Wrap Python ints to int64 as two's complement does, unless an input was an object array."""
    if result.dtype != object or any(a.dtype == object for a in inputs):
        return result
    return np.asarray((result + 2**63) % 2**64 - 2**63, dtype=np.int64)


def _times(a: Array, b: Array) -> Array:
    """Multiply, keeping a real factor real: inf times 1+2j is inf+infj, where complex(inf) would give NaN."""
    if np.iscomplexobj(a) == np.iscomplexobj(b):
        return np.asarray(a * b)
    out = np.empty(np.broadcast_shapes(a.shape, b.shape), complex)
    out.real, out.imag = (a.real * b, a.imag * b) if np.iscomplexobj(a) else (a * b.real, a * b.imag)
    return out


def _for(owner: Array, gradient: Array) -> Array:
    """Keep the real part of a gradient whose owner is real."""
    return gradient if np.iscomplexobj(owner) else np.asarray(gradient.real)


def _block(index: int, group_of: int, width: int) -> slice:
    """Give the channels that channel `index` meets: groups of `group_of` on its side face `width` on the other."""
    group = index // group_of
    return slice(group * width, (group + 1) * width)


def _weight_index(tap: Index, kernel: Index, flip: bool) -> Index:
    """Say which weight a tap uses: its own, or the opposite one in a true convolution."""
    return tuple(k - 1 - t for t, k in zip(tap, kernel, strict=True)) if flip else tap


def _pixel(x: Array, channels: slice, cell: Index, grid: Grid) -> Array:
    """Read (N, channels) at a cell: zeros over padding."""
    if grid.real(cell):
        return np.asarray(x[:, channels, *cell])
    return np.zeros((x.shape[0], channels.stop - channels.start), x.dtype)


# --- conv -------------------------------------------------------------------------------------------------------


@_quiet
def conv(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    flip: bool = False,
) -> Array:
    """Convolve x (N, I, *sizes) with w (O, I/groups, *kernel).

    y[n, o, pos] = b[o] + sum over channels c of o's group and taps of x[n, c, cell] * w[o, c, tap].
    """
    inputs = (x, w) if b is None else (x, w, b)
    x, w, *bias = _wide(*inputs)
    grid = _grid(x.shape[2:], w.shape[2:], stride, padding, dilation)
    per_group, width = w.shape[0] // groups, x.shape[1] // groups
    y = np.zeros((x.shape[0], w.shape[0], *grid.outs), np.result_type(x, w))
    for pos, tap, cell in grid.walk():
        k = _weight_index(tap, grid.kernel, flip)
        for o in range(w.shape[0]):
            pixel = _pixel(x, _block(o, per_group, width), cell, grid)
            y[:, o, *pos] += _times(pixel, w[o, :, *k]).sum(1)
    return _narrow(_add_bias(y, *bias), *inputs)


def _add_bias(y: Array, b: Array | None = None) -> Array:
    """Add b[o] to channel o."""
    if b is not None:
        for o in range(y.shape[1]):
            y[:, o] += b[o]
    return y


@_quiet
def conv_backward(
    dy: Array,
    x: Array,
    w: Array,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    flip: bool = False,
) -> tuple[Array, Array, Array]:
    """Give (dx, dw, db), the adjoint of `conv`.

    dx scatters dy * conj(w) to the cells that exist. dw sums dy * conj(x), x being zero over padding.
    """
    inputs = (dy, x, w)
    dy, x, w = _wide(*inputs)
    grid = _grid(x.shape[2:], w.shape[2:], stride, padding, dilation)
    assert dy.shape == (x.shape[0], w.shape[0], *grid.outs), (dy.shape, grid)
    per_group, width = w.shape[0] // groups, x.shape[1] // groups
    dx = np.zeros(x.shape, np.result_type(dy, w))
    dw = np.zeros(w.shape, np.result_type(dy, x))
    for pos, tap, cell in grid.walk():
        k = _weight_index(tap, grid.kernel, flip)
        for o in range(w.shape[0]):
            channels = _block(o, per_group, width)
            d = dy[:, o, *pos][:, None]
            if grid.real(cell):
                dx[:, channels, *cell] += _times(d, np.conj(w[o, :, *k]))
            dw[o, :, *k] += _times(d, np.conj(_pixel(x, channels, cell, grid))).sum(0)
    db = dy.sum(axis=(0, *range(2, dy.ndim)))
    return _narrow(_for(x, dx), *inputs), _narrow(_for(w, dw), *inputs), _narrow(db, *inputs)


# --- conv_transpose ---------------------------------------------------------------------------------------------


def _transpose_grid(
    sizes: Sequence[int],
    kernel: PerAxis,
    stride: PerAxis,
    padding: Padding,
    output_padding: PerAxis,
    output_size: PerAxis | None,
    dilation: PerAxis,
) -> Grid:
    """Lay the windows of a conv over the *output*, one per cell of x; named paddings are that conv's."""
    rank = len(sizes)
    k, s, d, extra = (_per_axis(v, rank) for v in (kernel, stride, dilation, output_padding))
    if any(extra) and (isinstance(padding, str) or output_size is not None):
        raise ValueError("output_padding goes with neither a named padding nor an output_size")
    if output_size is not None:
        big = _per_axis(output_size, rank)
    elif padding in ("same", "same_lower"):
        big = tuple(n * step for n, step in zip(sizes, s, strict=True))
    else:  # what the windows reach, less what the padding cuts off
        pairs = pads(sizes, k, s, padding, d)
        big = tuple((sizes[a] - 1) * s[a] + d[a] * (k[a] - 1) + 1 - sum(pairs[a]) + extra[a] for a in range(rank))
    return Grid(big, k, s, pads(big, k, s, padding, d), d, tuple(sizes))


@_quiet
def conv_transpose(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    output_padding: PerAxis = 0,
    output_size: PerAxis | None = None,
    dilation: PerAxis = 1,
    groups: int = 1,
    flip: bool = False,
) -> Array:
    """Scatter x (N, I, *sizes) by w (I, O/groups, *kernel): y[n, o, cell] += x[n, i, pos] * w[i, o, tap].

    It is the transpose, without conjugation, of the conv with the same arguments and the same weight.
    """
    inputs = (x, w) if b is None else (x, w, b)
    x, w, *bias = _wide(*inputs)
    grid = _transpose_grid(x.shape[2:], w.shape[2:], stride, padding, output_padding, output_size, dilation)
    per_group, width = x.shape[1] // groups, w.shape[1]
    y = np.zeros((x.shape[0], width * groups, *grid.sizes), np.result_type(x, w))
    for pos, tap, cell in grid.walk():
        if grid.real(cell):
            k = _weight_index(tap, grid.kernel, flip)
            for i in range(x.shape[1]):
                y[:, _block(i, per_group, width), *cell] += _times(x[:, i, *pos][:, None], w[i, :, *k])
    return _narrow(_add_bias(y, *bias), *inputs)


@_quiet
def conv_transpose_backward(
    dy: Array,
    x: Array,
    w: Array,
    *,
    stride: PerAxis = 1,
    padding: Padding = 0,
    output_padding: PerAxis = 0,
    output_size: PerAxis | None = None,
    dilation: PerAxis = 1,
    groups: int = 1,
    flip: bool = False,
) -> tuple[Array, Array, Array]:
    """Give (dx, dw, db), the adjoint of `conv_transpose`: both gather dy, which is zero where y was cut off."""
    inputs = (dy, x, w)
    dy, x, w = _wide(*inputs)
    grid = _transpose_grid(x.shape[2:], w.shape[2:], stride, padding, output_padding, output_size, dilation)
    per_group, width = x.shape[1] // groups, w.shape[1]
    assert dy.shape == (x.shape[0], width * groups, *grid.sizes), (dy.shape, grid)
    dx = np.zeros(x.shape, np.result_type(dy, w))
    dw = np.zeros(w.shape, np.result_type(dy, x))
    for pos, tap, cell in grid.walk():
        k = _weight_index(tap, grid.kernel, flip)
        for i in range(x.shape[1]):
            d = _pixel(dy, _block(i, per_group, width), cell, grid)
            dx[:, i, *pos] += _times(d, np.conj(w[i, :, *k])).sum(1)
            dw[i, :, *k] += _times(d, np.conj(x[:, i, *pos])[:, None]).sum(0)
    db = dy.sum(axis=(0, *range(2, dy.ndim)))
    return _narrow(_for(x, dx), *inputs), _narrow(_for(w, dw), *inputs), _narrow(db, *inputs)


# --- max_pool ---------------------------------------------------------------------------------------------------


def max_pool(
    x: Array,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
) -> tuple[Array, Array]:
    """Give (y, argmax): the largest real cell of each window, and its row-major number in the window (int64).

    The first of equal cells wins, the first NaN wins over all, padding never does.
    """
    grid = _grid(x.shape[2:], kernel, kernel if stride is None else stride, padding, dilation, ceil_mode)
    y = np.zeros((*x.shape[:2], *grid.outs), x.dtype.newbyteorder("="))
    argmax = np.zeros(y.shape, np.int64)
    for n, c in np.ndindex(*x.shape[:2]):
        for pos in np.ndindex(*grid.outs):
            best = None
            for number, (_, cell) in enumerate(grid.taps(pos)):
                if not grid.real(cell):
                    continue
                value = x[n, c, *cell]
                if best is None or value > best or (np.isnan(value) and not np.isnan(best)):
                    best = y[n, c, *pos] = value
                    argmax[n, c, *pos] = number
            assert best is not None, f"the window at {pos} holds no cell of the input"
    return y, argmax


def max_pool_backward(
    dy: Array,
    argmax: Array,
    sizes: Sequence[int],
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
) -> Array:
    """Give dx: each dy goes to the cell that won, and adds up where windows share it."""
    plane = plane_indices(argmax, sizes, kernel, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode)
    (wide,) = _wide(dy)
    dx = np.zeros((*wide.shape[:2], int(np.prod(sizes))), wide.dtype)
    for n, c, *pos in np.ndindex(*wide.shape):
        dx[n, c, plane[n, c, *pos]] += wide[n, c, *pos]
    return _narrow(dx.reshape(*wide.shape[:2], *sizes), dy)


def plane_indices(
    argmax: Array,
    sizes: Sequence[int],
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
) -> Array:
    """Turn numbers within the window into flat row-major indices of the unpadded plane (int64)."""
    grid = _grid(sizes, kernel, kernel if stride is None else stride, padding, dilation, ceil_mode)
    assert argmax.shape[2:] == grid.outs, (argmax.shape, grid)
    plane = np.zeros(argmax.shape, np.int64)
    for pos in np.ndindex(*grid.outs):
        cells = [cell for _, cell in grid.taps(pos)]
        for n, c in np.ndindex(*argmax.shape[:2]):
            cell = cells[int(argmax[n, c, *pos])]
            assert grid.real(cell), f"cell {cell} of the window at {pos} is not in the input"
            flat = 0
            for index, size in zip(cell, grid.sizes, strict=True):
                flat = flat * size + index
            plane[n, c, *pos] = flat
    return plane


# --- avg_pool ---------------------------------------------------------------------------------------------------


def _average(grid: Grid, pos: Index, count_include_pad: bool) -> tuple[list[Index], int]:
    """Give a window's real cells and its divisor, never 0, in which the ceil overhang never counts."""
    cells = [cell for _, cell in grid.taps(pos)]
    real = [cell for cell in cells if grid.real(cell)]
    counted = [cell for cell in cells if grid.padded(cell)] if count_include_pad else real
    return real, max(1, len(counted))


@_quiet
def avg_pool(
    x: Array,
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Array:
    """Sum the real cells of each window and divide by the number of cells counted; a window with none gives 0."""
    grid = _grid(x.shape[2:], kernel, kernel if stride is None else stride, padding, dilation, ceil_mode)
    x = x.astype(complex if x.dtype.kind == "c" else float)
    y = np.zeros((*x.shape[:2], *grid.outs), x.dtype)
    for pos in np.ndindex(*grid.outs):
        real, divisor = _average(grid, pos, count_include_pad)
        for cell in real:
            y[:, :, *pos] += x[:, :, *cell]
        y[:, :, *pos] /= divisor
    return y


@_quiet
def avg_pool_backward(
    dy: Array,
    sizes: Sequence[int],
    kernel: PerAxis,
    *,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Array:
    """Give dx: each real cell of a window gets dy over the window's divisor."""
    grid = _grid(sizes, kernel, kernel if stride is None else stride, padding, dilation, ceil_mode)
    assert dy.shape[2:] == grid.outs, (dy.shape, grid)
    dy = dy.astype(complex if dy.dtype.kind == "c" else float)
    dx = np.zeros((*dy.shape[:2], *sizes), dy.dtype)
    for pos in np.ndindex(*grid.outs):
        real, divisor = _average(grid, pos, count_include_pad)
        for cell in real:
            dx[:, :, *cell] += dy[:, :, *pos] / divisor
    return dx


# --- dropout ----------------------------------------------------------------------------------------------------

LOW = 0xFFFFFFFF
M1, M2 = 0x7FEB352D, 0x846CA68B  # lowbias32, by Chris Wellons ("hash prospector"), public domain


def _mix(v: int) -> int:
    """Hash 32 bits to 32 bits, one to one (lowbias32)."""
    v &= LOW
    v ^= v >> 16
    v = v * M1 & LOW
    v ^= v >> 15
    v = v * M2 & LOW
    return v ^ v >> 16


def _row_keys(seed: int, step: int, row: int) -> tuple[int, int]:
    """Give the two keys of one row of the first axis."""
    a = _mix(_mix(_mix(seed + 0x9E3779B9) ^ seed >> 32) + step)
    k1 = _mix(a + row)
    return k1, _mix(k1 ^ 0x85EBCA6B)


def dropout_mask(shape: Sequence[int], rate: float, seed: int, step: int) -> Array:
    """Say which elements stay: a pure function of seed, step, row, and row-major index in the row."""
    threshold = round(rate * 2**31)
    columns = list(itertools.product(*(range(n) for n in shape[1:])))
    mask = np.zeros(tuple(shape), bool)
    for row in range(shape[0]):
        k1, k2 = _row_keys(seed, step, row)
        for i, column in enumerate(columns):
            v = i + k1 & LOW
            v ^= v >> 16
            v = v * M1 & LOW
            v ^= k2
            v ^= v >> 15
            v = v * M2 & LOW
            v ^= v >> 16
            mask[row, *column] = v >> 1 >= threshold
    return mask


@_quiet
def dropout(x: Array, mask: Array, rate: float) -> Array:
    """Give x / (1 - rate) where the mask is true, else exact 0; `dropout(dy, mask, rate)` is the backward."""
    y = np.zeros(x.shape, complex if x.dtype.kind == "c" else float)
    for index in np.ndindex(*x.shape):
        if mask[index] and rate < 1:
            y[index] = x[index] / (1 - rate)
    return y
