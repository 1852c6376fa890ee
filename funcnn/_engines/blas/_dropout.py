"""Dropout: about ten passes of 32-bit integer arithmetic per block of a row, in cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from funcnn._engines._hash import M1, M2, SALT, base_key, threshold
from funcnn._engines._order import Array
from funcnn._engines._protocol import DropoutPlan
from funcnn._engines._threads import run_all
from funcnn._scratch import scratch
from funcnn._spec import COMPLEX_DTYPES, HALF_DTYPES

__all__ = ["BlasDropout"]

BLOCK = 1 << 16  # elements hashed at a time: two scratch arrays of 256 KB


class BlasDropout(DropoutPlan):
    """dropout for NumPy arrays."""

    engine = "blas"

    def forward(self, x: Array, step: Array) -> tuple[Array, Array]:
        mask = np.empty_like(x, bool, subok=False)
        if self.spec.rate == 0:
            mask[...] = True
        elif x.size:
            self._draw(mask, int(step))
        return self._select(x, mask), mask

    def backward(self, dy: Array, mask: Array) -> Array:
        return self._select(dy, mask)

    def _select(self, x: Array, mask: Array) -> Array:
        rate = self.spec.rate
        y = np.zeros_like(x, self.spec.dtype, subok=False)
        if rate == 1:
            return y
        scale = 1 / (1 - rate)
        if self.spec.dtype in HALF_DTYPES:
            np.copyto(y, x.astype(np.float32) * np.float32(scale), where=mask, casting="unsafe")
        elif self.spec.dtype in COMPLEX_DTYPES:  # part by part: a complex product turns an infinity into NaN
            for source, target in ((x.real, y.real), (x.imag, y.imag)):
                np.multiply(source, scale, out=target, where=mask)
        else:
            np.multiply(x, scale, out=y, where=mask)
        return y

    def _draw(self, mask: Array, step: int) -> None:
        """Write the mask (N, C, *spatial) of a step; `_hash` has the definition."""
        n = mask.shape[0]
        cells = mask[0].size
        limit = threshold(self.spec.rate)
        if limit >= 2**31:
            mask[...] = False
            return
        key = np.full(1, (base_key(self.spec.seed) + step) & 0xFFFFFFFF, np.uint32)
        _mix(key)
        first = key + np.arange(n, dtype=np.uint32)
        _mix(first)
        second = first ^ np.uint32(SALT)
        _mix(second)
        flat = mask.reshape(n, cells) if mask.flags.c_contiguous else None
        drawn = np.empty((n, cells), bool) if flat is None else flat

        def task(job: tuple[int, int]) -> None:
            row, lo = job
            hi = min(lo + BLOCK, cells)
            v = scratch("hash", (hi - lo,), np.uint32)
            np.add(_COUNT[: hi - lo], np.uint32((int(first[row]) + lo) & 0xFFFFFFFF), out=v)
            _mix(v, second[row])
            np.greater_equal(v, np.uint32(2 * limit), out=drawn[row, lo:hi])

        run_all(task, [(row, lo) for row in range(n) for lo in range(0, cells, BLOCK)], self.threads)
        if flat is None:
            mask[...] = drawn.reshape(mask.shape)


_COUNT = np.arange(BLOCK, dtype=np.uint32)


def _mix(v: Array, key: Any = None) -> None:
    """lowbias32 in place, with the second key after the first product."""
    t = scratch("shifted", v.shape, np.uint32)
    for shift, factor, extra in ((16, M1, key), (15, M2, None), (16, None, None)):
        np.right_shift(v, np.uint32(shift), out=t)
        np.bitwise_xor(v, t, out=v)
        if factor is not None:
            np.multiply(v, np.uint32(factor), out=v)
        if extra is not None:
            np.bitwise_xor(v, extra, out=v)
