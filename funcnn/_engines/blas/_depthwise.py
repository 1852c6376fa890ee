"""Depthwise convolution: one input channel per group. No matrix product fits, so each tap is a fused multiply-add pass.

The pass is `numpy.einsum`'s inner loop `out += a * b`. It runs over long contiguous runs because the cells are first copied
to a *plane*: padded, one plane for each phase of the stride, all rows of one pitch. A tap is then a shift of the flat plane:
with stride s and tap t of window o, cell o * s + t * dilation - lo is cell o + shift of plane phase, where
t * dilation = shift * s + phase. Results between the rows (`gap` cells) are computed and dropped.

Channels-first: a run is a whole plane, the weight one number. Channels-last: a run is a row of pixels times channels, and the
weight is repeated for every pixel of a row. Planes are cut so that one task's data fits the L2 cache.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from funcnn._engines._order import FIRST, LAST, Array
from funcnn._engines._threads import run_all
from funcnn._engines.blas._memory import put
from funcnn._scratch import scratch
from funcnn._spec import Axis

__all__ = ["adjoint", "correlate", "weight_gradient"]

# Measured: of 256 KB to 4 MB, these were the fastest.
PLANE_BYTES = {FIRST: 1 << 20, LAST: 4 << 20}


class _Phase(NamedTuple):
    """Taps first, first + step, ... of one axis that share a phase; their shifts are shift, shift + shift_step, ..."""

    phase: int
    first: int
    step: int
    taps: int
    shift: int
    shift_step: int


@lru_cache(256)
def _phases(axis: Axis) -> tuple[_Phase, ...]:
    step = axis.stride // math.gcd(axis.stride, axis.dilation)
    phases = []
    for first in range(min(step, axis.kernel)):
        shift, phase = divmod(first * axis.dilation, axis.stride)
        phases.append(
            _Phase(phase, first, step, -(-(axis.kernel - first) // step), shift, step * axis.dilation // axis.stride)
        )
    return tuple(phases)


def _most_shift(axis: Axis) -> int:
    return (axis.kernel - 1) * axis.dilation // axis.stride


class _Task(NamedTuple):
    """One image, a range of channels, a range of rows of the first axis."""

    n: int
    channels: slice
    rows: tuple[int, int]


def _tasks(n: int, channels: int, rows: int, row_bytes: int, order: str) -> list[_Task]:
    """Cut the work so that the planes of a task take about PLANE_BYTES; row_bytes: of one row of one channel."""
    fit = max(1, PLANE_BYTES[order] // max(row_bytes, 1))
    if order == FIRST:
        together = max(1, fit // rows)
        height = rows if together > 1 else min(rows, fit)
    else:
        together, height = channels, max(1, min(rows, fit // channels))
    height = -(-rows // (-(-rows // height)))
    return [
        _Task(i, slice(c, min(c + together, channels)), (r, min(r + height, rows)))
        for i in range(n)
        for c in range(0, channels, together)
        for r in range(0, rows, height)
    ]


def _valid(axis: Axis, phase: int, lo: int, hi: int) -> tuple[int, int]:
    """Cells lo .. hi of a phase's plane that are cells of x."""
    first = -((phase - axis.lo) // axis.stride)
    last = (axis.size - 1 + axis.lo - phase) // axis.stride + 1
    first, last = max(lo, first), min(hi, last)
    return (first, last) if first < last else (lo, lo)


def _plane(name: str, order: str, channels: int, sizes: tuple[int, ...], slack: int, dtype: Any) -> tuple[Array, Array]:
    """Scratch for planes of the given sizes: flat, with `slack` zeros at both ends, and seen as (C, *sizes)."""
    cells = math.prod(sizes)
    if order == FIRST:
        flat = scratch(name, (channels, cells + 2 * slack), dtype)
        flat[:, :slack] = 0
        flat[:, slack + cells :] = 0
        return flat, flat[:, slack : slack + cells].reshape(channels, *sizes)
    flat = scratch(name, (cells + 2 * slack, channels), dtype)
    flat[:slack] = 0
    flat[slack + cells :] = 0
    return flat, np.moveaxis(flat[slack : slack + cells].reshape(*sizes, channels), -1, 0)


_LETTERS = "ijklmnop"


class _Pass:
    """Multiply-add passes over planes of one shape: `sum over taps of weight[tap] * plane[cell + shift of tap]`."""

    def __init__(self, order: str, channels: int, sizes: tuple[int, ...], slack: int) -> None:
        self.order, self.channels, self.sizes, self.slack = order, channels, sizes, slack
        self.pitch = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        self.cells = math.prod(sizes)

    def __call__(self, flat: Array, start: int, steps: list[int], counts: list[int], weight: Array, out: Array) -> None:
        """out = the sum for a grid of taps; start and steps: shifts in cells, weight: (C, *taps) or (row, *taps)."""
        item = flat.itemsize
        taps = _LETTERS[: len(counts)]
        if self.order == FIRST:
            shape, strides = (self.cells, self.channels), (item, flat.strides[0])
            first, width = flat[:, self.slack + start :], 1
            equation = f"pc{taps},c{taps}->pc"
        else:
            width = self.channels
            row = self.sizes[-1] * width
            shape, strides = (row, self.cells // self.sizes[-1]), (item, row * item)
            first = flat[self.slack + start :]
            equation = f"qr{taps},q{taps}->qr"
        windows = as_strided(first, (*shape, *counts), (*strides, *(s * width * item for s in steps)))
        # order="F" makes the first label the inner loop and the taps the outer ones. Channels-last strides all differ, so
        # that "K" can sort the taps inside the rows: a row of out stays in the L1 cache for all taps (1.6 times as fast).
        np.einsum(equation, windows, weight, out=out.T, order="F" if self.order == FIRST else "K")

    def result(self, name: str, dtype: Any) -> Array:
        if self.order == FIRST:
            return scratch(name, (self.channels, self.cells), dtype)
        return scratch(name, (self.cells // self.sizes[-1], self.sizes[-1] * self.channels), dtype)

    def seen(self, out: Array) -> Array:
        """A result as (C, *sizes)."""
        if self.order == FIRST:
            return out.reshape(self.channels, *self.sizes)
        return np.moveaxis(out.reshape(*self.sizes, self.channels), -1, 0)

    def weights(self, weight: Array) -> Array:
        """(C, *k) as `__call__` wants it before the taps are chosen: channels-last repeats it for every pixel of a row."""
        if self.order == FIRST:
            return weight
        return np.ascontiguousarray(np.tile(np.moveaxis(weight, 0, -1), self.sizes[-1])).transpose(
            -1, *range(weight.ndim - 1)
        )


def _kernel(plan: Any, weight: Array, rank: int) -> Array:
    """weight as (C, m, *k), not flipped, with a tap axis of 1 for each of `rank` axes that it lacks."""
    spec = plan.spec
    weight = weight.astype(plan.sum_dtype, copy=False).reshape(spec.inputs, -1, *spec.kernel)
    weight = weight[(slice(None), slice(None), *(slice(None, None, -1),) * len(spec.axes))] if spec.flip else weight
    return weight.reshape(*weight.shape[:2], *(1,) * (rank - len(spec.axes)), *spec.kernel)


def _plane_sizes(axes: tuple[Axis, ...]) -> tuple[int, ...]:
    return tuple(a.out + _most_shift(a) for a in axes)


def _stacked(
    axes: tuple[Axis, ...], x: Array, y: Array, order: str, itemsize: int
) -> tuple[tuple[Axis, ...], Array, Array]:
    """Small channels-first images as one: the batch becomes a first spatial axis with a window of 1, for longer runs.

    A 5x5 stride-2 layer of 28 x 28 outputs took 0.6 of the time so; channels-last runs do not get longer by it.
    """
    n = x.shape[0]
    image = math.prod(_plane_sizes(axes)) * itemsize
    if order != FIRST or n < 2 or image > PLANE_BYTES[FIRST] // 4:
        return axes, x, y
    return (Axis(n, 1, 1, 1, 0, 0, n), *axes), x.swapaxes(0, 1)[None], y.swapaxes(0, 1)[None]


def correlate(plan: Any, x: Array, weight: Array, bias: Array | None, y: Array, order: str) -> None:
    """Write y (N, C * m, *out), allocated by the caller."""
    spec, dtype = plan.spec, plan.sum_dtype
    axes, x, y = _stacked(spec.axes, x, y, order, dtype.itemsize)
    kernel = _kernel(plan, weight, len(axes))
    multiplier = kernel.shape[1]
    sizes = _plane_sizes(axes)
    combinations = list(itertools.product(*map(_phases, axes)))
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize

    def task(job: _Task) -> None:
        r0, r1 = job.rows
        here = (r1 - r0 + _most_shift(axes[0]), *sizes[1:])
        channels = kernel[job.channels]
        work = _Pass(order, len(channels), here, _slack(axes, here))
        planes = [
            _fill(work, x[job.n, job.channels], axes, phases, r0, f"plane{i}", dtype)
            for i, phases in enumerate(combinations)
        ]
        for m in range(multiplier):
            weights = work.weights(channels[:, m])
            total = work.result("total", dtype)
            for i, (plane, phases) in enumerate(zip(planes, combinations, strict=True)):
                out = work.result("part", dtype) if i else total
                start = sum(p.shift * pitch for p, pitch in zip(phases, work.pitch, strict=True))
                steps = [p.shift_step * pitch for p, pitch in zip(phases, work.pitch, strict=True)]
                work(plane, start, steps, [p.taps for p in phases], weights[_grid(phases)], out)
                if i:
                    np.add(total, out, out=total)
            result = work.seen(total)[(slice(None), slice(0, r1 - r0), *(slice(0, a.out) for a in axes[1:]))]
            outputs = slice(job.channels.start * multiplier + m, job.channels.stop * multiplier, multiplier)
            if bias is None:
                np.copyto(y[job.n, outputs, r0:r1], result, casting="unsafe")
            else:
                shift = bias[outputs].astype(dtype, copy=False).reshape(-1, *(1,) * len(axes))
                np.add(result, shift, out=y[job.n, outputs, r0:r1], casting="unsafe")

    run_all(task, _tasks(len(x), spec.inputs, axes[0].out, row_bytes, order), plan.threads)


def _grid(phases: tuple[_Phase, ...]) -> tuple[slice, ...]:
    return (slice(None), *(slice(p.first, None, p.step) for p in phases))


def _slack(axes: tuple[Axis, ...], sizes: tuple[int, ...]) -> int:
    """Cells that a flat shift may reach beyond a plane."""
    return sum(_most_shift(a) * math.prod(sizes[i + 1 :]) for i, a in enumerate(axes))


def _fill(
    work: _Pass, x: Array, axes: tuple[Axis, ...], phases: tuple[_Phase, ...], row: int, name: str, dtype: Any
) -> Array:
    """The plane of one phase of x (C, *size), from row `row` of the plane on."""
    flat, plane = _plane(name, work.order, work.channels, work.sizes, work.slack, dtype)
    region, source = [], [slice(None)]
    for i, (axis, p, size) in enumerate(zip(axes, phases, work.sizes, strict=True)):
        lo = row if i == 0 else 0
        first, last = _valid(axis, p.phase, lo, lo + size)
        region.append(slice(first - lo, last - lo))
        cell = first * axis.stride + p.phase - axis.lo
        source.append(
            slice(cell, cell + (last - first - 1) * axis.stride + 1, axis.stride) if first < last else slice(0, 0)
        )
    put(plane, region, x[tuple(source)])
    return flat


def adjoint(plan: Any, y: Array, weight: Array, x: Array, order: str) -> None:
    """Add the adjoint of y (N, C * m, *out) to x (N, C, *size). The weight must be finite: gap cells are multiplied."""
    spec, dtype = plan.spec, plan.sum_dtype
    axes, x, y = _stacked(spec.axes, x, y, order, dtype.itemsize)
    kernel = _kernel(plan, weight, len(axes))
    multiplier = kernel.shape[1]
    sizes = _plane_sizes(axes)
    combinations = list(itertools.product(*map(_phases, axes)))
    row_bytes = math.prod(sizes[1:]) * dtype.itemsize
    halo = _most_shift(axes[0])

    def task(job: _Task) -> None:
        r0, r1 = job.rows  # rows of x's planes; they gather rows r0 - halo .. r1 of y
        channels = kernel[job.channels]
        work = _Pass(order, len(channels), (r1 - r0 + halo, *sizes[1:]), 0)
        work.slack = _slack(axes, work.sizes)
        totals = [work.result(f"total{i}", dtype) for i in range(len(combinations))]
        first = max(0, r0 - halo)
        last = max(first, min(axes[0].out, r1))
        for m in range(multiplier):
            flat, plane = _plane("plane", order, work.channels, work.sizes, work.slack, dtype)
            outputs = slice(job.channels.start * multiplier + m, job.channels.stop * multiplier, multiplier)
            region = [slice(first - r0 + halo, last - r0 + halo), *(slice(0, a.out) for a in axes[1:])]
            put(plane, region, y[job.n, outputs, first:last])
            weights = work.weights(channels[:, m])
            for total, phases in zip(totals, combinations, strict=True):
                out = work.result("part", dtype) if m else total
                start = halo * work.pitch[0] - sum(p.shift * q for p, q in zip(phases, work.pitch, strict=True))
                steps = [-p.shift_step * q for p, q in zip(phases, work.pitch, strict=True)]
                work(flat, start, steps, [p.taps for p in phases], weights[_grid(phases)], out)
                if m:
                    np.add(total, out, out=total)
        for total, phases in zip(totals, combinations, strict=True):
            _add_cells(x[job.n, job.channels], work.seen(total), axes, phases, r0, r1, work.sizes)

    run_all(task, _tasks(len(y), spec.inputs, sizes[0], row_bytes, order), plan.threads)


def _add_cells(
    x: Array, plane: Array, axes: tuple[Axis, ...], phases: tuple[_Phase, ...], r0: int, r1: int, sizes: tuple[int, ...]
) -> None:
    """x += the cells of one phase's plane, whose rows are r0 .. r1."""
    source, target = [slice(None)], [slice(None)]
    for i, (axis, p, size) in enumerate(zip(axes, phases, sizes, strict=True)):
        lo, hi = (r0, r1) if i == 0 else (0, size)
        first, last = _valid(axis, p.phase, lo, hi)
        if first == last:
            return
        source.append(slice(first - lo, last - lo))
        cell = first * axis.stride + p.phase - axis.lo
        target.append(slice(cell, cell + (last - first - 1) * axis.stride + 1, axis.stride))
    part = x[tuple(target)]
    np.add(part, plane[tuple(source)], out=part)


def weight_gradient(plan: Any, x: Array, y: Array, order: str) -> Array:
    """dweight; sums over the pixels of a task, then over tasks in a fixed order."""
    spec, dtype = plan.spec, plan.sum_dtype
    axes, x, y = _stacked(spec.axes, x, y, order, dtype.itemsize)
    rank = len(axes)
    multiplier = spec.outputs // spec.inputs
    sizes = _plane_sizes(axes)
    combinations = list(itertools.product(*map(_phases, axes)))
    jobs = _tasks(len(x), spec.inputs, axes[0].out, math.prod(sizes[1:]) * dtype.itemsize, order)
    parts = np.zeros((len(jobs), spec.inputs, multiplier, *(a.kernel for a in axes)), dtype)
    taps, pixels = _LETTERS[:rank], "stuvwxyz"[:rank]

    def task(number: int) -> None:
        job = jobs[number]
        r0, r1 = job.rows
        here = (r1 - r0 + _most_shift(axes[0]), *sizes[1:])
        outs = (r1 - r0, *(a.out for a in axes[1:]))
        c = job.channels.stop - job.channels.start
        work = _Pass(order, c, here, _slack(axes, here))
        for phases in combinations:
            flat = _fill(work, x[job.n, job.channels], axes, phases, r0, "plane", dtype)
            start = work.slack + sum(p.shift * q for p, q in zip(phases, work.pitch, strict=True))
            item, width = flat.itemsize, 1 if order == FIRST else c
            cell = [q * width * item for q in work.pitch]
            windows = as_strided(
                flat[:, start:] if order == FIRST else flat[start:],
                (c, *(p.taps for p in phases), *outs),
                (
                    flat.strides[0] if order == FIRST else item,
                    *(p.shift_step * s for p, s in zip(phases, cell, strict=True)),
                    *cell,
                ),
            )
            for m in range(multiplier):
                outputs = slice(job.channels.start * multiplier + m, job.channels.stop * multiplier, multiplier)
                gradient = y[job.n, outputs, r0:r1].astype(dtype, copy=False)
                target = parts[number, job.channels, m][_grid(phases)]
                if order == FIRST:
                    np.einsum(f"c{taps}{pixels},c{pixels}->c{taps}", windows, gradient, out=target)
                else:
                    for tap in np.ndindex(*(p.taps for p in phases)):
                        target[(slice(None), *tap)] = _channel_sums(windows[(slice(None), *tap)], gradient)

    run_all(task, range(len(jobs)), plan.threads)
    kernel = parts.sum(axis=0).reshape(spec.outputs, 1, *spec.kernel)
    if spec.flip:
        kernel = np.flip(kernel, axis=tuple(range(2, kernel.ndim)))
    return np.ascontiguousarray(kernel.astype(spec.weight_dtype, copy=False))


def _channel_sums(a: Array, b: Array) -> Array:
    """Sum over pixels of a * b, both (C, *pixels) with channels innermost in memory."""
    letters = "stuvwxyz"[: a.ndim - 1]
    return np.einsum(f"c{letters},c{letters}->c", a, b, order="F")
