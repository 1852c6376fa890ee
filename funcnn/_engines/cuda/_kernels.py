"""From a plan's numbers to compiled kernels and their arguments: the generated preamble, tiles, strides, launches.

The CUDA sources beside this module are plain text that begins with what `preamble` generates: what gives code its shape, as
types, windows and the tile of a thread. Sizes, strides and other numbers are arguments, so that inits share what is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from funcnn._engines import _gpu
from funcnn._engines._gpu import Array
from funcnn._engines._order import LAST, allocate, memory_order, strides_of
from funcnn._spec import HALF_DTYPES, REAL_OF_COMPLEX, Axis, ceil_div

__all__ = [
    "BLOCK",
    "C_TYPES",
    "INDEX_LIMIT",
    "ITEMSIZE",
    "PROGRAMS",
    "WORD",
    "Launch",
    "Tiling",
    "View",
    "aligned",
    "axis_sizes",
    "by_value",
    "compiled",
    "dense_view",
    "divisors",
    "dtype_types",
    "empty_in_order",
    "indices",
    "lanes_of",
    "prepared",
    "reach",
    "readable",
    "view_of",
    "wide",
    "window_rows",
]

BLOCK = 256  # threads; without shared memory or barriers any multiple of 32 up to 512 fills a multiprocessor as well
WORD = 16  # bytes of the largest load or store of a thread
# Numbers of elements, and distances between them, from which on 32 bits do not hold them. Below it a grid's last block
# may still count beyond its items.
INDEX_LIMIT = 2**31 - BLOCK

# ---- sources ---------------------------------------------------------------------------------------------------------

# Files of each program, in order, and its kernels.
_CELLS = ("common.cuh", "windows.cuh", "cells.cuh")
_COVERS = ("common.cuh", "windows.cuh", "covers.cuh")
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "max_pool": ((*_CELLS, "max_pool.cu"), ("max_pool", "max_pool_train")),
    "max_pool_backward": ((*_COVERS, "max_pool_backward.cu"), ("max_pool_backward",)),
    "avg_pool": ((*_CELLS, "mean.cuh", "avg_pool.cu"), ("avg_pool",)),
    "avg_pool_backward": ((*_COVERS, "mean.cuh", "avg_pool_backward.cu"), ("avg_pool_backward",)),
    "dropout": (("common.cuh", "dropout.cu"), ("dropout", "dropout_backward")),
    "columns": (("common.cuh", "windows.cuh", "columns.cuh", "columns.cu"), ("columns",)),
    "fold": (("common.cuh", "windows.cuh", "columns.cuh", "fold.cu"), ("fold",)),
}

C_TYPES = {
    "bool": "unsigned char",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}
ITEMSIZE = {name: 2 if name in HALF_DTYPES else np.dtype(name).itemsize for name in C_TYPES}
_HALF = {
    "float16": ("cuda_fp16.h", "__half2float", "__float2half_rn"),
    "bfloat16": ("cuda_bf16.h", "__bfloat162float", "__float2bfloat16_rn"),
}

Constants = Mapping[str, Any]


def wide(dtype: str) -> str:
    """The dtype of sums: half floats are summed in float32 and rounded once."""
    return "float32" if dtype in HALF_DTYPES else dtype


def dtype_types(dtype: str, wide_dtype: str | None = None) -> dict[str, str]:
    """Types T, Wide and Real of a dtype of arrays and one of sums, and the conversions between the first two."""
    wide_dtype = wide_dtype or wide(dtype)
    types = {
        "T": C_TYPES[dtype],
        "Wide": C_TYPES[wide_dtype],
        "Real": C_TYPES[REAL_OF_COMPLEX.get(wide_dtype, wide_dtype)],
    }
    if dtype in _HALF:
        header, widen, narrow = _HALF[dtype]
        return {**types, "#include": header, "WIDEN(v)": f"{widen}(v)", "NARROW(v)": f"{narrow}(v)"}
    return {**types, "WIDEN(v)": "Wide(v)", "NARROW(v)": "T(v)"}


def window_rows(axes: tuple[Axis, ...]) -> str:
    """Initializers of the kernels' `struct Window`; one is guarded if it reads padding or beyond it."""
    guarded = (a.lo > 0 or a.end > a.size for a in axes)
    return ", ".join(f"{{{a.kernel}, {a.stride}, {a.dilation}, {int(g)}}}" for a, g in zip(axes, guarded, strict=True))


