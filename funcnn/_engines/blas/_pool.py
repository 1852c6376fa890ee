"""Pooling by strided passes over whole arrays, one axis after the other: a k x k window costs 2 k passes, not k**2.

The work is cut into tasks (an image, some channels, some rows) whose arrays fit the L2 cache. Arrays have a channels-first
shape and any memory order; NumPy runs its inner loops along the innermost memory, rows or channels.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines._order import FIRST, Array, allocate, memory_order
from funcnn._engines._protocol import AvgPoolPlan, MaxPoolPlan
from funcnn._engines._threads import run_all
from funcnn._engines.blas._memory import scratch_in_order
from funcnn._spec import HALF_DTYPES, Axis

__all__ = ["BlasAvgPool", "BlasMaxPool"]

# Of x in one task. Passes shorter than some 100 microseconds lose more by handing the GIL from thread to thread than a
# second thread gains: with 2 threads 4 MB took half the time of 512 KB, though only the latter fits the L2 cache.
TASK_BYTES = 4 << 20
# Up to so many cells of a window the backward makes a pass for each of them; beyond, one weighted bincount.
MOST_PASSES = 32


class _Task(NamedTuple):
    """Ranges of images, of channels, and of output rows (first spatial axis)."""

    images: slice
    channels: slice
    rows: slice


def _tasks(x_shape: tuple[int, ...], rows: int, itemsize: int, order: str, cut_rows: bool) -> list[_Task]:
    """Cut x (N, C, *size) so that one task reads about TASK_BYTES: whole images, or parts of one image."""
    n, channels, *sizes = x_shape
    image = max(1, channels * math.prod(sizes) * itemsize)
    if image <= TASK_BYTES:
        return [_Task(part, slice(0, channels), slice(0, rows)) for part in _parts(n, TASK_BYTES // image)]
    pieces = -(-image // TASK_BYTES)
    if (order == FIRST and channels > 1) or not cut_rows:
        cuts = [(part, slice(0, rows)) for part in _parts(channels, -(-channels // pieces))]
    else:
        cuts = [(slice(0, channels), part) for part in _parts(rows, -(-rows // pieces))]
    return [_Task(slice(i, i + 1), *cut) for i in range(n) for cut in cuts]


def _parts(size: int, most: int) -> list[slice]:
    return [slice(lo, min(lo + most, size)) for lo in range(0, size, most)]


def _cut(axis: Axis, rows: slice) -> tuple[Axis, slice]:
    """An axis for the given windows only, and the cells that they read."""
    lo, hi = rows.start, rows.stop
    first = max(0, lo * axis.stride - axis.lo)
    last = max(first, min(axis.size, (hi - 1) * axis.stride - axis.lo + axis.span))
    return axis._replace(size=last - first, lo=axis.lo - lo * axis.stride + first, out=hi - lo), slice(first, last)


class _Step(NamedTuple):
    """One tap of an axis, as (windows, cells) pairs: windows that it is the first cell of; windows that it comes later in.

    `both` is (windows, cells of tap 0, cells of tap 1): the first two taps in one pass.
    """

    tap: int
    new: tuple[slice, slice] | None
    seen: tuple[slice, slice] | None
    both: tuple[slice, slice, slice] | None


@lru_cache(1024)
def _steps(axis: Axis) -> tuple[_Step, ...]:
    """The taps in order. Windows without any cell stay unwritten (only averages allow them)."""
    first0, last0 = axis.windows_inside(0)
    shared = first0, first0
    if axis.kernel > 1:
        _, last1 = axis.windows_inside(1)
        shared = first0, max(first0, min(last0, last1))
    steps = [_Step(0, _pair(axis, 0, shared[1], last0), None, None)]
    known = first0 if first0 < last0 else axis.out  # windows from here on have had a cell
    for tap in range(1, axis.kernel):
        first, last = axis.windows_inside(tap)
        if first == last:
            continue
        split = min(max(known, first), last)
        new = _pair(axis, tap, first, split)
        pair = _pair(axis, tap, split, last)
        both = None
        if tap == 1 and shared[0] < shared[1]:
            pair, both = None, (*_pair(axis, 0, *shared), _pair(axis, 1, *shared)[1])  # type: ignore[misc, index]
        steps.append(_Step(tap, new, pair, both))
        known = min(known, first)
    return tuple(steps)


def _pair(axis: Axis, tap: int, first: int, last: int) -> tuple[slice, slice] | None:
    if first >= last:
        return None
    start = axis.start(tap)
    return slice(first, last), slice(start + first * axis.stride, start + (last - 1) * axis.stride + 1, axis.stride)


def _at(axis: int, part: slice) -> tuple[Any, ...]:
    """Index of a part of one spatial axis of (N, C, *spatial)."""
    return (slice(None),) * (axis + 2) + (part,)


def _sum_dtype(dtype: str) -> np.dtype[Any]:
    """Half floats are computed in float32: NumPy's own float16 arithmetic is a software loop."""
    return np.dtype("float32") if dtype in HALF_DTYPES else np.dtype(dtype)


