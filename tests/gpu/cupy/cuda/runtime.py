"""`cupy.cuda.runtime`: what funcnn and array_api_compat ask of it."""

from __future__ import annotations

from . import device

__all__ = ["getDevice", "getDeviceCount", "memGetInfo", "setDevice"]

MEMORY = 8 << 30  # bytes that the double says a device has


def getDeviceCount() -> int:
    return device.COUNT


def getDevice() -> int:
    return device.current()


def setDevice(number: int) -> None:
    device.Device(number).use()


def memGetInfo() -> tuple[int, int]:
    return MEMORY, MEMORY
