"""Pooling by compiled kernels that walk tables of links (see `_pool_kernels`), for every rank, memory order and stride.

Arrays are *lifted*: seen as (N, G, *axes, lanes) with at least one axis before the lanes. Channels-first, G are the channels and
the last spatial axis are the lanes; channels-last, G is 1 and the channels are lanes, an axis whose windows are one cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines._order import FIRST, Array, memory_order
from funcnn._engines._protocol import AvgPoolPlan, MaxPoolPlan
from funcnn._engines._threads import run_all
from funcnn._engines.jit._kernels import kernel
from funcnn._engines.jit._pool_kernels import lanes_in_block, pool, scatter, spread
from funcnn._engines.jit._simd import CODES, lanes_of
from funcnn._scratch import scratch
from funcnn._spec import FLOAT_DTYPES, HALF_DTYPES, REAL_OF_COMPLEX, AvgPoolSpec, Axis, MaxPoolSpec, ceil_div

__all__ = ["JitAvgPool", "JitMaxPool"]

TASK_BYTES = 1 << 20  # of targets and sources in one task: 50 microseconds' work, and all its scratch
SCATTER = True
MEAN = -1  # where a kernel asks for the code of the argmax


class _Task(NamedTuple):
    """Ranges of images, of groups, and of targets along the first lifted axis."""

    images: slice
    groups: slice
    rows: slice


class _Tables:
    """Links from targets to sources, as the kernels read them: `address` is that of the head, see `_pool_kernels`."""

    def __init__(self, outer: tuple[Array, Array], middle: tuple[Array, Array], lanes: tuple[Array, Array, Array, Array], width: int, exact: bool) -> None:
        phases, inner, words, values = lanes
        self._kept = (*outer, *middle, *lanes)
        at = [_address(a) for a in self._kept]
        cols, pitch = len(middle[0]), words[0].nbytes if len(words) else 0
        longest = inner[:, 0].max(initial=0)
        self._head = np.asarray([*at[:4], cols, at[4], len(phases), *at[5:7], pitch, at[7], width, longest, exact], np.int64)
        self.address = _address(self._head)


class _Geometry:
    """The lifted axes of a Spec in one memory order, one way (backward: cells are targets), and their tables."""

    def __init__(self, spec: MaxPoolSpec | AvgPoolSpec, order: str, back: bool, dtype: str) -> None:
        axes, counts = list(spec.axes), [()] * len(spec.axes)
        if isinstance(spec, AvgPoolSpec):
            counts = list(spec.counts)
        if order != FIRST:
            axes, counts = [*axes, _alone(spec.channels)], [*counts, ()]
        elif len(axes) == 1:
            axes, counts = [_alone(1), *axes], [(), *counts]
        self.axes, self.counts, self.back, self.dtype = axes, counts, back, dtype
        self.exact = all(count & (count - 1) == 0 for axis in counts for count in axis)
        self.mean = isinstance(spec, AvgPoolSpec) and not back
        self.targets = tuple(axis.size if back else axis.out for axis in axes)
        self.sources = tuple(axis.out if back else axis.size for axis in axes)
        self._tables: dict[tuple[int, ...], _Tables] = {}

    @cached_property
    def divisor(self) -> Array:
        """Counted cells of each window, of the lifted axes."""
        divisor = np.ones((), self.dtype)
        for axis, counts in zip(self.axes, self.counts, strict=True):
            divisor = divisor[..., None] * np.maximum(counts or (1,) * axis.out, 1).astype(self.dtype)
        return divisor

    def tables(self, strides: tuple[int, ...]) -> _Tables:
        """Tables for sources whose axes have these strides. One init's arrays mostly have the same."""
        found = self._tables.get(strides)
        if found is None:
            if len(self._tables) > 8:
                self._tables = {}
            found = self._tables[strides] = self._make(strides)
        return found

    def _make(self, strides: tuple[int, ...]) -> _Tables:
        axes = self.axes
        places = [math.prod(axis.kernel for axis in axes[i + 1 :]) for i in range(len(axes))]
        counts = [()] * len(axes) if self.back else self.counts
        parts = [(*_links(axis, self.back), *rest) for axis, *rest in zip(axes, strides, places, counts, strict=True)]
        return _Tables(_joined(parts[:-2]), _joined(parts[-2:-1]), self._lanes(strides[-1]), self.targets[-1], self.exact)

    def _lanes(self, stride: int) -> tuple[Array, Array, Array, Array]:
        axis, back = self.axes[-1], self.back
        single, most = lanes_in_block(lanes_of(self.dtype))
        step = axis.stride if back else 1
        width = ceil_div(self.targets[-1], step)
        _, valid = _links(axis, back)
        phases, inner, words = [], [], []
        for phase in range(step):
            start = len(inner)
            for tap in range(axis.kernel):
                # The source of the phase's first target, were there one.
                first, rest = divmod(phase - axis.start(tap), axis.stride) if back else (axis.start(tap), 0)
                if not rest:
                    inner.append((first * stride, tap))
                    here = np.zeros(width, bool)
                    here[: len(valid[phase::step])] = valid[phase::step, tap]
                    cells = first + np.arange(width + 3 * 64) * (1 if back else axis.stride)
                    words.append(_words(here, cells, single, most))
            phases.append((start, len(inner)))
        values = np.ones(self.targets[-1] + most, self.dtype) if self.mean else np.zeros(self.targets[-1] + most, np.int32)
        values[: self.targets[-1]] = np.maximum(self.counts[-1] or 1, 1) if self.mean else valid.argmax(1)
        if self.mean and self.exact:
            values = 1 / values
        return (
            np.asarray(phases, np.int64),
            np.asarray(inner, np.int64).reshape(-1, 2),
            np.asarray(words, np.int64).reshape(len(words), ceil_div(width, single), 6),
            values,
        )