def _widened(part: Array, dtype: np.dtype[Any], order: str) -> Array:
    """part in the dtype to compute in and native byte order: itself, or a copy in scratch."""
    if part.dtype == dtype:
        return part
    wide = scratch_in_order("wide", part.shape, dtype, order)
    np.copyto(wide, part, casting="unsafe")
    return wide


def _resized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    """(N, C, *spatial) with another size of one spatial axis."""
    return (*shape[: axis + 2], size, *shape[axis + 3 :])


class BlasMaxPool(MaxPoolPlan):
    """max_pool for NumPy arrays."""

    engine = "blas"

    def forward(self, x: Array, train: bool) -> tuple[Array, Array | None]:
        spec = self.spec
        order = memory_order(x, spec.layout)
        shape = (x.shape[0], *spec.y_shape)
        y = allocate(np.empty, shape, spec.dtype, order)
        argmax = allocate(np.empty, shape, spec.argmax_dtype, order) if train else None
        wide = _sum_dtype(spec.dtype)

        def task(job: _Task) -> None:
            first, cells = _cut(spec.axes[0], job.rows)
            part = _widened(x[job.images, job.channels, cells], wide, order)
            axes = (first, *spec.axes[1:])
            place = (job.images, job.channels, job.rows)
            best, index = self._reduce(part, axes, order, train, exact_nan=False)
            if wide.kind == "f" and train and best.size and np.isnan(best.max()):
                best, index = self._reduce(part, axes, order, train, exact_nan=True)
            np.copyto(y[place], best, casting="unsafe")
            if argmax is not None and index is not None:
                np.copyto(argmax[place], index, casting="unsafe")

        run_all(task, _tasks(x.shape, spec.axes[0].out, x.itemsize, order, cut_rows=True), self.threads)
        return y, argmax

    def _reduce(
        self, x: Array, axes: tuple[Axis, ...], order: str, train: bool, exact_nan: bool
    ) -> tuple[Array, Array | None]:
        """Maxima of x (N, C, *size) and their cells, from the last axis to the first: row order, as ties need it."""
        index = None
        stride = 1
        for i in reversed(range(len(axes))):
            axis_pass = _MaxPass(self.spec.argmax_dtype, i, stride, order, train, exact_nan)
            x, index = axis_pass(x, index, axes[i])
            stride *= axes[i].kernel
        return x, index

    def backward(self, dy: Array, argmax: Array) -> Array:
        spec = self.spec
        order = memory_order(dy, spec.layout)
        dtype = _sum_dtype(spec.dtype)
        dx = allocate(np.zeros, (dy.shape[0], *spec.x_shape), dtype, order)
        run = self._add_passes if spec.taps <= MOST_PASSES else self._add_counts

        def task(job: _Task) -> None:
            part = _widened(dy[job.images, job.channels], dtype, order)
            run(dx[job.images, job.channels], part, argmax[job.images, job.channels], order)

        run_all(task, _tasks(dx.shape, spec.axes[0].out, dtype.itemsize, order, cut_rows=False), self.threads)
        return dx.astype(spec.dtype, copy=False)

    def _add_passes(self, dx: Array, dy: Array, argmax: Array, order: str) -> None:
        """dx (N, C, *size) += dy where the argmax is each cell in turn. Selection by bit masks: NaN and inf must not spread."""
        bits = np.dtype(f"i{dy.itemsize}")
        alone = all(axis.stride >= axis.span for axis in self.spec.axes)
        for tap, (windows, cells) in enumerate(self._windows_and_cells):
            if windows is None:
                continue
            here, target = dy[windows], dx[cells]
            chosen = scratch_in_order("chosen", here.shape, np.int8, order)
            np.equal(argmax[windows], argmax.dtype.type(tap), out=chosen.view(np.bool_))
            np.negative(chosen, out=chosen)
            mask = scratch_in_order("mask", here.shape, bits, order)
            np.copyto(mask, chosen)
            if alone:  # no other window has this cell
                np.bitwise_and(mask, here.view(bits), out=target.view(bits))
            else:
                np.bitwise_and(mask, here.view(bits), out=mask)
                np.add(target, mask.view(dy.dtype), out=target)

    @cached_property
    def _windows_and_cells(self) -> tuple[tuple[Any, Any], ...]:
        """For every cell of a window: the windows where it lies in x, and the cells of x that it is there."""
        pairs: list[tuple[Any, Any]] = []
        axes = self.spec.axes
        for taps in np.ndindex(*self.spec.kernel):
            parts = [_pair(axis, tap, *axis.windows_inside(tap)) for axis, tap in zip(axes, taps, strict=True)]
            if any(part is None for part in parts):
                pairs.append((None, None))
            else:
                windows, cells = zip(*(part for part in parts if part), strict=True)
                pairs.append(((..., *windows), (..., *cells)))
        return tuple(pairs)

    def _add_counts(self, dx: Array, dy: Array, argmax: Array, order: str) -> None:
        """dx (N, C, *size) += dy at the cells that the argmax names; the cost does not grow with the window."""
        plane = math.prod(dx.shape[2:])
        for place in np.ndindex(dx.shape[:2]):
            cell = self._base + self._offsets[argmax[place]]
            total = np.bincount(cell.reshape(-1), dy[place].reshape(-1), plane)
            dx[place] = total.reshape(dx.shape[2:])

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


