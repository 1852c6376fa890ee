"""Vector code for kernels: LLVM vectors as a Numba type, and memory reached by integer addresses.

Numba has no SIMD types. `Vector` gives it one: numbers that fill a register. The functions below are Numba intrinsics, to be
called in kernels on addresses (int64, in bytes) and vectors. Kernels never see NumPy arrays: each memory order, read-only
flag or byte order would be one more type to compile for.

`code` and `lanes` must be literal integers: `CODES` has the codes of dtypes, `lanes_of` the lanes of a register.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model
from numba.np.arrayobj import populate_array

from funcnn._engines.jit._host import (
    CODES,
    NAMES,
    bits,
)
from funcnn._engines.jit._ir import (
    I1,
    I32,
    I64,
    call_intrinsic,
    constant,
    element,
    first_lanes,
    gathered,
    is_float,
    mangled,
    masked_load,
    masked_store,
    multiply_add,
    plain_load,
    plain_store,
    pointer,
    splatted,
)

__all__ = [
    "add",
    "address",
    "beats",
    "bytes_of",
    "copy",
    "divide",
    "equal",
    "even",
    "every_lane",
    "exclusive_or",
    "fill_zero",
    "fma",
    "gather",
    "greater",
    "item_in",
    "joined",
    "lanes_in",
    "lanes_ramp",
    "load",
    "load_between",
    "load_even",
    "load_first",
    "load_like",
    "load_strided",
    "load_where",
    "lowest_like",
    "mask_like",
    "multiply",
    "number",
    "pairs_high",
    "pairs_low",
    "quarter",
    "read",
    "resized",
    "select",
    "shift_right",
    "splat",
    "splat_like",
    "store",
    "store_alternate",
    "store_first",
    "store_strided",
    "store_where",
    "table",
    "take",
    "transpose",
    "write",
    "zeros",
    "zeros_like",
]


class Vector(types.Type):
    """Numba type of a vector; code -> dtype, lanes."""

    def __init__(self, code: int, lanes: int) -> None:
        self.code, self.lanes = code, lanes
        super().__init__(name=f"Vector({NAMES[code]}, {lanes})")

    @property
    def llvm(self) -> Any:
        return ir.VectorType(element(self.code), self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


def scalar_type(code: int) -> Any:
    """Numba type of one number."""
    return getattr(types, NAMES[code] if NAMES[code] != "bool" else "boolean")


Emit = Callable[..., Any]


def _literals(*values: Any) -> list[int]:
    return [value.literal_value for value in values]


@intrinsic(prefer_literal=True)
def table(typingctx: Any, count: Any) -> Any:
    """An uninitialised int64 array on the stack: nobody owns it, so that its address is good until the kernel returns."""
    array = types.Array(types.int64, 1, "C")
    (n,) = _literals(count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = cgutils.alloca_once(builder, I64, size=constant(n))
        result = context.make_array(array)(context, builder)
        populate_array(result, data, [constant(n)], [constant(8)], constant(8), meminfo=None)
        return result._getvalue()

    return array(count), codegen


@intrinsic
def address(typingctx: Any, array: Any) -> Any:
    """Address of a `table`, or of an int64 array that the caller of the kernel owns."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.make_array(array)(context, builder, args[0]).data, I64)

    return types.int64(array), codegen


@intrinsic(prefer_literal=True)
def read(typingctx: Any, address: Any, code: Any) -> Any:
    """Number at an address."""
    (c,) = _literals(code)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return plain_load(builder, args[0], element(c))

    return scalar_type(c)(types.int64, code), codegen


@intrinsic(prefer_literal=True)
def write(typingctx: Any, address: Any, value: Any, code: Any) -> Any:
    """Write a number to an address."""
    (c,) = _literals(code)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        plain_store(builder, args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.int64, scalar_type(c), code), codegen


@intrinsic(prefer_literal=True)
def load(typingctx: Any, address: Any, code: Any, lanes: Any) -> Any:
    """Vector at an address."""
    kind = Vector(*_literals(code, lanes))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return plain_load(builder, args[0], kind.llvm)

    return kind(types.int64, code, lanes), codegen


