"""The CUDA kernels without a GPU: NVRTC compiles every source for real, and g++ runs the same text on the CPU.

Launches are tested by themselves here, below CuPy arrays: memory with guards around it, views of any alignment and stride,
offsets past 2**31. Signed overflow, indices out of an array and loads that are not aligned end the process (`host.SANITIZE`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import math
import mmap
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference as ref
from numpy.testing import assert_array_equal

import funcnn as fn
from funcnn import _spec
from funcnn._engines import _gpu

sys.path.append(str(Path(__file__).parent / "gpu"))
import host

ORDERS = ("channels_first", "channels_last")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
GUARD = 64  # bytes on both sides of an array


# ---- engine, memory --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cuda() -> Iterator[Any]:
    """The engine's modules, with g++ in CUDA's place; taken out again unless another test had them before."""
    host.need_gpu_stack()
    name = "funcnn._engines.cuda"
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gpu, "require_cuda", lambda: "g++")
        patch.setattr(_gpu, "free_bytes", lambda: 1 << 30)
        patch.setattr(_gpu, "compile_kernels", lambda *args: host.compile_kernels(*args, host.SANITIZE))
        patch.setattr(_gpu, "launch", host.launch)
        parts = {part[1:]: importlib.import_module(f"{name}.{part}") for part in ("_kernels", "_conv")}
        engine = SimpleNamespace(PLANS=sys.modules[name].PLANS, **parts)
        forget(engine)
        yield engine
        forget(engine)
    if name not in before:
        for module in [module for module in sys.modules if module.startswith(name)]:
            del sys.modules[module]
        del importlib.import_module("funcnn._engines").cuda


def forget(engine: Any) -> None:
    """Drop all kernels that the engine has compiled."""
    for cached in (engine.kernels._compiled, engine.conv._column_launch, engine.conv._fold_launch):
        cached.cache_clear()


class Memory:
    """A NumPy array as a launch takes it, in memory of its own: guards around it, an address off by `phase` bytes."""

    def __init__(self, values: Any, order: str = "channels_first", phase: int = 0) -> None:
        values = np.asarray(values)
        laid = np.moveaxis(values, 1, -1) if order == "channels_last" else values
        self.raw = np.full(laid.nbytes + 2 * GUARD + 16, 0xA5, np.uint8)
        self.at = GUARD - self.raw.ctypes.data % 16 + phase
        self.end = self.at + laid.nbytes
        array = self.raw[self.at : self.end].view(laid.dtype).reshape(laid.shape)
        array[...] = laid
        self.array = np.moveaxis(array, -1, 1) if order == "channels_last" else array

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.array.ctypes.data)

    def values(self) -> Any:
        """The array, after a look at the guards."""
        assert (self.raw[: self.at] == 0xA5).all(), "written before the array"
        assert (self.raw[self.end :] == 0xA5).all(), "written behind the array"
        return self.array


class Part:
    """A view of some memory as a launch takes it."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.data = SimpleNamespace(ptr=array.ctypes.data)