class _MaxPass:
    """The maxima along one spatial axis, and the index of the cell that won."""

    def __init__(self, argmax_dtype: str, i: int, stride: int, order: str, train: bool, exact_nan: bool) -> None:
        self.dtype, self.i, self.stride, self.order = np.dtype(argmax_dtype), i, stride, order
        self.train, self.exact_nan = train, exact_nan

    def __call__(self, x: Array, index: Array | None, axis: Axis) -> tuple[Array, Array | None]:
        """x (N, C, *size) and the index within the axes done before (None: none); both with `axis` reduced."""
        i = self.i
        shape = _resized(x.shape, i, axis.out)
        best = scratch_in_order(f"best{i}", shape, x.dtype, self.order)
        where = scratch_in_order(f"index{i}", shape, self.dtype, self.order) if self.train else None
        for tap, new, seen, both in _steps(axis):
            offset = self.dtype.type(tap * self.stride)
            if new is not None:
                windows, cells = _at(i, new[0]), _at(i, new[1])
                np.copyto(best[windows], x[cells])
                if where is not None:
                    self._index_of(index, cells, offset, where[windows])
            if both is not None:
                windows, cells0, cells = (_at(i, part) for part in both)
                old_index = None if index is None else index[cells0]
                target = None if where is None else where[windows]
                later = None if index is None else index[cells]
                self._compare(x[cells0], old_index, x[cells], later, offset, best[windows], target)
            if seen is not None:
                windows, cells = _at(i, seen[0]), _at(i, seen[1])
                target = None if where is None else where[windows]
                later = None if index is None else index[cells]
                self._compare(best[windows], target, x[cells], later, offset, best[windows], target)
        return best, where

    def _compare(
        self, old: Array, old_index: Array | None, value: Array, index: Array | None, offset: Any, best: Array,
        where: Array | None,
    ) -> None:  # fmt: skip
        """Write the better of old and a later cell's value to best, and its index to where (None: not asked for)."""
        if where is not None:
            # As a later cell has a larger index than any before, the maximum of "its index or 0" and the old one is right.
            candidate = where
            if old_index is where:
                candidate = scratch_in_order("candidate", old.shape, self.dtype, self.order)
            won = self._better(value, old)
            if index is None:
                np.multiply(won, offset, out=candidate, casting="unsafe")
            else:
                np.add(index, offset, out=candidate)
                np.multiply(candidate, won, out=candidate)
            if old_index is not None:
                np.maximum(old_index, candidate, out=where)
        np.maximum(old, value, out=best)

    def _index_of(self, index: Array | None, cells: Any, offset: Any, out: Array) -> None:
        if index is None:
            out[...] = offset
        else:
            np.add(index[cells], offset, out=out)

    def _better(self, value: Array, old: Array) -> Array:
        """1 where a later cell beats the best so far: it is larger, or the first NaN."""
        better = scratch_in_order("better", value.shape, np.bool_, self.order)
        np.greater(value, old, out=better)
        if self.exact_nan:
            better |= np.isnan(value) & ~np.isnan(old)
        return better.view(np.uint8)


