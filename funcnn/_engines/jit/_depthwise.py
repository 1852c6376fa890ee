"""Depthwise convolution: one channel of each group on one side. See `_lanes` for the kernels and what a place is."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines._order import FIRST, Array, allocate
from funcnn._engines._threads import ranges, run_all
from funcnn._engines.jit._kernels import kernel
from funcnn._engines.jit._lanes import depthwise, depthwise_gradient
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
from funcnn._engines.jit._walk import Pass, forwards
from funcnn._scratch import scratch
from funcnn._spec import ConvSpec

__all__ = ["Depthwise"]

# Of the cells of one task: smaller ones would fit the cache, but what Python does for each task is more than that saves.
TASK_BYTES = 2 << 20
# Places, and taps of the weight gradient, that are summed at a time: as many sums as hide the latency of a multiply-add.
PLACES, TAPS = 8, 8
ENDLESS = 1 << 40


class _Job(NamedTuple):
    """A range of groups, and a block."""

    groups: tuple[int, int]
    block: Block


class Depthwise(Maps):
    """Convolutions without sums over channels, or (the adjoint, with a multiplier) over the few of one group."""

    def __init__(self, spec: ConvSpec, dtype: str, threads: int) -> None:
        super().__init__(spec, dtype, threads)
        self.kernels = [kernel(depthwise, dtype, PLACES, spread) for spread in (0, 1)]
        self.gradient = kernel(depthwise_gradient, dtype, TAPS)

    def _by_channels(self, order: str) -> bool:
        """Whether a place is a vector of channels: they must lie together in x and in y."""
        return order != FIRST and self.spec.inputs == self.spec.outputs

    def _jobs(self, n: int, walks: Pass, view: View, channels: int, parts: int) -> list[_Job]:
        """Blocks, and ranges of groups where a block of all channels is more than TASK_BYTES and channels lie apart."""
        groups = self.spec.groups
        if view.order != FIRST:
            cut = cut_for(n, walks, view.row_numbers * groups * channels * self.item, parts, TASK_BYTES)
            return [_Job((0, groups), block) for block in blocks(n, walks, cut)]
        cut = cut_for(n, walks, view.row_numbers * channels * self.item, 1, TASK_BYTES)
        cut = cut._replace(images=1)
        plane = walks[0].span(cut.planes) * walks[1].span(cut.rows) * view.row_numbers * channels * self.item
        together = max(1, min(TASK_BYTES // plane, -(-groups * n // (2 * parts)), groups))
        return [_Job(*job) for job in itertools.product(ranges(groups, together), blocks(n, walks, cut))]

    def _convolve(self, walks: Pass, x: Array, weight: Array, bias: Array, y: Array, order: str) -> None:
        groups, outputs, channels = weight.shape[:3]
        by_channels = self._by_channels(order)
        to = steps_of(y)
        view = view_for(self.dtype, steps_of(x), walks, order if by_channels else FIRST, True)
        x_at, y_at = address_of(x), address_of(y)
        parts = self._parts(len(x) * math.prod(walk.windows for walk in walks) * weight.size)
        w = self._taps(weight, walks)
        taps_count = w.shape[-1]
        w = np.ascontiguousarray(w.reshape(groups, -1).T if by_channels else w)
        run = self.kernels[0 if by_channels else 1]
        if by_channels:  # a vector of the last channels reads beyond them
            w = np.pad(w, ((0, 0), (0, self.lanes)))
            bias = np.pad(bias, (0, self.lanes))

        def task(job: _Job) -> None:
            (g0, g1), block = job
            source, taps, places, targets_, lengths, full = _tables(view, to, size_of(block), g1 - g0, channels)
            start, _, _cells = view.block(x_at, block, g0 * channels, (g1 - g0) * channels)
            lanes = scratch("places", (PLACES * self.lanes,), self.dtype)
            buffer = address_of(lanes)
            target = y_at + g0 * outputs * to.c + target_of(to, walks, block)
            vector = self.lanes * self.item
            if by_channels:
                run(
                    start, vector, taps, places, address_of(w), vector, w.strides[0], address_of(bias), vector, groups,
                    target, vector, targets_, lengths, full, self.item, -(-groups // self.lanes), buffer,
                )  # fmt: skip
                return
            for o in range(outputs):
                run(
                    start, channels * source.c, taps, places,
                    address_of(w) + (g0 * outputs + o) * taps_count * self.item, outputs * taps_count * self.item, self.item,
                    address_of(bias) + (g0 * outputs + o) * self.item, outputs * self.item, ENDLESS,
                    target + o * to.c, outputs * to.c, targets_, lengths, full, walks[2].stride * to.w, g1 - g0, buffer,
                )  # fmt: skip

        run_all(task, self._jobs(len(x), walks, view, channels, parts), parts)

    def _taps(self, weight: Array, walks: Pass) -> Array:
        """weight (G, M, C, *k) as (G, M, C * taps) with the taps of a pass in its order."""
        index = np.ix_(*(walk.taps for walk in walks[3 - (weight.ndim - 3) :]))
        everything: tuple[Any, ...] = (slice(None),) * 3
        chosen = weight[everything + index]
        return chosen.reshape(*weight.shape[:2], -1)

    def weight_gradient(self, x: Array, y: Array, order: str) -> Array:
        spec = self.spec
        walks = forwards(spec.axes, spec.flip)
        by_channels = self._by_channels(order)
        multiplier = spec.outputs // spec.inputs
        if y.strides[1 if by_channels else -1] != self.item:  # vectors of dy are read where they are
            together = allocate(np.empty, y.shape, self.dtype, order if by_channels else FIRST)
            np.copyto(together, y)
            y = together
        to = steps_of(y)
        view = view_for(self.dtype, steps_of(x), walks, order if by_channels else FIRST, True)
        x_at, y_at = address_of(x), address_of(y)
        parts = self._parts(y.size * spec.taps)
        slices = -(-spec.groups // self.lanes) if by_channels else spec.groups
        padded = -(-spec.taps // TAPS) * TAPS
        total = np.zeros((multiplier, slices, padded, self.lanes), self.dtype)
        vector = self.lanes * self.item
        # A slice belongs to one task, which takes the blocks in their order: the same sums for every number of threads.
        jobs = self._jobs(len(x), walks, view, 1, 1)
        by_slices: list[tuple[tuple[int, int], list[Block]]] = (
            [(part, [job.block for job in jobs]) for part in ranges(slices, -(-slices // parts))]
            if by_channels
            else [
                (part, [job.block for job in jobs if job.groups == part])
                for part in dict.fromkeys(j.groups for j in jobs)
            ]
        )

        def task(job: tuple[tuple[int, int], list[Block]]) -> None:
            (s0, s1), own = job
            c0, c1 = (s0 * self.lanes, min(s1 * self.lanes, spec.groups)) if by_channels else (s0, s1)
            for block in own:
                source, taps, places, targets_, lengths, _ = _tables(view, to, size_of(block), c1 - c0, 1)
                start, _, _cells = view.block(x_at, block, c0, c1 - c0)
                taps = np.resize(taps, padded)
                for m in range(multiplier):
                    self.gradient(
                        start, vector if by_channels else source.c, taps, places,
                        y_at + (c0 * multiplier + m) * to.c + target_of(to, walks, block),
                        vector if by_channels else multiplier * to.c, targets_, lengths, c1 - c0 if by_channels else ENDLESS,
                        s1 - s0, address_of(total[m, s0]),
                    )  # fmt: skip

        run_all(task, by_slices, parts)
        total = total[:, :, : spec.taps]
        spread = np.moveaxis(total, -1, 2).reshape(multiplier, -1, spec.taps)
        weight = spread[:, : spec.groups] if by_channels else total.sum(-1)
        weight = np.moveaxis(weight, 0, 1).reshape(spec.outputs, 1, *spec.kernel)
        return np.ascontiguousarray(np.flip(weight, tuple(range(2, weight.ndim))) if spec.flip else weight)


@lru_cache(1024)
def _tables(
    view: View, to: Steps, here: Cut, groups: int, channels: int
) -> tuple[Steps, Array, Array, Array, Array, int]:
    """Steps of x, offsets of taps (of all channels of a group); offsets in x and y and lengths of places, full ones first."""
    source, w = view.source(here, groups * channels), view.walks[2]
    by_channels = view.order != FIRST
    columns = np.arange(0, w.windows, 1 if by_channels else view.lanes)
    lengths = np.full(len(columns), view.lanes) if by_channels else np.minimum(view.lanes, w.windows - columns)
    rows = view.rows(source, here)
    lengths = np.tile(lengths, len(rows))
    order = np.argsort(-lengths, kind="stable")
    return (
        source,
        np.add.outer(np.arange(channels) * source.c, view.taps(source)).reshape(-1),
        np.add.outer(rows, columns * view.step(source)).reshape(-1)[order],
        np.add.outer(targets(to, view.walks, here), columns * (w.stride * to.w)).reshape(-1)[order],
        lengths[order],
        int((lengths == view.lanes).sum()),
    )
