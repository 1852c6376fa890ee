"""All that the engines on CuPy arrays ask of CuPy, CUDA and cuDNN. No other module of funcnn imports the two libraries.

Nothing is imported before an engine is asked for. The tests put a double with the same functions in this module's place,
whose memory is that of the CPU: what is above this module runs there as it does on a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

__all__ = [
    "Array",
    "Graph",
    "Kernel",
    "compile_kernels",
    "device_of",
    "empty",
    "execute",
    "free_bytes",
    "frontend",
    "graph_errors",
    "launch",
    "matmul",
    "milliseconds",
    "new_graph",
    "on_device",
    "require_cuda",
    "require_cudnn",
    "stack",
]

Array = Any  # cupy.ndarray
Kernel = Any  # cupy.RawKernel
Graph = Any  # cudnn.pygraph

OLDEST_FRONTEND = (1, 32)  # of which all that is used here was seen to work


def _cupy() -> Any:
    return importlib.import_module("cupy")


# ---- what is there ---------------------------------------------------------------------------------------------------


def require_cuda() -> str:
    """The versions of CuPy and CUDA; ImportError with the reason where arrays on a GPU cannot be had."""
    try:
        cupy = _cupy()
    except ModuleNotFoundError:
        raise ImportError("CuPy is not installed: pip install cupy-cuda13x (or cupy-cuda12x)") from None
    runtime = cupy.cuda.runtime
    toolkit, driver = runtime.runtimeGetVersion(), runtime.driverGetVersion()
    if not driver:
        raise ImportError("no NVIDIA driver is installed")
    try:
        count = runtime.getDeviceCount()
    except Exception as error:  # of a class that only CuPy has
        raise ImportError(
            f"CUDA cannot be used: {error} (the driver is for CUDA {_cuda_version(driver)}, "
            f"CuPy has CUDA {_cuda_version(toolkit)})"
        ) from None
    if not count:
        raise ImportError("no CUDA device is visible")
    return f"CuPy {cupy.__version__}, CUDA {_cuda_version(toolkit)}"


def _cuda_version(number: int) -> str:
    """'13.0' for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


def require_cudnn() -> str:
    """The versions of cuDNN and its frontend; ImportError with the reason where they are missing or do not fit."""
    require_cuda()
    toolkit = _cupy().cuda.runtime.runtimeGetVersion() // 1000
    advice = f"pip install nvidia-cudnn-cu{toolkit} and pip install --no-deps nvidia-cudnn-frontend"
    try:
        cudnn = frontend()
    except ModuleNotFoundError:
        raise ImportError(f"nvidia-cudnn-frontend is not installed: {advice}") from None
    except Exception as error:
        raise ImportError(f"nvidia-cudnn-frontend cannot be loaded: {error}; {advice}") from None
    if tuple(map(int, re.findall(r"\d+", cudnn.__version__)[:2])) < OLDEST_FRONTEND:
        oldest = ".".join(map(str, OLDEST_FRONTEND))
        raise ImportError(f"nvidia-cudnn-frontend {cudnn.__version__} is too old, {oldest} is needed: {advice} -U")
    try:
        version = cudnn.backend_version()
    except Exception as error:
        raise ImportError(f"libcudnn cannot be loaded: {error}; {advice}") from None
    _require_one_cudnn(loaded_cudnn(), toolkit)
    return _versions(version)


def _versions(cudnn: int) -> str:
    return f"cuDNN {_cudnn_version(cudnn)}, frontend {frontend().__version__}"


def _cudnn_version(number: int) -> str:
    """'9.28.1' for 92801."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def loaded_cudnn() -> list[Path]:
    """The cuDNN libraries in this process, where the system tells."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if "libcudnn" in line}
    return sorted(path for path in paths if path.exists())  # not those that were removed since ("... (deleted)")


def _require_one_cudnn(libraries: list[Path], toolkit: int) -> None:
    """ImportError where libraries of two versions are loaded (cuDNN then fails at the first call), or one for another CUDA."""
    main = {path.parent: path for path in libraries if path.name.startswith("libcudnn.so")}
    versions = {folder: _function(path, "cudnnGetVersion") for folder, path in main.items()}
    strangers = [path for path in libraries if path.parent not in main]
    if len(set(versions.values())) > 1 or (main and strangers):
        found = [f"{path} ({_cudnn_version(versions[folder])})" for folder, path in main.items()]
        raise ImportError(
            f"cuDNN libraries of two versions are loaded: {', '.join([*found, *map(str, strangers)])}; "
            "keep one, or import it first"
        )
    for path in main.values():
        built_for = _function(path, "cudnnGetCudartVersion") // 1000
        if built_for != toolkit:
            raise ImportError(f"{path} is made for CUDA {built_for}, CuPy for CUDA {toolkit}")


