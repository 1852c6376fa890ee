"""Pooling by strided passes over whole arrays, one axis after the other: a k x k window costs 2 k passes, not k**2.

The work is cut into tasks (an image, some channels, some rows) whose arrays fit the L2 cache. Arrays have a channels-first
shape and any memory order; NumPy runs its inner loops along the innermost memory, rows or channels.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines._protocol import AvgPoolPlan, MaxPoolPlan
from funcnn._engines.blas._memory import FIRST, Array, allocate, memory_order, native
from funcnn._engines.blas._threads import run_all
from funcnn._scratch import scratch
from funcnn._spec import HALF_DTYPES, Axis

__all__ = ["BlasAvgPool", "BlasMaxPool"]

TASK_BYTES = 512 << 10  # of x in one task
# Up to so many cells of a window the backward makes a pass for each of them; beyond, one weighted bincount.
MOST_PASSES = 32


class _Task(NamedTuple):
    """One image, a range of channels, a range of output rows (first spatial axis)."""

    n: int
    channels: slice
    rows: tuple[int, int]


def _tasks(x_shape: tuple[int, ...], outs: tuple[int, ...], itemsize: int, order: str, cut_rows: bool) -> list[_Task]:
    """Cut x (N, C, *size) so that one task reads about TASK_BYTES."""
    n, channels, *sizes = x_shape
    plane = max(1, math.prod(sizes) * itemsize)
    together = max(1, min(channels, TASK_BYTES // plane)) if order == FIRST else channels
    if order != FIRST and not cut_rows:
        together = max(1, min(channels, max(16, TASK_BYTES // plane)))
    parts = min(outs[0], -(-plane * together // TASK_BYTES)) if cut_rows else 1
    rows = -(-outs[0] // parts)
    return [
        _Task(i, slice(c, min(c + together, channels)), (r, min(r + rows, outs[0])))
        for i in range(n)
        for c in range(0, channels, together or 1)
        for r in range(0, outs[0], rows)
    ]


def _cut(axis: Axis, rows: tuple[int, int]) -> tuple[Axis, slice]:
    """An axis for the given windows only, and the cells that they read."""
    lo, hi = rows
    first = max(0, lo * axis.stride - axis.lo)
    last = max(first, min(axis.size, (hi - 1) * axis.stride - axis.lo + axis.span))
    return axis._replace(size=last - first, lo=axis.lo - lo * axis.stride + first, out=hi - lo), slice(first, last)


class _Step(NamedTuple):
    """One tap: windows that it is the first cell of, their cells; windows that it comes later in, their cells."""

    tap: int
    new: tuple[slice, slice] | None
    seen: tuple[slice, slice] | None


@lru_cache(1024)
def _steps(axis: Axis) -> tuple[_Step, ...]:
    """The taps in order. Windows that have no cell at all in any tap stay unwritten (only averages allow them)."""
    steps = []
    known = axis.out  # windows from here on have had a cell
    for tap in range(axis.kernel):
        first, last = axis.windows_inside(tap)
        if first == last:
            continue
        split = min(max(known, first), last)
        steps.append(_Step(tap, _pair(axis, tap, first, split), _pair(axis, tap, split, last)))
        known = min(known, first)
    return tuple(steps)


def _pair(axis: Axis, tap: int, first: int, last: int) -> tuple[slice, slice] | None:
    if first >= last:
        return None
    start = axis.start(tap)
    return slice(first, last), slice(start + first * axis.stride, start + (last - 1) * axis.stride + 1, axis.stride)


def _at(axis: int, part: slice) -> tuple[Any, ...]:
    """Index of a part of one axis of (C, *spatial), counted among the spatial axes."""
    return (slice(None),) * (axis + 1) + (part,)


def _sum_dtype(dtype: str) -> np.dtype[Any]:
    """Half floats are computed in float32: NumPy's own float16 arithmetic is a software loop."""
    return np.dtype("float32") if dtype in HALF_DTYPES else np.dtype(dtype)


def _local(shape: tuple[int, ...], dtype: Any, name: str, like: Array) -> Array:
    """Scratch (C, *spatial) in the memory order of `like`."""
    if like.ndim > 1 and abs(like.strides[0]) < min(map(abs, like.strides[1:])):
        return np.moveaxis(scratch(name, (*shape[1:], shape[0]), dtype), -1, 0)
    return scratch(name, shape, dtype)