@intrinsic(prefer_literal=True)
def load_first(typingctx: Any, address: Any, count: Any, code: Any, lanes: Any) -> Any:
    """Vector of the first `count` numbers at an address, 0 beyond; nothing beyond is read."""
    kind = Vector(*_literals(code, lanes))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return masked_load(builder, args[0], kind.llvm, first_lanes(builder, args[1], kind.lanes))

    return kind(types.int64, types.int64, code, lanes), codegen


@intrinsic
def load_between(typingctx: Any, address: Any, first: Any, last: Any, other: Any) -> Any:
    """Lanes first .. last of the vector at an address, the others of a vector; nothing else is read."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, first, last, vector = args
        mask = builder.and_(
            first_lanes(builder, last, other.lanes), builder.not_(first_lanes(builder, first, other.lanes))
        )
        return masked_load(builder, address, other.llvm, mask, vector)

    return other(types.int64, types.int64, types.int64, other), codegen


@intrinsic(prefer_literal=True)
def gather(typingctx: Any, address: Any, step: Any, count: Any, code: Any, lanes: Any) -> Any:
    """`count` numbers that lie `step` bytes apart, 0 in the other lanes; nothing else is read."""
    kind = Vector(*_literals(code, lanes))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, step, count = args[:3]
        return gathered(builder, address, step, count, kind.llvm)

    return kind(types.int64, types.int64, types.int64, code, lanes), codegen


@intrinsic(prefer_literal=True)
def load_even(typingctx: Any, address: Any, code: Any, lanes: Any) -> Any:
    """Every second number from an address: reads up to the last one wanted."""
    kind = Vector(*_literals(code, lanes))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        n, half = kind.lanes, kind.lanes // 2
        low = plain_load(builder, args[0], kind.llvm)
        # The second half starts one number early, so that the number after the last wanted one is not read.
        step = constant(n * bits(kind.code) // 8 - bits(kind.code) // 8)
        high = plain_load(builder, builder.add(args[0], step), kind.llvm)
        picks = [2 * i for i in range(half)] + [n + 2 * i + 1 for i in range(n - half)]
        return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, n), picks))

    return kind(types.int64, code, lanes), codegen


@intrinsic
def store(typingctx: Any, address: Any, vector: Any) -> Any:
    """Write a vector to an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        plain_store(builder, *args)
        return context.get_dummy_value()

    return types.void(types.int64, vector), codegen


