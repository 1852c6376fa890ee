"""The device that `run_gpu.py` measures on, and the two clocks: time of the device, and of the host, for a call."""

from __future__ import annotations

import importlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import funcnn as fn

ROOT = Path(__file__).parent.parent
LONGEST = 0.1  # seconds of the long kernel
CLOCK = 1e-7  # seconds, less than an event can tell

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


class Gpu:
    """The device: what is queued on its default stream, and its clock."""

    double = False

    def __init__(self) -> None:
        self.xp = importlib.import_module("cupy")
        self._spin = self.xp.RawKernel(SPIN, "spin")
        self._hertz = 1e9
        self.busy(0.01)  # compiles
        seconds = min(self._seconds_of_spin() for _ in range(3))
        self._hertz *= 0.01 / seconds

    def _seconds_of_spin(self) -> float:
        start = self.mark()
        self.busy(0.01)
        return self.between(start, self.mark())

    def busy(self, seconds: float) -> None:
        """Queue a kernel of one thread that takes so long."""
        self._spin((1,), (1,), (self.xp.int64(seconds * self._hertz),))

    def mark(self) -> Any:
        event = self.xp.cuda.Event()
        event.record()
        return event

    def reached(self, mark: Any) -> bool:
        return bool(mark.done)

    def between(self, start: Any, stop: Any) -> float:
        """Seconds between two marks; waits for the second."""
        stop.synchronize()
        return self.xp.cuda.get_elapsed_time(start, stop) / 1e3

    def copy(self, target: Any, source: Any) -> None:
        self.xp.copyto(target, source)

    def wait(self) -> None:
        self.xp.cuda.Device().synchronize()

    def free(self) -> None:
        """Give the pools' memory back: the two libraries have one each."""
        self.xp.get_default_memory_pool().free_all_blocks()
        if torch := usable_torch():
            torch.cuda.empty_cache()

    def about(self) -> dict[str, Any]:
        runtime = self.xp.cuda.runtime
        found = {
            "gpu": runtime.getDeviceProperties(self.xp.cuda.Device().id)["name"].decode(),
            "driver": _ask_smi("driver_version"),
            "clocks now, most (SM, memory)": _ask_smi("clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem"),
            "CUDA runtime": runtime.runtimeGetVersion(),
            "CuPy": self.xp.__version__,
            "cudnn": str(fn.engines()["cudnn"].version),
        }
        if torch := usable_torch():
            found |= {"torch": torch.__version__, "cuDNN of torch": torch.backends.cudnn.version()}
        return found | {"libcudnn loaded": ", ".join(_loaded("libcudnn.so")) or "unknown"}


class Double:
    """The CPU double in place of the device: no queue, and the host's clock."""

    double = True

    def __init__(self) -> None:
        sys.path.insert(0, str(ROOT / "tests"))
        importlib.import_module("gpu.double").install()
        self.xp = importlib.import_module("cupy")

    def busy(self, seconds: float) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def reached(self, mark: float) -> bool:
        return False

    def between(self, start: float, stop: float) -> float:
        return stop - start

    def copy(self, target: Any, source: Any) -> None:
        target[...] = source

    def wait(self) -> None:
        pass

    def free(self) -> None:
        pass

    def about(self) -> dict[str, Any]:
        return {"gpu": "double"}


Device = Gpu | Double


def usable_torch() -> Any:
    """The module torch where it has a GPU, else None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _ask_smi(fields: str) -> str:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "unknown"
    command = [smi, "--id=0", f"--query-gpu={fields}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return answer.stdout.strip() or "unknown"


def _loaded(library: str) -> list[str]:
    """Files of a library that this process has mapped: two of libcudnn would be two versions beside each other."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return sorted({line.split()[-1] for line in lines if library in line})


def host_seconds(device: Device, call: Callable[[], Any], count: int = 10, rounds: int = 5) -> float:
    """Median host time of a call, the queue being far from full."""
    spent = []
    for _ in range(rounds):
        device.wait()
        for _ in range(count):
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
    device.wait()
    return statistics.median(spent)


def device_seconds(device: Device, call: Callable[[], Any], calls: int, host: float) -> tuple[float, bool]:
    """Device time of a call, all `calls` being queued before the first starts; and whether the host was too slow for that.

    host: about what a call takes there.
    """
    head = 2e-4 + 2 * calls * host
    while True:
        device.busy(head)
        start = device.mark()
        for _ in range(calls):
            call()
        late = device.reached(start)
        seconds = max(device.between(start, device.mark()), CLOCK) / calls
        if not late or head >= LONGEST:
            return seconds, late
        head = min(4 * head, LONGEST)


def copy_seconds(device: Device, moved: float, turns: int) -> float:
    """Device time of a copy that reads and writes so many bytes in all."""
    source = device.xp.ones(int(moved / 8), "float32")
    target = device.xp.empty_like(source)

    def copy() -> None:
        device.copy(target, source)

    copy()
    host = host_seconds(device, copy, 3, 2)
    return statistics.median(device_seconds(device, copy, 20, host)[0] for _ in range(turns))
