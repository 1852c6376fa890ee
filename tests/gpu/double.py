"""The double of `funcnn._engines._gpu` and of CuPy: engines on CuPy arrays run through it on a machine without a GPU.

`install()` comes before anything imports CuPy. What engines ask of the GPU is counted in `calls`, by the name of the
function, so that a test can say that an engine really ran. Every address handed to a kernel or to cuDNN must lie in an
allocation that is in use.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from funcnn._engines import _gpu

HERE = Path(__file__).parent
calls: Counter[str] = Counter()

Array = Kernel = Graph = Any


def real_gpu() -> bool:
    """Whether CuPy is installed here with a GPU; asked in another process, since this one may be about to take the double."""
    code = "import cupy, sys; sys.exit(not cupy.is_available())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def install() -> None:
    """Put the doubles in the place of CuPy and of `_gpu`, for this process."""
    loaded = sys.modules.get("cupy")
    if loaded is not None and not str(loaded.__file__).startswith(str(HERE)):
        raise RuntimeError("CuPy itself is imported already: the double must come before it")
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    for name, function in public().items():
        setattr(_gpu, name, function)


def installed() -> bool:
    """Whether the engines see the doubles."""
    return _gpu.empty is empty


def public() -> dict[str, Callable[..., Any]]:
    """The functions that stand for those of `_gpu`."""
    return {name: globals()[name] for name in _gpu.__all__ if inspect.isfunction(globals()[name])}


def check_live(name: str, address: int) -> None:
    """An address must lie in an allocation in use: one already freed or made up is the engine's fault."""
    from cupy.cuda import memory

    assert memory.is_live(address), f"{name}: address {address:#x} lies in no allocation in use"


# ---- what is there ---------------------------------------------------------------------------------------------------


def require_cuda() -> str:
    import cupy

    return f"double of CuPy {cupy.__version__} on the CPU"


def require_cudnn() -> str:
    return f"double of cuDNN on the CPU, frontend {importlib.metadata.version('nvidia-cudnn-frontend')}"


# ---- memory, devices -------------------------------------------------------------------------------------------------


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    import cupy

    calls["empty"] += 1
    return cupy.empty(shape, dtype)


def device_of(array: Any) -> int:
    import cupy

    return int((array.device or cupy.cuda.Device()).id)


def on_device(device: int) -> AbstractContextManager[Any]:
    import cupy

    return cupy.cuda.Device(device)


def free_bytes() -> int:
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes())


# ---- kernels ---------------------------------------------------------------------------------------------------------


def compile_kernels(source: str, names: tuple[str, ...]) -> dict[str, Kernel]:
    from gpu import host

    calls["compile_kernels"] += 1
    return host.compile_kernels(source, names)


def launch(kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
    from gpu import host

    calls["launch"] += 1
    for arg in args:
        if hasattr(arg, "data") and hasattr(arg.data, "ptr"):
            check_live("launch", arg.data.ptr)
    host.launch(kernel, grid, block, args)


def matmul(a: Array, b: Array, out: Array) -> None:
    import cupy

    calls["matmul"] += 1
    cupy.matmul(a, b, out=out)


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    run()
    return statistics.median(_timed(run) for _ in range(repeats))


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


# ---- cuDNN -----------------------------------------------------------------------------------------------------------


def frontend() -> Any:
    from gpu import graphs

    return graphs.frontend()


def graph_errors() -> tuple[type[Exception], ...]:
    return (frontend().cudnnGraphNotSupportedError, RuntimeError, ValueError, ImportError)


def stack() -> str:
    return require_cudnn()


def new_graph(**types: Any) -> Graph:
    from gpu import graphs

    calls["new_graph"] += 1
    return graphs.new_graph(**types)


def execute(graph: Graph, pointers: dict[int, int], workspace: int) -> None:
    from gpu import graphs

    calls["execute"] += 1
    for uid, address in pointers.items():
        check_live(f"execute: tensor {uid}", address)
    assert workspace == graph.get_workspace_size(), "execute: the workspace is not the plan's"
    graphs.execute(graph, pointers)