def _alone(size: int) -> Axis:
    """An axis whose windows are its cells."""
    return Axis(size, 1, 1, 1, 0, 0, size)


def _links(axis: Axis, back: bool) -> tuple[Array, Array]:
    """Source of every (target, tap), and whether there is one. Cells are sources of windows; backward, windows of cells."""
    tap = np.arange(axis.kernel) * axis.dilation - axis.lo
    if not back:
        source = np.arange(axis.out)[:, None] * axis.stride + tap
        return source, (source >= 0) & (source < axis.size)
    source, rest = np.divmod(np.arange(axis.size)[:, None] - tap, axis.stride)
    return source, (rest == 0) & (source >= 0) & (source < axis.out)


def _joined(parts: list[tuple[Any, ...]]) -> tuple[Array, Array]:
    """Rows (first link, last link, divisor, longest distance) and links (distance, number) of some axes together, in row-major order."""
    distance = number = np.zeros((1, 1), np.int64)
    valid, count = np.ones((1, 1), bool), np.ones(1, np.int64)
    for source, here, stride, place, counts in parts:
        shape = (len(valid) * len(here), -1)
        taps = np.broadcast_to(np.arange(here.shape[1]) * place, here.shape)
        distance, number, valid = (
            np.asarray(join(a[:, None, :, None], b[None, :, None, :])).reshape(shape)
            for join, a, b in (
                (np.add, distance, source * stride),
                (np.add, number, taps),
                (np.logical_and, valid, here),
            )
        )
        count = np.outer(count, np.maximum(counts, 1) if counts else np.ones(len(here), np.int64)).reshape(-1)
    lengths = valid.sum(1)
    ends = lengths.cumsum()
    longest = np.where(valid, distance, 0).max(1)
    return np.stack([ends - lengths, ends, count, longest], 1), np.stack([distance[valid], number[valid]], 1)