class Far(Part):
    """An array of which few pages are ever touched: its images lie `step` elements apart."""

    def __init__(self, shape: tuple[int, ...], dtype: str, step: int) -> None:
        item = np.dtype(dtype).itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        count = (shape[0] - 1) * step + math.prod(shape[1:])
        raw = np.frombuffer(mmap.mmap(-1, count * item, flags=flags), np.uint8)
        inner = [item * math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
        super().__init__(np.ndarray(shape, dtype, buffer=raw.data, strides=(step * item, *inner)))


def garbage(shape: tuple[int, ...], dtype: str, order: str) -> Memory:
    """Memory for a result."""
    memory = Memory(np.zeros(shape, dtype), order)
    memory.raw[memory.at : memory.end] = 0x5A
    return memory


def view(cuda: Any, memory: Any) -> Any:
    """What a launch depends on of an array."""
    array = memory.array
    return cuda.kernels.View(tuple(s // array.itemsize for s in array.strides), array.ctypes.data % 16, array.itemsize)


def plan_of(cuda: Any, spec: Any, order: str = "channels_first") -> Any:
    """The plan whose init compiles for a memory order."""
    return cuda.PLANS[type(spec)](dataclasses.replace(spec, layout=order), fn.Options(), "cupy", None, 1)


def pool_spec(op: str, shape: tuple[int, ...], kernel: tuple[int, ...], dtype: str, **options: Any) -> Any:
    """The Spec of a pool of channels-first x."""
    options = {
        "kernel_size": kernel, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False,
        "layout": "channels_first", **options,
    }  # fmt: skip
    if op == "max_pool":
        return _spec.max_pool_spec("test", shape, dtype, ("uint8", "uint16"), **options)
    return _spec.avg_pool_spec("test", shape, dtype, **{"count_include_pad": True, **options})


def conv_spec(shape: tuple[int, ...], weight: tuple[int, ...], dtype: str, **options: Any) -> Any:
    """The Spec of a convolution of channels-first x."""
    options = {
        "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "flip": False, "layout": "channels_first", **options,
    }  # fmt: skip
    return _spec.conv_spec("test", shape, weight, dtype, dtype, "int64", **options)


def dropout_spec(shape: tuple[int, ...], dtype: str, rate: float = 0.25, seed: int = 2**40 + 3) -> Any:
    return _spec.dropout_spec("test", shape, dtype, rate=rate, seed=seed, layout="channels_first")


def digits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Whole numbers -4 .. 4, or 0 .. 8, with many ties."""
    low = 0 if np.dtype(dtype).kind in "ub" else -4
    rng = np.random.default_rng(seed)
    values = rng.integers(low, low + 9, shape)
    return (values + 1j * rng.integers(low, low + 9, shape) if dtype in COMPLEX else values).astype(dtype)


def equal(got: Any, wanted: Any) -> None:
    """Same shape and values; NaN where NaN is."""
    assert got.shape == wanted.shape
    wide = "complex128" if got.dtype.kind == "c" else "float64"
    assert_array_equal(got.astype(wide), np.asarray(wanted).astype(got.dtype).astype(wide))


# ---- NVRTC -----------------------------------------------------------------------------------------------------------


@functools.cache  # some dtypes have sums, and so a source, in common
def compiled(source: str, architecture: str) -> str:
    """Compile a source to a cubin, warnings being errors: what the assembler says about registers, and the PTX."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], [])
    options = [f"-I{host.cuda_include()}", "-std=c++17", f"-arch={architecture}", "-Werror=all-warnings", "-Xptxas=-v"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    assert nvrtc.nvrtcGetCUBINSize(program)[1] > 0
    ptx = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return log.decode() + ptx.decode()


@pytest.fixture
def sources(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """(name of its first kernel, text) of every source that plans ask for in the test; nothing runs."""
    found: list[tuple[str, str]] = []

    def record(text: str, names: tuple[str, ...]) -> dict[str, None]:
        found.append((names[0], text))
        return dict.fromkeys(names)

    monkeypatch.setattr(_gpu, "compile_kernels", record)
    forget(cuda)
    yield found
    forget(cuda)


def specs_of(dtype: str) -> Iterator[Any]:
    """A Spec of each op that has the dtype: overlapping windows, padding and dilation, so that nothing is compiled away."""
    shape, windows = (1, 16, 9, 16), {"stride": 2, "padding": 1}
    if dtype not in COMPLEX:
        yield pool_spec("max_pool", shape, (3, 2), dtype, **windows)
    if dtype in FLOATS + COMPLEX:
        yield pool_spec("avg_pool", shape, (3, 2), dtype, **windows, count_include_pad=False)
        yield dropout_spec(shape, dtype)
    if dtype not in ("bool", "uint64"):
        yield conv_spec(shape, (4, 8, 3, 2), dtype, groups=2, dilation=(2, 1), **windows)


CONV_SOURCES = {"columns", "fold"}
MAX_SOURCES = {"max_pool", "max_pool_backward"}
MEAN_SOURCES = {"avg_pool", "avg_pool_backward", "dropout"}
SOURCES = {
    "bool": {"max_pool"},
    **dict.fromkeys(INTEGERS, {"max_pool"} | CONV_SOURCES),
    "uint64": {"max_pool"},
    **dict.fromkeys(FLOATS, MAX_SOURCES | MEAN_SOURCES | CONV_SOURCES),
    **dict.fromkeys(COMPLEX, MEAN_SOURCES | CONV_SOURCES),
}


@pytest.mark.parametrize("dtype", SOURCES)
def test_every_source_compiles_for_every_architecture(cuda: Any, sources: list[tuple[str, str]], dtype: str) -> None:
    for order in ORDERS:
        for spec in specs_of(dtype):
            plan_of(cuda, spec, order)
    assert sorted(name for name, _ in sources) == sorted([*SOURCES[dtype]] * 2)
    for name, source in sources:
        for architecture in ("sm_80", "sm_90", "sm_100"):
            said = compiled(source, architecture)
            assert not re.search(r"[1-9]\d* bytes spill", said), (name, said[:2000])
            assert max(map(int, re.findall(r"Used (\d+) registers", said))) <= 96, (name, said[:2000])


def test_tests_for_padding_are_compiled_away(cuda: Any, sources: list[tuple[str, str]]) -> None:
    for size, padding in ((33, 0), (34, 0), (32, 1)):
        plan_of(
            cuda, pool_spec("max_pool", (1, 16, size, 32), (3, 2), "int8", stride=2, padding=((padding, 0), (0, 0)))
        )
    assert len(sources) == 2  # 34 cells are not all read, but no window reads padding
    bare, guarded = (compiled(source, "sm_90").count("setp") for _, source in sources)
    assert bare < guarded


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_threads_move_16_bytes_at_a_time(cuda: Any, sources: list[tuple[str, str]], dtype: str, order: str) -> None:
    shape = (1, 16, 32, 32)
    for spec in (*(pool_spec(op, shape, (2, 2), dtype) for op in ("max_pool", "avg_pool")), dropout_spec(shape, dtype)):
        plan_of(cuda, spec, order)
    assert len(sources) == 5
    for name, source in sources:
        move = "st" if name.endswith("_backward") else "ld"
        assert re.search(rf"{move}\.global(\.nc)?\.v4\.[fub]32", compiled(source, "sm_90")), name


def test_inits_share_kernels(cuda: Any, sources: list[tuple[str, str]]) -> None:
    # Sizes, channels, groups, padding, rates and seeds are arguments; each row is compiled for once.
    shape, other, options = (1, 16, 9, 16), (1, 48, 30, 64), {"stride": 2, "padding": ((1, 1), (1, 1))}
    more = {**options, "padding": ((2, 1), (1, 2))}
    rows = [
        *([pool_spec(op, shape, (3, 3), "float32", **options), pool_spec(op, other, (3, 3), "float32", **more)]
          for op in ("max_pool", "avg_pool")),
        [conv_spec(shape, (4, 8, 3, 3), "float32", **options, groups=2),
         conv_spec(other, (12, 4, 3, 3), "float32", **more, groups=12)],
        [dropout_spec(shape, "float32"), dropout_spec(other, "float32", 0.5, seed=4)],
        [pool_spec("avg_pool", shape, (2, 2), "float32"),
         pool_spec("avg_pool", other, (2, 2), "float32", count_include_pad=False)],
    ]  # fmt: skip
    for order, specs in itertools.product(ORDERS, rows):
        before = len(sources)
        plan_of(cuda, specs[0], order)
        assert len(sources) > before
        before = len(sources)
        for spec in specs:
            plan = plan_of(cuda, spec, order)
            if hasattr(plan, "_forward"):
                plan._forward(5, order, cuda.kernels.dense_view((5, *spec.x_shape), 4, order))
        assert len(sources) == before, (specs, order)


def test_divisors_are_exact(cuda: Any) -> None:
    rng, top = np.random.default_rng(0), 2**31 - 1
    numbers = [*range(1, 300), top, top - 1, 2**30, 2**30 - 1, 2**30 + 1, *map(int, rng.integers(1, top, 2000))]
    for d, row in zip(numbers, cuda.kernels.divisors(numbers, False), strict=True):
        divisor, multiplier, shift = map(int, row)
        assert divisor == d
        for n in {0, 1, d - 1, d, min(2 * d - 1, top), top // d * d, top // d * d - 1, top}:
            assert (2 * n * multiplier >> 32) >> shift == n // d, (n, d)


# ---- pools -----------------------------------------------------------------------------------------------------------

# (x, kernel, options): remainders of tiles and of blocks of 256 threads, windows over padding, rank 1 to 3.
POOLS = [
    ((3, 8, 6, 8), (2, 2), {}),
    ((2, 6, 7, 12), (3, 2), {"stride": 2, "padding": ((1, 1), (0, 1))}),
    ((2, 3, 9, 7), (2, 3), {"stride": (3, 1), "dilation": (2, 2), "padding": (1, 2), "ceil_mode": True}),
    ((1, 4, 5, 4, 6), (2, 3, 2), {"stride": (2, 1, 2), "padding": (0, 1, 1)}),
    ((5, 4, 21), (4,), {"stride": 4}),
    ((2, 4, 8), (3,), {"stride": 2, "padding": ((1, 0),)}),
    ((2, 4, 8), (3,), {"stride": 2, "padding": ((0, 1),)}),
    # By the kernels of the second one, for only sizes and amounts of padding are others.
    ((1, 10, 5, 4), (3, 2), {"stride": 2, "padding": ((1, 1), (0, 1))}),
    ((4, 2, 3, 132), (3, 2), {"stride": 2, "padding": ((2, 0), (0, 1))}),
]


def pool_forward(cuda: Any, spec: Any, x: Any, order: str, kernel: str) -> list[Any]:
    """What a kernel of a pool writes: y, and argmax."""
    n = x.array.shape[0]
    dtypes = [spec.dtype] + ([spec.argmax_dtype] if kernel == "max_pool_train" else [])
    results = [garbage((n, *spec.y_shape), dtype, order) for dtype in dtypes]
    plan_of(cuda, spec, order)._forward(n, order, view(cuda, x))(kernel, x, *results)
    return [result.values() for result in results]


def pool_backward(cuda: Any, spec: Any, order: str, *arrays: Any) -> Any:
    """Dx from dy, and argmax."""
    plan, n = plan_of(cuda, spec, order), arrays[0].array.shape[0]
    dx = garbage((n, *spec.x_shape), spec.dtype, order)
    plan._backward(n, order, *(view(cuda, array) for array in arrays))(f"{plan.name}_backward", *arrays, dx)
    return dx.values()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *zip(
            POOLS,
            ("float32", "float32", "float64", "bfloat16", "int8", *["float32"] * 4),
            strict=True,
        ),
        (POOLS[0], "float16"),
        (POOLS[0], "bool"),
    ],
)
def test_max_pool(cuda: Any, case: Any, dtype: str, order: str) -> None:
    shape, kernel, options = case
    spec = pool_spec("max_pool", shape, kernel, dtype, **options)
    x = digits(shape, dtype)
    y, argmax = ref.max_pool(x, kernel, **options)
    for phase in (0, x.itemsize):  # an aligned address, and that of an array that begins within a word
        got, winner = pool_forward(cuda, spec, Memory(x, order, phase), order, "max_pool_train")
        equal(got, y)
        equal(winner, argmax)
    equal(pool_forward(cuda, spec, Memory(x, order), order, "max_pool")[0], y)
    if dtype in FLOATS:
        dy = digits(y.shape, dtype, 3)
        wanted = ref.max_pool_backward(dy, argmax, shape[2:], kernel, **options)
        for winners in ORDERS:
            mine = Memory(argmax.astype(spec.argmax_dtype), winners)
            equal(pool_backward(cuda, spec, order, Memory(dy, order), mine), wanted)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *zip(
            POOLS,
            ("float32", "float16", "bfloat16", "float64", "complex64", *["float64"] * 2, *["float16"] * 2),
            strict=True,
        )
    ],
)
def test_avg_pool(cuda: Any, case: Any, dtype: str, order: str) -> None:
    shape, kernel, options = case
    scale = np.asarray(36, dtype)  # means are whole numbers, or exact all the same
    x = digits(shape, dtype) * scale
    for count in (True, False) if "padding" in options else (True,):
        spec = pool_spec("avg_pool", shape, kernel, dtype, count_include_pad=count, **options)
        wanted = ref.avg_pool(x, kernel, count_include_pad=count, **options)
        equal(pool_forward(cuda, spec, Memory(x, order), order, "avg_pool")[0], wanted)
        dy = digits(wanted.shape, dtype, 3) * scale
        dx = ref.avg_pool_backward(dy, shape[2:], kernel, count_include_pad=count, **options)
        equal(pool_backward(cuda, spec, order, Memory(dy, order)), dx)


@pytest.mark.parametrize("order", ORDERS)
def test_the_first_nan_wins_and_padding_never(cuda: Any, order: str) -> None:
    _, kernel, options = POOLS[1]
    x = np.full((1, 2, 5, 12), -np.inf, np.float32)
    x[0, 1, 1, 1:3] = np.nan
    x[0, 1, 2, 2:5] = np.inf
    y, argmax = ref.max_pool(x, kernel, **options)
    spec = pool_spec("max_pool", x.shape, kernel, "float32", **options)
    got, winner = pool_forward(cuda, spec, Memory(x, order), order, "max_pool_train")
    equal(got, y)
    equal(winner, argmax)
    assert (np.isnan(y).sum(), (y == np.inf).sum(), (y == -np.inf).sum()) == (4, 1, 31)


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint16"])
def test_the_lowest_integer_beats_padding(cuda: Any, dtype: str) -> None:
    x = np.full((1, 1, 2, 2), np.iinfo(dtype).min, dtype)
    spec = pool_spec("max_pool", x.shape, (2, 2), dtype, padding=1)
    y, argmax = pool_forward(cuda, spec, Memory(x), "channels_first", "max_pool_train")
    equal(y, x)
    equal(argmax, np.asarray([[[[3, 2], [1, 0]]]]))


def test_any_strides_are_read(cuda: Any) -> None:
    spec = pool_spec("max_pool", (2, 4, 6, 8), (2, 2), "float32")
    whole = Memory(digits((4, 8, 12, 16), "float32")).array
    parts = [whole[::2, ::2, ::2, ::2], whole[1::-1, 3::-1, 5::-1, 7::-1], whole[:2, :4, :6, :8]]
    for part in (*parts, np.broadcast_to(whole[0, 0, 0, :8], (2, 4, 6, 8))):
        (y,) = pool_forward(cuda, spec, Part(part), "channels_first", "max_pool")
        equal(y, ref.max_pool(part, (2, 2))[0])


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("shape", "dtype", "rate"),
    [
        ((3, 8, 4, 6), "float32", 0.25),
        ((2, 16, 3, 7), "float32", 0.7),
        ((2, 8, 5, 3), "float16", 0.25),
        ((2, 3, 5), "complex64", 0.5),
        ((5, 4, 16), "bfloat16", 0.25),
    ],
)
def test_dropout(cuda: Any, shape: tuple[int, ...], dtype: str, rate: float, order: str) -> None:
    x = digits(shape, dtype) * np.asarray(3, dtype)
    x.flat[:2] = np.inf, np.nan
    spec, step = dropout_spec(shape, dtype, rate, seed=shape[0] << 40), 7
    plan, mask = plan_of(cuda, spec, order), ref.dropout_mask(shape, spec.rate, spec.seed, step)
    wide = x.astype("complex128" if dtype in COMPLEX else "float64")
    wanted = np.zeros_like(wide)
    wanted[mask] = (wide[mask].view(np.float64) * (1 / (1 - rate))).view(wide.dtype)
    count = Memory(np.asarray(step, np.int32))
    for phase in (0, x.itemsize):
        source = Memory(x, order, phase)
        y, drawn = garbage(shape, dtype, order), garbage(shape, "bool", order)
        plan._launch(shape, order, view(cuda, source))("dropout", source, count, y, drawn)
        equal(drawn.values(), mask)
        equal(y.values(), wanted)
    source = Memory(x, order)
    for masks in ORDERS:
        dx, given = garbage(shape, dtype, order), Memory(mask, masks)
        plan._launch(shape, order, view(cuda, source), view(cuda, given))("dropout_backward", source, given, dx)
        equal(dx.values(), wanted)


# ---- columns ---------------------------------------------------------------------------------------------------------

CONVS = [
    (
        (2, 8, 5, 6), (4, 4, 3, 2),
        {"groups": 2, "stride": (2, 1), "dilation": (1, 2), "padding": ((1, 1), (0, 2)), "flip": True},
    ),
    ((2, 3, 17), (2, 3, 3), {"stride": 2, "padding": 1}),
    # By the kernels of the first one.
    (
        (3, 16, 4, 9), (8, 4, 3, 2),
        {"groups": 4, "stride": (2, 1), "dilation": (1, 2), "padding": ((1, 1), (0, 1)), "flip": True},
    ),
]  # fmt: skip


def columns_of(x: Any, spec: Any) -> Any:
    """All windows of x as (N, C, taps, pixels), by the definition."""
    windows = np.zeros((*x.shape[:2], spec.taps, math.prod(a.out for a in spec.axes)), x.dtype)
    for t, taps in enumerate(itertools.product(*(range(k) for k in spec.kernel))):
        for p, outs in enumerate(itertools.product(*(range(a.out) for a in spec.axes))):
            cell = [a.start(tap) + o * a.stride for a, tap, o in zip(spec.axes, taps, outs, strict=True)]
            if all(0 <= c < a.size for c, a in zip(cell, spec.axes, strict=True)):
                windows[:, :, spec.taps - 1 - t if spec.flip else t, p] = x[(slice(None), slice(None), *cell)]
    return windows


def folded(columns: Any, spec: Any) -> Any:
    """The adjoint of `columns_of`: a cell gets the sum of what the columns have where they show it."""
    sizes = [a.size for a in spec.axes]
    x = np.zeros((*columns.shape[:2], *sizes), columns.dtype)
    for cell in np.ndindex(*sizes):
        one = np.zeros((1, 1, *sizes), columns.dtype)
        one[(0, 0, *cell)] = 1
        x[(slice(None), slice(None), *cell)] = (columns_of(one, spec) * columns).sum(axis=(2, 3))
    return x


def column_memory(spec: Any, sums: str, block: Any, order: str) -> tuple[Memory, tuple[int, int, int, int]]:
    """Memory for the columns of a block, and the strides of its matrices (B, G, K, P)."""
    images, pixels, groups, taps = block.n1 - block.n0, block.p1 - block.p0, spec.groups, spec.taps
    channels = spec.inputs // groups
    k = channels * taps
    if order == "channels_first":
        memory = garbage((images, spec.inputs, taps, pixels), sums, order)
        return memory, (groups * k * pixels if images > 1 else 0, k * pixels, pixels, 1)
    return garbage((images, pixels, groups, taps, channels), sums, "channels_first"), (0, k, 1, groups * k)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("case", "dtype"), [(CONVS[0], "float32"), (CONVS[0], "int8"), (CONVS[1], "float16"), (CONVS[2], "float32")]
)
def test_columns_and_fold(cuda: Any, case: Any, dtype: str, order: str) -> None:
    shape, weight, options = case
    spec = conv_spec(shape, weight, dtype, **options)
    sums, pixels, n = plan_of(cuda, spec, order)._sum.name, math.prod(a.out for a in spec.axes), shape[0]
    x = Memory(digits(shape, dtype), order)
    wanted = columns_of(x.array.astype(sums), spec)
    cells = garbage(shape, sums, order)
    # All images at once; then the last one again, in two parts of its pixels.
    for block in (cuda.conv.Block(*part) for part in ((0, n, 0, pixels), (n - 1, n, 0, 5), (n - 1, n, 5, pixels))):
        images = slice(block.n0, block.n1)
        to, steps = column_memory(spec, sums, block, order)
        source, target = Part(x.array[images]), Part(cells.array[images])
        kernel, grid, args = cuda.conv._column_launch(spec, sums, block, order, view(cuda, source), steps)
        host.launch(kernel, grid, (256,), (source, to, args))
        to.values()
        equal(column_view(to, spec, order), wanted[images][..., block.p0 : block.p1])
        kernel, grid, args = cuda.conv._fold_launch(spec, sums, block, order, steps)
        host.launch(kernel, grid, (256,), (to, target, args))
        if block.p1 == pixels:
            equal(cells.values(), folded(wanted, spec))


