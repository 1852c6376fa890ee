"""Kernels on demand: each is compiled once per process, at an init, from the host's register width and a dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba

from funcnn._engines.jit import _host

__all__ = ["kernel", "njit", "part"]


@cache
def kernel(make: Callable[..., Any], dtype: str, *shape: int) -> Any:
    """make(code, item bytes, lanes, *shape, stamp): the compiled kernel of a dtype; `shape`: of a tile, if it has one."""
    lanes = _host.lanes_of(dtype)
    return make(_host.CODES[dtype], _host.register_bytes() // lanes, lanes, *shape, _host.stamp())


def njit(signature: str | None = None, *, cache: bool = False, **options: Any) -> Callable[..., Any]:
    """`numba.njit`, without a cache where neither the package's folder nor the user's own can be written to."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, cache=cache, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            return numba.njit(signature, **options)(function)

    return compiled


part = njit(nogil=True, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")
"""Decorator of a function that is a part of kernels: it is compiled into each."""
