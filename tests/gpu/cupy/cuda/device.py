"""`cupy.cuda.device`: which device is the current one. The double has two, so that a wrong one can be told."""

from __future__ import annotations

import threading
from typing import Any

COUNT = 2
_current = threading.local()


def current() -> int:
    """The number of this thread's current device."""
    return getattr(_current, "id", 0)


def _stack() -> list[int]:
    """What was current before each `with` that this thread is in."""
    if not hasattr(_current, "stack"):
        _current.stack = []
    return _current.stack


class Device:
    """A device by its number; within `with` it is the current one. It cannot be hashed, as CuPy's cannot."""

    __hash__ = None

    def __init__(self, device: Any = None) -> None:
        self.id = current() if device is None else int(device)
        if not 0 <= self.id < COUNT:
            raise RuntimeError(f"cudaErrorInvalidDevice: invalid device ordinal {self.id}")

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        _stack().append(current())
        self.use()
        return self

    def __exit__(self, *exception: Any) -> None:
        _current.id = _stack().pop()

    def use(self) -> None:
        _current.id = self.id

    def synchronize(self) -> None:
        """Nothing is ever queued here."""
