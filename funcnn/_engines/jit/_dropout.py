"""Dropout in one pass: hash, comparison, product and mask of a vector of elements at a time; `_hash` has the definition.

An array is seen as rows of the batch, lines, and elements of a line: the innermost axes of its memory, merged as far as the
strides and the logical index of the elements allow. The index is what is hashed, so that memory order changes nothing.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines._hash import M1, M2, SALT, base_key, mix, threshold
from funcnn._engines._order import Array
from funcnn._engines._protocol import DropoutPlan
from funcnn._engines._threads import ranges, run_all
from funcnn._engines.jit._host import (
    CODES,
)
from funcnn._engines.jit._kernels import kernel, njit, part
from funcnn._engines.jit._pool_kernels import lanes_in_block, put
from funcnn._engines.jit._simd import (
    add,
    every_lane,
    exclusive_or,
    greater,
    item_in,
    lanes_in,
    lanes_ramp,
    load_like,
    load_strided,
    load_where,
    mask_like,
    multiply,
    number,
    select,
    shift_right,
    splat,
    splat_like,
    store_strided,
    zeros_like,
)
from funcnn._engines.jit._view import address_of
from funcnn._spec import COMPLEX_DTYPES, HALF_DTYPES

__all__ = ["JitDropout"]

TASK_CELLS = 1 << 18  # in one task: 50 microseconds' work
UINT8, UINT32 = CODES["uint8"], CODES["uint32"]
WORD = 0xFFFFFFFF
AXIS = 5  # numbers of an axis in a table: size, bytes between its elements in x, y and mask, distance of their indices


# ---- kernel ----------------------------------------------------------------------------------------------------------


@part
def _mix(v: int) -> int:
    """lowbias32 of an int64 below 2**32."""
    v = ((v ^ v >> 16) * M1) & WORD
    v = ((v ^ v >> 15) * M2) & WORD
    return v ^ v >> 16


@part
def _hashed(v: Any, key: Any) -> Any:
    """lowbias32 of a vector, with the second key after the first product."""
    v = multiply(exclusive_or(v, shift_right(v, splat_like(16, v))), splat_like(M1, v))
    v = exclusive_or(v, key)
    v = multiply(exclusive_or(v, shift_right(v, splat_like(15, v))), splat_like(M2, v))
    return exclusive_or(v, shift_right(v, splat_like(16, v)))


@part
def _get(at: int, step: int, count: int, zero: Any) -> Any:
    """The first `count` elements `step` bytes apart, up to all; 0 in other lanes."""
    lanes = lanes_in(zero)
    word = every_lane(zero) if count >= lanes else (1 << count) - 1
    if step != item_in(zero):
        return load_strided(at, step, word, zero)
    return load_like(at, zero) if count >= lanes else load_where(at, mask_like(word, zero), zero)


@part
def _set(at: int, step: int, vector: Any, count: int) -> None:
    if step == item_in(vector):
        put(at, vector, count)
    else:
        store_strided(at, step, vector, count)


@part
def _drop(x: int, y: int, mask: int, count: int, first: int, second: int, least: int, line: int, scale: Any) -> None:
    """One vector of elements: hash them unless `least` is negative (then the mask says), and write what y and mask want."""
    zero = splat_like(0, scale)
    nought = zeros_like(scale, UINT8)
    index_step, m_step = number(line, 4), number(line, 3)
    if least >= 0:
        v = splat_like(first, zeros_like(scale, UINT32))
        v = add(v, multiply(lanes_ramp(v), splat_like(index_step, v)))
        dropped = greater(splat_like(least, v), _hashed(v, splat_like(second, v)))
        _set(mask, m_step, select(dropped, nought, splat_like(1, nought)), count)
    else:
        dropped = greater(splat_like(1, nought), _get(mask, m_step, count, nought))
    if y:
        value = _get(x, number(line, 1), count, zero)
        _set(y, number(line, 2), select(dropped, zero, multiply(value, scale)), count)


def drop(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: dropout of some rows, lines and elements."""
    single, most = lanes_in_block(lanes)
    number_type = np.float64 if item == 8 else np.float32

    @njit(f"void({', '.join(['int64'] * 14)}, float64)", nogil=True, cache=True)
    def run(
        x: int, y: int, mask: int, n_steps: int, n0: int, n1: int, axes: int, count: int, l0: int, l1: int, i0: int, i1: int,
        key: int, least: int, scale: float,
    ) -> None:  # fmt: skip
        """Elements i0 .. i1 of lines l0 .. l1 of rows n0 .. n1.

        n_steps: table of the bytes between rows of x, y, mask; axes: table of `count` axes, the last one is the line.
        """
        stamp  # noqa: B018
        line = axes + 8 * AXIS * (count - 1)
        several, one = splat(number_type(scale), code, most), splat(number_type(scale), code, single)
        for n in range(n0, n1):
            first = _mix((key + n) & WORD)
            second = _mix(first ^ SALT)
            for at in range(l0, l1):
                to_x, to_y, to_mask = (
                    x + n * number(n_steps, 0),
                    y + n * number(n_steps, 1),
                    mask + n * number(n_steps, 2),
                )
                rest, index = at, first
                for a in range(count - 2, -1, -1):
                    axis = axes + 8 * AXIS * a
                    place = rest % number(axis, 0)
                    rest //= number(axis, 0)
                    to_x += place * number(axis, 1)
                    to_y += place * number(axis, 2)
                    to_mask += place * number(axis, 3)
                    index += place * number(axis, 4)
                i = i0
                while i < i1:
                    x_at, m_at = to_x + i * number(line, 1), to_mask + i * number(line, 3)
                    y_at = to_y + i * number(line, 2) if y else 0
                    start = index + i * number(line, 4)
                    if i1 - i > 2 * single:
                        _drop(x_at, y_at, m_at, i1 - i, start, second, least, line, several)
                        i += most
                    else:
                        _drop(x_at, y_at, m_at, i1 - i, start, second, least, line, one)
                        i += single

    return run


