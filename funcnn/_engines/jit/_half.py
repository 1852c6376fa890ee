"""float16 to float32 and back by vectors, where the CPU has instructions for it: NumPy takes number by number."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from funcnn._engines._order import Array
from funcnn._engines._threads import ranges, run_all
from funcnn._engines.jit import _host
from funcnn._engines.jit._ir import plain_load, plain_store
from funcnn._engines.jit._kernels import kernel, njit
from funcnn._engines.jit._view import address_of

__all__ = ["compile_casts", "copy_cast"]

WIDEN, NARROW = 1, 0
# Numbers that NumPy converts as fast, and that one thread converts while they could be handed to another.
FEW, SHARED = 256, 1 << 18


def compile_casts(dtype: str) -> None:
    """What `copy_cast` needs for arrays of a dtype: a call compiles nothing."""
    if dtype == "float16" and _host.converts_halves():
        kernel(cast, "float32", WIDEN), kernel(cast, "float32", NARROW)


def copy_cast(target: Array, source: Array, threads: int = 1) -> None:
    """numpy.copyto(target, source, casting="unsafe") for arrays of one shape."""
    kinds = source.dtype.name, target.dtype.name
    if kinds not in (("float16", "float32"), ("float32", "float16")) or source.size < FEW or not _alike(source, target):
        np.copyto(target, source, casting="unsafe")
        return
    run = kernel(cast, "float32", WIDEN if kinds[0] == "float16" else NARROW)
    parts = threads if source.size > SHARED else 1
    start, to = address_of(source), address_of(target)
    run_all(lambda part: run(start, to, *part), ranges(source.size, -(-source.size // parts)), parts)


def _alike(a: Array, b: Array) -> bool:
    """Whether the CPU converts, and both arrays are one run of numbers in the same order."""
    axes = sorted(range(a.ndim), key=lambda axis: -abs(a.strides[axis]))
    native = a.dtype.isnative and b.dtype.isnative
    together = a.transpose(axes).flags.c_contiguous and b.transpose(axes).flags.c_contiguous
    return native and together and _host.converts_halves()


@intrinsic(prefer_literal=True)
def _cast(typingctx: Any, start: Any, to: Any, widen: Any, lanes: Any) -> Any:
    """A vector of float32 of float16 at an address, or the other way round."""
    widen_, n = widen.literal_value, lanes.literal_value
    half, single = ir.VectorType(ir.HalfType(), n), ir.VectorType(ir.FloatType(), n)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = plain_load(builder, args[0], half if widen_ else single)
        plain_store(builder, args[1], builder.fpext(value, single) if widen_ else builder.fptrunc(value, half))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, widen, lanes), codegen


def cast(code: int, item: int, lanes: int, widen: int, stamp: int) -> Any:
    """Kernel: numbers first .. last, at least as many as a register has lanes."""
    step, to_step = (2, 4) if widen else (4, 2)

    @njit("void(int64, int64, int64, int64)", nogil=True, cache=True)
    def convert(start: int, to: int, first: int, last: int) -> None:
        stamp  # noqa: B018
        for k in range(first, last, lanes):
            i = min(k, last - lanes)  # the last register overlaps the one before
            _cast(start + i * step, to + i * to_step, widen, lanes)

    return convert
