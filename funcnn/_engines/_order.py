"""Memory orders of arrays with strides. Arrays have a channels-first *shape* here, whatever their memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["FIRST", "LAST", "Array", "allocate", "memory_order"]

FIRST, LAST = "channels_first", "channels_last"
Array = np.ndarray[Any, Any]


def memory_order(x: Any, layout: str) -> str:
    """FIRST or LAST: whether the channels of x (N, C, *spatial; what has a shape and strides) lie innermost; else `layout`."""
    return _order(x.shape, x.strides, layout)


@lru_cache(4096)
def _order(shape: tuple[int, ...], strides: tuple[int, ...], layout: str) -> str:
    steps = [abs(step) for step, n in zip(strides[2:], shape[2:], strict=True) if n > 1]
    if shape[1] < 2 or not steps or not strides[1]:
        return layout
    return LAST if abs(strides[1]) < min(steps) else FIRST


def allocate(make: Any, shape: tuple[int, ...], dtype: Any, order: str) -> Array:
    """make(shape) (numpy.empty or numpy.zeros) in the given memory order, seen as channels-first."""
    if order == FIRST:
        return make(shape, dtype)
    n, c, *spatial = shape
    last = len(spatial) + 1
    return make((n, *spatial, c), dtype).transpose(0, last, *range(1, last))  # a tenth of what numpy.moveaxis takes
