"""Pooling by compiled kernels. Arrays are lifted (`_pool_tables`), so that ranks and memory orders are all the same here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines._order import FIRST, LAST, Array, memory_order
from funcnn._engines._protocol import AvgPoolPlan, MaxPoolPlan
from funcnn._engines._threads import run_all
from funcnn._engines.jit._kernels import kernel
from funcnn._engines.jit._pool_kernels import pool, scatter, spread
from funcnn._engines.jit._pool_tables import Geometry, lifted
from funcnn._engines.jit._simd import CODES
from funcnn._engines.jit._view import address_of
from funcnn._scratch import scratch
from funcnn._spec import FLOAT_DTYPES, HALF_DTYPES, REAL_OF_COMPLEX, AvgPoolSpec, MaxPoolSpec, ceil_div

__all__ = ["JitAvgPool", "JitMaxPool"]

TASK_BYTES = 1 << 20  # of the larger array in one task: some 50 microseconds' work
MEAN = -1  # in place of the code of the argmax


class _Task(NamedTuple):
    """Ranges of images, of groups, and of targets along the first axis."""

    images: slice
    groups: slice
    rows: slice


def _tasks(n: int, groups: int, rows: int, unit: int, cut: bool) -> Iterator[_Task]:
    """Whole images, or groups of one, or (cut) rows of one group, whose unit of memory is a group of an image."""
    if groups * unit <= TASK_BYTES:
        for images in _cuts(n, TASK_BYTES // (groups * unit)):
            yield _Task(images, slice(0, groups), slice(0, rows))
        return
    for i in range(n):
        for part in _cuts(groups, max(1, TASK_BYTES // unit)):
            for targets in _cuts(rows, max(1, rows * TASK_BYTES // unit) if cut else rows):
                yield _Task(slice(i, i + 1), part, targets)


def _cuts(size: int, most: int) -> list[slice]:
    """Ranges of at most `most` that cover 0 .. size, of nearly equal length."""
    count = ceil_div(size, most)
    return [slice(size * i // count, size * (i + 1) // count) for i in range(count)]


def _end(a: Array) -> int:
    """Address behind the last byte."""
    last = sum((n - 1) * step for n, step in zip(a.shape, a.strides, strict=True) if step > 0)
    return address_of(a) + last + a.itemsize


def _new(n: int, shape: tuple[int, ...], dtype: str, order: str) -> Array:
    """A new array (N, C, *spatial) in a memory order; shape: (C, *spatial)."""
    if order == FIRST:
        return np.empty((n, *shape), dtype)
    c, *spatial = shape
    return np.empty((n, *spatial, c), dtype).transpose(0, -1, *range(1, len(shape)))


def _copied(name: str, part: Array, dtype: Any) -> Array:
    """A packed copy in scratch."""
    copy = scratch(name, part.shape, dtype)
    np.copyto(copy, part, casting="unsafe")
    return copy


class _Source(NamedTuple):
    """Packed windows of a task; the first `skipped` ones along the first axis are not there."""

    part: Array
    skipped: int

    def places(self, step: int) -> tuple[int, int, int]:
        """Address of window 0, the end of what may be read, windows of a unit; `step`: windows in one of the first axis."""
        start = address_of(self.part)
        return start - self.skipped * step * self.part.itemsize, start + self.part.nbytes, self.part.shape[2] * step


class _Target:
    """Where a kernel writes a task's part of a lifted array: in place, or in scratch that `finish` copies."""

    def __init__(self, a: Array, task: _Task, dtype: np.dtype[Any]) -> None:
        part = a[task.images, task.groups]
        inner = math.prod(a.shape[3:-1])
        self.first, self.last = task.rows.start * inner, task.rows.stop * inner
        self.part, self.scratch = part[:, :, task.rows], None
        if a.dtype == dtype and a.flags.c_contiguous:
            self.rows, self.address = a.shape[2] * inner, address_of(part)
        else:
            self.scratch = scratch("target", self.part.shape, dtype)
            self.rows = self.last - self.first
            self.address = address_of(self.scratch) - self.first * a.shape[-1] * dtype.itemsize

    def finish(self) -> None:
        if self.scratch is not None:
            np.copyto(self.part, self.scratch, casting="unsafe")