def _function(path: Path, name: str) -> int:
    """What a function without arguments of a library returns."""
    function = getattr(ctypes.CDLL(str(path)), name)
    function.restype = ctypes.c_size_t
    return int(function())


def stack() -> str:
    """Libraries and current device, as far as a plan of cuDNN depends on them."""
    properties = _cupy().cuda.runtime.getDeviceProperties(_cupy().cuda.runtime.getDevice())
    return f"{_versions(frontend().backend_version())}, {properties['name'].decode()}"


# ---- memory, devices -------------------------------------------------------------------------------------------------


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """A new array on the current device, from CuPy's pool on the current stream; its memory begins at a multiple of 512."""
    return _cupy().empty(shape, dtype)


def device_of(array: Any) -> int:
    """Number of the device that an array lies on, or that an ArraySpec names; the current one where it names none."""
    device = array.device
    return int(_cupy().cuda.runtime.getDevice() if device is None else device.id)


def on_device(device: int) -> AbstractContextManager[Any]:
    """While it is entered, the device is the current one."""
    return _cupy().cuda.Device(device)


def free_bytes() -> int:
    """Bytes that can still be allocated on the current device, those that CuPy's pool keeps for reuse included."""
    cupy = _cupy()
    return int(cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes())


# ---- kernels ---------------------------------------------------------------------------------------------------------


def compile_kernels(source: str, names: tuple[str, ...]) -> dict[str, Kernel]:
    """Kernels (`extern "C"`) of a CUDA C++17 source by name, for any device. CuPy keeps what NVRTC made of it on disk."""
    module = _cupy().RawModule(code=source, options=("-std=c++17",))
    return {name: module.get_function(name) for name in names}


def launch(kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Queue a kernel on the current stream. args: arrays (as pointers), NumPy scalars, structured NumPy arrays (by value)."""
    kernel(grid, block, args)


_compute_type = threading.Lock()  # CuPy has one for all threads


def matmul(a: Array, b: Array, out: Array) -> None:
    """out = a @ b by cuBLAS in the arrays' dtype; float32 means float32, whatever CUPY_TF32 says."""
    if out.dtype not in ("float32", "complex64"):
        _cupy().matmul(a, b, out=out)
        return
    linalg = importlib.import_module("cupy._core._routines_linalg")
    with _compute_type:
        before = linalg.get_compute_type(out.dtype)
        linalg.set_compute_type(out.dtype, linalg.COMPUTE_TYPE_FP32)
        try:
            _cupy().matmul(a, b, out=out)
        finally:
            linalg.set_compute_type(out.dtype, before)


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """Device time of run(), queued `repeats` times in a row on the current stream; the least of three rounds."""
    cuda = _cupy().cuda
    run()
    times = []
    for _ in range(3):
        first, last = cuda.Event(), cuda.Event()
        first.record()
        for _ in range(repeats):
            run()
        last.record()
        last.synchronize()
        times.append(cuda.get_elapsed_time(first, last) / repeats)
    return float(min(times))


# ---- cuDNN -----------------------------------------------------------------------------------------------------------


def frontend() -> Any:
    """The module of cuDNN's Python frontend."""
    return importlib.import_module("cudnn")


def graph_errors() -> tuple[type[Exception], ...]:
    """What the frontend raises for a graph or a plan that it refuses."""
    return (frontend().cudnnGraphNotSupportedError, RuntimeError, ValueError, ImportError)


class _Handle:
    """A cuDNN handle of one thread on one device; destroyed with the thread."""

    def __init__(self) -> None:
        cudnn = frontend()
        self.handle = cudnn.create_handle()
        self._destroy = cudnn.destroy_handle

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_destroy"):  # at exit the driver may be gone first
            self._destroy(self.handle)


class _Handles(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[int, _Handle] = {}


_handles = _Handles()


def _handle() -> Any:
    """This thread's handle on the current device, bound to CuPy's current stream."""
    cuda = _cupy().cuda
    device = cuda.runtime.getDevice()
    found = _handles.by_device.get(device)
    if found is None:
        found = _handles.by_device[device] = _Handle()
    frontend().set_stream(handle=found.handle, stream=cuda.get_current_stream().ptr)
    return found.handle


def new_graph(**types: Any) -> Graph:
    """An empty cudnn.pygraph for the current device."""
    return frontend().pygraph(handle=_handle(), **types)


def execute(graph: Graph, pointers: dict[int, int], workspace: int) -> None:
    """Queue the plan that was built last of a graph on the current stream: tensors as addresses by uid, workspace in bytes.

    By `execute_plan_at_index` the frontend would ask at every call, of every plan, whether a filter excludes it: as long again
    as all else that it does. The workspace comes from CuPy's pool and goes back when the plan is queued: the pool hands it to
    the same stream only.
    """
    memory = empty((workspace,), "uint8") if workspace else None
    graph.execute(pointers, 0 if memory is None else memory.data.ptr, handle=_handle())
