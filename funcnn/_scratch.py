"""Scratch memory for the CPU engines: one bounded arena per thread. A result is never a view of it."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np

__all__ = ["release_scratch", "scratch"]


# A larger request (one plane of a huge image, say) gets memory of its own, which is freed with the call.
MOST_KEPT = 32 << 20


class _Arena:
    """One thread's buffers by name; each grows to the largest request of up to MOST_KEPT bytes and stays."""

    __slots__ = ("__weakref__", "buffers")

    def __init__(self) -> None:
        self.buffers: dict[str, np.ndarray] = {}


_local = threading.local()
_arenas: weakref.WeakSet[_Arena] = weakref.WeakSet()
_lock = threading.Lock()
_ALIGN = 64


def scratch(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised C-ordered array from this thread's arena; it is valid until the next request of that name."""
    arena: _Arena | None = getattr(_local, "arena", None)
    if arena is None:
        arena = _local.arena = _Arena()
        with _lock:
            _arenas.add(arena)
    dtype = np.dtype(dtype)
    size = dtype.itemsize
    for n in shape:
        size *= n
    if size > MOST_KEPT:
        return np.empty(shape, dtype)
    buffer = arena.buffers.get(name)
    if buffer is None or buffer.nbytes < size:
        raw = np.empty(size + _ALIGN, np.uint8)
        start = -raw.ctypes.data % _ALIGN
        buffer = arena.buffers[name] = raw[start : start + size]
    return np.ndarray(shape, dtype, buffer)


def release_scratch() -> None:
    """Free the scratch memory that the CPU engines keep between calls, of every thread.

    Calls that are running keep what they use until they return.

    Examples
    --------
    >>> import funcnn as fn
    >>> fn.release_scratch()
    """
    with _lock:
        for arena in list(_arenas):
            arena.buffers = {}


def poison() -> None:
    """Overwrite all scratch of this thread with NaN patterns. For tests: no result may change."""
    arena: _Arena | None = getattr(_local, "arena", None)
    if arena is not None:
        for buffer in arena.buffers.values():
            buffer.fill(0xFF)