@intrinsic
def store_first(typingctx: Any, address: Any, vector: Any, count: Any) -> Any:
    """Write the first `count` numbers of a vector to an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        masked_store(builder, args[0], args[1], first_lanes(builder, args[2], vector.lanes))
        return context.get_dummy_value()

    return types.void(types.int64, vector, types.int64), codegen


@intrinsic(prefer_literal=True)
def splat(typingctx: Any, value: Any, code: Any, lanes: Any) -> Any:
    """A number in every lane."""
    kind = Vector(*_literals(code, lanes))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splatted(builder, args[0], kind.lanes)

    return kind(scalar_type(kind.code), code, lanes), codegen


@intrinsic
def copy(typingctx: Any, to: Any, start: Any, size: Any) -> Any:
    """Copy `size` bytes between places that do not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, start = (pointer(builder, address, ir.IntType(8)) for address in args[:2])
        cgutils.raw_memcpy(builder, to, start, args[2], constant(1))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def fill_zero(typingctx: Any, to: Any, size: Any) -> Any:
    """Write `size` bytes of 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.memset(builder, pointer(builder, args[0], ir.IntType(8)), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def transpose(typingctx: Any, to: Any, to_step: Any, start: Any, step: Any, code: Any, lanes: Any) -> Any:
    """Write a square of `lanes` x `lanes` numbers transposed; its rows lie `step` bytes apart, those written `to_step`."""
    kind = Vector(*_literals(code, lanes))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, to_step, start, step = args[:4]
        n = kind.lanes
        rows = [plain_load(builder, builder.add(start, builder.mul(step, constant(i))), kind.llvm) for i in range(n)]
        distance = n // 2
        while distance:  # swap the off-diagonal squares of each pair of rows, from large to small
            low = [j if not j & distance else n + j - distance for j in range(n)]
            high = [j + distance if not j & distance else n + j for j in range(n)]
            for i in range(n):
                if not i & distance:
                    pair = rows[i], rows[i + distance]
                    for row, picks in ((i, low), (i + distance, high)):
                        rows[row] = builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(I32, n), picks))
            distance //= 2
        for i, row in enumerate(rows):
            plain_store(builder, builder.add(to, builder.mul(to_step, constant(i))), row)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4, code, lanes), codegen


def _elementwise(emit: Callable[[Any, Vector, Any], Any], count: int, mask: bool = False) -> Any:
    """An intrinsic of `count` vectors of one type; the result is of that type, or a mask."""

    def typed(vector: Vector) -> tuple[Any, Any]:
        result = Vector(CODES["bool"], vector.lanes) if mask else vector

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, vector, args)

        return result(*(vector,) * count), codegen

    if count == 2:
        return intrinsic(lambda typingctx, a, b: typed(a))
    return intrinsic(lambda typingctx, a, b, c: typed(a))


def _add(builder: Any, kind: Vector, args: Any) -> Any:
    return (builder.fadd if is_float(kind.code) else builder.add)(*args)


def _multiply(builder: Any, kind: Vector, args: Any) -> Any:
    return (builder.fmul if is_float(kind.code) else builder.mul)(*args)


def _greater(builder: Any, kind: Vector, args: Any) -> Any:
    if is_float(kind.code):
        return builder.fcmp_ordered(">", *args)
    compare = builder.icmp_unsigned if NAMES[kind.code].startswith(("uint", "bool")) else builder.icmp_signed
    return compare(">", *args)


add = _elementwise(_add, 2)
multiply = _elementwise(_multiply, 2)
fma = _elementwise(lambda builder, kind, args: multiply_add(builder, *args), 3)
greater = _elementwise(_greater, 2, mask=True)


# ---- for kernels whose functions get dtype and lanes from a vector, so that they need no literals ---------------------


def bytes_of(code: int) -> int:
    """Bytes of one number."""
    return bits(code) // 8


def _of_type(value: Callable[[Vector], int]) -> Any:
    """An intrinsic: an int64 constant that the type of a vector tells."""

    @intrinsic
    def of_type(typingctx: Any, like: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return constant(value(like))

        return types.int64(like), codegen

    return of_type


lanes_in = _of_type(lambda kind: kind.lanes)
item_in = _of_type(lambda kind: bytes_of(kind.code))
every_lane = _of_type(lambda kind: (1 << kind.lanes) - 1 if kind.lanes < 64 else -1)  # as a word of `lane_mask`


@intrinsic
def take(typingctx: Any, counter: Any) -> Any:
    """The int64 at an address, which is raised by 1: no two threads get the same."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), constant(1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def number(typingctx: Any, table: Any, index: Any) -> Any:
    """Number of an int64 table by its address; indexing an array would cost a check for negative indices."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return plain_load(builder, builder.add(args[0], builder.mul(args[1], constant(8))), I64)

    return types.int64(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def zeros(typingctx: Any, code: Any, lanes: Any) -> Any:
    """Zero in every lane."""
    kind = Vector(*_literals(code, lanes))
    return kind(code, lanes), lambda context, builder, signature, args: ir.Constant(kind.llvm, None)


@intrinsic(prefer_literal=True)
def zeros_like(typingctx: Any, like: Any, code: Any) -> Any:
    """Zero in as many lanes as another vector has."""
    (c,) = _literals(code)
    kind = Vector(c, like.lanes)
    return kind(like, code), lambda context, builder, signature, args: ir.Constant(kind.llvm, None)


@intrinsic
def lowest_like(typingctx: Any, like: Any) -> Any:
    """The least number of a vector's dtype (-inf of floats) in every lane."""
    number = element(like.code)
    if is_float(like.code):
        least = ir.Constant(number, float("-inf"))
    else:
        least = ir.Constant(number, -(1 << (number.width - 1)) if NAMES[like.code].startswith("int") else 0)
    return like(like), lambda context, builder, signature, args: splatted(builder, least, like.lanes)


@intrinsic
def splat_like(typingctx: Any, value: Any, like: Any) -> Any:
    """An int64, converted to a vector's dtype, in every lane."""
    number = element(like.code)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if is_float(like.code):
            value = builder.sitofp(args[0], number)
        else:
            value = args[0] if number.width == 64 else builder.trunc(args[0], number)
        return splatted(builder, value, like.lanes)

    return like(types.int64, like), codegen


