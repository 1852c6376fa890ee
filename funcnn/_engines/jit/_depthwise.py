"""Depthwise convolution: one channel of each group on one side. See `_lanes` for the kernels and what a place is."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np

from funcnn._engines._order import FIRST, LAST, Array, allocate
from funcnn._engines._threads import ranges, run_all
from funcnn._engines.jit._kernels import kernel
from funcnn._engines.jit._lanes import (
    PLACES,
    ROOM,
    RUN,
    STRIP,
    TAPS,
    depthwise_first,
    depthwise_gradient_first,
    depthwise_gradient_last,
    depthwise_last,
)
from funcnn._engines.jit._maps import Maps
from funcnn._engines.jit._view import (
    Block,
    Cut,
    Steps,
    View,
    address_of,
    blocks,
    cut_for,
    size_of,
    steps_of,
    target_of,
    targets,
    view_for,
)
from funcnn._engines.jit._walk import Pass, Walk, forwards
from funcnn._scratch import scratch
from funcnn._spec import ConvSpec

__all__ = ["Depthwise"]

# Of the cells of a block, channels-first: they, and what is read and written beside them, stay in an L2 cache.
BLOCK_BYTES = 256 << 10
# Sums of the weight gradient that are made apart, channels-last: for up to so many threads.
SUMS = 16
ORIGIN = Block((0, 1), (0, 1), (0, 1))


class Depthwise(Maps):
    """Convolutions without sums over channels, or (the adjoint, with a multiplier) over the few of one group."""

    def __init__(self, spec: ConvSpec, dtype: str, threads: int) -> None:
        super().__init__(spec, dtype, threads)
        self.first, self.last = kernel(depthwise_first, dtype), kernel(depthwise_last, dtype)
        self.gradient_first = kernel(depthwise_gradient_first, dtype)
        self.gradient_last = kernel(depthwise_gradient_last, dtype)

    def _by_channels(self, order: str) -> bool:
        """Whether a place is a vector of channels: they must lie together in x and in y."""
        return order != FIRST and self.spec.inputs == self.spec.outputs

    def _convolve(self, walks: Pass, x: Array, weight: Array, bias: Array, y: Array, order: str) -> None:
        parts = self._parts(len(x) * math.prod(walk.windows for walk in walks) * weight.size)
        run = self._convolve_last if self._by_channels(order) else self._convolve_first
        run(walks, x, weight, bias, y, parts)

    def weight_gradient(self, x: Array, y: Array, order: str) -> Array:
        spec = self.spec
        walks = forwards(spec.axes, spec.flip)
        run = self._gradient_last if self._by_channels(order) else self._gradient_first
        weight = run(walks, x, y, self._parts(y.size * spec.taps)).reshape(spec.outputs, 1, *spec.kernel)
        return np.ascontiguousarray(np.flip(weight, tuple(range(2, weight.ndim))) if spec.flip else weight)

    def _together(self, a: Array, axis: int, order: str) -> Array:
        """a, or a copy where its numbers do not lie together along an axis."""
        if a.strides[axis] == self.item:
            return a
        copy = allocate(np.empty, a.shape, self.dtype, order)
        np.copyto(copy, a)
        return copy

    # ---- channels-last -----------------------------------------------------------------------------------------------

    def _convolve_last(self, walks: Pass, x: Array, weight: Array, bias: Array, y: Array, parts: int) -> None:
        channels = len(weight)
        wide = max(channels, self.lanes)  # a vector of weights is read whole
        x = self._together(x, 1, LAST)
        at, to = steps_of(x), steps_of(y)
        order, cells, runs = _tap_order(walks, weight.shape[2:], 2)
        axes, taps = _located(walks, at, to, channels >= self.lanes)
        taps = taps[order]
        offsets = taps[:, 0].copy()
        w = np.zeros((len(taps), wide), self.dtype)
        w[:, :channels] = weight.reshape(channels, -1).T[cells]
        shifts, nothing = np.zeros((2, wide), self.dtype)
        shifts[:channels] = bias
        start, target = address_of(x), address_of(y) + target_of(to, walks, ORIGIN)

        def task(part: tuple[int, int]) -> None:
            self.last(
                start, address_of(nothing), target, axes, taps, offsets, runs, *part, _pointers(taps),
                address_of(w), w.strides[0], address_of(shifts), channels,
            )  # fmt: skip

        run_all(task, _shares(_strips(len(x), walks), parts), parts)

    def _gradient_last(self, walks: Pass, x: Array, y: Array, parts: int) -> Array:
        """(G, taps)."""
        channels = x.shape[1]
        x, y = self._together(x, 1, LAST), self._together(y, 1, LAST)
        order, runs = _repeated_order(walks, self.spec.kernel)
        axes, taps = _located(walks, steps_of(x), steps_of(y), channels >= self.lanes)
        taps = taps[order]
        offsets = taps[:, 0].copy()
        nothing = np.zeros(max(channels, self.lanes), self.dtype)
        # Each task has some of the sums, which are cut by the batch alone: the same ones for every number of threads.
        strips = _strips(len(x), walks)
        count = min(SUMS, strips)
        cuts = np.array([strips * i // count for i in range(count + 1)])
        firsts = np.maximum(0, np.minimum(np.arange(0, channels, self.lanes), channels - self.lanes))
        sums = np.zeros((count, len(firsts), len(taps), self.lanes), self.dtype)

        def task(part: tuple[int, int]) -> None:
            self.gradient_last(
                address_of(x), address_of(nothing), address_of(y), axes, taps, offsets, runs, cuts, *part, _pointers(taps),
                channels, address_of(sums),
            )  # fmt: skip

        run_all(task, _shares(count, parts), parts)
        total = sums.sum(0)[:, np.unique(order, return_index=True)[1]]
        result = np.empty((len(nothing), self.spec.taps), self.dtype)
        for first, vectors in zip(firsts, total, strict=True):
            result[first : first + self.lanes] = vectors.T
        return result[:channels]

    # ---- channels-first ----------------------------------------------------------------------------------------------

    def _convolve_first(self, walks: Pass, x: Array, weight: Array, bias: Array, y: Array, parts: int) -> None:
        groups, outputs, channels = weight.shape[:3]
        at, to = steps_of(x), steps_of(y)
        view = view_for(self.dtype, at, walks, FIRST, copies=True)
        own = self._blocks(view, channels)
        # Groups lie along the longer axis of a block; side by side in a row places have no cells in common.
        upright = size_of(own[0]).rows * self.lanes >= walks[2].windows
        order, cells, runs = _tap_order(walks, weight.shape[2:], 1 if upright else None)
        w = weight.reshape(groups, outputs, -1).take(cells, -1)
        pixel = walks[2].stride * to.w

        def task(job: tuple[Block, tuple[int, int]]) -> None:
            block, part = job
            here = size_of(block)
            starts, x_step, targets_, y_step, lengths = _groups(view, to, here, channels, upright)
            room, buffer = self._cells(view, here, channels), scratch("places", (PLACES * self.lanes,), self.dtype)
            whole = pixel == self.item and lengths.min() == self.lanes
            self.first(
                address_of(x), at.n, channels * at.c, _extents(view, block, channels), walks[2].step * at.w,
                address_of(room), starts, x_step, _offsets(view, here, channels)[order], runs,
                address_of(w), address_of(bias), outputs,
                address_of(y) + target_of(to, walks, block), to.n, to.c, targets_, y_step, lengths, pixel,
                0 if whole else address_of(buffer), len(x), *part,
            )  # fmt: skip

        run_all(task, list(itertools.product(own, _shares(len(x) * groups, parts))), parts)

    def _gradient_first(self, walks: Pass, x: Array, y: Array, parts: int) -> Array:
        """(O, taps)."""
        images, groups = x.shape[:2]
        y = self._together(y, -1, FIRST)
        at, to = steps_of(x), steps_of(y)
        view = view_for(self.dtype, at, walks, FIRST, copies=True)
        padded = -(-self.spec.taps // TAPS) * TAPS
        sums = np.zeros((self.spec.outputs, padded, self.lanes), self.dtype)

        def task(part: tuple[int, int]) -> None:
            # A channel belongs to one task, which takes the blocks in their order: the same sums for every number of threads.
            for block in self._blocks(view, 1):
                here = size_of(block)
                places, targets_, lengths = _places(view, to, here)
                room = self._cells(view, here, 1)
                self.gradient_first(
                    address_of(x), at.n, at.c, _extents(view, block, 1), walks[2].step * at.w, address_of(room), places,
                    np.resize(_offsets(view, here, 1), padded), self.spec.outputs // groups,
                    address_of(y) + target_of(to, walks, block), to.n, to.c, targets_, lengths,
                    int((lengths == self.lanes).sum()), images, *(images * g for g in part), address_of(sums),
                )  # fmt: skip

        run_all(task, _shares(groups, parts), parts)
        return sums.sum(-1)[:, : self.spec.taps]

    def _blocks(self, view: View, channels: int) -> list[Block]:
        """Blocks of one image."""
        cut = cut_for(1, view.walks, view.row_numbers * channels * self.item, 1, BLOCK_BYTES)
        return blocks(1, view.walks, cut._replace(images=1))

    def _cells(self, view: View, here: Cut, channels: int) -> Array:
        """Zeros for the copy of a block, and as many beyond as the places of a group that do not exist read."""
        size = channels * view.source(here, channels).n // self.item
        beyond = PLACES * max(view.row_numbers * view.walks[1].step, self.lanes) + self.lanes
        cells = scratch("cells", (size + beyond,), self.dtype)
        cells.fill(0)
        return cells


def _shares(size: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of 0 .. size, one for each thread: to hand over more often costs more than it evens out."""
    return ranges(size, -(-size // parts))


def _inside(walk: Walk, offset: int) -> tuple[int, int]:
    """The windows (from, to) for which a tap is a cell of the source."""
    first = walk.start + offset
    return max(0, -(first // walk.step)), (walk.size - 1 - first) // walk.step + 1


# ---- taps ------------------------------------------------------------------------------------------------------------


@lru_cache(1024)
def _tap_order(walks: Pass, shape: tuple[int, ...], along: int | None) -> tuple[Array, Array, int]:
    """Numbers of a pass's taps of weights (C, *k), those in runs along an axis first; their numbers in the weights; runs.

    A run has RUN taps whose cells lie a window apart.
    """
    chains = [] if along is None else _chains(walks[along])
    runs = [chain[k : k + RUN] for chain in chains for k in range(0, len(chain) - RUN + 1, RUN)]
    order = _ordered(shape[0], walks, along or 0, runs)
    cells = np.arange(math.prod(shape)).reshape(shape)
    cells = cells[np.ix_(range(shape[0]), *(walk.taps for walk in walks[4 - len(shape) :]))].reshape(-1)
    return order, cells[order], len(runs) * len(order) // len(walks[along or 0].offsets)


@lru_cache(1024)
def _repeated_order(walks: Pass, kernel: tuple[int, ...]) -> tuple[Array, int]:
    """As `_tap_order` for the weight gradient: all taps are in runs along the last axis or none is, a multiple of TAPS.

    Taps may occur more than once.
    """
    chains = _chains(walks[2])
    runs = [chain[min(k, len(chain) - RUN) :][:RUN] for chain in chains for k in range(0, len(chain), RUN)]
    if min(map(len, chains)) < RUN:
        runs = []
    order = _ordered(1, walks, 2, runs)
    return np.resize(order, -(-len(order) // TAPS) * TAPS), len(runs)


def _ordered(channels: int, walks: Pass, along: int, runs: list[list[int]]) -> Array:
    """Numbers of taps (channels, *offsets): of all runs of an axis, then of its other taps."""
    sizes = [channels, *(len(walk.offsets) for walk in walks)]
    rows = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), 1 + along, -1).reshape(-1, sizes[1 + along])
    first = list(itertools.chain(*runs))
    alone = [tap for tap in range(sizes[1 + along]) if tap not in first]
    return np.concatenate([rows[:, first].reshape(-1), rows[:, alone].reshape(-1)])


def _chains(walk: Walk) -> list[list[int]]:
    """Taps of an axis in lists of such whose cells lie a window apart."""
    chains: dict[int, list[int]] = {}  # by the cell that the next tap would have
    for tap, offset in enumerate(walk.offsets):
        chains[offset + walk.step] = [*chains.pop(offset, []), tap]
    return list(chains.values())


# ---- channels-last: tables -------------------------------------------------------------------------------------------


def _strips(images: int, walks: Pass) -> int:
    d, h, w = walks
    return images * d.windows * h.windows * -(-w.windows // STRIP)


def _pointers(taps: Array) -> Array:
    return scratch("pointers", (len(taps) * ROOM,), np.int64)


@lru_cache(1024)
def _located(walks: Pass, x: Steps, y: Steps, direct: bool) -> tuple[Array, Array]:
    """The tables of `_lanes._locate`. `direct`: whether windows can lie inside, to be read by whole vectors."""
    axes, steps = [(0, x.n, y.n, 0, 0)], x[1:4]
    for walk, x_step, y_step in zip(walks, steps, y[1:4], strict=True):
        parts = [_inside(walk, offset) for offset in walk.offsets]
        lo, hi = max(lo for lo, _ in parts), min(hi for _, hi in parts)
        axes.append((walk.windows, walk.step * x_step, walk.stride * y_step, lo, hi if direct else lo))
    taps = [
        (
            sum((walk.start + offset) * step for walk, offset, step in zip(walks, offsets, steps, strict=True)),
            *itertools.chain(*map(_inside, walks, offsets)),
        )
        for offsets in itertools.product(*(walk.offsets for walk in walks))
    ]
    return np.array(axes), np.array(taps)


# ---- channels-first: tables ------------------------------------------------------------------------------------------


def _offsets(view: View, here: Cut, channels: int) -> Array:
    """Offsets of the taps of all channels of a group in a block's copy."""
    source = view.source(here, channels)
    return np.add.outer(np.arange(channels) * source.c, view.taps(source)).reshape(-1)


@lru_cache(1024)
def _groups(view: View, to: Steps, here: Cut, channels: int, upright: bool) -> tuple[Array, int, Array, int, Array]:
    """Groups of places: offsets in a block's copy and bytes from place to place, the same of y, and the lanes of places.

    A place has 0 lanes where it does not exist; where there are enough, the last group begins earlier.
    """
    (d, h, w), lanes, source = view.walks, view.lanes, view.source(here, channels)
    height, width = (PLACES, lanes) if upright else (1, PLACES * lanes)
    rows, columns = (
        np.maximum(0, np.minimum(np.arange(0, size, span), size - span))
        for size, span in ((here.rows, height), (w.windows, width))
    )
    place = np.arange(PLACES)
    there = rows[:, None, None] + place * upright < here.rows
    lengths = np.clip(w.windows - columns[:, None] - place * (not upright) * lanes, 0, lanes) * there

    def spread(planes: int, row: int, column: int) -> tuple[Array, int]:
        starts = np.add.outer(np.arange(here.planes) * planes, np.add.outer(rows * row, columns * column))
        return starts.reshape(-1), row if upright else lanes * column

    return (
        *spread(source.d * d.step, source.h * h.step, view.item),
        *spread(to.d * d.stride, to.h * h.stride, to.w * w.stride),
        np.tile(lengths.reshape(-1), here.planes),
    )


@lru_cache(1024)
def _places(view: View, to: Steps, here: Cut) -> tuple[Array, Array, Array]:
    """Places one by one: offsets in the copy of a block of a channel and in y, and their lanes; those with all lanes first."""
    source, w = view.source(here, 1), view.walks[2]
    columns = np.arange(0, w.windows, view.lanes)
    rows = view.rows(source, here)
    lengths = np.tile(np.minimum(view.lanes, w.windows - columns), len(rows))
    order = np.argsort(-lengths, kind="stable")
    return (
        np.add.outer(rows, columns * view.item).reshape(-1)[order],
        np.add.outer(targets(to, view.walks, here), columns * (w.stride * to.w)).reshape(-1)[order],
        lengths[order],
    )


@lru_cache(1024)
def _extents(view: View, block: Block, channels: int) -> Array:
    """The table of `_lanes._stage`: the cells of a block that are no padding."""
    d, h, w = view.walks
    at, source = view.at, view.source(size_of(block), channels)
    table, x, put = [(channels, at.c, source.c)], 0, 0
    for walk, (first, last), a, b in ((d, block.d, at.d, source.d), (h, block.h, at.h, source.h)):
        start = first * walk.step + walk.start
        lo, hi = max(0, -start), min(walk.span(last - first), walk.size - start)
        table.append((hi - lo, a, b))
        x, put = x + (start + lo) * a, put + lo * b
    for i, phase in enumerate(view.phases):
        start = w.start + phase
        lo, hi = max(0, -(start // w.step)), min(view.cells, (w.size - 1 - start) // w.step + 1)
        table.append((hi - lo, x + (start + lo * w.step) * at.w, put + (i * view.cells + lo) * view.item))
    return np.array(table)
