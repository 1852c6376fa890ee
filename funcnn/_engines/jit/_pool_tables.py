"""The tables that the kernels of pooling walk; `_pool_kernels` says what is in them.

Arrays are *lifted*: seen as (N, G, *axes) with at least two axes, of which vectors run along the last. Channels-first, G are
the channels and the axes the spatial ones; channels-last, G is 1 and the channels are the last axis, of windows of one cell.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines._order import FIRST, Array
from funcnn._engines.jit._host import (
    lanes_of,
)
from funcnn._engines.jit._pool_kernels import WORDS, lanes_in_block
from funcnn._engines.jit._view import address_of
from funcnn._spec import AvgPoolSpec, Axis, MaxPoolSpec, ceil_div

__all__ = ["Geometry", "Tables", "lifted"]

MOST_KEPT = 8  # tables for so many memory layouts of the sources


def lifted(a: Array, order: str) -> Array:
    """(N, C, *spatial) as (N, G, *axes)."""
    if order != FIRST:
        return a.transpose(0, *range(2, a.ndim), 1)[:, None]
    return a[:, :, None] if a.ndim == 3 else a


def _alone(size: int) -> Axis:
    """An axis whose windows are its cells."""
    return Axis(size, 1, 1, 1, 0, 0, size)


class Geometry:
    """The lifted axes of a Spec in one memory order: cells are the sources of windows, or (back) windows those of cells.

    dtype: that the kernel computes in.
    """

    def __init__(self, spec: MaxPoolSpec | AvgPoolSpec, order: str, back: bool, dtype: str) -> None:
        axes = list(spec.axes)
        counts = list(spec.counts) if isinstance(spec, AvgPoolSpec) else [(1,) * axis.out for axis in axes]
        if order != FIRST:
            axes.append(_alone(spec.channels))
            counts.append((1,) * spec.channels)
        elif len(axes) == 1:
            axes.insert(0, _alone(1))
            counts.insert(0, (1,))
        self.axes, self.back, self.dtype = axes, back, dtype
        self.mean = isinstance(spec, AvgPoolSpec) and not back
        self.divisors = [np.maximum(count, 1) for count in counts]
        self.targets = tuple(axis.size if back else axis.out for axis in axes)
        self.sources = tuple(axis.out if back else axis.size for axis in axes)
        self._tables: dict[tuple[int, ...], Tables] = {}

    @cached_property
    def divisor(self) -> Array:
        """Counted cells of each window (*out)."""
        product = np.ones((), self.dtype)
        for divisors in self.divisors:
            product = product[..., None] * divisors.astype(self.dtype)
        return product

    def needed(self, targets: slice) -> slice:
        """Sources of a range of targets, on the first axis."""
        axis = self.axes[0]
        if self.back:
            first = ceil_div(targets.start + axis.lo - axis.span + 1, axis.stride)
            last = (targets.stop - 1 + axis.lo) // axis.stride + 1
        else:
            first = targets.start * axis.stride - axis.lo
            last = (targets.stop - 1) * axis.stride - axis.lo + axis.span
        first = min(max(first, 0), self.sources[0])
        return slice(first, max(first, min(last, self.sources[0])))

    def tables(self, strides: tuple[int, ...]) -> Tables:
        """Tables for sources whose axes have these strides; the arrays of one init mostly have the same."""
        found = self._tables.get(strides)
        if found is None:
            found = Tables(self, strides)
            if len(self._tables) < MOST_KEPT:
                self._tables[strides] = found
        return found


class Tables:
    """The tables, and the `address` of the one that leads to all."""

    def __init__(self, geometry: Geometry, strides: tuple[int, ...]) -> None:
        parts = _parts(geometry, strides)
        outer_rows, outer = _joined(parts[:-2])
        middle_rows, middle = _joined(parts[-2:-1])
        phases, inner, words = _along(geometry, strides[-1])
        values, exact = _values(geometry)
        arrays = outer_rows, outer, middle_rows, middle, phases, inner, words, values
        at = [address_of(a) for a in arrays]
        pitch = math.prod(words.shape[1:]) * words.itemsize
        longest = int(inner[:, 0].max(initial=0))
        head = [
            *at[:4],
            len(middle_rows),
            at[4],
            len(phases),
            *at[5:7],
            pitch,
            at[7],
            geometry.targets[-1],
            longest,
            exact,
        ]
        self._kept = (*arrays, np.asarray(head, np.int64))
        self.address = address_of(self._kept[-1])


class _Part(NamedTuple):
    """Links of one axis: distance of the source of every (target, tap), whether there is one, the taps' numbers; divisors."""

    distance: Array
    valid: Array
    number: Array
    divisor: Array


