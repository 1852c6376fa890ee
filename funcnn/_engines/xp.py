"""Engine `xp`: every Spec on any Array-API library, by names of the standard only. The reference for meaning, not speed.

No function writes into an array, so jax.jit, grad and vmap and torch autograd pass through. Windows are read by `take`
with index tables made from the Spec, one per axis, so that the number of array operations does not grow with the number
of taps. Shapes in comments: N batch, C I O channels, G groups, K taps of the window, P windows, both flattened.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import array_api_compat
import numpy as np

from funcnn._arrays import dtype_name, named
from funcnn._engines._hash import M1, M2, SALT, base_key, threshold
from funcnn._engines._protocol import AvgPoolPlan, ConvPlan, DropoutPlan, MaxPoolPlan, Plan
from funcnn._spec import COMPLEX_DTYPES, HALF_DTYPES, AvgPoolSpec, Axis, ConvSpec, DropoutSpec, MaxPoolSpec, Spec

__all__ = ["PLANS", "VERSION"]

VERSION = f"array-api-compat {array_api_compat.__version__}"
Array = Any


class _Windows:
    """Reading and writing windows with one library's standard functions."""

    def __init__(self, library: str) -> None:
        self.library = named(library)
        self.xp: Any = self.library.xp

    def cast(self, array: Array, dtype: str) -> Array:
        return self.xp.astype(array, self.library.dtype(dtype), copy=False)

    def constant(self, values: np.ndarray, like: Array, dtype: str | None = None) -> Array:
        """A NumPy array as one of the library, on the device of `like`; by default of the dtype that indexing needs."""
        kind = self.library.dtype(dtype) if dtype else self.xp.__array_namespace_info__().default_dtypes()["indexing"]
        return self.xp.asarray(values, dtype=kind, **self.library.place(self.library.device(like)))

    def take(self, array: Array, axis: int, table: np.ndarray, fill: float) -> Array:
        """Cells of one axis by a table (a, b), where -1 reads `fill`; the axis becomes two, of sizes a and b."""
        shape = array.shape
        if (table < 0).any():
            edge = self.xp.full_like(array[(slice(None),) * axis + (slice(0, 1), ...)], fill)
            array = self.xp.concat([array, edge], axis=axis)
            table = np.where(table < 0, shape[axis], table)
        array = self.xp.take(array, self.constant(table.reshape(-1), array), axis=axis)
        return self.xp.reshape(array, (*shape[:axis], *table.shape, *shape[axis + 1 :]))

    def unfold(self, x: Array, axes: tuple[Axis, ...], fill: float) -> Array:
        """Every window of x (N, C, *size) as (N, C, K, P)."""
        for i, axis in reversed(list(enumerate(axes))):
            x = self.take(x, i + 2, _cell_of(axis), fill)
        n, c, *pairs = x.shape  # N, C, k1, out1, k2, out2, ...
        x = self.xp.permute_dims(x, (0, 1, *range(2, x.ndim, 2), *range(3, x.ndim, 2)))
        return self.xp.reshape(x, (n, c, math.prod(pairs[::2]), math.prod(pairs[1::2])))

    def fold(self, windows: Array, axes: tuple[Axis, ...]) -> Array:
        """The adjoint of `unfold`: windows (N, C, K, P) added up on the cells that they cover, (N, C, *size)."""
        n, c, _, _ = windows.shape
        rank = len(axes)
        x = self.xp.reshape(windows, (n, c, *(a.kernel for a in axes), *(a.out for a in axes)))
        x = self.xp.permute_dims(x, (0, 1, *(j for i in range(rank) for j in (i + 2, i + 2 + rank))))
        for i, axis in enumerate(axes):
            shape = x.shape
            x = self.xp.reshape(x, (*shape[: i + 2], axis.kernel * axis.out, *shape[i + 4 :]))
            taps, cells = np.arange(axis.kernel), _window_of(axis)  # (size, k)
            x = self.take(x, i + 2, np.where(cells < 0, -1, taps * axis.out + cells), 0)
            x = self.xp.sum(x, axis=i + 3, dtype=x.dtype)
        return x

    def complex(self, real: Array, imag: Array, dtype: str) -> Array:
        """real + i imag. The standard has no such function, and imag * 1j makes NaN + inf j of an infinity."""
        finite = self.xp.isfinite(imag)
        turned = self.cast(self.xp.where(finite, imag, self.xp.zeros_like(imag)), dtype) * 1j
        for chosen, value in ((imag > 0, math.inf), (imag < 0, -math.inf), (self.xp.isnan(imag), math.nan)):
            constant = self.constant(np.asarray(complex(0, value)), imag, dtype)
            turned = self.xp.where(chosen & ~finite, constant, turned)
        return self.cast(real, dtype) + turned

    def sum_taken(self, array: Array, tables: tuple[np.ndarray, ...]) -> Array:
        """Sums along each axis over the second axis of its table: separable window sums."""
        for i, table in enumerate(tables):
            array = self.xp.sum(self.take(array, i + 2, table, 0), axis=i + 3, dtype=array.dtype)
        return array