def column_view(memory: Memory, spec: Any, order: str) -> Any:
    """Columns as (n, C, taps, pixels)."""
    if order == "channels_first":
        return memory.array
    n, pixels, *_ = memory.array.shape
    return memory.array.transpose(0, 2, 4, 3, 1).reshape(n, spec.inputs, spec.taps, pixels)


# ---- offsets past 2**31 ----------------------------------------------------------------------------------------------

FAR = 2**31 + 64


def is_big(launch: Any) -> bool:
    """Whether a launch counts in 64 bits."""
    return launch.args.dtype[0].base == np.int64


def test_inputs_that_reach_past_2_to_the_31(cuda: Any) -> None:
    spec = pool_spec("max_pool", (2, 8, 4, 8), (2, 2), "float32")
    x = Far((2, *spec.x_shape), "float32", FAR)
    x.array[...] = digits(x.array.shape, "float32")
    y, argmax = ref.max_pool(np.array(x.array), (2, 2))
    got, winner = pool_forward(cuda, spec, x, "channels_first", "max_pool_train")
    equal(got, y)
    equal(winner, argmax)
    dy, winners = Far(y.shape, "float32", FAR), Far(y.shape, "uint8", FAR)
    dy.array[...], winners.array[...] = digits(y.shape, "float32", 3), argmax
    wanted = ref.max_pool_backward(np.array(dy.array), argmax, (4, 8), (2, 2))
    equal(pool_backward(cuda, spec, "channels_first", dy, winners), wanted)


