"""Dropout in one pass: the kernel hashes, compares, scales and writes y and mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from funcnn._engines import _gpu
from funcnn._engines._gpu import Array
from funcnn._engines._hash import M1, M2, SALT, base_key, threshold
from funcnn._engines._order import FIRST, LAST, memory_order
from funcnn._engines._protocol import DropoutPlan
from funcnn._engines.cuda._kernels import (
    ITEMSIZE,
    WORD,
    Launch,
    Tiling,
    View,
    aligned,
    dense_view,
    dtype_types,
    empty_in_order,
    lanes_of,
    prepared,
    readable,
    view_of,
)

__all__ = ["CudaDropout"]

LAUNCHES = 64


class CudaDropout(DropoutPlan):
    """dropout for CuPy arrays."""

    engine = "cuda"

    def choose_algorithm(self) -> str:
        spec = self.spec
        self._launch: Callable[..., Launch] = lru_cache(LAUNCHES)(self._prepare)
        least = threshold(spec.rate)
        self._types = {**dtype_types(spec.dtype), "Keep": "unsigned char"}
        self._constants = {
            "KEEPS": least < 2**31,
            **{name: f"{value}u" for name, value in (("M1", M1), ("M2", M2), ("SALT", SALT))},
        }
        scale = 1 / (1 - spec.rate) if spec.rate < 1 else 0.0
        self._members = np.array([base_key(spec.seed), 2 * least % 2**32], np.uint32), scale
        shape = (1, *spec.x_shape, *(1,) * (2 - len(spec.x_shape)))
        if all(shape):  # compile for arrays as they mostly come, so that an error is one of init
            x, mask = (dense_view(shape, ITEMSIZE[dtype], spec.layout) for dtype in (spec.dtype, "bool"))
            self._launch(shape, spec.layout, x, mask)
        return "direct"

    def forward(self, x: Array, step: Array) -> tuple[Array, Array]:
        with _gpu.on_device(_gpu.device_of(x)):
            x, order = self._ordered(x)
            y, mask = (empty_in_order(x.shape, dtype, order) for dtype in (x.dtype, bool))
            if y.size:
                self._launch(x.shape, order, view_of(x))("dropout", x, step, y, mask)
        return self._as_given(y), self._as_given(mask)

    def backward(self, dy: Array, mask: Array) -> Array:
        with _gpu.on_device(_gpu.device_of(dy)):
            (dy, order), (mask, _) = self._ordered(dy), self._ordered(mask)
            dx = empty_in_order(dy.shape, dy.dtype, order)
            if dx.size:
                self._launch(dy.shape, order, view_of(dy), view_of(mask))("dropout_backward", dy, mask, dx)
        return self._as_given(dx)

    def _ordered(self, x: Array) -> tuple[Array, str]:
        """x with a channel and a spatial axis at least, and its memory order."""
        missing = 3 - x.ndim
        if missing > 0:
            x = x.reshape(*x.shape, *(1,) * missing)
        order = memory_order(x, self.spec.layout)
        return readable(x, self.spec.layout), order

    def _as_given(self, y: Array) -> Array:
        return y.reshape(y.shape[0], *self.spec.x_shape) if len(self.spec.x_shape) < 2 else y

    def _prepare(self, shape: tuple[int, ...], order: str, *views: View) -> Launch:
        n, channels, *cells = shape
        steps, merged = _merged(order, channels, tuple(cells), tuple(view.strides for view in views))
        channels, *cells = merged
        views = tuple(view._replace(strides=s) for view, s in zip(views, steps, strict=True))
        itemsize = views[0].itemsize
        lanes = lanes_of(channels, WORD // itemsize) if order == LAST else 1
        tile = lanes_of(cells[-1], WORD // itemsize) if order == FIRST else 1
        tiling = Tiling(order, channels, tuple(cells), lanes, tile)
        axis = 1 if order == LAST else len(cells) + 1
        packed = [lanes * tile > 1 and aligned(view, axis, lanes * tile) for view in views]
        constants = {**self._constants, "X_PACKED": packed[0], "MASK_PACKED": packed[-1]}
        # The forward's kernel reads no mask: any strides will do.
        arrays = [((n, channels, *cells), view.strides) for view in (views[0], views[-1])]
        return prepared("dropout", self._types, constants, self._members, tiling, n, tuple(arrays))


def _merged(
    order: str, channels: int, cells: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Strides and (C, *cells) with axes merged where all arrays allow it: a row of one long axis has words at any width.

    Channels-last only the spatial axes are one; channels-first the channels too, for the index of an element counts on.
    """
    count = math.prod(cells)
    if all(_is_dense(s[2:], cells) for s in strides):
        if order == FIRST and all(s[1] == count * s[-1] or channels == 1 for s in strides):
            return tuple((s[0], 0, s[-1]) for s in strides), (1, channels * count)
        return tuple((s[0], s[1], s[-1]) for s in strides), (channels, count)
    return strides, (channels, *cells)


def _is_dense(strides: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether every axis steps over the whole of the next one."""
    return all(a == b * n for a, b, n in zip(strides[:-1], strides[1:], sizes[1:], strict=True))