@intrinsic
def lanes_ramp(typingctx: Any, like: Any) -> Any:
    """0, 1, 2, ... in a vector of integers like another one."""
    return like(like), lambda context, builder, signature, args: ir.Constant(like.llvm, list(range(like.lanes)))


@intrinsic
def load_like(typingctx: Any, address: Any, like: Any) -> Any:
    """A vector at an address, of another one's type."""
    return like(types.int64, like), lambda context, builder, signature, args: plain_load(builder, args[0], like.llvm)


@intrinsic
def mask_like(typingctx: Any, word: Any, like: Any) -> Any:
    """Mask for a vector from the lowest bits of an int64, one a lane."""
    kind = Vector(CODES["bool"], like.lanes)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = args[0] if kind.lanes == 64 else builder.trunc(args[0], ir.IntType(kind.lanes))
        return builder.bitcast(word, kind.llvm)

    return kind(types.int64, like), codegen


@intrinsic
def load_where(typingctx: Any, address: Any, mask: Any, other: Any) -> Any:
    """Vector at an address where the mask is set, of `other` elsewhere; nothing else is read."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = other.llvm
        values = [pointer(builder, args[0], kind), ir.Constant(I32, 1), args[1], args[2]]
        return call_intrinsic(builder, f"llvm.masked.load.{mangled(kind)}.p0", kind, values)

    return other(types.int64, mask, other), codegen


@intrinsic
def store_where(typingctx: Any, address: Any, vector: Any, mask: Any) -> Any:
    """Write the lanes of a vector where the mask is set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        masked_store(builder, *args)
        return context.get_dummy_value()

    return types.void(types.int64, vector, mask), codegen


@intrinsic
def select(typingctx: Any, mask: Any, a: Any, b: Any) -> Any:
    """Lanes of a where the mask is set, else of b."""
    return a(mask, a, b), lambda context, builder, signature, args: builder.select(*args)


@intrinsic
def resized(typingctx: Any, vector: Any, like: Any) -> Any:
    """A vector of integers in another integer dtype: cut, or extended by zeros."""
    old, new = bits(vector.code), bits(like.code)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if old == new:
            return args[0]
        return (builder.trunc if new < old else builder.zext)(args[0], like.llvm)

    return like(vector, like), codegen


def _apart(builder: Any, name: str, kinds: list[Any], body: Callable[[Any, list[Any]], None]) -> Any:
    """A function of its own in the module: what it holds in registers costs its caller nothing as long as it is not called."""
    module = builder.module
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    inner = ir.IRBuilder(function.append_basic_block())
    body(inner, list(function.args))
    inner.ret_void()
    return function


def _spill(builder: Any, kind: Any) -> tuple[Any, Any]:
    """Room for a vector on the stack: its pointer and address."""
    place = cgutils.alloca_once(builder, kind)
    return place, builder.ptrtoint(place, I64)


