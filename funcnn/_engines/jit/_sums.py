"""Sums over all but the channels (the bias gradient). A product with ones would do, but leaves BLAS's threads spinning."""

from __future__ import annotations

from typing import Any

import numpy as np

from funcnn._engines._order import LAST, Array
from funcnn._engines._threads import ranges, run_all
from funcnn._engines.jit import _host
from funcnn._engines.jit._kernels import kernel, njit
from funcnn._engines.jit._simd import (
    add,
    load,
    load_first,
    store,
    store_first,
    zeros,
)
from funcnn._engines.jit._view import address_of, evenly, steps_of

__all__ = ["ChannelSums"]

# Slices of the pixels with a sum each, channels-last, as many for every number of threads.
SLICES = 16
# Pixels, channels-last, that are summed before they are added to the sum of a slice: so roundings do not pile up.
PIXELS = 256
# Numbers that one thread adds while they could be handed to another.
SHARED = 1 << 18


class ChannelSums:
    """Sums of y (N, C, *spatial) over all but the channels, for one dtype."""

    def __init__(self, dtype: str, threads: int) -> None:
        self.dtype, self.threads = dtype, threads
        self.item = np.dtype(dtype).itemsize
        self.sum_first, self.sum_last = kernel(sum_rows, dtype), kernel(sum_pixels, dtype)

    def __call__(self, y: Array, order: str) -> Array:
        parts = self.threads if y.size > SHARED else 1
        spread = np.moveaxis(y, 1, -1)
        if order == LAST and spread.strides[-1] == self.item and evenly(spread[..., 0]):
            return self._last(spread, parts)
        if evenly(y[0, 0]) and y.strides[-1] == self.item:
            return self._first(y, parts)
        return y.sum(axis=(0, *range(2, y.ndim)), dtype=self.dtype)

    def _first(self, y: Array, parts: int) -> Array:
        n, c = y.shape[:2]
        at, lanes = steps_of(y), _host.lanes_of(self.dtype)
        sums = np.empty((n, c, lanes), self.dtype)
        start, length = address_of(y), y[0, 0].size

        def task(part: tuple[int, int]) -> None:
            self.sum_first(start, at.n, at.c, c, length, address_of(sums), *part)

        run_all(task, ranges(n * c, -(-n * c // parts)), parts)
        return sums.sum((0, 2))

    def _last(self, y: Array, parts: int) -> Array:
        """y: channels-last in shape, too."""
        pixels, c = y[..., 0].size, y.shape[-1]
        cuts = ranges(pixels, -(-pixels // SLICES))
        sums = np.zeros((len(cuts), c), self.dtype)

        def task(part: tuple[int, int]) -> None:
            for i in range(*part):
                self.sum_last(address_of(y), y.strides[-2], *cuts[i], c, address_of(sums[i]))

        run_all(task, ranges(len(cuts), -(-len(cuts) // parts)), parts)
        return sums.sum(0)


def sum_rows(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: sums of rows of y (image, channel), as vectors whose lanes are to be added."""
    register = lanes * item

    @njit("void(int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
    def sums(start: int, image: int, channel: int, channels: int, length: int, to: int, first: int, last: int) -> None:
        stamp  # noqa: B018
        for row in range(first, last):
            at = start + row // channels * image + row % channels * channel
            a, b, c, d = zeros(code, lanes), zeros(code, lanes), zeros(code, lanes), zeros(code, lanes)
            whole = length // (4 * lanes)
            for _ in range(whole):
                a, b = add(a, load(at, code, lanes)), add(b, load(at + register, code, lanes))
                c, d = add(c, load(at + 2 * register, code, lanes)), add(d, load(at + 3 * register, code, lanes))
                at += 4 * register
            for i in range(whole * 4 * lanes, length, lanes):
                a = add(a, load_first(at, length - i, code, lanes))
                at += register
            store(to + row * register, add(add(a, b), add(c, d)))

    return sums


def sum_pixels(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: adds pixels first .. last of y, each of `channels` numbers, to a sum."""
    register, most = lanes * item, PIXELS

    @njit("void(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
    def sums(start: int, step: int, first: int, last: int, channels: int, to: int) -> None:
        stamp  # noqa: B018
        for p0 in range(first, last, most):
            for k in range(0, channels, 4 * lanes):
                a, b, c, d = zeros(code, lanes), zeros(code, lanes), zeros(code, lanes), zeros(code, lanes)
                here = channels - k
                for p in range(p0, min(p0 + most, last)):
                    at = start + p * step + k * item
                    a = add(a, load_first(at, here, code, lanes))
                    b = add(b, load_first(at + register, here - lanes, code, lanes))
                    c = add(c, load_first(at + 2 * register, here - 2 * lanes, code, lanes))
                    d = add(d, load_first(at + 3 * register, here - 3 * lanes, code, lanes))
                at = to + k * item
                store_first(at, add(load_first(at, here, code, lanes), a), here)
                at, here = at + register, here - lanes
                store_first(at, add(load_first(at, here, code, lanes), b), here)
                at, here = at + register, here - lanes
                store_first(at, add(load_first(at, here, code, lanes), c), here)
                at, here = at + register, here - lanes
                store_first(at, add(load_first(at, here, code, lanes), d), here)

    return sums