class _Passes:
    """Both ways of a pool, task by task."""

    def __init__(self, spec: MaxPoolSpec | AvgPoolSpec, threads: int) -> None:
        self.spec, self.threads = spec, threads
        # Half floats are summed in float32, a complex number is two real ones.
        real = "float32" if spec.dtype in HALF_DTYPES else REAL_OF_COMPLEX.get(spec.dtype, spec.dtype)
        self.real = np.dtype("uint8" if real == "bool" else real)
        self.index = CODES[spec.argmax_dtype] if isinstance(spec, MaxPoolSpec) else MEAN
        self.pool = kernel(pool, self.real.name, self.index)
        if spec.dtype in FLOAT_DTYPES or self.index == MEAN:  # nothing else has a backward
            self.spread = kernel(spread, self.real.name, self.index)
        if spec.dtype in FLOAT_DTYPES and self.index != MEAN:
            self.scatter = kernel(scatter, self.real.name, self.index)
        self._geometries: dict[tuple[str, bool], Geometry] = {}

    def windows(self, x: Array, y: Array, argmax: Array | None, order: str) -> None:
        """Write y and argmax (N, C, *out), both in a memory order, from x (N, C, *size)."""
        if math.prod(y.shape[2:]) == 1:  # both orders are the same: let the channels fill the vectors
            order = LAST
        geometry, real = self._geometry(order, back=False), self.real
        x, y = lifted(x, order), lifted(y, order)
        index = None if argmax is None else lifted(argmax, order)
        end = _end(x)

        def run(task: _Task) -> None:
            part, limit, skipped = x[task.images, task.groups], end, 0
            if part.dtype != real:
                cells = geometry.needed(task.rows)
                part = _copied("source", part[:, :, cells], real)
                limit, skipped = _end(part), cells.start
            n, groups, *_ = part.shape
            n_step, g_step, *steps = part.strides
            tables, target = geometry.tables(tuple(steps)), _Target(y, task, real)
            self.pool(
                address_of(part) - skipped * steps[0], limit, n_step, g_step, geometry.axes[-1].stride * steps[-1],
                target.address, 0 if index is None else _Target(index, task, index.dtype).address,
                groups, n * groups, target.rows, target.first, target.last, tables.address,
            )  # fmt: skip
            target.finish()

        self._run(run, y, x)

    def cells(self, dy: Array, argmax: Array | None, dx: Array, order: str) -> None:
        """Write dx (N, C, *size), in a memory order: the sum of dy over each cell's windows, or over those that it won."""
        geometry, real = self._geometry(order, back=True), self.real
        dy, dx = lifted(dy, order), lifted(dx, order)
        index = None if argmax is None else lifted(argmax, order)
        sizes = geometry.sources
        steps = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        tables, step = geometry.tables(steps), steps[0]

        def run(task: _Task) -> None:
            windows = geometry.needed(task.rows)
            if index is None:
                part = dy[task.images, task.groups, windows]
                scaled = scratch("source", part.shape, real)
                np.divide(part, geometry.divisor[windows], out=scaled, dtype=real, casting="unsafe")
                places = (*_Source(scaled, windows.start).places(step), 0, 0, 0)
            else:
                numbers = _packed("index", index, task, windows, index.dtype)
                places = (*_packed("source", dy, task, windows, real).places(step), *numbers.places(step))
            target = _Target(dx, task, real)
            units = math.prod(target.part.shape[:2])
            self.spread(*places, target.address, units, target.rows, target.first, target.last, tables.address)
            target.finish()

        self._run(run, dx, dy)

    def winners(self, dy: Array, argmax: Array, dx: Array) -> None:
        """Write dx (N, C, *size), channels-first, by one addition for each window."""
        bases, offsets = self._places
        dy, argmax, dx = (lifted(a, FIRST) for a in (dy, argmax, dx))
        axis, size, whole = self.spec.axes[-1], math.prod(dx.shape[2:]), slice(0, dy.shape[2])

        def run(task: _Task) -> None:
            part = _packed("source", dy, task, whole, self.real).part
            index = _packed("index", argmax, task, whole, argmax.dtype).part
            target = _Target(dx, task, self.real)
            self.scatter(
                address_of(part), address_of(index), target.address, math.prod(part.shape[:2]), size,
                len(bases), address_of(bases), address_of(offsets), axis.out, axis.stride * self.real.itemsize,
            )  # fmt: skip
            target.finish()

        self._run(run, dx, dy, cut=False)

    @cached_property
    def _places(self) -> tuple[Array, Array]:
        """Bytes from a plane's first cell to each row's first window, and from a window's first tap to each."""
        base = offset = np.zeros((), np.int64)
        for axis in self.spec.axes:
            base = base[..., None] * axis.size + np.arange(axis.out) * axis.stride - axis.lo
            offset = offset[..., None] * axis.size + np.arange(axis.kernel) * axis.dilation
        return base[..., 0].reshape(-1) * self.real.itemsize, offset.reshape(-1) * self.real.itemsize

    def _run(self, run: Callable[[_Task], None], target: Array, source: Array, cut: bool = True) -> None:
        """Run tasks for all of a target; cut: also for parts of one unit of it."""
        n, groups, rows, *_ = target.shape
        unit = max(target.size, source.size) // (n * groups) * self.real.itemsize
        run_all(run, list(_tasks(n, groups, rows, unit, cut)), self.threads)

    def _geometry(self, order: str, back: bool) -> Geometry:
        found = self._geometries.get((order, back))
        if found is None:
            found = self._geometries[order, back] = Geometry(self.spec, order, back, self.real.name)
        return found


