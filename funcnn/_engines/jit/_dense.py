"""Convolution by register tiles, in one dtype: blocks, and the calls of the kernels of `_gemm`.

Legend: N batch, C channels that are summed, M channels that come out, K = C * taps, NR lanes and MR rows of a tile. All arrays
have a channels-first shape; memory order decides which side of the tile the pixels are on.

A map works block by block: some rows of windows whose cells fit the L2 cache. Where windows reach padding (or rows do not lie
as the tile wants them) the block's cells are copied to padded rows in scratch; else they are read where they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from funcnn._engines._order import FIRST, LAST, Array
from funcnn._engines._threads import ranges, run_all
from funcnn._engines.jit import _gemm, _host
from funcnn._engines.jit._columns import Target, columns_for, fits
from funcnn._engines.jit._kernels import kernel
from funcnn._engines.jit._maps import Maps
from funcnn._engines.jit._view import (
    STAGE_BYTES,
    Block,
    Cut,
    Steps,
    View,
    address_of,
    blocks,
    cut_for,
    evenly,
    grid,
    merged,
    size_of,
    steps_of,
    target_of,
    targets,
    view_for,
)
from funcnn._engines.jit._walk import Pass, Walk, forwards, single, three
from funcnn._scratch import scratch
from funcnn._spec import ConvSpec

__all__ = ["Dense"]

# Of the panels of windows that are multiplied together.
PANEL_BYTES = 1 << 19
# Of weights that stay in the L2 cache while all pixels pass by.
RESIDENT_BYTES = 640 << 10
# Of the channels of a pixel, to be read in place where windows reach padding: a copy makes longer runs of few channels.
LEAST_IN_PLACE = 64
# Cells in a row of windows that all tiles of the weight gradient sum before the next ones: they and their dy stay in the L1
# cache.
GRADIENT_CELLS = 256
# Of the sums of slices of the pixels, and the multiply-adds that are worth a slice where there are two already.
SLICES_BYTES, SLICE_WORK = 2 << 20, 200 << 20
# Of the cells of one block that need not stay in a cache, because they are read once.
IN_PLACE_BYTES = 4 << 20
# Numbers of a weight that one thread packs while it could be handed to another.
SHARED_PACKING = 1 << 16


BlockMap = Callable[[Block, int], None]


class Tile(NamedTuple):
    """Rows and vectors of a register tile."""

    mr: int
    nv: int


def tiles() -> tuple[Tile, Tile]:
    """Tiles for pixels as vectors and for channels as vectors: 24 and 28 sums of 32 registers, or 12 of 16."""
    return (Tile(8, 3), Tile(14, 2)) if _host.registers() == 32 else (Tile(4, 3), Tile(6, 2))


class _Weights(NamedTuple):
    """Weights as a tile reads them: address, and steps in bytes to the next group, tile, row of a tile, number of a row."""

    memory: Array
    address: int
    group: int
    tile: int
    row: int
    step: int


class Dense(Maps):
    """Convolutions that sum over channels."""

    def __init__(self, spec: ConvSpec, dtype: str, threads: int) -> None:
        super().__init__(spec, dtype, threads)
        self.tile = dict(zip((FIRST, LAST), tiles(), strict=True))
        self.pack = kernel(_gemm.pack, dtype)
        if fits(spec):
            columns_for(spec, dtype, FIRST)
        self.convolve_first = {
            mr: kernel(_gemm.convolve_first, dtype, mr, self.tile[FIRST].nv) for mr in (4, self.tile[FIRST].mr)
        }
        self.convolve_last = {nv: kernel(_gemm.convolve_last, dtype, self.tile[LAST].mr, nv) for nv in (1, 2)}
        self.gradient = kernel(_gemm.weight_gradient, dtype, *self.tile[LAST])

    def weight_gradient(self, x: Array, y: Array, order: str) -> Array:
        """The gradient (O, I / groups, *k)."""
        spec = self.spec
        groups, outputs, channels = spec.groups, spec.outputs // spec.groups, spec.inputs // spec.groups
        walks, x, y = merged(forwards(spec.axes, spec.flip), x, y)
        parts = self._parts(y.size * channels * spec.taps)
        if order == LAST and channels > outputs and all(walk == single(walk.size) for walk in walks):
            # A tile reads a few numbers of each pixel as its rows: of wide pixels they do not stay in the L1 cache.
            total = self._pixel_sums(walks, y, x, groups, order, parts)
            return np.ascontiguousarray(total[:, :outputs, :channels]).reshape(spec.weight_shape)
        total = self._pixel_sums(walks, x, y, groups, order, parts)
        return self._transposed(total, channels * spec.taps, outputs, parts)

    def _pixel_sums(self, walks: Pass, x: Array, y: Array, groups: int, order: str, parts: int) -> Array:
        """Sums over all windows of each of their numbers times each channel of y: (G, padded C * taps, padded O / G)."""
        to, tile = steps_of(y), self.tile[LAST]
        inputs, channels, outputs = x.shape[1], x.shape[1] // groups, y.shape[1] // groups
        k_count, wide = channels * math.prod(len(walk.taps) for walk in walks), tile.nv * self.lanes
        padded, tiles_ = -(-outputs // wide) * wide, -(-k_count // tile.mr)
        # Slices of the pixels have a sum each, as many for every number of threads. Threads share the rows of a large sum.
        most = SLICES_BYTES // (groups * k_count * padded * self.item)
        slices = min(max(most, 1), max(2, y.size * k_count // SLICE_WORK))
        slices = 1 << slices.bit_length() - 1  # a power of 2: three slices for two threads take as long as four
        shares = -(-parts // slices)
        view = view_for(self.dtype, steps_of(x), walks, order, apart=True)
        cut = cut_for(len(x), walks, view.row_numbers * inputs * self.item, slices)
        all_blocks = blocks(len(x), walks, cut)
        cuts = ranges(len(all_blocks), -(-len(all_blocks) // slices))
        total = np.empty((len(cuts), groups, tiles_ * tile.mr, padded), self.dtype)
        nothing = np.zeros(wide, self.dtype)
        x_at, y_at = address_of(x), address_of(y)
        even = padded == outputs and to.c == self.item and evenly(y[:, 0])

        def task(job: tuple[tuple[int, tuple[int, int]], tuple[int, int]]) -> None:
            (s, part), (t0, t1) = job
            k0, k1 = t0 * tile.mr, min(t1 * tile.mr, k_count)
            for block in all_blocks[slice(*part)]:
                start = address_of(nothing) if block is all_blocks[part[0]] else 0
                tables = _gradient_tables(view, to, size_of(block), inputs, channels)
                source, _, _cells = view.block(x_at, block, 0, inputs)
                together = max(1, GRADIENT_CELLS // walks[2].step)
                chunk = scratch("dy chunk", (together, wide), self.dtype)
                dy = y_at + target_of(to, walks, block)
                group, side, pixel = outputs * self.item, wide * self.item, to.w
                if not even:
                    packed = scratch("dy", (groups, padded // wide, len(tables.pixels), wide), self.dtype)
                    count = groups * (padded // wide)
                    self.pack(dy, outputs * to.c, to.c, outputs, tables.pixels, wide, address_of(packed), 0, count)
                    dy, (group, side, pixel, _) = address_of(packed), packed.strides
                self.gradient(
                    groups, source, tables.group, tables.places[k0:k1], tables.cells, together,
                    dy, group, side, pixel, outputs, address_of(chunk), address_of(total[s, 0, k0:]), total.strides[1], k1 - k0,
                    start,
                )  # fmt: skip

        run_all(task, list(itertools.product(enumerate(cuts), ranges(tiles_, -(-tiles_ // shares)))), parts)
        return total.sum(0) if len(cuts) > 1 else total[0]

    def _transposed(self, total: Array, k_count: int, outputs: int, parts: int) -> Array:
        """(G, padded K, padded O / G) as a weight (O, C, *k)."""
        spec = self.spec
        groups = len(total)
        weight = np.empty((groups, outputs, k_count), self.dtype)
        start, to = address_of(total), address_of(weight)

        def task(job: tuple[int, tuple[int, int]]) -> None:
            g, (o0, o1) = job
            offsets = np.arange(o0, o1) * self.item
            put = to + (g * outputs + o0) * k_count * self.item
            self.pack(start + g * total.strides[0], 0, total.strides[1], k_count, offsets, k_count, put, 0, 1)

        parts = parts if weight.size > SHARED_PACKING else 1
        run_all(task, list(itertools.product(range(groups), ranges(outputs, -(-outputs // parts)))), parts)
        weight = weight.reshape(spec.weight_shape)
        return np.flip(weight, tuple(range(2, weight.ndim))) if spec.flip else weight

    # ---- the adjoint of few inputs -----------------------------------------------------------------------------------

    def adjoint(self, y: Array, weight: Array, bias: Array, x: Array, order: str) -> None:
        if fits(self.spec):
            self._adjoint_by_columns(y, weight, bias, x, order)
        else:
            super().adjoint(y, weight, bias, x, order)

    def _adjoint_by_columns(self, y: Array, weight: Array, bias: Array, x: Array, order: str) -> None:
        spec = self.spec
        columns = columns_for(spec, self.dtype, order)
        if spec.flip:
            weight = np.flip(weight, tuple(range(2, weight.ndim)))
        matrix = np.ascontiguousarray(weight.transpose(*range(2, weight.ndim), 1, 0))
        matrix = matrix.reshape(1, columns.numbers, spec.outputs, *(1,) * len(spec.axes))
        parts = self._parts(y.size * columns.numbers)
        walks = three(tuple(single(a.out) for a in spec.axes))
        view = view_for(self.dtype, steps_of(y), walks, order)
        multiply = self._block_map(view, y, matrix, np.zeros(columns.numbers, self.dtype), columns.steps, order, parts)

        def task(target: Target) -> None:
            sums = columns.sums(target, bias)
            products = scratch("columns", (columns.together, walks[2].windows, columns.numbers), self.dtype)
            at = address_of(products)
            for block in columns.blocks(target):
                multiply(block, at)
                columns.add(at, target, block, sums)
            columns.write(sums, x, target)

        run_all(task, columns.targets(len(y), parts), parts)

    # ---- one pass ----------------------------------------------------------------------------------------------------

    def _convolve(self, walks: Pass, x: Array, weight: Array, bias: Array, y: Array, order: str) -> None:
        """Write the cells of y of one pass; weight (G, M, C, *k), bias (G * M)."""
        if order == FIRST:  # channels-last tiles take pixels from several rows
            walks, x, y = merged(walks, x, y)
        parts = self._parts(len(x) * math.prod(walk.windows for walk in walks) * weight.size)
        channels, taps = weight.shape[2], math.prod(len(walk.taps) for walk in walks)
        zeros = order == LAST and channels * self.item >= LEAST_IN_PLACE and taps <= _gemm.MOST_TAPS
        view = view_for(self.dtype, steps_of(x), walks, order, zeros=zeros)
        if view.direct and order == LAST:
            self._convolve_in_place(view, x, weight, bias, y, parts)
            return
        to, y_at, row = steps_of(y), address_of(y), view.row_numbers * len(weight) * channels * self.item
        cut = cut_for(len(x), walks, row, *((2 * parts, IN_PLACE_BYTES) if view.direct else (parts, STAGE_BYTES)))
        run = self._block_map(view, x, weight, bias, to, order, parts)
        run_all(lambda block: run(block, y_at + target_of(to, walks, block)), blocks(len(x), walks, cut), parts)

    def _convolve_in_place(self, view: View, x: Array, weight: Array, bias: Array, y: Array, parts: int) -> None:
        """A channels-last pass that copies nothing."""
        groups, outputs, channels = weight.shape[:3]
        to, x_at, y_at = steps_of(y), address_of(x), address_of(y)
        most = STAGE_BYTES // 4 if self._resident(weight) else STAGE_BYTES
        cut = cut_for(len(x), view.walks, view.row_numbers * groups * channels * self.item, parts, most)
        jobs, tables = _last_jobs(view, to, len(x), cut, groups, channels)
        if groups > 1 or self._resident(weight) or weight.size <= x.size:  # threads share the blocks
            multiply, counter = self._last(view, x, weight, bias, to, parts), np.zeros(1, int)
            run_all(lambda _: multiply(tables[0], jobs, counter, x_at, y_at), range(parts), parts)
            return

        def task(o: int) -> None:  # each thread packs the weights that it needs, just before it does
            own = slice(o, o + wide)
            multiply = self._last(view, x, weight[:, own], bias[own], to, 1)
            multiply(tables[0], jobs, np.zeros(1, int), x_at, y_at + o * to.c)

        wide = self.tile[LAST].nv * self.lanes
        run_all(task, range(0, outputs, wide), parts)

    def _block_map(
        self, view: View, x: Array, weight: Array, bias: Array, to: Steps, order: str, parts: int
    ) -> BlockMap:
        """The map of one block to the address of its first pixel, from where steps `to` lead to the others."""
        if order == FIRST:
            return self._first(view, x, weight, bias, to, parts)
        multiply, groups, channels = self._last(view, x, weight, bias, to, parts), len(weight), weight.shape[2]

        def run(block: Block, at: int) -> None:
            tables = _last_tables(view, to, size_of(block), groups, channels, view.edges(block))
            start, _, _cells = view.block(address_of(x), block, 0, groups * channels)
            job = np.array([(0, 0, address_of(tables.pixels), tables.pixels.shape[1])])
            multiply(tables, job, np.zeros(1, int), start, at)

        return run

    def _first(self, view: View, x: Array, weight: Array, bias: Array, to: Steps, parts: int) -> BlockMap:
        groups, outputs, channels = weight.shape[:3]
        walks, item, tile = view.walks, self.item, self.tile[FIRST]
        wide, mr = tile.nv * self.lanes, tile.mr if outputs > 4 else 4
        packed = self._pack(weight, walks, mr, FIRST, parts)
        taps_count = math.prod(len(walk.taps) for walk in walks)
        width, pixel = walks[2].windows, walks[2].stride * to.w
        x_at, limit = address_of(x), byte_bounds(x)[1]
        # By the Spec alone: sums are rounded where a chunk ends, and no block, batch or thread may show in them.
        chunk = max(1, min(channels, PANEL_BYTES // (_gemm.MOST_PANELS * taps_count * wide * item)))

        def run(block: Block, at: int) -> None:
            tables = _first_tables(view, to, size_of(block), groups * channels)
            start, end, _cells = view.block(x_at, block, 0, groups * channels)
            together = min(_gemm.MOST_PANELS, -(-len(tables.rows) * width // wide))
            panels = scratch("panels", (together * chunk * taps_count * wide,), self.dtype)
            sums = scratch("sums", (together * (outputs + mr) * wide,), self.dtype)
            self.convolve_first[mr](
                groups, start, channels * tables.source.c, end or limit, tables.source.c, channels,
                tables.taps, tables.rows, width, together,
                packed.address, packed.group, packed.row, packed.step, packed.tile, outputs,
                at, outputs * to.c, to.c, pixel, address_of(bias),
                address_of(panels), address_of(sums), chunk,
            )  # fmt: skip

        return run

    def _last(self, view: View, x: Array, weight: Array, bias: Array, to: Steps, parts: int) -> Callable[..., None]:
        """The map of jobs (see the kernel), of x and y at addresses."""
        groups, outputs, channels = weight.shape[:3]
        walks, mr = view.walks, self.tile[LAST].mr
        nv = 1 if outputs <= self.lanes else 2
        wide = nv * self.lanes
        packed = self._pack(weight, walks, wide, LAST, parts)
        padded = np.zeros((groups, -(-outputs // wide) * wide), self.dtype)
        padded[:, :outputs] = bias.reshape(groups, outputs)
        zeros = np.zeros(groups * channels, self.dtype)
        dump = np.empty(wide, self.dtype)
        resident = self._resident(weight)
        steps = groups * packed.group // (wide * self.item)  # of all tiles of the same pixels
        x_step, y_step = walks[2].step * view.source(Cut(1, 1, 1), groups * channels).w, walks[2].stride * to.w
        # Bytes of x and y that each step fetches for the next pixels: the tile after this one has them, if weights stay.
        x_ahead, y_ahead = (-(-mr * abs(step) // steps) if resident else 0 for step in (x_step, y_step))

        def multiply(tables: _LastTables, jobs: Array, counter: Array, x_at: int, y_at: int) -> None:
            self.convolve_last[nv](
                groups, jobs, address_of(counter), x_at, channels * self.item, tables.runs, tables.taps, channels, resident,
                x_ahead, packed.address, outputs, y_at, outputs * to.c, y_ahead,
                address_of(padded), address_of(zeros), address_of(dump),
            )  # fmt: skip

        return multiply

    def _resident(self, weight: Array) -> bool:
        """Whether packed weights stay in the L2 cache while all pixels pass by once."""
        return weight.size * self.item <= RESIDENT_BYTES

    def _pack(self, weight: Array, walks: Pass, width: int, order: str, parts: int) -> _Weights:
        """weight (G, M, C, *k) as (G, tile, k, width): k = (channel, tap), channels-last (tap, channel)."""
        groups, outputs, channels = weight.shape[:3]
        g_step, m_step = weight.strides[:2]
        offsets, together = _weight_offsets(weight.strides[2:], walks, channels, order, self.item)
        if order == FIRST and together:
            return _Weights(weight, address_of(weight), g_step, width * m_step, m_step, self.item)
        count = -(-outputs // width)
        packed = scratch("weights", (groups, count, len(offsets), width), self.dtype)

        start, to = address_of(weight), address_of(packed)

        def task(tiles: tuple[int, int]) -> None:
            self.pack(start, g_step, m_step, outputs, offsets, width, to, *tiles)

        parts = parts if packed.size > SHARED_PACKING else 1
        run_all(task, ranges(groups * count, -(-groups * count // parts)), parts)
        return _Weights(packed, address_of(packed), packed.strides[0], packed.strides[1], self.item, width * self.item)


# ---- tables of a block's shape: made once, for every batch -----------------------------------------------------------------


@lru_cache(1024)
def _weight_offsets(strides: tuple[int, ...], walks: Pass, channels: int, order: str, item: int) -> tuple[Array, bool]:
    """Offset of every number k of a row of a weight (C, *k) with these strides; whether they lie together."""
    c_step, *k_steps = strides
    steps = (*(0,) * (3 - len(k_steps)), *k_steps)
    taps = grid([[tap * s for tap in walk.taps] for walk, s in zip(walks, steps, strict=True)])
    cs = np.arange(channels) * c_step
    offsets = (np.add.outer(cs, taps) if order == FIRST else np.add.outer(taps, cs)).reshape(-1)
    return offsets, bool((offsets == np.arange(len(offsets)) * item).all())


class _FirstTables(NamedTuple):
    source: Steps
    taps: Array
    rows: Array  # (rows, 2): of x, of y


@lru_cache(1024)
def _first_tables(view: View, to: Steps, here: Cut, channels: int) -> _FirstTables:
    source = view.source(here, channels)
    rows = np.stack([view.rows(source, here), targets(to, view.walks, here)], 1)
    return _FirstTables(source, view.taps(source), rows)


class _LastTables(NamedTuple):
    taps: Array
    runs: Array  # of taps that lie together
    pixels: Array  # (3, pixels): of x, of y, padding


@lru_cache(1024)
def _last_tables(
    view: View, to: Steps, here: Cut, groups: int, channels: int, edges: tuple[Walk | None, Walk | None]
) -> _LastTables:
    source, w = view.source(here, groups * channels), view.walks[2]
    taps = view.taps(source)
    together = source.w == channels * view.item and w.offsets == tuple(range(len(w.taps)))
    columns = np.arange(w.windows)
    x_at = np.add.outer(view.rows(source, here), columns * (w.step * source.w)).reshape(-1)
    y_at = np.add.outer(targets(to, view.walks, here), columns * (w.stride * to.w)).reshape(-1)
    return _LastTables(
        taps,
        taps[:: len(w.taps)].copy() if together else taps,
        np.stack([x_at, y_at, view.padding(here, edges)]),
    )


@lru_cache(256)
def _last_jobs(view: View, to: Steps, n: int, cut: Cut, groups: int, channels: int) -> tuple[Array, list[_LastTables]]:
    """The blocks of a pass in place as jobs for the kernel, and the tables that they refer to, which blocks have in common."""
    own = blocks(n, view.walks, cut)
    tables = [_last_tables(view, to, size_of(block), groups, channels, view.edges(block)) for block in own]
    rows = [
        (view.block(0, block, 0, 0)[0], target_of(to, view.walks, block), address_of(t.pixels), t.pixels.shape[1])
        for block, t in zip(own, tables, strict=True)
    ]
    return np.array(rows), tables


class _GradientTables(NamedTuple):
    group: int  # from a group to the next
    places: Array  # of k
    cells: Array  # of x, for every window: offset and distance from the one before; and one more
    pixels: Array  # of dy


@lru_cache(1024)
def _gradient_tables(view: View, to: Steps, here: Cut, inputs: int, channels: int) -> _GradientTables:
    source, windows = view.source(here, inputs), np.arange(view.walks[2].windows)
    taps, cs = view.taps(source), np.arange(channels) * source.c
    cells = np.add.outer(view.rows(source, here), windows * view.step(source)).reshape(-1)
    return _GradientTables(
        channels * source.c,
        np.add.outer(cs, taps).reshape(-1),
        np.stack([np.append(cells, 0), np.diff(cells, prepend=0, append=0)]),
        np.add.outer(targets(to, view.walks, here), windows * to.w).reshape(-1),
    )