class BlasMaxPool(MaxPoolPlan):
    """max_pool for NumPy arrays."""

    engine = "blas"

    def forward(self, x: Array, train: bool) -> tuple[Array, Array | None]:
        spec = self.spec
        x = native(x)
        order = memory_order(x, spec.layout)
        shape = (x.shape[0], *spec.y_shape)
        y = allocate(np.empty, shape, spec.dtype, order)
        argmax = allocate(np.empty, shape, spec.argmax_dtype, order) if train else None
        wide = _sum_dtype(spec.dtype)

        def task(job: _Task) -> None:
            first, cells = _cut(spec.axes[0], job.rows)
            part = x[job.n, job.channels, cells]
            if part.dtype != wide:
                part = _copy(part, wide, "wide")
            axes = (first, *spec.axes[1:])
            place = (job.n, job.channels, slice(*job.rows))
            best, index = self._reduce(part, axes, train, exact_nan=False)
            if wide.kind == "f" and train and np.isnan(best.max()):
                best, index = self._reduce(part, axes, train, exact_nan=True)
            np.copyto(y[place], best, casting="unsafe")
            if argmax is not None:
                np.copyto(argmax[place], index, casting="unsafe")

        run_all(task, _tasks(x.shape, spec.y_shape[1:], x.itemsize, order, cut_rows=True), self.threads)
        return y, argmax

    def _reduce(self, x: Array, axes: tuple[Axis, ...], train: bool, exact_nan: bool) -> tuple[Array, Array]:
        """Maxima of x (C, *size) and their cells, from the last axis to the first: row order, as ties need it."""
        index: Any = None
        stride = 1
        for i in reversed(range(len(axes))):
            x, index = self._reduce_axis(x, index, i, axes[i], stride, train, exact_nan)
            stride *= axes[i].kernel
        return x, index

    def _reduce_axis(
        self, x: Array, index: Any, i: int, axis: Axis, stride: int, train: bool, exact_nan: bool
    ) -> tuple[Array, Any]:
        shape = (*x.shape[: i + 1], axis.out, *x.shape[i + 2 :])
        dtype = np.dtype(self.spec.argmax_dtype)
        best = _local(shape, x.dtype, f"best{i}", x)
        where = _local(shape, dtype, f"index{i}", x) if train else None
        for step in _steps(axis):
            offset = dtype.type(step.tap * stride)
            if step.new is not None:
                windows, cells = _at(i, step.new[0]), _at(i, step.new[1])
                np.copyto(best[windows], x[cells])
                if where is not None:
                    np.add(0 if index is None else index[cells], offset, out=where[windows], dtype=dtype)
            if step.seen is None:
                continue
            windows, cells = _at(i, step.seen[0]), _at(i, step.seen[1])
            old, value = best[windows], x[cells]
            if where is not None:
                better = _local(old.shape, np.bool_, "better", x)
                np.greater(value, old, out=better)
                if exact_nan:
                    better |= np.isnan(value) & ~np.isnan(old)
                # A later cell has a larger index, so where it is better the maximum of indices is its own.
                candidate = _local(old.shape, dtype, "candidate", x)
                won = better.view(np.uint8)
                if index is None:
                    np.multiply(won, offset, out=candidate, casting="unsafe")
                else:
                    np.add(index[cells], offset, out=candidate)
                    np.multiply(candidate, won, out=candidate)
                np.maximum(where[windows], candidate, out=where[windows])
            np.maximum(old, value, out=old)
        return best, where

    def backward(self, dy: Array, argmax: Array) -> Array:
        spec = self.spec
        order = memory_order(dy, spec.layout)
        dtype = _sum_dtype(spec.dtype)
        dx = allocate(np.zeros, (dy.shape[0], *spec.x_shape), dtype, order)
        run = self._add_passes if spec.taps <= MOST_PASSES else self._add_counts

        def task(job: _Task) -> None:
            part = dy[job.n, job.channels]
            if part.dtype != dtype:
                part = _copy(part, dtype, "wide")
            run(dx[job.n, job.channels], part, argmax[job.n, job.channels])

        run_all(task, _tasks(dx.shape, spec.y_shape[1:], dtype.itemsize, order, cut_rows=False), self.threads)
        return dx.astype(spec.dtype, copy=False)

    def _add_passes(self, dx: Array, dy: Array, argmax: Array) -> None:
        """dx (C, *size) += dy where the argmax is each cell in turn. Selection by bit masks: NaN and inf must not spread."""
        bits = np.dtype(f"i{dy.itemsize}")
        for tap, (windows, cells) in enumerate(self._windows_and_cells):
            if windows is None:
                continue
            here = dy[windows]
            chosen = _local(here.shape, np.int8, "chosen", dy)
            np.equal(argmax[windows], argmax.dtype.type(tap), out=chosen.view(np.bool_))
            np.negative(chosen, out=chosen)
            mask = _local(here.shape, bits, "mask", dy)
            np.copyto(mask, chosen)
            np.bitwise_and(mask, here.view(bits), out=mask)
            target = dx[cells]
            np.add(target, mask.view(dy.dtype), out=target)

    @cached_property
    def _windows_and_cells(self) -> tuple[tuple[Any, Any], ...]:
        """For every cell of a window: the windows where it lies in x, and the cells of x that it is there."""
        pairs = []
        axes = self.spec.axes
        for taps in np.ndindex(*self.spec.kernel):
            parts = [_pair(axis, tap, *axis.windows_inside(tap)) for axis, tap in zip(axes, taps, strict=True)]
            if any(part is None for part in parts):
                pairs.append((None, None))
            else:
                pairs.append(tuple((slice(None), *(part[k] for part in parts if part)) for k in (0, 1)))
        return tuple(pairs)

    def _add_counts(self, dx: Array, dy: Array, argmax: Array) -> None:
        """dx (C, *size) += dy at the cells that the argmax names; its cost does not grow with the window."""
        plane = math.prod(dx.shape[1:])
        for channel in range(len(dx)):
            cell = self._base + self._offsets[argmax[channel]]
            total = np.bincount(cell.reshape(-1), dy[channel].reshape(-1), plane)
            dx[channel] = total.reshape(dx.shape[1:])

    @cached_property
    def _base(self) -> Array:
        """Flat cell of tap 0 of each window (*out)."""
        base = np.zeros((), np.int64)
        for axis in self.spec.axes:
            base = base[..., None] * axis.size + np.arange(axis.out) * axis.stride - axis.lo
        return base

    @cached_property
    def _offsets(self) -> Array:
        """Flat distance from tap 0 of each cell of a window (K,)."""
        offsets = np.zeros((), np.int64)
        for axis in self.spec.axes:
            offsets = offsets[..., None] * axis.size + np.arange(axis.kernel) * axis.dilation
        return offsets.reshape(-1)


