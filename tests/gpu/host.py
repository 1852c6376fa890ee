"""CUDA kernels on the CPU: the same source, compiled by g++ with `include/host.hpp`, in which threads are loops.

Half floats come from the host side of CUDA's own headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

__all__ = ["Kernel", "compile_kernels", "cuda_include", "launch", "need_gpu_stack"]

INCLUDE = Path(__file__).parent / "include"
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-class-memaccess",
         "-include", "host.hpp")  # fmt: skip
# Signed numbers that overflow, indices out of an array, loads that are not aligned end the process with a message. They
# double the time to compile, so only the tests of the kernels themselves ask for them.
SANITIZE = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-fno-sanitize=vptr")


def cuda_include() -> Path | None:
    """The folder of CUDA's headers, from its package for Python; None where there is none."""
    spec = find_spec("nvidia")
    roots = [] if spec is None else [Path(root) for root in spec.submodule_search_locations or ()]
    found = [header.parent for root in roots for header in sorted(root.glob("c*/include/cuda_fp16.h"))]
    return found[0] if found else None


def need_gpu_stack() -> None:
    """Skip where g++, CUDA's headers or its compiler are missing, unless FUNCNN_TEST_BACKENDS asks for cupy_cuda."""
    missing = [
        what
        for what, there in (
            ("g++", shutil.which("g++")),
            ("CUDA's headers (nvidia-cuda-runtime)", cuda_include()),
            ("its compiler (nvidia-cuda-nvrtc)", _has("cuda.bindings.nvrtc")),
        )
        if not there
    ]
    if not missing:
        return
    if "cupy_cuda" in os.environ.get("FUNCNN_TEST_BACKENDS", "").split(","):
        pytest.fail(f"missing: {', '.join(missing)}")
    pytest.skip(f"missing: {', '.join(missing)}")


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


class Kernel(NamedTuple):
    """A compiled kernel: how to run it, and the bytes of its parameters, negative for pointers."""

    name: str
    run: Any
    parameters: tuple[int, ...]


def compile_kernels(source: str, names: tuple[str, ...], flags: tuple[str, ...] = ()) -> dict[str, Kernel]:
    """Kernels of a source by name, as `_gpu.compile_kernels` gives them; `flags` of g++ beside the usual ones."""
    library = ctypes.CDLL(str(_built(source + "".join(f"\nHOST_KERNEL({name})" for name in names), flags)))
    return {name: _kernel(library, name) for name in names}


def _kernel(library: ctypes.CDLL, name: str) -> Kernel:
    sizes = (ctypes.c_int * 64)()
    count = getattr(library, f"describe_{name}")(sizes)
    run = getattr(library, f"launch_{name}")
    run.restype = None
    return Kernel(name, run, tuple(sizes[:count]))


@cache
def _headers() -> str:
    return "".join(path.read_text() for path in sorted(INCLUDE.rglob("*")) if path.is_file())


def _built(text: str, flags: tuple[str, ...]) -> Path:
    """The shared library of a text, compiled once: kept under the hash of all that goes into it."""
    include = cuda_include()
    digest = hashlib.sha256("\0".join([text, _headers(), str(include), *FLAGS, *flags]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"funcnn-host-kernels-{os.getuid()}"
    library = folder / f"{digest}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / f"{digest}.{os.getpid()}"
        command = ["g++", *FLAGS, *flags, f"-I{INCLUDE}", "-isystem", str(include), "-x", "c++", "-", "-o", str(part)]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        part.replace(library)  # at once, for another process may build the same
    return library


def launch(
    kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], first_block: int = 0
) -> None:
    """Run a kernel, as `_gpu.launch` queues it; from a block on, where all of a large grid would take too long."""
    held = [_argument(arg) for arg in args]
    given = tuple(size for _, size in held)
    assert given == kernel.parameters, f"{kernel.name} takes {kernel.parameters} (bytes, < 0: pointer), got {given}"
    sizes = [*_three(grid), *_three(block)]
    assert all(size > 0 for size in sizes), sizes
    assert grid[0] < 2**31
    assert max(_three(grid)[1:]) < 2**16, grid
    pointers = (ctypes.c_void_p * len(held))(*(value.ctypes.data for value, _ in held))
    kernel.run((ctypes.c_uint * 7)(*sizes, first_block), pointers)


def _argument(arg: Any) -> tuple[Any, int]:
    """Memory that holds an argument, and its bytes, negative for a pointer."""
    data = getattr(arg, "data", None)
    if hasattr(data, "ptr"):
        return np.asarray(data.ptr, np.uint64), -8
    value = np.asarray(arg)
    return value, value.nbytes


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z
