"""`cupy.cuda.memory`: the double's device memory, which is main memory that knows what of it is in use."""

from __future__ import annotations

import bisect
import threading

import numpy as np

from .device import Device, current

ALIGNMENT = 512  # of CuPy's pool
POISON = 0xFF  # NaN in every float dtype, -1 in every signed integer

allocations = 0  # made so far
_lock = threading.RLock()  # a finalizer may run while its own thread holds the lock
_live: dict[int, int] = {}  # first address -> bytes
_starts: list[int] = []  # the first addresses, sorted


class Memory:
    """One allocation on the current device: poisoned when it is made and when it is freed."""

    def __init__(self, size: int) -> None:
        global allocations
        self.size, self.device_id = size, current()
        raw = np.empty(size + ALIGNMENT, np.uint8)
        offset = -raw.__array_interface__["data"][0] % ALIGNMENT
        self.bytes = raw[offset : offset + size]
        self.bytes.fill(POISON)
        self.ptr = raw.__array_interface__["data"][0] + offset
        with _lock:
            allocations += 1
            _live[self.ptr] = size
            bisect.insort(_starts, self.ptr)

    def __del__(self) -> None:
        self.bytes.fill(POISON)
        with _lock:
            del _live[self.ptr]
            del _starts[bisect.bisect_left(_starts, self.ptr)]


class MemoryPointer:
    """An address within an allocation."""

    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset

    @property
    def device_id(self) -> int:
        return self.mem.device_id

    @property
    def device(self) -> Device:
        return Device(self.device_id)

    def __int__(self) -> int:
        return self.ptr


def alloc(size: int) -> MemoryPointer:
    return MemoryPointer(Memory(size), 0)


def is_live(ptr: int) -> bool:
    """Whether an address lies within an allocation that is in use."""
    with _lock:
        i = bisect.bisect_right(_starts, ptr) - 1
        return i >= 0 and ptr < _starts[i] + max(_live[_starts[i]], 1)
