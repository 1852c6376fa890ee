"""`cupy.cuda` of the double: devices, memory, and streams on which everything has run as soon as it is queued."""

from __future__ import annotations

import threading
from typing import Any

from . import device, memory, runtime
from .device import Device
from .memory import Memory, MemoryPointer, alloc

__all__ = ["Device", "ExternalStream", "Memory", "MemoryPointer", "Stream", "alloc", "device", "get_current_stream"]
__all__ += ["is_available", "memory", "runtime"]

_current = threading.local()


class Stream:
    """A stream by the address of its handle; within `with` it is the current one."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.ptr = 0 if null else 2 if ptds else id(self)
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(get_current_stream())
        return self.use()

    def __exit__(self, *exception: Any) -> None:
        _current.stream = self._before.pop()

    def use(self) -> Stream:
        _current.stream = self
        return self

    def synchronize(self) -> None:
        """Nothing is ever queued here."""


class ExternalStream(Stream):
    """A stream that somebody else made."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__()
        self.ptr = ptr


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


def get_current_stream() -> Stream:
    return getattr(_current, "stream", Stream.null)


def is_available() -> bool:
    return True
