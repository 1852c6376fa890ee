"""Pooling by compiled kernels. Arrays are lifted (`_pool_tables`), so that ranks and memory orders are all the same here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines._order import FIRST, LAST, Array, allocate, memory_order
from funcnn._engines._protocol import AvgPoolPlan, MaxPoolPlan
from funcnn._engines._threads import ranges, run_all
from funcnn._engines.jit._half import compile_casts, copy_cast
from funcnn._engines.jit._host import (
    CODES,
)
from funcnn._engines.jit._kernels import kernel
from funcnn._engines.jit._pool_kernels import pool, scatter, spread
from funcnn._engines.jit._pool_tables import Geometry, lifted
from funcnn._engines.jit._view import address_of
from funcnn._scratch import scratch
from funcnn._spec import FLOAT_DTYPES, HALF_DTYPES, REAL_OF_COMPLEX, AvgPoolSpec, MaxPoolSpec

__all__ = ["JitAvgPool", "JitMaxPool"]

TASK_BYTES = 1 << 20  # of the larger array in one task that needs scratch
ALONE_BYTES = (
    4 << 20
)  # without scratch: what one thread does while it could be handed to another; else a task for each thread
MEAN = -1  # in place of the code of the argmax


class _Task(NamedTuple):
    """Ranges of images, of groups, and of targets along the first axis."""

    images: slice
    groups: slice
    rows: slice


def _tasks(shape: tuple[int, int, int], unit: int, most: int, cut: bool) -> Iterator[_Task]:
    """Cut images x groups x rows: whole images, groups of one, or (cut) rows of one group; `most` bytes, a group has `unit`."""
    n, groups, rows = shape
    if groups * unit <= most:
        for images in _cuts(n, most // (groups * unit)):
            yield _Task(images, slice(0, groups), slice(0, rows))
        return
    for i in range(n):
        for part in _cuts(groups, max(1, most // unit)):
            for targets in _cuts(rows, max(1, rows * most // unit) if cut else rows):
                yield _Task(slice(i, i + 1), part, targets)


def _units(task: _Task) -> int:
    """Groups of all images."""
    return (task.images.stop - task.images.start) * (task.groups.stop - task.groups.start)


def _cuts(size: int, most: int) -> list[slice]:
    return [slice(*part) for part in ranges(size, most)]


def _end(a: Array) -> int:
    """Address behind the last byte."""
    last = sum((n - 1) * step for n, step in zip(a.shape, a.strides, strict=True) if step > 0)
    return address_of(a) + last + a.itemsize


def _copied(name: str, part: Array, dtype: Any) -> Array:
    """A packed copy in scratch."""
    copy = scratch(name, part.shape, dtype)
    copy_cast(copy, part)
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
    """Where a kernel writes a lifted array: in place, or task by task in scratch that `finish` copies."""

    def __init__(self, a: Array, dtype: np.dtype[Any]) -> None:
        self.array, self.dtype = a, dtype
        self.inner = math.prod(a.shape[3:-1])  # rows of vectors for one target on the first axis
        self.unit = a.shape[2] * self.inner
        self.row_bytes = a.shape[-1] * dtype.itemsize
        self.start = address_of(a) if a.dtype == dtype and a.flags.c_contiguous else 0

    def place(self, task: _Task) -> tuple[int, int, Array | None]:
        """Address of row 0 of the first unit, rows of a unit, and the scratch."""
        if self.start:
            units = task.images.start * self.array.shape[1] + task.groups.start
            return self.start + units * self.unit * self.row_bytes, self.unit, None
        memory = scratch("target", self.array[task].shape, self.dtype)
        first, last = self.rows(task)
        return address_of(memory) - first * self.row_bytes, last - first, memory

    def rows(self, task: _Task) -> tuple[int, int]:
        """First and last row of vectors."""
        return task.rows.start * self.inner, task.rows.stop * self.inner

    def finish(self, task: _Task, memory: Array | None) -> None:
        if memory is not None:
            copy_cast(self.array[task], memory)


class _Passes:
    """Both ways of a pool, task by task."""

    def __init__(self, spec: MaxPoolSpec | AvgPoolSpec, threads: int) -> None:
        self.spec, self.threads = spec, threads
        # Half floats are summed in float32, a complex number is two real ones.
        real = "float32" if spec.dtype in HALF_DTYPES else REAL_OF_COMPLEX.get(spec.dtype, spec.dtype)
        self.real = np.dtype("uint8" if real == "bool" else real)
        self.index = CODES[spec.argmax_dtype] if isinstance(spec, MaxPoolSpec) else MEAN
        self.pool = kernel(pool, self.real.name, self.index)
        compile_casts(spec.dtype)
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
        y_at, index_at = _Target(y, real), None if index is None else _Target(index, index.dtype)
        start, end, stride = address_of(x), _end(x), geometry.axes[-1].stride

        def run(task: _Task) -> None:
            images, groups, _ = task
            if x.dtype == real:
                (n_step, g_step, *steps), limit = x.strides, end
                at = start + images.start * n_step + groups.start * g_step
            else:
                cells = geometry.needed(task.rows)
                part = _copied("source", x[images, groups, cells], real)
                (n_step, g_step, *steps), limit = part.strides, _end(part)
                at = address_of(part) - cells.start * steps[0]
            tables = geometry.tables(tuple(steps))
            to, rows, memory = y_at.place(task)
            self.pool(
                at, limit, n_step, g_step, stride * steps[-1], to, index_at.place(task)[0] if index_at else 0,
                groups.stop - groups.start, _units(task), rows, *y_at.rows(task), tables.address,
            )  # fmt: skip
            y_at.finish(task, memory)

        self._run(run, y, x, copied=x.dtype != real or y.dtype != real)

    def cells(self, dy: Array, argmax: Array | None, dx: Array, order: str) -> None:
        """Write dx (N, C, *size), in a memory order: the sum of dy over each cell's windows, or over those that it won."""
        geometry, real = self._geometry(order, back=True), self.real
        dy, dx = lifted(dy, order), lifted(dx, order)
        index = None if argmax is None else lifted(argmax, order)
        sizes = geometry.sources
        steps = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        tables, step, dx_at = geometry.tables(steps), steps[0], _Target(dx, real)

        def run(task: _Task) -> None:
            windows = geometry.needed(task.rows)
            if index is None:
                part = dy[task.images, task.groups, windows]
                scaled = scratch("source", part.shape, real)
                np.divide(part, geometry.divisor[windows], out=scaled, dtype=real, casting="unsafe")
                places = (*_Source(scaled, windows.start).places(step), 0, 0, 0)
            else:  # both stay in variables: scratch beyond what is kept is gone with its array
                values = _packed("source", dy, task, windows, real)
                numbers = _packed("index", index, task, windows, index.dtype)
                places = (*values.places(step), *numbers.places(step))
            to, rows, memory = dx_at.place(task)
            self.spread(*places, to, _units(task), rows, *dx_at.rows(task), tables.address)
            dx_at.finish(task, memory)

        self._run(run, dx, dy, copied=index is None or dy.dtype != real or not dy.flags.c_contiguous)

    def winners(self, dy: Array, argmax: Array, dx: Array) -> None:
        """Write dx (N, C, *size), channels-first, by one addition for each window."""
        bases, offsets = self._places
        dy, argmax, dx = (lifted(a, FIRST) for a in (dy, argmax, dx))
        axis, size, whole = self.spec.axes[-1], math.prod(dx.shape[2:]), slice(0, dy.shape[2])
        dx_at = _Target(dx, self.real)

        def run(task: _Task) -> None:
            part = _packed("source", dy, task, whole, self.real).part
            index = _packed("index", argmax, task, whole, argmax.dtype).part
            to, _, memory = dx_at.place(task)
            self.scatter(
                address_of(part), address_of(index), to, _units(task), size,
                len(bases), address_of(bases), address_of(offsets), axis.out, axis.stride * self.real.itemsize,
            )  # fmt: skip
            dx_at.finish(task, memory)

        self._run(run, dx, dy, copied=dy.dtype != self.real or not dy.flags.c_contiguous, cut=False)

    @cached_property
    def _places(self) -> tuple[Array, Array]:
        """Bytes from a plane's first cell to each row's first window, and from a window's first tap to each."""
        base = offset = np.zeros((), np.int64)
        for axis in self.spec.axes:
            base = base[..., None] * axis.size + np.arange(axis.out) * axis.stride - axis.lo
            offset = offset[..., None] * axis.size + np.arange(axis.kernel) * axis.dilation
        return base[..., 0].reshape(-1) * self.real.itemsize, offset.reshape(-1) * self.real.itemsize

    def _run(self, run: Callable[[_Task], None], target: Array, source: Array, copied: bool, cut: bool = True) -> None:
        """Run tasks for all of a target. copied: they need scratch; cut: also for parts of one unit of it."""
        n, groups, rows, *_ = target.shape
        size = max(target.size, source.size) * self.real.itemsize
        most = TASK_BYTES if copied else max(ALONE_BYTES, -(-size // self.threads))
        run_all(run, list(_tasks((n, groups, rows), size // (n * groups), most, cut)), self.threads)

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
        y = allocate(np.empty, (len(x), *spec.y_shape), spec.dtype, order)
        argmax = allocate(np.empty, (len(x), *spec.y_shape), spec.argmax_dtype, order) if train else None
        if y.size and spec.dtype == "bool":
            self._passes.windows(x.view(np.uint8), y.view(np.uint8), argmax, order)
        elif y.size:
            self._passes.windows(x, y, argmax, order)
        return y, argmax

    def backward(self, dy: Array, argmax: Array) -> Array:
        order = memory_order(dy, self.spec.layout)
        dx = allocate(np.empty, (len(dy), *self.spec.x_shape), self.spec.dtype, order)
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
        y = allocate(np.empty, (len(x), *self.spec.y_shape), self.spec.dtype, order)
        if y.size:
            for source, target in _real_pairs(x, y):
                self._passes.windows(source, target, None, order)
        return y

    def backward(self, dy: Array) -> Array:
        order = memory_order(dy, self.spec.layout)
        dx = allocate(np.empty, (len(dy), *self.spec.x_shape), self.spec.dtype, order)
        if dx.size:
            for source, target in _real_pairs(dy, dx):
                self._passes.cells(source, None, target, order)
        return dx


def _real_pairs(source: Array, target: Array) -> tuple[tuple[Array, Array], ...]:
    """Real arrays as they are, complex ones as their real and their imaginary parts."""
    if target.dtype.kind != "c":
        return ((source, target),)
    return (source.real, target.real), (source.imag, target.imag)
