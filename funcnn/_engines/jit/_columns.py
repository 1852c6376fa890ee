"""Adjoint of a convolution of few inputs (the data gradient of a first layer): one product for all taps, then col2im.

A register tile has 8 rows or 32 lanes of output channels: 3 channels leave most of it idle. A product of y with the weights of
all taps at once, 3 * 49 columns for a kernel of 7 x 7, fills it. Each column is then added where its tap lies in x. Only cells
of y are multiplied, so that weights may be infinite.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines._order import LAST, Array
from funcnn._engines._threads import ranges
from funcnn._engines.jit._kernels import kernel, njit
from funcnn._engines.jit._simd import (
    add,
    load,
    load_first,
    store,
    store_first,
)
from funcnn._engines.jit._view import Block, Steps, address_of
from funcnn._scratch import scratch
from funcnn._spec import Axis, ConvSpec

__all__ = ["Columns", "columns_for", "fits"]

# Input channels of a convolution whose adjoint goes by columns, and output channels that make it worth while.
MOST_INPUTS, LEAST_OUTPUTS = 8, 16
# Of the cells of x that one task sums up, and of the columns that wait to be added.
TARGET_BYTES, COLUMN_BYTES = 1 << 20, 1 << 20


def fits(spec: ConvSpec) -> bool:
    """Whether the adjoint goes by columns."""
    return spec.groups == 1 and spec.taps > 1 and spec.inputs <= MOST_INPUTS and spec.outputs >= LEAST_OUTPUTS


class Target(NamedTuple):
    """Planes and rows of x of one task; more than one image only where they are whole."""

    n: tuple[int, int]
    d: tuple[int, int]
    h: tuple[int, int]


class Columns:
    """The columns of some rows of y, and the padded rows of x in scratch that they are added to.

    Channels-last a row of x is (cells, I); channels-first it is (phases of the stride, cells) for each channel, so that the
    cells that neighbouring windows write lie together.
    """

    def __init__(self, spec: ConvSpec, dtype: str, order: str) -> None:
        self.axes = (*(Axis(1, 1, 1, 1, 0, 0, 1),) * (3 - len(spec.axes)), *spec.axes)
        self.dtype, self.item, self.last, self.inputs = dtype, np.dtype(dtype).itemsize, order == LAST, spec.inputs
        self.scatter = kernel(add_runs, dtype)
        w = self.axes[2]
        self.phases = 1 if self.last else w.stride
        # For each tap the cell that window 0 writes, counted in its phase, and the phase.
        places = [divmod(w.start(t), self.phases) for t in range(w.kernel)]
        self.left = max(0, -min(cell for cell, _ in places))
        most = max(cell for cell, _ in places) + (w.out - 1) * (w.stride // self.phases)
        self.cells = self.left + max(-(-w.size // self.phases), most + 1)
        self.starts = [phase * self.cells + self.left + cell for cell, phase in places]
        # Numbers of a pixel of y: (row of the kernel, tap, I). `together` rows of y are multiplied at a time.
        self.numbers = spec.taps * spec.inputs
        self.height = max(1, len(self.sources(1, (0, self.axes[1].size))))  # rows of y that write to x
        self.together = max(1, COLUMN_BYTES // (w.out * self.numbers * self.item))
        pixel = self.numbers * self.item if self.last else self.item
        row, column = w.out * pixel, self.item if self.last else self.together * w.out * self.item
        self.steps = Steps(self.height * row, 0, row, pixel, column)

    def targets(self, n: int, parts: int) -> list[Target]:
        """Tasks of about TARGET_BYTES, at least `parts` of them."""
        d, h, _ = self.axes
        row = self.phases * self.cells * self.inputs * self.item
        rows = max(1, min(h.size, TARGET_BYTES // row))
        planes = max(1, min(d.size, TARGET_BYTES // (row * rows)))
        images = 1
        if d.out == d.size == 1 and rows == h.size:
            images = max(1, min(n // parts, TARGET_BYTES // (row * rows), self.together // self.height))
        while -(-n // images) * -(-d.size // planes) * -(-h.size // rows) < parts and planes * rows > 1:
            planes, rows = (-(-planes // 2), rows) if planes > 1 else (1, -(-rows // 2))
        parts_of = (ranges(size, most) for size, most in ((n, images), (d.size, planes), (h.size, rows)))
        return [Target(*part) for part in itertools.product(*parts_of)]

    def blocks(self, target: Target) -> list[Block]:
        """The windows that write to a target, as many at a time as are multiplied together."""
        ds, hs = self.sources(0, target.d), self.sources(1, target.h)
        rows = self.together // (target.n[1] - target.n[0])
        return [
            Block(target.n, (d, d + 1), (hs[lo], hs[hi - 1] + 1))
            for d, (lo, hi) in itertools.product(ds, ranges(len(hs), rows))
        ]

    def sources(self, axis: int, part: tuple[int, int]) -> range:
        """Windows along an axis that write to a range of cells."""
        a = self.axes[axis]
        first = -((a.start(a.kernel - 1) - part[0]) // a.stride)
        last = (part[1] - 1 - a.start(0)) // a.stride
        return range(max(0, first), min(a.out, last + 1))

    def sums(self, target: Target, bias: Array) -> Array:
        """Room for the cells of a task, with the bias in it: (N, D, H, cells, I), or (I, N, D, H, phases, cells)."""
        size = tuple(hi - lo for lo, hi in target)
        shape = (*size, self.cells, self.inputs) if self.last else (self.inputs, *size, self.phases, self.cells)
        sums = scratch("sums of x", shape, self.dtype)
        if bias.any():
            sums[...] = bias if self.last else bias.reshape(-1, *(1,) * 5)
        else:
            sums.fill(0)
        return sums

    def add(self, columns: int, target: Target, block: Block, sums: Array) -> None:
        """Add the columns of a block, at an address, to the sums of a task."""
        images = 0, block.n[1] - block.n[0]
        rows, runs, length = _tables(self, target._replace(n=images), block._replace(n=images), sums.strides[0])
        w, steps = self.axes[2], self.steps
        count, step = (w.out, w.stride * self.inputs * self.item) if self.last else (1, 0)
        c_tap = w.kernel * self.inputs * steps.c
        self.scatter(columns, steps.h, steps.w, c_tap, address_of(sums), rows, step, count, runs, length)

    def runs(self, plane: int) -> tuple[Array, int]:
        """(offset in the columns, in the sums) of runs of numbers for a row of the kernel; their length."""
        w = self.axes[2]
        if self.last:
            pixel = self.inputs * self.item
            together = w.kernel if w.dilation == 1 else 1  # taps that lie together
            runs = [(t * pixel, start * pixel) for t, start in enumerate(self.starts)][::together]
            return np.array(runs), together * self.inputs
        taps = itertools.product(enumerate(self.starts), range(self.inputs))
        runs = [((t * self.inputs + c) * self.steps.c, c * plane + start * self.item) for (t, start), c in taps]
        return np.array(runs), w.out

    def rows(self, target: Target, block: Block) -> Array:
        """For rows of windows: offset in the sums of the row of cells of each row of the kernel; -1 where it is not theirs."""
        pitch = self.phases * self.cells * self.item * (self.inputs if self.last else 1)
        cells, own = [], []
        for axis, windows, (lo, hi) in zip(self.axes, block[1:], target[1:], strict=False):
            at = np.add.outer(np.arange(*windows) * axis.stride, [axis.start(t) for t in range(axis.kernel)])
            cells.append(at - lo)
            own.append((lo <= at) & (at < hi))
        height, planes = target.h[1] - target.h[0], target.d[1] - target.d[0]
        offsets = (cells[0][0][:, None] * height + cells[1][:, None]) * pitch
        offsets = np.where(own[0][0][:, None] & own[1][:, None], offsets, -1).reshape(1, *cells[1].shape[:1], -1)
        images = np.arange(block.n[1] - block.n[0]).reshape(-1, 1, 1) * (planes * height * pitch)
        return np.where(offsets < 0, -1, offsets + images).reshape(-1, offsets.shape[-1])

    def write(self, sums: Array, x: Array, target: Target) -> None:
        """Copy the sums of a task to its cells of x."""
        x = x.reshape(*x.shape[:2], *(1,) * (5 - x.ndim), *x.shape[2:])
        x = x[slice(*target.n), :, slice(*target.d), slice(*target.h)].swapaxes(0, 1)
        if self.last:
            np.moveaxis(x, 0, -1)[...] = sums[:, :, :, self.left : self.left + x.shape[-1]]
            return
        for phase in range(min(self.phases, x.shape[-1])):
            to = x[..., phase :: self.phases]
            to[...] = sums[..., phase, self.left : self.left + to.shape[-1]]


@lru_cache(1024)
def _tables(columns: Columns, target: Target, block: Block, plane: int) -> tuple[Array, Array, int]:
    return columns.rows(target, block), *columns.runs(plane)


columns_for = lru_cache(1024)(Columns)
"""The columns for a Spec, a dtype and a memory order: the same object for the same arguments."""


def add_runs(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: adds the columns of some rows of windows to sums (col2im)."""

    @njit(
        "void(int64, int64, int64, int64, int64, int64[:, ::1], int64, int64, int64[:, ::1], int64)",
        nogil=True,
        cache=True,
    )
    def scatter(
        columns: int, c_row: int, c_step: int, c_tap: int, sums: int, rows: Any, step: int, count: int, runs: Any, length: int
    ) -> None:  # fmt: skip
        """rows: (row, row of the kernel) of offsets in the sums, -1: none. Each has `count` times all runs of `length` numbers.

        c_row, c_step, c_tap: bytes of the columns from a row, a time and a row of the kernel to the next; step: of the sums.
        """
        stamp  # noqa: B018
        whole, rest = length // lanes, length % lanes
        register = lanes * item
        for r in range(len(rows)):
            for i in range(count):
                for q in range(rows.shape[1]):
                    if rows[r, q] < 0:
                        continue
                    for u in range(len(runs)):
                        start = columns + r * c_row + i * c_step + q * c_tap + runs[u, 0]
                        to = sums + rows[r, q] + i * step + runs[u, 1]
                        for _ in range(whole):
                            store(to, add(load(to, code, lanes), load(start, code, lanes)))
                            start, to = start + register, to + register
                        if rest:
                            new = add(load_first(to, rest, code, lanes), load_first(start, rest, code, lanes))
                            store_first(to, new, rest)

    return scatter