@pytest.mark.parametrize(("step", "big"), [(2**31 - 256 - 256, False), (2**31 - 256 - 255, True)])
def test_64_bits_only_where_needed(cuda: Any, step: int, big: bool) -> None:
    plan = plan_of(cuda, pool_spec("max_pool", (2, 8, 4, 8), (2, 2), "float32"))
    assert is_big(plan._forward(2, "channels_first", cuda.kernels.View((step, 32, 8, 1), 0, 4))) == big


def test_results_past_2_to_the_31(cuda: Any) -> None:
    spec, n = pool_spec("max_pool", (1, 1, 32, 64), (1, 1), "uint8"), 2**20 + 2  # of 2048 cells each
    x, y = (Far((n, *spec.x_shape), "uint8", 2048) for _ in range(2))
    x.array[-2:] = digits((2, *spec.x_shape), "uint8")
    launch = plan_of(cuda, spec)._forward(n, "channels_first", view(cuda, x))
    assert is_big(launch)
    host.launch(launch.kernels["max_pool"], launch.grid, (256,), (x, y, launch.args), first_block=launch.grid[0] - 2)
    equal(y.array[-2:], x.array[-2:])


@pytest.mark.parametrize("op", ["max_pool", "avg_pool"])
def test_gradients_of_pools_past_2_to_the_31(cuda: Any, op: str) -> None:
    spec, n = pool_spec(op, (1, 8, 32, 8), (2, 2), "float32"), 2**20 + 2  # of 2048 cells each
    dy, dx = Far((n, *spec.y_shape), "float32", 512), Far((n, *spec.x_shape), "float32", 2048)
    dy.array[-2:] = digits((2, *spec.y_shape), "float32")
    winners = [Far(dy.array.shape, "uint8", 512)] if op == "max_pool" else []
    for winner in winners:
        winner.array[-2:] = np.random.default_rng(0).integers(0, 4, (2, *spec.y_shape))
    launch = plan_of(cuda, spec)._backward(n, "channels_first", *(view(cuda, array) for array in (dy, *winners)))
    assert is_big(launch)
    kernel = launch.kernels[f"{op}_backward"]
    host.launch(kernel, launch.grid, (256,), (dy, *winners, dx, launch.args), first_block=launch.grid[0] - 1)
    given = [np.array(array.array[-2:]) for array in (dy, *winners)]
    equal(dx.array[-2:], getattr(ref, f"{op}_backward")(*given, (32, 8), (2, 2)))