@intrinsic
def load_strided(typingctx: Any, address: Any, step: Any, word: Any, other: Any) -> Any:
    """Numbers `step` bytes apart in the lanes whose bit in a word is set, of `other` elsewhere; nothing else is read."""
    number, size = element(other.code), bytes_of(other.code)

    def body(builder: Any, args: list[Any]) -> None:
        to, start, step, word = args
        with cgutils.for_range(builder, constant(other.lanes)) as loop:
            bit = builder.trunc(builder.lshr(word, loop.index), I1)
            with builder.if_then(bit):
                value = plain_load(builder, builder.add(start, builder.mul(loop.index, step)), number)
                plain_store(builder, builder.add(to, builder.mul(loop.index, constant(size))), value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = _apart(builder, f"load_strided_{mangled(other.llvm)}", [I64] * 4, body)
        place, to = _spill(builder, other.llvm)
        builder.store(args[3], place)
        builder.call(function, [to, *args[:3]])
        return builder.load(place)

    return other(types.int64, types.int64, types.int64, other), codegen


@intrinsic
def store_strided(typingctx: Any, address: Any, step: Any, vector: Any, count: Any) -> Any:
    """Write the first `count` numbers, up to all, `step` bytes apart."""
    number, size = element(vector.code), bytes_of(vector.code)

    def body(builder: Any, args: list[Any]) -> None:
        to, step, start, count = args
        with cgutils.for_range(builder, count) as loop:
            value = plain_load(builder, builder.add(start, builder.mul(loop.index, constant(size))), number)
            plain_store(builder, builder.add(to, builder.mul(loop.index, step)), value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = _apart(builder, f"store_strided_{mangled(vector.llvm)}", [I64] * 4, body)
        place, start = _spill(builder, vector.llvm)
        builder.store(args[2], place)
        lanes = constant(vector.lanes)
        count = builder.select(builder.icmp_signed("<", args[3], lanes), args[3], lanes)
        builder.call(function, [args[0], args[1], start, count])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, vector, types.int64), codegen


def _shuffled(picks: Callable[[int], list[int]]) -> Any:
    """An intrinsic: a vector of lanes picked from two, those of the second counted on from the first's."""

    @intrinsic
    def shuffle(typingctx: Any, low: Any, high: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.shuffle_vector(*args, ir.Constant(ir.VectorType(I32, low.lanes), picks(low.lanes)))

        return low(low, low), codegen

    return shuffle


# Every second number of two vectors, where the second starts with the last number of the first (see `load_even`).
even = _shuffled(lambda n: [2 * i if 2 * i < n else 2 * i + 1 for i in range(n)])
# Numbers of two vectors in turn: the first and the second half of what that gives.
pairs_low = _shuffled(lambda n: [i // 2 + i % 2 * n for i in range(n)])
pairs_high = _shuffled(lambda n: [n // 2 + i // 2 + i % 2 * n for i in range(n)])


@intrinsic
def joined(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four vectors as one."""
    result = Vector(a.code, 4 * a.lanes)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pair(low: Any, high: Any) -> Any:
            lanes = 2 * low.type.count
            return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, lanes), list(range(lanes))))

        return pair(pair(*args[:2]), pair(*args[2:]))

    return result(a, a, a, a), codegen


@intrinsic(prefer_literal=True)
def quarter(typingctx: Any, vector: Any, index: Any) -> Any:
    """One of four equal parts of a vector."""
    (i,) = _literals(index)
    result = Vector(vector.code, vector.lanes // 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        picks = list(range(i * result.lanes, (i + 1) * result.lanes))
        return builder.shuffle_vector(args[0], args[0], ir.Constant(ir.VectorType(I32, result.lanes), picks))

    return result(vector, index), codegen


def _beats(builder: Any, kind: Vector, args: Any) -> Any:
    if not is_float(kind.code):
        return _greater(builder, kind, args)
    return builder.and_(builder.fcmp_unordered(">", *args), builder.fcmp_ordered("ord", args[1], args[1]))


def _equal(builder: Any, kind: Vector, args: Any) -> Any:
    return builder.fcmp_ordered("==", *args) if is_float(kind.code) else builder.icmp_unsigned("==", *args)


beats = _elementwise(_beats, 2, mask=True)  # a later number is larger than the best so far, or the first NaN
equal = _elementwise(_equal, 2, mask=True)
divide = _elementwise(lambda builder, kind, args: builder.fdiv(*args), 2)
exclusive_or = _elementwise(lambda builder, kind, args: builder.xor(*args), 2)
shift_right = _elementwise(lambda builder, kind, args: builder.lshr(*args), 2)


@intrinsic
def store_alternate(typingctx: Any, address: Any, vector: Any, count: Any) -> Any:
    """Write the first `count` numbers of a vector to every second place from an address."""
    lanes, never = vector.lanes, (1 << 31) - 1

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count = splatted(builder, args[2], lanes)
        for half in range(2):
            picks = [(half * lanes + i) // 2 for i in range(lanes)]
            numbers = ir.Constant(ir.VectorType(I64, lanes), [never if i % 2 else pick for i, pick in enumerate(picks)])
            spread = builder.shuffle_vector(args[1], args[1], ir.Constant(ir.VectorType(I32, lanes), picks))
            to = builder.add(args[0], constant(half * lanes * bytes_of(vector.code)))
            masked_store(builder, to, spread, builder.icmp_signed("<", numbers, count))
        return context.get_dummy_value()

    return types.void(types.int64, vector, types.int64), codegen
