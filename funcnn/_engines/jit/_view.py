"""Blocks of a pass, and the source of a pass as the kernels read it: in place, or copied to padded rows in scratch.

All arrays have a channels-first shape (N, C, *spatial) of 1 to 3 spatial axes; offsets and steps are in bytes.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines._order import FIRST, LAST, Array
from funcnn._engines._threads import ranges
from funcnn._engines.jit import _host
from funcnn._engines.jit._gemm import stage_first, stage_last
from funcnn._engines.jit._kernels import kernel
from funcnn._engines.jit._walk import POINT, Pass, Walk, single
from funcnn._scratch import scratch

# Of the cells of one block: half of a 2 MB L2 cache. Smaller blocks cost more in Python than they save in the cache.
STAGE_BYTES = 1 << 20
# Bytes of a line of a cache.
LINE = 64
# Most cells of a row that `merged` makes of smaller ones.
ROW_CELLS = 1 << 10


class Block(NamedTuple):
    """Ranges of images, planes and rows of windows."""

    n: tuple[int, int]
    d: tuple[int, int]
    h: tuple[int, int]


class Cut(NamedTuple):
    """Images, planes and rows of windows of one block."""

    images: int
    planes: int
    rows: int


def blocks(n: int, walks: Pass, cut: Cut) -> list[Block]:
    axes = [
        ranges(size, most)
        for size, most in ((n, cut.images), (walks[0].windows, cut.planes), (walks[1].windows, cut.rows))
    ]
    return [Block(*block) for block in itertools.product(*axes)]


@lru_cache(1024)
def cut_for(n: int, walks: Pass, row_bytes: int, parts: int, most: int = STAGE_BYTES) -> Cut:
    """Blocks whose cells take about `most` bytes (row_bytes: of one row of cells), and at least `parts` of them.

    Several images are whole ones, and several planes too: the rows of a block follow each other in an array.
    """
    d, h, _ = walks

    def size(planes: int, rows: int) -> int:
        return d.span(planes) * h.span(rows) * row_bytes

    images, planes, rows = 1, d.windows, h.windows
    while planes > 1 and size(planes, rows) > most:
        planes = -(-planes // 2)
    while rows > 1 and size(planes, rows) > most:
        rows = -(-rows // 2)
    if (planes, rows) == (d.windows, h.windows):
        # As many for every thread: three blocks for two threads take as long as four.
        fit = max(1, 2 * most // max(size(planes, rows), 1))
        images = -(-n // (parts * -(-n // (parts * fit))))
    while -(-n // images) * -(-d.windows // planes) * -(-h.windows // rows) < parts and images * planes * rows > 1:
        if images > 1:
            images = -(-images // 2)
        else:
            planes, rows = (-(-planes // 2), rows) if planes > 1 else (1, -(-rows // 2))
    return Cut(images, planes, rows)


class Steps(NamedTuple):
    """Where the kernels find the cells of a block: byte steps from one cell to the next, and from one channel to the next."""

    n: int
    d: int
    h: int
    w: int
    c: int

    def grid(self, cut: Cut) -> Array:
        """Offsets of images by planes by rows, flat."""
        plane = np.add.outer(np.arange(cut.planes) * self.d, np.arange(cut.rows) * self.h)
        return np.add.outer(np.arange(cut.images) * self.n, plane).reshape(-1)


def targets(y: Steps, walks: Pass, cut: Cut) -> Array:
    """Offset in y of the first pixel of every row of windows of a block."""
    d, h, _ = walks
    return Steps(y.n, y.d * d.stride, y.h * h.stride, 0, 0).grid(cut)


def steps_of(a: Array) -> Steps:
    """The strides of an array (N, C, *spatial)."""
    n, c, *spatial = a.strides
    d, h, w = (*(0,) * (3 - len(spatial)), *spatial)
    return Steps(n, d, h, w, c)


def address_of(a: Array) -> int:
    """Address of the first number; ten times as fast as `a.ctypes.data`."""
    return int(a.__array_interface__["data"][0])


def evenly(a: Array) -> bool:
    """Whether all numbers of an array lie the same distance apart."""
    return all(far == size * near for far, size, near in zip(a.strides, a.shape[1:], a.strides[1:], strict=False))


class View:
    """The source of a pass as the kernels read it: in place, or block by block in padded rows (`copies`: always).

    `zeros`: the kernel reads zeros where a window lies in padding, see `padding`. `apart`: the kernel reads a few numbers of
    each of many pixels, whose distance in a copy shall not be a power of 2: a cache has few places for these. A copy has a
    register of slack at its end, so that a vector of the last cells may read beyond them. A view holds no array: it is made
    once for the steps of an array.
    """

    def __init__(
        self,
        dtype: str,
        at: Steps,
        walks: Pass,
        order: str,
        copies: bool = False,
        zeros: bool = False,
        apart: bool = False,
    ) -> None:
        self.at, self.walks, self.order, self.dtype, self.apart = at, walks, order, dtype, apart
        self.item, self.lanes = np.dtype(dtype).itemsize, _host.lanes_of(dtype)
        self.stage = kernel(stage_first if order == FIRST else stage_last, dtype)
        w = walks[2]
        fits = w.step == 1 and at.w == self.item if order == FIRST else at.c == self.item
        self.direct = fits and not copies and (zeros or all(walk.inside for walk in walks))
        # Channels-first rows hold one part for each phase of the stride, so that neighbouring windows' cells lie together.
        self.phases = sorted({o % w.step for o in w.offsets}) if order == FIRST else [0]
        self.firsts = np.array([w.start + phase for phase in self.phases])
        self.cells = w.windows + w.offsets[-1] // w.step if order == FIRST else w.span(w.windows)
        self.row_numbers = len(self.phases) * self.cells  # of one channel

    def source(self, here: Cut, channels: int) -> Steps:
        """Steps between the cells of a block."""
        d, h, _ = self.walks
        if self.direct:
            return self.at
        planes, rows = d.span(here.planes), h.span(here.rows)
        if self.order == FIRST:
            pitch = self.row_numbers * self.item
            image = planes * rows * pitch
            return Steps(image, rows * pitch, pitch, self.item, here.images * image)
        pixel = self._pixel(channels)
        pitch = self.cells * pixel
        return Steps(planes * rows * pitch, rows * pitch, pitch, pixel, self.item)

    def _pixel(self, channels: int) -> int:
        """Bytes of a pixel of a copy, channels-last: if `apart`, an odd number of lines of the cache."""
        pixel = channels * self.item
        return (-(-pixel // LINE) | 1) * LINE if self.apart and pixel >= LINE else pixel

    def block(self, x: int, block: Block, channel: int, channels: int) -> tuple[int, int, Any]:
        """Address of the first tap of a block's first window, of x at an address; the end of its copy (0: in place); the copy.

        The caller holds the copy while it uses the address: scratch beyond what is kept is gone with its array.
        """
        d, h, w = self.walks
        d0, h0 = block.d[0] * d.step + d.start, block.h[0] * h.step + h.start
        at = self.at
        base = x + block.n[0] * at.n + channel * at.c
        if self.direct:
            return base + d0 * at.d + h0 * at.h + w.start * at.w, 0, None
        here = size_of(block)
        planes, rows = d.span(here.planes), h.span(here.rows)
        pixel = self._pixel(channels) if self.order == LAST else channels * self.item
        size = here.images * planes * rows * self.row_numbers * (pixel // self.item) + self.lanes
        cells = scratch("cells", (size,), self.dtype)
        staged = address_of(cells)
        axes = np.array(
            (
                (channels, at.c, 0, 0),
                (here.images, at.n, 0, 0),
                (planes, at.d, d0, d.size),
                (rows, at.h, h0, h.size),
                (w.step, at.w, w.start, w.size),
            )
        )
        if self.order == FIRST:
            self.stage(base, axes, self.firsts, staged, self.cells)
        else:
            self.stage(base, axes, staged, self.cells, pixel)
        return staged, staged + size * self.item, cells

    def taps(self, source: Steps) -> Array:
        """Offset of every tap of a window."""
        d, h, w = self.walks
        if self.order == LAST or self.direct:
            columns = [o * source.w for o in w.offsets]
        else:
            columns = [(self.phases.index(o % w.step) * self.cells + o // w.step) * self.item for o in w.offsets]
        return grid([[o * source.d for o in d.offsets], [o * source.h for o in h.offsets], columns])

    def rows(self, source: Steps, here: Cut) -> Array:
        """Offset of the first cell of every row of windows of a block."""
        d, h, _ = self.walks
        return Steps(source.n, source.d * d.step, source.h * h.step, 0, 0).grid(here)

    def edges(self, block: Block) -> tuple[Walk | None, Walk | None]:
        """The planes and the rows of windows of a block, as far as they reach padding that is not in a copy."""
        if not self.direct:
            return None, None
        d, h = self.walks[0].part(*block.d), self.walks[1].part(*block.h)
        return None if d.inside else d, None if h.inside else h

    def padding(self, here: Cut, edges: tuple[Walk | None, Walk | None]) -> Array:
        """For every window of a block, bit t: its tap t lies in padding that is not in a copy."""
        axes = (*edges, self.walks[2] if self.direct else None)
        counts = here.planes, here.rows, self.walks[2].windows
        flags = [
            np.zeros((n, len(walk.taps)), bool) if edge is None else edge.outside()
            for n, walk, edge in zip(counts, self.walks, axes, strict=True)
        ]
        d, h, w = (np.expand_dims(f, tuple({0, 1, 2, 3, 4, 5} - {i, i + 3})) for i, f in enumerate(flags))
        bits = (d | h | w).reshape(math.prod(counts), -1)
        if not bits.any():
            return np.zeros(here.images * len(bits), int)
        return np.tile(bits @ (1 << np.arange(bits.shape[1])), here.images)

    def step(self, source: Steps) -> int:
        """Bytes from a cell of one window to that of the next."""
        return self.item if self.order == FIRST else self.walks[2].step * source.w


view_for = lru_cache(1024)(View)
"""The view for a dtype, steps, a pass, a memory order and `copies`: the same object for the same arguments."""


def grid(axes: list[list[int]]) -> Array:
    """Sums of one number of each axis, the last axis fastest."""
    d, h, w = map(np.array, axes)
    return np.add.outer(np.add.outer(d, h), w).reshape(-1)


def size_of(block: Block) -> Cut:
    return Cut(*(hi - lo for lo, hi in block))


def target_of(to: Steps, walks: Pass, block: Block) -> int:
    """Offset of the first pixel of a block."""
    d, h, w = walks
    return (
        block.n[0] * to.n
        + (d.first + block.d[0] * d.stride) * to.d
        + (h.first + block.h[0] * h.stride) * to.h
        + w.first * to.w
    )


def merged(walks: Pass, x: Array, y: Array) -> tuple[Pass, Array, Array]:
    """A pass of single taps over every cell as one over long rows, where the memory of the axes is one run.

    Rows of 7 cells would leave most of a tile idle; rows of all cells could not be cut into blocks.
    """
    if any(walk != single(walk.size) for walk in walks):
        return walks, x, y
    cells = math.prod(walk.size for walk in walks)
    width = max(n for n in range(1, min(cells, ROW_CELLS) + 1) if cells % n == 0)
    if width < ROW_CELLS // 16:
        width = cells
    long_x, long_y = _in_rows(x, width), _in_rows(y, width)
    if long_x is None or long_y is None:
        return walks, x, y
    return (POINT, single(cells // width), single(width)), long_x, long_y


def _in_rows(a: Array, width: int) -> Array | None:
    """a (N, C, *spatial) as (N, C, rows, width) without a copy, None where that cannot be."""
    step = None
    for size, stride in zip(reversed(a.shape[2:]), reversed(a.strides[2:]), strict=True):
        if size > 1 and step is not None and stride != step:
            return None
        if size > 1 or step is None:
            step = stride * size
    return a.reshape(*a.shape[:2], -1, width)