def test_dropout_past_2_to_the_31(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    n, shape = 2**20 + 2, (8, 32, 8)
    spec, step = dropout_spec((1, *shape), "float32", 0.5), 3
    x, y, dx = (Far((n, *shape), "float32", 2048) for _ in range(3))
    drawn = Far((n, *shape), "bool", 2048)
    x.array[-2:] = digits((2, *shape), "float32")
    launch = plan_of(cuda, spec)._launch((n, *shape), "channels_first", view(cuda, x))
    assert is_big(launch)
    grid, args = launch.grid, launch.args
    count = Memory(np.asarray(step, np.int32))
    host.launch(launch.kernels["dropout"], grid, (256,), (x, count, y, drawn, args), first_block=grid[0] - 4)
    host.launch(launch.kernels["dropout_backward"], grid, (256,), (x, drawn, dx, args), first_block=grid[0] - 4)
    keys = ref._row_keys
    monkeypatch.setattr(ref, "_row_keys", lambda seed, step, row: keys(seed, step, n - 2 + row))
    mask = ref.dropout_mask((2, *shape), spec.rate, spec.seed, step)
    assert_array_equal(drawn.array[-2:], mask)
    for result in (y, dx):
        equal(result.array[-2:], 2 * x.array[-2:] * mask)


def test_fold_past_2_to_the_31(cuda: Any) -> None:
    spec, n = conv_spec((1, 4, 4, 128), (4, 4, 1, 2), "float32"), 2**20 + 2  # of 2048 cells each
    pixels, step = 4 * 127, 4 * 2 * 4 * 127
    columns, x = Far((n, 4, 2, pixels), "float32", step), Far((n, *spec.x_shape), "float32", 2048)
    columns.array[-1:] = digits((1, 4, 2, pixels), "float32")
    block, steps = cuda.conv.Block(0, n, 0, pixels), (step, step, pixels, 1)
    kernel, grid, args = cuda.conv._fold_launch(spec, "float32", block, "channels_first", steps)
    assert args.dtype[0].base == np.int64
    host.launch(kernel, grid, (256,), (columns, x, args), first_block=grid[0] - 8)
    equal(x.array[-1:], folded(columns.array[-1:], spec))


def test_columns_of_inputs_past_2_to_the_31(cuda: Any) -> None:
    spec = conv_spec((2, 2, 4), (1, 2, 2), "int8")
    x = Far((2, *spec.x_shape), "int8", FAR)
    x.array[...] = digits(x.array.shape, "int8")
    block = cuda.conv.Block(0, 2, 0, 3)
    to, steps = column_memory(spec, "int32", block, "channels_first")
    kernel, grid, args = cuda.conv._column_launch(spec, "int32", block, "channels_first", view(cuda, x), steps)
    host.launch(kernel, grid, (256,), (x, to, args))
    equal(column_view(to, spec, "channels_first"), columns_of(np.array(x.array).astype(np.int32), spec))