def _words(here: Array, cells: Array, single: int, most: int) -> Array:
    """For every vector of targets words of 64 bits: the targets that have the source; and, where the targets' sources are
    every second number in memory, these numbers, from the first on and from number `most` - 1 on. First with a bit for all
    beyond the last target whose source would lie behind the first one, where it does no harm to read; then without.
    """
    starts = np.arange(0, len(here), single)[:, None]
    lane = np.arange(64)
    words = []
    for harmless in (cells >= 0, np.zeros(len(cells), bool)):
        bits = harmless.copy()
        bits[: len(here)] = here
        near, far = (bits[starts + e // 2] & (e % 2 == 0) for e in (lane, lane + most - 1))
        words += [bits[starts + lane], near, far]
    return np.stack([_packed(bits) for bits in words], 1)


def _packed(bits: Array) -> Array:
    return np.packbits(bits, axis=1, bitorder="little").view("<i8")[:, 0]


def _lift(a: Array, order: str) -> Array:
    """(N, C, *spatial) as (N, G, *axes, lanes)."""
    if order != FIRST:
        return a.transpose(0, *range(2, a.ndim), 1)[:, None]
    return a[:, :, None] if a.ndim == 3 else a


def _end(a: Array) -> int:
    """Address behind the last byte of an array that is not empty."""
    return _address(a) + a.itemsize + sum((n - 1) * step for n, step in zip(a.shape, a.strides, strict=True) if step > 0)


def _new(n: int, shape: tuple[int, ...], dtype: str, order: str) -> tuple[Array, Array]:
    """A new array (N, C, *spatial) in a memory order, and the same one lifted. shape: (C, *spatial)."""
    if order == FIRST:
        a = np.empty((n, *shape), dtype)
        return a, _lift(a, order)
    c, *spatial = shape
    memory = np.empty((n, 1, *spatial, c), dtype)
    return memory[:, 0].transpose(0, -1, *range(1, len(shape))), memory


def _address(a: Array) -> int:
    address: int = a.__array_interface__["data"][0]
    return address


def _tasks(shape: tuple[int, ...], itemsize: int, rows: int) -> Iterator[_Task]:
    """Cut lifted arrays of which the larger has a shape: whole images, or groups of one, or targets of one."""
    n, groups, *sizes = shape
    unit = max(1, math.prod(sizes) * itemsize)
    whole = slice(0, rows)
    if groups * unit <= TASK_BYTES:
        for part in _parts(n, TASK_BYTES // max(1, groups * unit)):
            yield _Task(part, slice(0, groups), whole)
        return
    for i in range(n):
        if unit <= TASK_BYTES:
            for part in _parts(groups, TASK_BYTES // unit):
                yield _Task(slice(i, i + 1), part, whole)
            continue
        for g in range(groups):
            for part in _parts(rows, max(1, rows * TASK_BYTES // unit)):
                yield _Task(slice(i, i + 1), slice(g, g + 1), part)


def _parts(size: int, most: int) -> list[slice]:
    """Ranges of at most `most` that cover 0 .. size, of nearly equal length."""
    count = ceil_div(size, most)
    return [slice(size * i // count, size * (i + 1) // count) for i in range(count)]


def _needed(axis: Axis, targets: slice, back: bool) -> slice:
    """Sources of a range of targets."""
    if back:
        first = ceil_div(targets.start + axis.lo - axis.span + 1, axis.stride)
        last, size = (targets.stop - 1 + axis.lo) // axis.stride + 1, axis.out
    else:
        first, size = targets.start * axis.stride - axis.lo, axis.size
        last = (targets.stop - 1) * axis.stride - axis.lo + axis.span
    first = min(max(first, 0), size)
    return slice(first, max(first, min(last, size)))


class _Target:
    """Where a kernel writes a task's part of a lifted array: in place, or in scratch that `finish` copies."""

    def __init__(self, a: Array, task: _Task, dtype: np.dtype[Any]) -> None:
        part = a[task.images, task.groups]
        inner = math.prod(a.shape[3:-1])
        self.rows = a.shape[2] * inner
        self.first, self.last = task.rows.start * inner, task.rows.stop * inner
        self.scratch = None
        if a.dtype == dtype and a.flags.c_contiguous:
            self.address = _address(part)
            return
        self.part = part[:, :, task.rows]
        self.scratch = scratch("target", self.part.shape, dtype)
        self.rows = self.last - self.first
        self.address = _address(self.scratch) - self.first * a.shape[-1] * dtype.itemsize

    def finish(self) -> None:
        if self.scratch is not None:
            np.copyto(self.part, self.scratch, casting="unsafe")


class _Passes:
    """Forward and backward of a pool over lifted arrays, in tasks."""

    spec: MaxPoolSpec | AvgPoolSpec
    threads: int
    real: np.dtype[Any]  # that the kernels compute in
    forward_kernel: Callable[..., None]
    backward_kernel: Callable[..., None]

    @cached_property
    def _geometries(self) -> dict[tuple[str, bool], _Geometry]:
        return {}

    def _geometry(self, order: str, back: bool) -> _Geometry:
        found = self._geometries.get((order, back))
        if found is None:
            found = self._geometries[order, back] = _Geometry(self.spec, order, back, self.real.name)
        return found

    def _reduce(self, x: Array, y: Array, index: Array | None, order: str) -> None:
        """Write y, and argmax, from x (N, C, *size)."""
        geometry, real = self._geometry(order, False), self.real
        stride, end = geometry.axes[-1].stride, _end(x)
        def run(task: _Task) -> None:
            box = x[task.images, task.groups]
            start, limit = _address(box), end
            if box.dtype != real:
                cells = _needed(geometry.axes[0], task.rows, False)
                box = _copied("source", box[:, :, cells], real)
                start, limit = _address(box) - cells.start * box.strides[2], _end(box)
            t = geometry.tables(box.strides[2:])
            n, groups, *_ = box.shape
            target = _Target(y, task, real)
            self.forward_kernel(
                start, limit, *box.strides[:2], stride * box.strides[-1], target.address, 0 if index is None else _Target(index, task, index.dtype).address,
                groups, n * groups, target.rows, target.first, target.last, t.address,
            )  # fmt: skip
            target.finish()

        larger = x.shape if x.size > y.size else y.shape
        run_all(run, list(_tasks(larger, real.itemsize, geometry.targets[0])), self.threads)

    def _spread(self, dy: Array, index: Array | None, dx: Array, order: str) -> None:
        """Write dx (N, C, *size): the sum of dy over the windows of each cell, or over those whose argmax it is."""
        geometry, real = self._geometry(order, True), self.real
        sizes = geometry.sources
        strides = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        row, t = strides[0], geometry.tables(strides)

        def packed(a: Array, task: _Task, dtype: np.dtype[Any]) -> tuple[int, int, int]:
            """Address of the first window of a part, the end of what may be read, windows of a unit."""
            part = a[task.images, task.groups]
            if a.dtype == dtype and a.flags.c_contiguous and not (a is dy and index is None):
                return _address(part), _address(a) + a.nbytes, row * sizes[0]
            windows = _needed(geometry.axes[0], task.rows, True)
            part = part[:, :, windows]
            copy = scratch("source" if a is dy else "index", part.shape, dtype)
            if index is None:
                np.divide(part, geometry.divisor[windows], out=copy, dtype=dtype, casting="unsafe")
            else:
                np.copyto(copy, part, casting="unsafe")
            start = _address(copy)
            return start - windows.start * row * dtype.itemsize, start + copy.nbytes, row * copy.shape[2]

        def run(task: _Task) -> None:
            target = _Target(dx, task, real)
            n, groups = (part.stop - part.start for part in task[:2])
            self.backward_kernel(
                *packed(dy, task, real), *((0, 0, 0) if index is None else packed(index, task, index.dtype)),
                target.address, n * groups, target.rows, target.first, target.last, t.address,
            )  # fmt: skip
            target.finish()

        larger = dx.shape if dx.size > dy.size else dy.shape
        run_all(run, list(_tasks(larger, real.itemsize, geometry.targets[0])), self.threads)


def _copied(name: str, part: Array, dtype: np.dtype[Any]) -> Array:
    copy = scratch(name, part.shape, dtype)
    np.copyto(copy, part, casting="unsafe")
    return copy


def _real(dtype: str) -> str:
    """The dtype that kernels compute in: half floats are summed in float32, a complex number is two real ones."""
    if dtype in HALF_DTYPES:
        return "float32"
    return "uint8" if dtype == "bool" else REAL_OF_COMPLEX.get(dtype, dtype)


class JitMaxPool(_Passes, MaxPoolPlan):
    """max_pool for NumPy arrays."""

    engine = "jit"

    def choose_algorithm(self) -> str:
        self.real = np.dtype(_real(self.spec.dtype))
        index = np.dtype(self.spec.argmax_dtype)
        shape = CODES[index.name]
        self.forward_kernel = kernel(pool, self.real.name, shape)
        if self.spec.dtype in FLOAT_DTYPES:  # others have no backward
            self.backward_kernel = kernel(spread, self.real.name, shape)
            self.scatter_kernel = kernel(scatter, self.real.name, shape)
        return "direct"

    def forward(self, x: Array, train: bool) -> tuple[Array, Array | None]:
        spec = self.spec
        order = memory_order(x, spec.layout)
        y, target = _new(len(x), spec.y_shape, spec.dtype, order)
        argmax, index = _new(len(x), spec.y_shape, spec.argmax_dtype, order) if train else (None, None)
        if spec.dtype == "bool":
            x, target = x.view(np.uint8), target.view(np.uint8)
        if y.size:
            self._reduce(_lift(x, order), target, index, order)
        return y, argmax

    def backward(self, dy: Array, argmax: Array) -> Array:
        order = memory_order(dy, self.spec.layout)
        dx, target = _new(len(dy), self.spec.x_shape, self.spec.dtype, order)
        if dx.size:
            run = self._scatter if order == FIRST and self.scatters else self._spread
            run(_lift(dy, order), _lift(argmax, order), target, order)
        return dx

    @cached_property
    def scatters(self) -> bool:
        """Whether to add up window by window rather than cell by cell, channels-first.

        A cell costs all windows that have it, at a vector a time; a window always costs a nanosecond or two.
        """
        return SCATTER

    @cached_property
    def _places(self) -> tuple[Array, Array]:
        """Bytes from the first cell of a plane: of each row's first window; and from a window's first tap to each."""
        base = offset = np.zeros((), np.int64)
        for axis in self.spec.axes:
            base = base[..., None] * axis.size + np.arange(axis.out) * axis.stride - axis.lo
            offset = offset[..., None] * axis.size + np.arange(axis.kernel) * axis.dilation
        item = self.real.itemsize
        return base[..., 0].reshape(-1) * item, offset.reshape(-1) * item

    def _scatter(self, dy: Array, index: Array, dx: Array, order: str) -> None:
        """Write dx (N, C, *size) from dy and its argmax."""
        bases, offsets = self._places
        axis, real = self.spec.axes[-1], self.real
        size = math.prod(dx.shape[2:])

        def run(task: _Task) -> None:
            target = _Target(dx, task, real)
            part, where = dy[task.images, task.groups], index[task.images, task.groups]
            if part.dtype != real or not part.flags.c_contiguous:
                part = _copied("source", part, real)
            if not where.flags.c_contiguous:
                where = _copied("index", where, where.dtype)
            self.scatter_kernel(
                _address(part), _address(where), target.address, part.shape[0] * part.shape[1], size, len(bases),
                _address(bases), _address(offsets), axis.out, axis.stride * real.itemsize,
            )  # fmt: skip
            target.finish()

        whole = slice(0, dx.shape[2])
        tasks = [task._replace(rows=whole) for task in _tasks(dx.shape, real.itemsize, 1)]
        run_all(run, tasks, self.threads)


class JitAvgPool(_Passes, AvgPoolPlan):
    """avg_pool for NumPy arrays."""

    engine = "jit"

    def choose_algorithm(self) -> str:
        self.real = np.dtype(_real(self.spec.dtype))
        self.forward_kernel = kernel(pool, self.real.name, MEAN)
        self.backward_kernel = kernel(spread, self.real.name, MEAN)
        return "direct"

    def forward(self, x: Array) -> Array:
        order = memory_order(x, self.spec.layout)
        y, target = _new(len(x), self.spec.y_shape, self.spec.dtype, order)
        if y.size:
            for real_x, real_y in _parts_of(_lift(x, order), target):
                self._reduce(real_x, real_y, None, order)
        return y

    def backward(self, dy: Array) -> Array:
        order = memory_order(dy, self.spec.layout)
        dx, target = _new(len(dy), self.spec.x_shape, self.spec.dtype, order)
        if dx.size:
            for real_dy, real_dx in _parts_of(_lift(dy, order), target):
                self._spread(real_dy, None, real_dx, order)
        return dx


def _parts_of(source: Array, target: Array) -> tuple[tuple[Array, Array], ...]:
    """Real arrays as they are, complex ones as their real and imaginary parts."""
    if target.dtype.kind != "c":
        return ((source, target),)
    return (source.real, target.real), (source.imag, target.imag)
