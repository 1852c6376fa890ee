"""Memory orders of arrays with strides. Arrays have a channels-first *shape* here, whatever their memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["FIRST", "LAST", "Array", "allocate", "memory_order", "strides_of", "to_first", "to_last"]

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
    return to_first(make((n, *spatial, c), dtype))


def to_first(a: Any) -> Any:
    """(N, *spatial, C) seen as (N, C, *spatial), in a tenth of what numpy.moveaxis takes."""
    return a.transpose(0, a.ndim - 1, *range(1, a.ndim - 1))


def to_last(a: Any) -> Any:
    """(N, C, *spatial) seen as (N, *spatial, C)."""
    return a.transpose(0, *range(2, a.ndim), 1)


def strides_of(a: Any) -> tuple[int, ...]:
    """Strides in elements."""
    item = a.itemsize
    return tuple([step // item for step in a.strides])