# ---- plan ------------------------------------------------------------------------------------------------------------


class _Task(NamedTuple):
    """Ranges of rows, lines, and elements of a line."""

    rows: tuple[int, int]
    lines: tuple[int, int]
    cells: tuple[int, int]


def _tasks(rows: int, lines: int, cells: int) -> list[_Task]:
    """Whole rows, or else whole lines of a row, or else elements of a line: as many as make a task."""
    sizes = (rows, max(1, TASK_CELLS // (lines * cells))), (lines, max(1, TASK_CELLS // cells)), (cells, TASK_CELLS)
    return [_Task(*parts) for parts in itertools.product(*(ranges(size, most) for size, most in sizes))]


def _merged(shape: tuple[int, ...], x: Array, y: Array, mask: Array) -> Array:
    """Axes of a row (size, bytes between elements of x, of y, of mask, distance of indices), outermost memory first."""
    axes: list[list[int]] = []
    distance = math.prod(shape[1:])
    for size, *steps in zip(shape[1:], x.strides[1:], y.strides[1:], mask.strides[1:], strict=True):
        distance //= size
        axes.append([size, *steps, distance])
    axes.sort(key=lambda axis: -abs(axis[2]))
    merged: list[list[int]] = []
    for size, *steps in axes:
        if size == 1:
            continue
        if merged and all(far == size * near for far, near in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = [merged[-1][0] * size, *steps]
        else:
            merged.append([size, *steps])
    return np.asarray(merged or [[1, 0, 0, 0, 0]], np.int64)


def _in_rows(a: Array) -> bool:
    """Whether the rows of the batch lie outermost: where they do not, each of them would read all memory."""
    return len(a) < 2 or abs(a.strides[0]) >= max(map(abs, a.strides[1:]), default=0)


class JitDropout(DropoutPlan):
    """dropout for NumPy arrays."""

    engine = "jit"

    def choose_algorithm(self) -> str:
        # Half floats and complex numbers take only the mask from the kernel.
        self.fused = self.spec.dtype not in (*HALF_DTYPES, *COMPLEX_DTYPES)
        self.scale = 1 / (1 - self.spec.rate) if self.spec.rate < 1 else 0.0
        self.kernel = kernel(drop, self.spec.dtype if self.fused else "float32")
        return "direct"

    def forward(self, x: Array, step: Array) -> tuple[Array, Array]:
        mask = np.empty_like(x, bool, subok=False)
        least = 2 * threshold(self.spec.rate)
        if least > WORD:
            mask[...] = False
            return np.zeros_like(x, self.spec.dtype, subok=False), mask
        key = mix((base_key(self.spec.seed) + int(step)) & WORD)
        return self._select(x, mask, key, least), mask

    def backward(self, dy: Array, mask: Array) -> Array:
        return self._select(dy, mask, 0, -1)

    def _select(self, x: Array, mask: Array, key: int, least: int) -> Array:
        """y; the mask is drawn with it, or given where `least` is negative."""
        if self.fused and x.dtype.isnative and _in_rows(x) and _in_rows(mask):
            y = np.empty_like(x, self.spec.dtype, subok=False)
            self._run(x, y, mask, key, least)
            return y
        if least >= 0:
            drawn = mask if _in_rows(mask) else np.empty(mask.shape, bool)
            self._run(None, None, drawn, key, least)
            if drawn is not mask:
                mask[...] = drawn
        y = np.zeros_like(x, self.spec.dtype, subok=False)
        outermost = max(range(x.ndim), key=lambda axis: abs(y.strides[axis]))
        source, keep, target = (a.swapaxes(0, outermost) for a in (x, mask, y))
        for lo, hi in ranges(len(target), max(1, TASK_CELLS * len(target) // max(1, x.size))):
            self._multiply(source[lo:hi], keep[lo:hi], target[lo:hi])
        return y

    def _multiply(self, x: Array, mask: Array, y: Array) -> None:
        """Write the elements of y that the mask keeps."""
        if self.spec.dtype in HALF_DTYPES:
            np.copyto(y, x.astype(np.float32) * np.float32(self.scale), where=mask, casting="unsafe")
        elif self.spec.dtype in COMPLEX_DTYPES:  # part by part: a complex product turns an infinity into NaN
            for source, target in ((x.real, y.real), (x.imag, y.imag)):
                np.multiply(source, self.scale, out=target, where=mask)
        else:
            np.multiply(x, self.scale, out=y, where=mask)

    def _run(self, x: Array | None, y: Array | None, mask: Array, key: int, least: int) -> None:
        """Write y and, unless `least` is negative, the mask; without x and y the mask alone."""
        if not mask.size:
            return
        arrays = [mask if a is None else a for a in (x, y, mask)]
        axes = _merged(mask.shape, *arrays)
        n_steps = np.asarray([a.strides[0] for a in arrays], np.int64)
        at = [0 if a is None else address_of(a) for a in (x, y, mask)]
        lines = math.prod(axes[:-1, 0].tolist())

        def task(part: _Task) -> None:
            self.kernel(
                *at, address_of(n_steps), *part.rows, address_of(axes), len(axes), *part.lines, *part.cells,
                key, least, self.scale,
            )  # fmt: skip

        run_all(task, _tasks(len(mask), lines, int(axes[-1, 0])), self.threads)