@lru_cache(256)
def _cell_of(axis: Axis) -> np.ndarray:
    """(k, out): the cell that each tap of each window reads, -1 for padding."""
    cells = np.arange(axis.kernel)[:, None] * axis.dilation + np.arange(axis.out) * axis.stride - axis.lo
    return np.where((cells < 0) | (cells >= axis.size), -1, cells)


@lru_cache(256)
def _window_of(axis: Axis) -> np.ndarray:
    """(size, k): the window whose tap t reads each cell, -1 if there is none."""
    offset = np.arange(axis.size)[:, None] + axis.lo - np.arange(axis.kernel) * axis.dilation
    window = offset // axis.stride
    return np.where((offset % axis.stride != 0) | (window < 0) | (window >= axis.out), -1, window)


def _sum_dtype(dtype: str) -> str:
    """Half floats are summed in float32 and rounded once."""
    return "float32" if dtype in HALF_DTYPES else dtype


class XpConv(ConvPlan):
    engine = "xp"

    def _windows(self) -> _Windows:
        return _Windows(self.library)

    def correlate(self, x: Array, weight: Array, bias: Array | None) -> Array:
        w = self._windows()
        return self._finish(w, self._by_parts(w, self._correlate, x, weight), bias)

    def _correlate(self, w: _Windows, x: Array, weight: Array) -> Array:
        spec = self.spec
        columns = self._grouped(w, w.unfold(self._widen(w, x), spec.axes, 0))  # (N, G, I/G * K, P)
        y = w.xp.matmul(self._matrix(w, weight), columns)  # (N, G, O/G, P)
        return w.xp.reshape(y, (x.shape[0], spec.outputs, *(a.out for a in spec.axes)))

    def adjoint(self, y: Array, weight: Array, bias: Array | None) -> Array:
        w = self._windows()
        return self._finish(w, self._by_parts(w, self._adjoint, y, weight), bias)

    def _adjoint(self, w: _Windows, y: Array, weight: Array) -> Array:
        spec = self.spec
        rows = self._grouped(w, self._widen(w, y))  # (N, G, O/G, P)
        windows = w.xp.matmul(w.xp.matrix_transpose(self._matrix(w, weight)), rows)  # (N, G, I/G * K, P)
        windows = w.xp.reshape(windows, (y.shape[0], spec.inputs, spec.taps, rows.shape[-1]))
        return w.fold(windows, spec.axes)

    def _by_parts(self, w: _Windows, run: Any, x: Array, weight: Array) -> Array:
        """run(w, x, weight); of a complex x with a real weight both parts as one real batch: inf * 2 has no NaN part."""
        if self.spec.weight_dtype == self.spec.dtype:
            return run(w, x, weight)
        n = x.shape[0]
        y = run(w, w.xp.concat([w.xp.real(x), w.xp.imag(x)], axis=0), weight)
        return w.complex(y[:n, ...], y[n:, ...], self.spec.dtype)

    def weight_gradient(self, x: Array, y: Array) -> Array:
        spec, w = self.spec, self._windows()
        columns = self._batch_last(
            w, self._grouped(w, w.unfold(self._widen(w, x), spec.axes, 0))
        )  # (G, I/G * K, N * P)
        rows = self._batch_last(w, self._grouped(w, self._widen(w, y)))  # (G, O/G, N * P)
        gradient = w.xp.matmul(rows, w.xp.matrix_transpose(columns))  # (G, O/G, I/G * K)
        gradient = w.xp.reshape(gradient, spec.weight_shape)
        if spec.dtype in COMPLEX_DTYPES and spec.weight_dtype not in COMPLEX_DTYPES:
            gradient = w.xp.real(gradient)
        return w.cast(self._flipped(w, gradient), spec.weight_dtype)

    def bias_gradient(self, dy: Array) -> Array:
        w = self._windows()
        total = w.xp.sum(self._widen(w, dy), axis=(0, *range(2, dy.ndim)))
        return w.cast(total, self.spec.y_dtype)

    def conjugate(self, a: Array) -> Array:
        return self._windows().xp.conj(a) if dtype_name(a.dtype) in COMPLEX_DTYPES else a

    def _widen(self, w: _Windows, array: Array) -> Array:
        """In the dtype to sum in: y's, or float32 for half floats; what is real in a complex convolution stays real."""
        if self.spec.y_dtype in COMPLEX_DTYPES:
            return array
        return w.cast(array, _sum_dtype(self.spec.y_dtype))

    def _flipped(self, w: _Windows, weight: Array) -> Array:
        return w.xp.flip(weight, axis=tuple(range(2, weight.ndim))) if self.spec.flip else weight

    def _matrix(self, w: _Windows, weight: Array) -> Array:
        """(G, O/G, I/G * K)."""
        spec = self.spec
        shape = (spec.groups, spec.outputs // spec.groups, spec.inputs // spec.groups * spec.taps)
        return w.xp.reshape(self._flipped(w, self._widen(w, weight)), shape)

    def _grouped(self, w: _Windows, array: Array) -> Array:
        """(N, C, K, P) or (N, C, *spatial) as (N, G, C/G * K, P)."""
        n, c, *rest = array.shape
        spec = self.spec
        columns = math.prod(a.out for a in spec.axes)
        rows = c // spec.groups * (math.prod(rest) // columns)
        return w.xp.reshape(array, (n, spec.groups, rows, columns))

    def _batch_last(self, w: _Windows, array: Array) -> Array:
        """(N, G, R, P) as (G, R, N * P)."""
        n, g, r, p = array.shape
        return w.xp.reshape(w.xp.permute_dims(array, (1, 2, 0, 3)), (g, r, n * p))

    def _finish(self, w: _Windows, y: Array, bias: Array | None) -> Array:
        if bias is not None:
            y = y + w.xp.reshape(self._widen(w, bias), (bias.shape[0],) + (1,) * (y.ndim - 2))
        return w.cast(y, self.spec.y_dtype)


class XpMaxPool(MaxPoolPlan):
    engine = "xp"

    def forward(self, x: Array, train: bool) -> tuple[Array, Array | None]:
        spec, w = self.spec, _Windows(self.library)
        out = (x.shape[0], *spec.y_shape)
        # bool has no maximum in the standard; half floats go through float32, where every library has all of this.
        wide = w.cast(x, "uint8" if spec.dtype == "bool" else _sum_dtype(spec.dtype))
        real = w.xp.isdtype(wide.dtype, "real floating")
        cells = w.unfold(wide, spec.axes, -math.inf if real else int(w.xp.iinfo(wide.dtype).min))  # (N, C, K, P)
        best = w.xp.max(cells, axis=2, keepdims=True)
        hit = cells == best
        if real:
            hit = hit | w.xp.isnan(cells)
        hit = hit & w.constant(_inside(spec.axes), x, "bool")
        # The first hit in row order, without relying on how a library's argmax breaks ties.
        tap = w.constant(np.arange(spec.taps)[:, None], x)
        first = w.xp.min(w.xp.where(hit, tap, w.xp.full_like(tap, spec.taps - 1)), axis=2, keepdims=True)
        y = w.xp.reshape(w.xp.take_along_axis(cells, first, axis=2), out)
        argmax = w.cast(w.xp.reshape(first, out), spec.argmax_dtype) if train else None
        return w.cast(y, spec.dtype), argmax

    def backward(self, dy: Array, argmax: Array) -> Array:
        spec, w = self.spec, _Windows(self.library)
        n, c = dy.shape[:2]
        flat = (n, c, 1, math.prod(axis.out for axis in spec.axes))
        tap = w.constant(np.arange(spec.taps)[:, None], dy)
        chosen = w.xp.reshape(w.xp.astype(argmax, tap.dtype), flat) == tap  # (N, C, K, P)
        dy = w.xp.reshape(w.cast(dy, _sum_dtype(spec.dtype)), flat)
        return w.cast(w.fold(w.xp.where(chosen, dy, w.xp.zeros_like(dy)), spec.axes), spec.dtype)


@lru_cache(256)
def _inside(axes: tuple[Axis, ...]) -> np.ndarray:
    """(K, P): whether a tap of a window reads a cell of the input."""
    inside = np.ones((1, 1), bool)
    for axis in axes:
        inside = (inside[:, None, :, None] & (_cell_of(axis) >= 0)[None, :, None, :]).reshape(
            inside.shape[0] * axis.kernel, inside.shape[1] * axis.out
        )
    return inside


class XpAvgPool(AvgPoolPlan):
    engine = "xp"

    def forward(self, x: Array) -> Array:
        spec, w = self.spec, _Windows(self.library)
        total = w.sum_taken(w.cast(x, _sum_dtype(spec.dtype)), tuple(_cell_of(a).T for a in spec.axes))
        return w.cast(total / self._divisor(w, total), spec.dtype)

    def backward(self, dy: Array) -> Array:
        spec, w = self.spec, _Windows(self.library)
        dy = w.cast(dy, _sum_dtype(spec.dtype))
        spread = w.sum_taken(dy / self._divisor(w, dy), tuple(_window_of(a) for a in spec.axes))
        return w.cast(spread, spec.dtype)

    def _divisor(self, w: _Windows, like: Array) -> Array:
        divisor = np.ones(())
        for counts in self.spec.counts:
            divisor = divisor[..., None] * np.maximum(counts, 1)
        return w.xp.astype(w.constant(divisor, like), like.dtype)


class XpDropout(DropoutPlan):
    engine = "xp"

    def forward(self, x: Array, step: Array) -> tuple[Array, Array]:
        w = _Windows(self.library)
        mask = self._mask(w, x.shape, step, x)
        return self._select(w, x, mask), mask

    def backward(self, dy: Array, mask: Array) -> Array:
        return self._select(_Windows(self.library), dy, mask)

    def _select(self, w: _Windows, x: Array, mask: Array) -> Array:
        rate, dtype = self.spec.rate, self.spec.dtype
        if rate == 1:  # an infinity times a scale of 0 would warn
            mask = w.xp.zeros_like(mask)
        scale = 1 / (1 - rate) if rate < 1 else 1.0
        if dtype in COMPLEX_DTYPES:
            scaled = w.complex(w.xp.real(x) * scale, w.xp.imag(x) * scale, dtype)
        else:
            scaled = w.cast(x, _sum_dtype(dtype)) * scale
        return w.cast(w.xp.where(mask, scaled, w.xp.zeros_like(scaled)), self.spec.dtype)

    def _mask(self, w: _Windows, shape: tuple[int, ...], step: Array, like: Array) -> Array:
        """The keyed hash of `_hash`, in int32: not every library has uint32, and int32 wraps in all of them."""
        n, *rest = shape
        cells = math.prod(rest)
        key = _mix(w.xp.reshape(step, (1,)) + _int32(base_key(self.spec.seed)))
        first = _mix(key + w.xp.reshape(w.constant(np.arange(n), like, "int32"), (n,)))
        second = _mix(first ^ _int32(SALT))
        v = w.constant(np.arange(cells).astype(np.int32)[None], like, "int32") + w.xp.reshape(first, (n, 1))
        v = (v ^ _shift(v, 16)) * _int32(M1) ^ w.xp.reshape(second, (n, 1))
        v = (v ^ _shift(v, 15)) * _int32(M2)
        v = v ^ _shift(v, 16)
        limit = threshold(self.spec.rate)
        # round(1 * 2**31) is no int32; nothing of 31 bits reaches it.
        keep = _shift(v, 1) >= limit if limit < 2**31 else w.xp.zeros_like(v, dtype=w.library.dtype("bool"))
        return w.xp.reshape(keep, tuple(shape))


def _int32(value: int) -> int:
    """A 32-bit pattern as a signed Python int."""
    return value - 2**32 if value >= 2**31 else value


def _shift(v: Array, bits: int) -> Array:
    """Logical right shift of int32."""
    return (v >> bits) & (2 ** (32 - bits) - 1)


def _mix(v: Array) -> Array:
    v = (v ^ _shift(v, 16)) * _int32(M1)
    v = (v ^ _shift(v, 15)) * _int32(M2)
    return v ^ _shift(v, 16)


PLANS: dict[type[Spec], type[Plan[Any]]] = {
    ConvSpec: XpConv,
    MaxPoolSpec: XpMaxPool,
    AvgPoolSpec: XpAvgPool,
    DropoutSpec: XpDropout,
}