def _parts(geometry: Geometry, strides: tuple[int, ...]) -> list[_Part]:
    axes = geometry.axes
    parts = []
    for i, (axis, stride, divisor) in enumerate(zip(axes, strides, geometry.divisors, strict=True)):
        source, valid = _sources(axis, geometry.back)
        number = np.arange(axis.kernel) * math.prod(later.kernel for later in axes[i + 1 :])
        ones = np.ones(len(source), np.int64)
        parts.append(
            _Part(source * stride, valid, np.broadcast_to(number, source.shape), divisor if geometry.mean else ones)
        )
    return parts


def _sources(axis: Axis, back: bool) -> tuple[Array, Array]:
    """Source of every (target, tap), and whether there is one."""
    start = np.arange(axis.kernel) * axis.dilation - axis.lo
    if not back:
        source = np.arange(axis.out)[:, None] * axis.stride + start
        return source, (source >= 0) & (source < axis.size)
    source, rest = np.divmod(np.arange(axis.size)[:, None] - start, axis.stride)
    return source, (rest == 0) & (source >= 0) & (source < axis.out)


def _joined(parts: list[_Part]) -> tuple[Array, Array]:
    """Rows (first link, last link, divisor, longest distance) and links (distance, number) of some axes in row-major order."""
    joined = _Part(*(np.full(shape, one) for shape, one in (((1, 1), 0), ((1, 1), True), ((1, 1), 0), ((1,), 1))))
    for part in parts:
        shape = (len(joined.valid) * len(part.valid), -1)

        def outer(operation: Any, a: Array, b: Array) -> Array:
            together: Array = operation(a[:, None, :, None], b[None, :, None, :]).reshape(shape)  # noqa: B023
            return together

        joined = _Part(
            outer(np.add, joined.distance, part.distance),
            outer(np.logical_and, joined.valid, part.valid),
            outer(np.add, joined.number, part.number),
            np.outer(joined.divisor, part.divisor).reshape(-1),
        )
    distance, valid, number, divisor = joined
    lengths = valid.sum(1)
    ends = lengths.cumsum()
    rows = np.stack([ends - lengths, ends, divisor, np.where(valid, distance, 0).max(1)], 1)
    return rows.astype(np.int64), np.stack([distance[valid], number[valid]], 1).astype(np.int64)


def _along(geometry: Geometry, stride: int) -> tuple[Array, Array, Array]:
    """Phases, links and words of the axis along a row."""
    axis, back = geometry.axes[-1], geometry.back
    step = axis.stride if back else 1
    jump = 1 if back else axis.stride  # from the source of a target to that of the next one of its phase
    width = ceil_div(geometry.targets[-1], step)
    single, most = lanes_in_block(lanes_of(geometry.dtype))
    _, valid = _sources(axis, back)
    phases: list[tuple[int, int]] = []
    links: list[tuple[int, int]] = []
    words: list[Array] = []
    for phase in range(step):
        begin = len(links)
        for tap in range(axis.kernel):
            # The source of the phase's first target, were there one.
            first, rest = divmod(phase - axis.start(tap), axis.stride) if back else (axis.start(tap), 0)
            if rest == 0:
                links.append((first * stride, tap))
                here = valid[phase::step, tap]
                behind = first + jump * np.arange(width + 3 * 64) >= 0
                words.append(_words(np.pad(here, (0, width - len(here))), behind, single, most))
        phases.append((begin, len(links)))
    vectors = ceil_div(width, single)
    return (
        np.asarray(phases, np.int64),
        np.asarray(links, np.int64).reshape(-1, 2),
        np.asarray(words, np.int64).reshape(-1, vectors, WORDS),
    )


def _words(here: Array, behind: Array, single: int, most: int) -> Array:
    """Words of every vector of targets (vectors, 6). here: targets that have the source; behind: beyond them, may be read."""
    starts = np.arange(0, len(here), single)[:, None]
    lane = np.arange(64)
    words = []
    for beyond in (behind, np.zeros_like(behind)):
        bits = beyond.copy()
        bits[: len(here)] = here
        words.append(bits[starts + lane])
        for first in (0, most - 1):
            words.append(bits[starts + (first + lane) // 2] & ((first + lane) % 2 == 0))
    return np.stack([np.packbits(word, axis=1, bitorder="little").view("<i8")[:, 0] for word in words], 1)


def _values(geometry: Geometry) -> tuple[Array, bool]:
    """What each target along a row has: the number of its first tap, or its divisor, or (True) one over that."""
    _, most = lanes_in_block(lanes_of(geometry.dtype))
    room = (0, most)  # a vector may run over the end
    if not geometry.mean:
        _, valid = _sources(geometry.axes[-1], geometry.back)
        return np.pad(valid.argmax(1), room).astype(np.int32), False
    divisors = np.pad(geometry.divisors[-1], room, constant_values=1).astype(geometry.dtype)
    exact = all(bool((count & (count - 1) == 0).all()) for count in geometry.divisors)
    return (1 / divisors if exact else divisors), exact
