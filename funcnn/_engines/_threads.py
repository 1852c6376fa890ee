"""Loops over independent tasks on a few threads: NumPy's passes over arrays release the GIL.

BLAS products are not run here: the BLAS library has threads of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["ranges", "run_all"]

T = TypeVar("T")

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _executor() -> ThreadPoolExecutor:
    """The pool, made on first use and again in a forked child. Its threads sleep when there is no work."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="funcnn")
        return _pool


def _forget_pool() -> None:
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def ranges(size: int, most: int) -> list[tuple[int, int]]:
    """Ranges of at most `most` that cover 0 .. size, of nearly equal length."""
    count = -(-size // most)
    return [(size * i // count, size * (i + 1) // count) for i in range(count)]


def run_all(task: Callable[[T], Any], items: Sequence[T], threads: int) -> None:
    """task(item) for every item. Items are handed out as threads come free, so no result may depend on the order."""
    workers = min(threads, len(items))
    if workers < 2:
        for item in items:
            task(item)
        return
    rest = iter(items)  # next() on a list iterator is atomic

    def work() -> None:
        for item in rest:
            task(item)

    helpers = [_executor().submit(work) for _ in range(workers - 1)]
    try:
        work()
    finally:
        # All tasks must be over before the caller's arrays may go, also when one of them failed.
        errors = [helper.exception() for helper in helpers]
    for error in errors:
        if error is not None:
            raise error
