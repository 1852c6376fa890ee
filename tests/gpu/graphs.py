"""cuDNN without a GPU: graphs are built by cuDNN itself for a described device, and computed by NumPy.

cuDNN can plan for a device that is only described ("deviceless ahead-of-time compilation"). One of its libraries links
against the driver's: a stub with the six functions that it asks for at load time is enough, put under the driver's name
before cuDNN is loaded. What else it misses it only reports on standard error.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

# A description of an H200, as cuDNN wants it.
DEVICE = {
    "version": 1,
    "deviceName": "NVIDIA H200",
    "cudaDeviceId": 0,
    "deviceVer": 900,
    "multiProcessorCount": 132,
    "smCountOrigin": 0,
    "driverVer": 13000,
    "maxSharedMemoryPerBlockOptin": 232448,
    "totalGlobalMem": 150_000_000_000,
    "warpSize": 32,
    "l2CacheSize": 62914560,
    "regsPerBlock": 65536,
    "maxSharedMemoryPerBlock": 49152,
    "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536,
    "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144,
    "supportCoopLaunch": 1,
    "isTccDriver": 0,
    "oversizedSharedMemoryPerBlock": 0,
    "pciDeviceId": 0,
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
}
STUB = """
int cuGetErrorString(int e, const char **s) { *s = "stub"; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { return 0; }
int cuModuleLoadData(void **m, const void *d) { return 0; }
int cuModuleUnload(void *m) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
"""
DTYPES = {"HALF": np.dtype("float16"), "BFLOAT16": np.dtype(ml_dtypes.bfloat16), "FLOAT": np.dtype("float32"),
          "DOUBLE": np.dtype("float64")}  # fmt: skip


@functools.cache
def frontend() -> Any:
    """The module `cudnn`, over the stub of a driver."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=STUB, text=True, check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return importlib.import_module("cudnn")


@functools.cache
def _device() -> Any:
    return frontend().create_device_properties(json.dumps(DEVICE))


def new_graph(**types: Any) -> Any:
    return frontend().pygraph(device_property=_device(), **types)


def execute(graph: Any, pointers: dict[int, int]) -> None:
    """Compute a graph on the tensors at these addresses, node by node (a convolution, an addition), in float64."""
    values: dict[int, np.ndarray] = {}
    for node in graph.nodes:
        inputs = {
            name: values[tensor.uid] if tensor.is_virtual else memory(tensor, pointers[tensor.uid]).astype(np.float64)
            for name, tensor in node.inputs.items()
        }
        (output,) = node.outputs.values()
        with np.errstate(invalid="ignore", over="ignore"):
            result = NODES[node.node_type.name](inputs, node.params, output.dim)
            if output.is_virtual:
                values[output.uid] = result
            else:
                memory(output, pointers[output.uid])[...] = result.astype(DTYPES[output.data_type.name])


def memory(tensor: Any, address: int) -> np.ndarray:
    """A tensor of a graph at an address."""
    assert address % 16 == 0, f"{tensor.name} must lie at a multiple of 16 bytes, got {address:#x}"
    dtype = DTYPES[tensor.data_type.name]
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.dim, tensor.stride, strict=True))
    flat = np.frombuffer((ctypes.c_char * (extent * dtype.itemsize)).from_address(address), dtype)
    steps = [step * dtype.itemsize for step in tensor.stride]
    return np.lib.stride_tricks.as_strided(flat, tensor.dim, steps)


# ---- what nodes mean -------------------------------------------------------------------------------------------------


def _taps(params: Any, kernel: tuple[int, ...], out: tuple[int, ...]) -> Any:
    """Each tap of the kernel and the cells of a padded image that it reads."""
    for tap in np.ndindex(*kernel):
        starts = [t * d for t, d in zip(tap, params["dilation"], strict=True)]
        cells = [
            slice(start, start + (o - 1) * s + 1, s) for start, o, s in zip(starts, out, params["stride"], strict=True)
        ]
        yield (..., *tap), (..., *cells)


def _padded(params: Any, image: np.ndarray) -> np.ndarray:
    return np.pad(image, [(0, 0), (0, 0), *zip(params["pre_padding"], params["post_padding"], strict=True)])


def _grouped(array: np.ndarray, axis: int, groups: int) -> np.ndarray:
    shape = array.shape
    return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])


def _fprop(inputs: Any, params: Any, dim: tuple[int, ...]) -> np.ndarray:
    image, weight = _padded(params, inputs["image"]), inputs["weight"]
    groups = image.shape[1] // weight.shape[1]
    image, weight = _grouped(image, 1, groups), _grouped(weight, 0, groups)
    y = np.zeros((dim[0], groups, dim[1] // groups, *dim[2:]))
    for tap, cells in _taps(params, weight.shape[3:], dim[2:]):
        y += np.einsum("goc,ngc...->ngo...", weight[tap], image[cells])
    return y.reshape(dim)


def _dgrad(inputs: Any, params: Any, dim: tuple[int, ...]) -> np.ndarray:
    loss, weight = inputs["loss"], inputs["filter"]
    groups = dim[1] // weight.shape[1]
    loss, weight = _grouped(loss, 1, groups), _grouped(weight, 0, groups)
    image = _grouped(_padded(params, np.zeros(dim)), 1, groups)
    for tap, cells in _taps(params, weight.shape[3:], loss.shape[3:]):
        image[cells] += np.einsum("goc,ngo...->ngc...", weight[tap], loss)
    inside = [slice(lo, lo + size) for lo, size in zip(params["pre_padding"], dim[2:], strict=True)]
    return image[(..., *inside)].reshape(dim)


def _wgrad(inputs: Any, params: Any, dim: tuple[int, ...]) -> np.ndarray:
    image, loss = _padded(params, inputs["image"]), inputs["loss"]
    groups = image.shape[1] // dim[1]
    image, loss = _grouped(image, 1, groups), _grouped(loss, 1, groups)
    weight = np.zeros((groups, dim[0] // groups, *dim[1:]))
    pixels = "xyz"[: len(dim) - 2]
    for tap, cells in _taps(params, dim[2:], loss.shape[3:]):
        weight[tap] = np.einsum(f"ngo{pixels},ngc{pixels}->goc", loss, image[cells])
    return weight.reshape(dim)


def _add(inputs: Any, params: Any, dim: tuple[int, ...]) -> np.ndarray:
    assert params["mode"] == "add"
    return inputs["IN_0"] + inputs["IN_1"]


NODES = {"CONV_FPROP": _fprop, "CONV_DGRAD": _dgrad, "CONV_WGRAD": _wgrad, "POINTWISE": _add}