class BlasAvgPool(AvgPoolPlan):
    """avg_pool for NumPy arrays."""

    engine = "blas"

    def forward(self, x: Array) -> Array:
        spec = self.spec
        order = memory_order(x, spec.layout)
        y = allocate(np.empty, (x.shape[0], *spec.y_shape), spec.dtype, order)
        dtype = _sum_dtype(spec.dtype)

        def task(job: _Task) -> None:
            first, cells = _cut(spec.axes[0], job.rows)
            part = _widened(x[job.images, job.channels, cells], dtype, order)
            for i, axis in enumerate((first, *spec.axes[1:])):
                part = _sum_axis(part, i, axis, order)
            divisor = self._divisor if isinstance(self._divisor, float) else self._divisor[job.rows]
            np.divide(part, divisor, out=y[job.images, job.channels, job.rows], casting="unsafe")

        run_all(task, _tasks(x.shape, spec.axes[0].out, x.itemsize, order, cut_rows=True), self.threads)
        return y

    def backward(self, dy: Array) -> Array:
        spec = self.spec
        order = memory_order(dy, spec.layout)
        dx = allocate(np.empty, (dy.shape[0], *spec.x_shape), spec.dtype, order)
        dtype = _sum_dtype(spec.dtype)

        def task(job: _Task) -> None:
            source = dy[job.images, job.channels]
            part = scratch_in_order("scaled", source.shape, dtype, order)
            np.divide(source, self._divisor, out=part, casting="unsafe", dtype=dtype)
            for i, axis in reversed(list(enumerate(spec.axes))):
                part = _spread_axis(part, i, axis, order)
            np.copyto(dx[job.images, job.channels], part, casting="unsafe")

        run_all(task, _tasks(dx.shape, spec.axes[0].out, dtype.itemsize, order, cut_rows=False), self.threads)
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


def _sum_axis(x: Array, i: int, axis: Axis, order: str) -> Array:
    """Sums over the windows of one spatial axis of x (N, C, *size)."""
    total = scratch_in_order(f"sum{i}", _resized(x.shape, i, axis.out), x.dtype, order)
    if not _all_covered(axis):
        total[...] = 0
    for _, new, seen, both in _steps(axis):
        if new is not None:
            np.copyto(total[_at(i, new[0])], x[_at(i, new[1])])
        if both is not None:
            np.add(x[_at(i, both[1])], x[_at(i, both[2])], out=total[_at(i, both[0])])
        if seen is not None:
            part = total[_at(i, seen[0])]
            np.add(part, x[_at(i, seen[1])], out=part)
    return total


@lru_cache(256)
def _all_covered(axis: Axis) -> bool:
    """Whether every window has a cell of x."""
    covered = np.zeros(axis.out, bool)
    for tap in range(axis.kernel):
        covered[slice(*axis.windows_inside(tap))] = True
    return bool(covered.all())


def _spread_axis(y: Array, i: int, axis: Axis, order: str) -> Array:
    """The adjoint of `_sum_axis`."""
    total = scratch_in_order(f"spread{i}", _resized(y.shape, i, axis.size), y.dtype, order)
    total[...] = 0
    for tap in range(axis.kernel):
        pair = _pair(axis, tap, *axis.windows_inside(tap))
        if pair is not None:
            part = total[_at(i, pair[1])]
            np.add(part, y[_at(i, pair[0])], out=part)
    return total