def preamble(types: Constants, constants: Constants, big: bool) -> str:
    """The text before a source. Constants: bool, int, or text, which becomes a macro."""
    lines = [f"#include <{types['#include']}>"] if "#include" in types else []
    lines += ["template <class R> struct Complex;"]
    lines += [
        f"using Index = {'long long' if big else 'int'};",
        f"using Count = unsigned {'long long' if big else 'int'};",
    ]
    for name, text in types.items():
        if name != "#include":
            lines.append(f"#define {name} {text}" if "(" in name else f"using {name} = {text};")
    return "\n".join([*lines, *(_constant(name, value) for name, value in constants.items()), ""])


def _constant(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"#define {name} {value}"
    if isinstance(value, bool):
        return f"[[maybe_unused]] constexpr bool {name} = {str(value).lower()};"
    return f"[[maybe_unused]] constexpr int {name} = {value};"


@cache
def _text(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text()


def source(program: str, types: Constants, constants: Constants, big: bool) -> str:
    """The whole text of a program."""
    return "\n".join([preamble(types, constants, big), *map(_text, PROGRAMS[program][0])])


@lru_cache(1024)
def _compiled(program: str, text: str) -> dict[str, _gpu.Kernel]:
    return _gpu.compile_kernels(text, PROGRAMS[program][1])


def compiled(program: str, types: Constants, constants: Constants, big: bool) -> dict[str, _gpu.Kernel]:
    """The kernels of a program by name."""
    return _compiled(program, source(program, types, constants, big))


# ---- arguments -------------------------------------------------------------------------------------------------------


def by_value(*members: Any) -> Any:
    """A C struct: its members in order, aligned as C aligns them."""
    values = [np.asarray(member) for member in members]
    struct = np.zeros((), np.dtype([("", value.dtype, value.shape) for value in values], align=True))
    for name, value in zip(struct.dtype.names or (), values, strict=True):
        struct[name] = value
    return struct


def indices(numbers: Sequence[int], big: bool) -> Any:
    """Members of the kernels' type Index."""
    return np.array(numbers, np.int64 if big else np.int32)


def divisors(numbers: Sequence[int], big: bool) -> Any:
    """Members of the kernels' `struct Divisor`: the multiplier is 2**(31 + shift) / number, rounded up, of 32 bits."""
    shifts = [0 if big else (number - 1).bit_length() for number in numbers]
    rows = [(n, 0 if big else ceil_div(1 << 31 + s, n), s) for n, s in zip(numbers, shifts, strict=True)]
    count = np.uint64 if big else np.uint32
    return np.array(rows, np.dtype([("", count), ("", np.uint32), ("", np.uint32)], align=True))


def axis_sizes(axes: tuple[Axis, ...], count_padding: bool = False) -> Any:
    """Members of the kernels' `struct Axis`; `count_padding`: the divisor of an average counts the declared padding."""
    counted = [(-a.lo, a.size + a.hi) if count_padding else (0, a.size) for a in axes]
    return np.array([(a.size, a.lo, a.out, *ends) for a, ends in zip(axes, counted, strict=True)], np.int32)


# ---- tiles -----------------------------------------------------------------------------------------------------------


class Tiling(NamedTuple):
    """How the cells of an output (N, C, *cells) in a memory order are dealt out: `tile` of the last axis times `lanes`
    channels to each thread. Only one of the two is more than 1 on the contiguous axis of memory, where it makes a word.
    """

    order: str
    channels: int
    cells: tuple[int, ...]
    lanes: int
    tile: int

    @property
    def constants(self) -> dict[str, Any]:
        """What is compiled for the tiles."""
        last = self.order == LAST
        return {"RANK": len(self.cells), "CHANNELS_LAST": last, "LANES": self.lanes, "TILE": self.tile}

    def sizes(self, big: bool) -> Any:
        """The kernels' `struct Tiles`."""
        *outer, last = self.cells
        counts = (self.channels // self.lanes, *outer, last // self.tile)
        return by_value(indices((self.channels, math.prod(self.cells)), big), divisors(counts, big))

    def items(self, n: int) -> int:
        """Threads for a batch of n."""
        return n * self.channels * math.prod(self.cells) // (self.lanes * self.tile)


def lanes_of(size: int, most: int) -> int:
    """The largest power of 2 up to `most` that divides a size."""
    return math.gcd(size, 1 << (most.bit_length() - 1)) if most > 0 else 1


# ---- arrays ----------------------------------------------------------------------------------------------------------


def empty_in_order(shape: tuple[int, ...], dtype: Any, order: str) -> Array:
    """A new array of a channels-first shape in a memory order."""
    return allocate(_gpu.empty, shape, np.dtype(dtype), order)


def readable(x: Array, layout: str) -> Array:
    """x, or a copy where kernels cannot step through it: strides that are no whole number of elements."""
    if all(s % x.itemsize == 0 for s in x.strides) and x.data.ptr % x.itemsize == 0:
        return x
    copy = empty_in_order(x.shape, x.dtype, memory_order(x, layout))
    copy[...] = x
    return copy


class View(NamedTuple):
    """What a launch depends on of an array: element strides, address modulo a word, bytes of an element."""

    strides: tuple[int, ...]
    phase: int
    itemsize: int


def view_of(x: Array) -> View:
    """The view of an array."""
    return View(strides_of(x), x.data.ptr % WORD, x.itemsize)


def dense_view(shape: tuple[int, ...], itemsize: int, order: str) -> View:
    """The view of a new array of a channels-first shape in a memory order."""
    _, c, *cells = shape
    inner = [math.prod(cells[axis + 1 :]) for axis in range(len(cells))]
    count = math.prod(cells)
    if order == LAST:
        return View((count * c, 1, *(c * step for step in inner)), 0, itemsize)
    return View((count * c, count, *inner), 0, itemsize)


def aligned(view: View, axis: int, count: int) -> bool:
    """Whether every `count` neighbours on an axis, from a multiple of `count` on, are one aligned word of memory."""
    others = (*view.strides[:axis], *view.strides[axis + 1 :])
    word = min(count * view.itemsize, WORD)
    return view.strides[axis] == 1 and view.phase % word == 0 and all(s * view.itemsize % word == 0 for s in others)


def reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the farthest one that strides reach."""
    return sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True) if n)


# ---- launches --------------------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """Kernels and what they are called with, but for the arrays."""

    kernels: dict[str, _gpu.Kernel]
    grid: tuple[int, ...]
    args: Any  # the kernels' `struct Args`, by value

    def __call__(self, name: str, *arrays: Array) -> None:
        _gpu.launch(self.kernels[name], self.grid, (BLOCK,), (*arrays, self.args))


def prepared(
    program: str,
    types: Constants,
    constants: Constants,
    members: tuple[Any, ...],
    tiling: Tiling,
    n: int,
    views: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
) -> Launch:
    """A launch over a tiling for a batch of n; `views` are (shape, element strides) of the arrays that are read.

    A program's `struct Args` has the number of items, the tiling, what `members` are, and the strides.
    """
    items = tiling.items(n)
    big = max(items * tiling.lanes * tiling.tile, *(reach(*view) for view in views)) >= INDEX_LIMIT
    kernels = compiled(program, types, {**tiling.constants, **constants}, big)
    strides = (indices(s, big) for _, s in views)
    args = by_value(indices((items,), big), tiling.sizes(big), *members, *strides)
    return Launch(kernels, (ceil_div(items, BLOCK),), args)
