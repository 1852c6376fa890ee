"""Facts about `cupy` as JSON, of CuPy itself or of the double, whichever the search path has: the two must agree.

Run as a script: CuPy without a GPU has arrays over main memory, of which all but the values can be asked.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import cupy
import ml_dtypes
import numpy as np

SHAPE = (2, 3, 1, 4)


def expressions(text: str) -> list[str]:
    """The expressions of a text that has them between semicolons."""
    return [part.strip() for part in text.split(";")]


SLICES = expressions("""
    x; x[1]; x[:, 1:]; x[..., ::2]; x[::-1]; x[:, ::-2]; x[:, None]; x[..., None]; x[1, 2, 0, 3]; x[()]; x[:, :0]; x[1:, :0];
    x[-1:, ..., 1]; x[np.int64(1)]; x[..., 0]; x[None, 1:, :, :, 1:3]; x[:0]
""")
VIEWS = expressions("""
    v; v.T; v.real; v.view(); v.view(np.int32); v.view(np.float64); v.view(np.int8); v.swapaxes(0, -1); v.squeeze(); v.ravel();
    v.conj(); v.transpose(); v[0]; next(iter(v)); len(v); v.reshape(-1); v.reshape(v.shape); v.reshape(1, *v.shape);
    v.reshape(*v.shape, 1); v.reshape(-1, v.shape[-1]); v.reshape(v.shape[0], -1); v.reshape((v.size // 2, 2));
    v.astype(v.dtype, copy=False); cupy.moveaxis(v, 1, -1); cupy.expand_dims(v, 1); cupy.broadcast_to(v, (5, *v.shape));
    cupy.ascontiguousarray(v); cupy.permute_dims(v, range(v.ndim))
""")
TEXTS = expressions("""
    str(x.device); repr(x.device); x.device == cupy.cuda.Device(0); x.device == 0; x.device.id; int(x.device); x.data.device;
    x.data.device_id; type(x.data.ptr); int(x.data) == x.data.ptr; x.data.mem.ptr == x.data.ptr; str(cupy.float32);
    cupy.bool_ is np.bool_; cupy.dtype is np.dtype; type(x).__name__; isinstance(x, np.ndarray); x.__array_priority__;
    type(x.shape); type(x.strides); x.flags.owndata; x[0].flags.owndata; x.flags['C_CONTIGUOUS']; x.base; x.T.base is x;
    x[0][0].base is x; x.T.T.base is x; x.astype(np.float32, copy=False) is x; x.conj() is x; x.ndim; x.nbytes; x.size
""")
ERRORS = expressions("""
    np.asarray(x); np.array(x); hash(x); bool(x); len(x[0, 0, 0, 0]); x[0, 0, 0, 0, 0]; x[5]; x.reshape(7); hash(x.device);
    iter(x[0, 0, 0, 0]); cupy.array(['text']); x.flags.writeable; x.flags['ALIGNED']; x.astype(np.float32, casting='safe');
    x.__array_namespace__; x.__array_interface__; x.to_device; x.transpose(0, 1); x.squeeze(0); cupy.object_; cupy.float128;
    cupy.empty((-1,)); x.argmax(3, 4, 5, 6, 7)
""")
DTYPES = ("bool", "int8", "uint16", "int64", "float16", "bfloat16", "float32", "complex64", "complex128")


def over(host: np.ndarray) -> Any:
    """An array over the memory of a NumPy array; the double makes one of its own."""
    if not hasattr(cupy.cuda, "UnownedMemory"):
        return cupy.asarray(host)
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    return cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0))


def fact(text: str, x: Any, v: Any = None) -> Any:
    """What an expression gives: for an array where it lies, else its text; what needs a GPU is a copy."""
    try:
        value = eval(text, {"x": x, "v": v, "np": np, "cupy": cupy, "ml_dtypes": ml_dtypes})
    except Exception as error:
        kind = type(error).__name__
        return {"CUDARuntimeError": "copy", "AxisError": "ValueError"}.get(kind, kind)
    if not isinstance(value, cupy.ndarray):
        return str(value)
    if value.data.mem is not x.data.mem:
        return "copy"
    flags = value.flags.c_contiguous, value.flags.f_contiguous
    where = value.data.ptr - x.data.ptr, [s for s, n in zip(value.strides, value.shape, strict=True) if n > 1]
    # Nothing reads an address in an array of no cells, nor a stride along an axis of one.
    return value.shape, str(value.dtype), flags, value is v, where if value.size else None


def views(dtype: str) -> dict[str, Any]:
    """Facts about every view of every slice of every order of axes."""
    x = over(np.zeros(SHAPE, dtype))
    found = {}
    for axes in itertools.permutations(range(len(SHAPE))):
        turned = x.transpose(axes)
        for cut in SLICES:
            try:
                v = eval(cut, {"x": turned, "np": np})
            except IndexError:
                continue
            found |= {f"{dtype} {axes} {cut} {view}": fact(view, x, v) for view in VIEWS}
    return found


def public(thing: Any) -> list[str]:
    """Public names: those of `__all__` where there is one."""
    return sorted(getattr(thing, "__all__", None) or (name for name in dir(thing) if not name.startswith("_")))


def main() -> None:
    x = over(np.zeros(SHAPE, np.float32))
    json.dump(
        {
            "views": views("float32") | views("int64"),
            "texts": {text: fact(text, x) for text in (*TEXTS, *ERRORS)},
            "dtypes": {name: fact(f"cupy.ndarray((1,), np.dtype('{name}'), x.data)", x) for name in DTYPES},
            "names": public(cupy),
            "cuda": public(cupy.cuda),
            "runtime": public(cupy.cuda.runtime),
            "array": public(cupy.ndarray),
            "file": cupy.__file__,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