def _packed(name: str, a: Array, task: _Task, windows: slice, dtype: np.dtype[Any]) -> _Source:
    """A task's windows of a lifted array."""
    part = a[task.images, task.groups]
    if a.dtype == dtype and a.flags.c_contiguous:
        return _Source(part, 0)
    return _Source(_copied(name, part[:, :, windows], dtype), windows.start)


class JitMaxPool(MaxPoolPlan):
    """max_pool for NumPy arrays."""

    engine = "jit"

    def choose_algorithm(self) -> str:
        self._passes = _Passes(self.spec, self.threads)
        return "direct"

    def forward(self, x: Array, train: bool) -> tuple[Array, Array | None]:
        spec, order = self.spec, memory_order(x, self.spec.layout)
        y = _new(len(x), spec.y_shape, spec.dtype, order)
        argmax = _new(len(x), spec.y_shape, spec.argmax_dtype, order) if train else None
        if y.size and spec.dtype == "bool":
            self._passes.windows(x.view(np.uint8), y.view(np.uint8), argmax, order)
        elif y.size:
            self._passes.windows(x, y, argmax, order)
        return y, argmax

    def backward(self, dy: Array, argmax: Array) -> Array:
        order = memory_order(dy, self.spec.layout)
        dx = _new(len(dy), self.spec.x_shape, self.spec.dtype, order)
        if dx.size and order == FIRST:
            self._passes.winners(dy, argmax, dx)
        elif dx.size:
            self._passes.cells(dy, argmax, dx, order)
        return dx


class JitAvgPool(AvgPoolPlan):
    """avg_pool for NumPy arrays."""

    engine = "jit"

    def choose_algorithm(self) -> str:
        self._passes = _Passes(self.spec, self.threads)
        return "direct"

    def forward(self, x: Array) -> Array:
        order = memory_order(x, self.spec.layout)
        y = _new(len(x), self.spec.y_shape, self.spec.dtype, order)
        if y.size:
            for source, target in _real_pairs(x, y):
                self._passes.windows(source, target, None, order)
        return y

    def backward(self, dy: Array) -> Array:
        order = memory_order(dy, self.spec.layout)
        dx = _new(len(dy), self.spec.x_shape, self.spec.dtype, order)
        if dx.size:
            for source, target in _real_pairs(dy, dx):
                self._passes.cells(source, None, target, order)
        return dx


def _real_pairs(source: Array, target: Array) -> tuple[tuple[Array, Array], ...]:
    """Real arrays as they are, complex ones as their real and their imaginary parts."""
    if target.dtype.kind != "c":
        return ((source, target),)
    return (source.real, target.real), (source.imag, target.imag)