def _copy(part: Array, dtype: np.dtype[Any], name: str) -> Array:
    """part in another dtype, in scratch."""
    wide = _local(part.shape, dtype, name, part)
    np.copyto(wide, part, casting="unsafe")
    return wide


class BlasAvgPool(AvgPoolPlan):
    """avg_pool for NumPy arrays."""

    engine = "blas"

    def forward(self, x: Array) -> Array:
        spec = self.spec
        x = native(x)
        order = memory_order(x, spec.layout)
        y = allocate(np.empty, (x.shape[0], *spec.y_shape), spec.dtype, order)
        dtype = _sum_dtype(spec.dtype)

        def task(job: _Task) -> None:
            first, cells = _cut(spec.axes[0], job.rows)
            part = x[job.n, job.channels, cells]
            if part.dtype != dtype:
                part = _copy(part, dtype, "wide")
            for i, axis in enumerate((first, *spec.axes[1:])):
                part = _sum_axis(part, i, axis)
            divisor = self._divisor if isinstance(self._divisor, float) else self._divisor[slice(*job.rows)]
            np.divide(part, divisor, out=y[job.n, job.channels, slice(*job.rows)], casting="unsafe")

        run_all(task, _tasks(x.shape, spec.y_shape[1:], x.itemsize, order, cut_rows=True), self.threads)
        return y

    def backward(self, dy: Array) -> Array:
        spec = self.spec
        dy = native(dy)
        order = memory_order(dy, spec.layout)
        dx = allocate(np.empty, (dy.shape[0], *spec.x_shape), spec.dtype, order)
        dtype = _sum_dtype(spec.dtype)

        def task(job: _Task) -> None:
            source = dy[job.n, job.channels]
            part = _local(source.shape, dtype, "scaled", source)
            np.divide(source, self._divisor, out=part, casting="unsafe", dtype=dtype)
            for i, axis in reversed(list(enumerate(spec.axes))):
                part = _spread_axis(part, i, axis)
            np.copyto(dx[job.n, job.channels], part, casting="unsafe")

        run_all(task, _tasks(dx.shape, spec.y_shape[1:], dtype.itemsize, order, cut_rows=False), self.threads)
        return dx

    @cached_property
    def _divisor(self) -> Any:
        """Counted cells of each window (*out), in the dtype of the sums; one number where all are equal."""
        counts = np.ones(())
        for axis in self.spec.counts:
            counts = counts[..., None] * np.maximum(axis, 1)
        if counts.min() == counts.max():
            return float(counts.flat[0])
        return counts.astype(np.zeros(1, _sum_dtype(self.spec.dtype)).real.dtype)


def _sum_axis(x: Array, i: int, axis: Axis) -> Array:
    """Sums over the windows of one spatial axis of x (C, *size)."""
    shape = (*x.shape[: i + 1], axis.out, *x.shape[i + 2 :])
    total = _local(shape, x.dtype, f"sum{i}", x)
    if any(count == 0 for count in _covered(axis)):
        total[...] = 0
    for step in _steps(axis):
        if step.new is not None:
            np.copyto(total[_at(i, step.new[0])], x[_at(i, step.new[1])])
        if step.seen is not None:
            part = total[_at(i, step.seen[0])]
            np.add(part, x[_at(i, step.seen[1])], out=part)
    return total


@lru_cache(256)
def _covered(axis: Axis) -> tuple[int, ...]:
    """Cells of x in each window."""
    inside = np.zeros(axis.out, int)
    for tap in range(axis.kernel):
        first, last = axis.windows_inside(tap)
        inside[first:last] += 1
    return tuple(inside.tolist())


def _spread_axis(y: Array, i: int, axis: Axis) -> Array:
    """The adjoint of `_sum_axis`."""
    shape = (*y.shape[: i + 1], axis.size, *y.shape[i + 2 :])
    total = _local(shape, y.dtype, f"spread{i}", y)
    total[...] = 0
    for tap in range(axis.kernel):
        pair = _pair(axis, tap, *axis.windows_inside(tap))
        if pair is not None:
            part = total[_at(i, pair[1])]
            np.add(part, y[_at(i, pair[0])], out=part)
    return total
