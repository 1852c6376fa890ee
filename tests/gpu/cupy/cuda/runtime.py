"""`cupy.cuda.runtime`: what funcnn and array_api_compat ask of it."""

from __future__ import annotations

from . import device

__all__ = ["driverGetVersion", "getDevice", "getDeviceCount", "memGetInfo", "runtimeGetVersion", "setDevice"]

MEMORY = 8 << 30  # bytes that the double says a device has


def runtimeGetVersion() -> int:
    return 13000


def driverGetVersion() -> int:
    """0: where `funcnn._engines._gpu` has no double, engines that need a GPU must not take this for one."""
    return 0


def getDeviceCount() -> int:
    return device.COUNT


def getDevice() -> int:
    return device.current()


def setDevice(number: int) -> None:
    device.Device(number).use()


def memGetInfo() -> tuple[int, int]:
    return MEMORY, MEMORY
