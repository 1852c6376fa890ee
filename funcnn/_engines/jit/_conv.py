"""conv and conv_transpose of the jit engine: every dtype as a convolution in the dtype of its sums.

float32 and float64 go to the kernels as they are. Other dtypes are converted a few images at a time: half floats to float32,
integers to int64, and complex arrays to real ones with twice the channels:

    [re y]   [re w  -im w] [re x]
    [im y] = [im w   re w] [im x]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from funcnn._engines._order import Array, allocate, memory_order
from funcnn._engines._protocol import ConvPlan
from funcnn._engines.jit import _winograd
from funcnn._engines.jit._dense import Dense
from funcnn._engines.jit._depthwise import Depthwise
from funcnn._engines.jit._half import compile_casts, copy_cast
from funcnn._engines.jit._maps import Maps
from funcnn._engines.jit._sums import ChannelSums
from funcnn._spec import COMPLEX_DTYPES, FLOAT_DTYPES, HALF_DTYPES, REAL_OF_COMPLEX, Spec

__all__ = ["JitConv"]

# Of images that are converted at a time.
CHUNK_BYTES = 4 << 20


class JitConv(ConvPlan):
    """conv and conv_transpose for NumPy arrays."""

    engine = "jit"

    @classmethod
    def refusal(cls, spec: Spec) -> str | None:
        rank = len(spec.axes)  # type: ignore[union-attr]
        return f"it has no convolution of rank {rank}, only of 1 to 3" if rank > 3 else None

    def choose_algorithm(self) -> str:
        self.core, self.channel_sums  # noqa: B018  (compile)
        compile_casts(self.spec.dtype)
        names: list[tuple[type[Maps], str]] = [
            (Depthwise, "depthwise"),
            (_winograd.Winograd, "winograd"),
            (Dense, "tiles"),
        ]
        return next(name for kind, name in names if isinstance(self.core, kind))

    @cached_property
    def sum_dtype(self) -> str:
        """The real dtype of products and sums."""
        dtype = self.spec.dtype
        if dtype in COMPLEX_DTYPES:
            return REAL_OF_COMPLEX[dtype]
        if dtype in HALF_DTYPES:
            return "float32"
        return dtype if dtype in FLOAT_DTYPES else "int64"

    @cached_property
    def core(self) -> Maps:
        spec = self._real_spec
        kind: type[Maps] = Depthwise if spec.inputs == spec.groups > 1 else Dense
        if self.options.numerics == "fast" and _winograd.fits(spec, self.sum_dtype):
            kind = _winograd.Winograd
        return kind(spec, self.sum_dtype, self.threads)

    @cached_property
    def channel_sums(self) -> ChannelSums:
        return ChannelSums(self.sum_dtype, self.threads)

    @cached_property
    def _parts(self) -> int:
        """Real numbers of one number in the channels: 2 where a complex weight mixes them."""
        return 2 if self.spec.weight_dtype in COMPLEX_DTYPES else 1

    @cached_property
    def _real_spec(self) -> Any:
        spec, parts = self.spec, self._parts
        return dataclasses.replace(
            spec, inputs=parts * spec.inputs, outputs=parts * spec.outputs,
            dtype=self.sum_dtype, weight_dtype=self.sum_dtype, y_dtype=self.sum_dtype,
        )  # fmt: skip

    # ---- the three maps ----------------------------------------------------------------------------------------------

    def correlate(self, x: Array, weight: Array, bias: Array | None) -> Array:
        return self._map(self.core.correlate, x, weight, bias, self.spec.outputs, tuple(a.out for a in self.spec.axes))

    def adjoint(self, y: Array, weight: Array, bias: Array | None) -> Array:
        # The transpose of the real matrix above belongs to the conjugate weight.
        weight = self.conjugate(weight)
        return self._map(self.core.adjoint, y, weight, bias, self.spec.inputs, tuple(a.size for a in self.spec.axes))

    def _map(
        self, run: Any, x: Array, weight: Array, bias: Array | None, channels: int, sizes: tuple[int, ...]
    ) -> Array:
        order = memory_order(x, self.spec.layout)
        y = allocate(np.empty, (len(x), channels, *sizes), self.spec.y_dtype, order)
        if not y.size:
            return y
        if bias is None:
            bias = np.zeros(channels, self.spec.y_dtype)
        if not x.size:
            y[...] = bias.reshape(-1, *(1,) * len(sizes))
            return y
        weight, shift = self._real_weight(weight), self._real_bias(bias)
        if x.dtype == self.sum_dtype:
            run(x, weight, shift, y, order)
            return y
        for part in self._chunks(x, y):
            source = self._real(x[part], order)
            result = allocate(np.empty, (len(source), shift.size, *sizes), self.sum_dtype, order)
            run(source, weight, shift, result, order)
            self._from_real(result, y[part])
        if self._parts == 1 and bias.dtype.kind == "c":  # images of real and of imaginary parts have no bias in common
            y += bias.reshape(-1, *(1,) * len(sizes))
        return y

    def weight_gradient(self, x: Array, y: Array) -> Array:
        spec = self.spec
        order = memory_order(x, spec.layout)
        if not x.size or not y.size:
            return np.zeros(spec.weight_shape, spec.weight_dtype)
        if x.dtype == y.dtype == self.sum_dtype:
            return self.core.weight_gradient(x, y, order)
        total: Any = 0
        for part in self._chunks(x, y):
            dy = y[part]
            if dy.dtype.kind == "c" and self._parts == 1:  # the real part of x * dy, where only x and dy are complex
                dy = dy.conj()
            total = total + self.core.weight_gradient(self._real(x[part], order), self._real(dy, order), order)
        if self._parts == 2:
            o, i, *kernel = spec.weight_shape
            blocks = total.reshape(spec.groups, 2, o // spec.groups, 2, i, *kernel)
            weight = np.empty((spec.groups, o // spec.groups, i, *kernel), spec.weight_dtype)
            weight.real = blocks[:, 0, :, 0] - blocks[:, 1, :, 1]
            weight.imag = blocks[:, 0, :, 1] + blocks[:, 1, :, 0]
            return weight.reshape(o, i, *kernel)
        return total.astype(spec.weight_dtype, copy=False)

    def bias_gradient(self, dy: Array) -> Array:
        if dy.dtype == self.sum_dtype and dy.size:
            return self.channel_sums(dy, memory_order(dy, self.spec.layout))
        dtype = "float32" if self.spec.y_dtype in HALF_DTYPES else self.spec.y_dtype
        return dy.sum(axis=(0, *range(2, dy.ndim)), dtype=dtype).astype(self.spec.y_dtype, copy=False)

    def conjugate(self, a: Array) -> Array:
        return a.conj() if a.dtype.kind == "c" else a

    # ---- conversions -------------------------------------------------------------------------------------------------

    def _chunks(self, x: Array, y: Array) -> Iterator[slice]:
        """Ranges of images whose converted arrays take about CHUNK_BYTES."""
        image = max(x[0].size, y[0].size) * np.dtype(self.sum_dtype).itemsize * (2 if x.dtype.kind == "c" else 1)
        step = max(1, CHUNK_BYTES // image)
        return (slice(lo, lo + step) for lo in range(0, len(x), step))

    def _real(self, x: Array, order: str) -> Array:
        """x in the real dtype: complex numbers as twice the channels of each group, or as twice the images."""
        if x.dtype.kind != "c":
            real = np.empty_like(x, self.sum_dtype, subok=False)
            copy_cast(real, x, self.threads)
            return real
        n, c, *sizes = x.shape
        if self._parts == 1:
            real = allocate(np.empty, (2 * n, c, *sizes), self.sum_dtype, order)
            real[:n], real[n:] = x.real, x.imag
            return real
        groups = self.spec.groups
        real = allocate(np.empty, (n, 2 * c, *sizes), self.sum_dtype, order)
        parts = real.reshape(n, groups, 2, c // groups, *sizes)
        x = x.reshape(n, groups, c // groups, *sizes)
        parts[:, :, 0], parts[:, :, 1] = x.real, x.imag
        return real

    def _from_real(self, real: Array, y: Array) -> None:
        """Write results in y's dtype."""
        if y.dtype.kind != "c":
            copy_cast(y, real, self.threads)
        elif self._parts == 1:
            y.real, y.imag = real[: len(y)], real[len(y) :]
        else:
            n, c, *sizes = y.shape
            groups = self.spec.groups
            parts = real.reshape(n, groups, 2, c // groups, *sizes)
            y = y.reshape(n, groups, c // groups, *sizes)
            y.real, y.imag = parts[:, :, 0], parts[:, :, 1]

    def _real_weight(self, weight: Array) -> Array:
        """weight (O, C, *k) in the real dtype, complex ones as the matrix above for each group."""
        if self._parts == 1:
            return weight.astype(self.sum_dtype, copy=False)
        o, i, *kernel = weight.shape
        groups = self.spec.groups
        w = weight.reshape(groups, o // groups, i, *kernel)
        matrix = np.empty((groups, 2, o // groups, 2, i, *kernel), self.sum_dtype)
        matrix[:, 0, :, 0] = matrix[:, 1, :, 1] = w.real
        matrix[:, 1, :, 0], matrix[:, 0, :, 1] = w.imag, -w.imag
        return matrix.reshape(2 * o, 2 * i, *kernel)

    def _real_bias(self, bias: Array) -> Array:
        """bias (C,) in the real dtype, contiguous."""
        if self._parts == 2:
            parts = bias.reshape(self.spec.groups, 1, -1)
            bias = np.concatenate([parts.real, parts.imag], 1).reshape(-1)
        elif bias.dtype.kind == "c":
            bias = np.zeros(bias.shape)
        return np.ascontiguousarray(bias, self.sum_dtype)
