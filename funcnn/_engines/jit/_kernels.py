"""Kernels on demand: each is compiled once per process, at an init, from the host's register width and a dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from funcnn._engines.jit import _simd

__all__ = ["kernel"]


@cache
def kernel(make: Callable[..., Any], dtype: str, *shape: int) -> Any:
    """make(code, item bytes, lanes, *shape, stamp): the compiled kernel of a dtype; `shape`: of a tile, if it has one."""
    lanes = _simd.lanes_of(dtype)
    return make(_simd.CODES[dtype], _simd.register_bytes() // lanes, lanes, *shape, _simd.stamp())
