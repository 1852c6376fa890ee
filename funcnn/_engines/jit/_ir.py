"""Pieces of LLVM code for intrinsics: vectors, and memory reached by integer addresses (i64, in bytes)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from funcnn._engines.jit._host import NAMES, bits

__all__ = [
    "I1",
    "I32",
    "I64",
    "call_intrinsic",
    "constant",
    "element",
    "entry_of",
    "first_lanes",
    "gathered",
    "is_float",
    "mangled",
    "masked_load",
    "masked_store",
    "multiply_add",
    "plain_load",
    "plain_store",
    "pointer",
    "prefetch",
    "splatted",
]

I64, I32, I1 = ir.IntType(64), ir.IntType(32), ir.IntType(1)


def is_float(code: int) -> bool:
    """Whether a code is that of a float dtype."""
    return NAMES[code].startswith("float")


def element(code: int) -> Any:
    """LLVM type of one number."""
    if NAMES[code] == "float32":
        return ir.FloatType()
    return ir.DoubleType() if NAMES[code] == "float64" else ir.IntType(bits(code))


def constant(value: int) -> Any:
    """An i64 constant."""
    return ir.Constant(I64, value)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """An address (i64) as a pointer to a type."""
    return builder.inttoptr(address, kind.as_pointer())


def call_intrinsic(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call an LLVM intrinsic by its mangled name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def splatted(builder: Any, value: Any, lanes: int) -> Any:
    """A number in every lane."""
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(
        one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    )


def first_lanes(builder: Any, count: Any, lanes: int) -> Any:
    """Mask of the first `count` (i64) lanes; any count, also below 0 and above `lanes`."""
    for sign, limit in (("<", 0), (">", lanes)):  # as a narrow number it is compared in one register
        count = builder.select(builder.icmp_signed(sign, count, constant(limit)), constant(limit), count)
    numbers = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
    return builder.icmp_signed("<", numbers, splatted(builder, builder.trunc(count, I32), lanes))


def mangled(kind: Any) -> str:
    """LLVM's name part of a vector type: v16f32."""
    number = kind.element
    name = {ir.FloatType: "f32", ir.DoubleType: "f64"}.get(type(number)) or f"i{number.width}"
    return f"v{kind.count}{name}"


def masked_load(builder: Any, address: Any, kind: Any, mask: Any, other: Any = None) -> Any:
    """Vector at an address where the mask is set, `other` (or 0) elsewhere; nothing else is read."""
    other = ir.Constant(kind, None) if other is None else other
    args = [pointer(builder, address, kind), ir.Constant(I32, 1), mask, other]
    return call_intrinsic(builder, f"llvm.masked.load.{mangled(kind)}.p0", kind, args)


def masked_store(builder: Any, address: Any, vector: Any, mask: Any) -> None:
    """Write the lanes of a vector where the mask is set."""
    args = [vector, pointer(builder, address, vector.type), ir.Constant(I32, 1), mask]
    call_intrinsic(builder, f"llvm.masked.store.{mangled(vector.type)}.p0", ir.VoidType(), args)


def gathered(builder: Any, address: Any, step: Any, count: Any, kind: Any) -> Any:
    """Vector of `count` numbers that lie `step` bytes apart, 0 in the other lanes; nothing else is read."""
    n = kind.count
    offsets = builder.mul(splatted(builder, step, n), ir.Constant(ir.VectorType(I64, n), list(range(n))))
    places = builder.add(splatted(builder, address, n), offsets)
    places = builder.inttoptr(places, ir.VectorType(kind.element.as_pointer(), n))
    args = [places, I32(1), first_lanes(builder, count, n), ir.Constant(kind, None)]
    return call_intrinsic(builder, f"llvm.masked.gather.{mangled(kind)}.v{n}p0", kind, args)


def plain_load(builder: Any, address: Any, kind: Any) -> Any:
    """Value or vector at any address."""
    return builder.load(pointer(builder, address, kind), typ=kind, align=1)


def plain_store(builder: Any, address: Any, value: Any) -> None:
    """Write a value or vector to any address."""
    builder.store(value, pointer(builder, address, value.type), align=1)


def prefetch(builder: Any, address: Any, write: bool) -> None:
    """Ask for a cache line, to be read or written; an address of no memory does nothing."""
    to = pointer(builder, address, ir.IntType(8))
    numbers = [I32(int(write)), I32(3), I32(1)]  # of most use again; data, not code
    call_intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), [to, *numbers])


def entry_of(builder: Any, table: Any, index: Any) -> Any:
    """Number of an int64 table at an address."""
    return plain_load(builder, builder.add(table, builder.mul(index, constant(8))), I64)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c: one instruction where the CPU has it (fmuladd, which unlike fma is no function call elsewhere)."""
    if isinstance(a.type.element, ir.IntType):
        return builder.add(builder.mul(a, b), c)
    return call_intrinsic(builder, f"llvm.fmuladd.{mangled(a.type)}", a.type, [a, b, c])
