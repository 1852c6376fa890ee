"""What is special to the engine that compiles: kernels, their cache, CPUs, threads, sizes that do not fill a register."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case, expected, inputs, normal
from conftest import Backend, need
from numpy.testing import assert_array_equal
from running import LAYOUTS, assert_results, run, start, steps, to_layout

import funcnn as fn
from funcnn._engines.jit import _kernels
from funcnn._engines.jit._view import blocks, cut_for
from funcnn._engines.jit._walk import forwards
from funcnn._spec import Axis


@pytest.fixture(autouse=True)
def _jit() -> None:
    need(Backend.NUMPY_JIT)


def conv(shape: tuple[int, ...], weight: tuple[int, ...], **options: Any) -> Case:
    return Case("conv", "conv", shape, weight, options)


BOTH = (Backend.NUMPY_JIT, Backend.NUMPY_BLAS)
CHANNELS = (1, 3, 17, 23, 24, 25, 33)


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_kernel_leaves_its_arrays(layout: str) -> None:
    """Memory before and behind x, weight, bias, dy and argmax may not be touched: a process of its own would die of it.

    The first test, for this process could die of the same in others.
    """
    script = str(Path(__file__).with_name("guards.py"))
    done = subprocess.run([sys.executable, script, layout], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-300:], done.stderr[-3000:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("inputs_", "outputs"), [*zip(CHANNELS, reversed(CHANNELS), strict=True), (33, 33), (2, 65)])
def test_channels_that_fill_no_register(layout: str, inputs_: int, outputs: int) -> None:
    case = conv((2, inputs_, 5, 7), (outputs, inputs_, 3, 2), padding=1)
    arrays = inputs(case)
    assert_results(Backend.NUMPY_JIT, run(case, Backend.NUMPY_JIT, arrays, layout), expected(case, arrays), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_every_width(layout: str, groups: int, stride: int) -> None:
    for width in range(1, 41):
        case = conv((1, 3, width), (6, 3 // groups, 3), padding=1, stride=stride, groups=groups)
        arrays = inputs(case, seed=width)
        assert_results(Backend.NUMPY_JIT, run(case, Backend.NUMPY_JIT, arrays, layout), expected(case, arrays), layout)


FEW_INPUTS = (
    conv((5, 3, 6, 7), (17, 3, 3, 3), padding=1),
    conv((3, 2, 19, 23), (16, 2, 3, 4), padding=((2, 0), (1, 3)), stride=(2, 3), dilation=(2, 1), flip=True),
    conv((2, 5, 9, 20), (20, 5, 2, 3), padding=(0, 2), stride=2, dilation=(1, 3)),
    conv((3, 8, 21), (33, 8, 5), padding=2, stride=3),
    conv((2, 1, 5, 6, 9), (18, 1, 2, 3, 3), padding=1, stride=(1, 2, 2), flip=True),
    Case("conv", "conv_transpose", (2, 17, 5, 6), (17, 3, 3, 4), {"stride": (2, 3), "padding": 1}),
    Case("conv", "conv_transpose", (3, 16, 7), (16, 4, 2), {"stride": 3, "dilation": 2}),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", FEW_INPUTS, ids=lambda case: "x".join(map(str, case.x)))
def test_few_inputs(case: Case, layout: str) -> None:
    """Their adjoint goes by columns: phases of strides, dilated taps, planes, several images at a time, a bias."""
    arrays = inputs(case)
    assert_results(Backend.NUMPY_JIT, run(case, Backend.NUMPY_JIT, arrays, layout), expected(case, arrays), layout)


LARGE = (
    conv((4, 24, 31, 33), (40, 24, 3, 3), padding=1, stride=(1, 2)),
    conv((3, 96, 30, 30), (96, 1, 3, 3), padding=1, groups=96),
    conv((2, 8, 12, 20, 21), (16, 8, 3, 3, 3), padding=1),
    conv((3, 128, 9, 7), (256, 128, 3, 3), padding=1),
    conv((3, 3, 64, 50), (24, 3, 5, 5), padding=2, stride=2),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", LARGE, ids=["strided", "depthwise", "3-D", "wide", "few inputs"])
def test_the_same_bits_for_every_number_of_threads(case: Case, layout: str) -> None:
    arrays = {k: to_layout(k, a, layout) for k, a in inputs(case, dtype="float32", make=normal).items()}
    results = []
    for threads in (1, 2, 3):
        state = start(case, Backend.NUMPY_JIT, arrays, layout, options=fn.Options(threads=threads))
        results.append(steps("conv", arrays, state)[0])
    for other in results[1:]:
        for name, array in results[0].items():
            assert_array_equal(other[name], array, err_msg=name)


MANY_BLOCKS = (
    conv((1, 48, 121, 102), (16, 48, 3, 3), padding=1, stride=2),
    conv((1, 96, 130, 90), (96, 1, 5, 3), padding=(2, 1), stride=(3, 2), groups=96),
    conv((1, 16, 15, 50, 50), (8, 16, 3, 2, 3), padding=1, stride=(2, 3, 1)),
    conv((1, 3, 360, 301), (16, 3, 5, 3), padding=2, stride=(2, 3)),
    conv((1, 2, 40, 90, 70), (16, 2, 3, 2, 3), padding=1, stride=(1, 2, 1)),
    conv((2, 128, 9, 7), (256, 128, 3, 3), padding=1),
    conv((3, 21, 40, 33), (9, 21, 1, 1)),
    conv((20, 24, 9, 10), (32, 24, 3, 3), padding=1),
)
KINDS = ("dense", "depthwise", "3-D", "few inputs", "few inputs, 3-D", "wide", "1x1", "small")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", MANY_BLOCKS, ids=KINDS)
def test_blocks_of_rows(case: Case, threads: int, layout: str) -> None:
    """What is cut into blocks of rows or planes, slices, or shares: the same whole numbers as engine blas has."""
    arrays = {name: to_layout(name, a, layout) for name, a in inputs(case, dtype="float32").items()}
    options = fn.Options(threads=threads)
    mine, its = (steps("conv", arrays, start(case, backend, arrays, layout, options=options))[0] for backend in BOTH)
    for name, array in its.items():
        assert_array_equal(mine[name], array, err_msg=name)


def test_several_images_or_planes_of_a_block_are_whole() -> None:
    """Rows of dy that is read in place are taken to follow each other."""
    walks = forwards((Axis(6, 3, 1, 1, 1, 1, 6), Axis(9, 3, 1, 1, 1, 1, 9), Axis(7, 3, 1, 1, 1, 1, 7)), False)
    for n, parts, most in itertools.product(range(1, 40), range(1, 9), (700, 7000, 70000)):
        cut = cut_for(n, walks, 100, parts, most)
        assert cut.images == 1 or cut[1:] == (6, 9)
        assert cut.planes == 1 or cut.rows == 9
        assert len(blocks(n, walks, cut)) >= min(parts, 54 * n)


def test_eight_threads_share_a_state_with_different_batches() -> None:
    case = conv((8, 32, 28, 28), (32, 32, 3, 3), padding=1)
    arrays = inputs(case, dtype="float32", make=normal)
    state = start(case, Backend.NUMPY_JIT, arrays, options=fn.Options(threads=2))
    whole = steps("conv", arrays, state)[0]

    def part(number: int) -> bool:
        rows = slice(0, 1 + number % 8)
        y, _ = fn.conv(arrays["x"][rows], arrays["weight"], arrays["bias"], state)
        dx = fn.conv_backward(arrays["dy"][rows], arrays["x"][rows], arrays["weight"], state, wrt="x")[0]
        return np.array_equal(y, whole["y"][rows]) and np.array_equal(dx, whole["dx"][rows])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(part, range(64)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1, (2, 3)])
@pytest.mark.parametrize("channels", [3, 16, 21])
def test_depthwise_takes_nothing_from_around_its_arrays(
    layout: str, stride: int, padding: int | tuple[int, int], channels: int
) -> None:
    for size in ((9, 70), (20, 7), (3, 3)):
        case = conv((2, channels, *size), (channels, 1, 3, 2), padding=padding, stride=stride, groups=channels)
        _assert_the_same_within_nan(case, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"padding": 1, "stride": 2}], ids=["plain", "strided"])
@pytest.mark.parametrize(("inputs_", "outputs"), [(3, 32), (32, 3), (20, 32), (16, 64)])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 2)])
def test_dense_takes_nothing_from_around_its_arrays(
    layout: str, options: dict[str, Any], inputs_: int, outputs: int, kernel: tuple[int, int]
) -> None:
    for size in ((6, 35), (11, 7)):
        _assert_the_same_within_nan(conv((2, inputs_, *size), (outputs, inputs_, *kernel), **options), layout)


def _assert_the_same_within_nan(case: Case, layout: str) -> None:
    """x and dy are parts of arrays of NaN: a cell beyond them that reached a result would show."""
    arrays = {name: to_layout(name, a, layout) for name, a in inputs(case, dtype="float32").items()}
    around = {name: _surrounded(a) if name in ("x", "dy") else a for name, a in arrays.items()}
    mine, its = (
        steps("conv", values, start(case, backend, values, layout))[0]
        for backend, values in zip(BOTH, (around, arrays), strict=True)
    )
    for name, array in its.items():
        assert_array_equal(mine[name], array, err_msg=name)


def _surrounded(a: np.ndarray) -> np.ndarray:
    whole = np.full([n + 4 for n in a.shape], np.nan, a.dtype)
    part = whole[(slice(2, -2),) * a.ndim]
    part[...] = a
    return part


ORDERS = {
    "fortran": np.asfortranarray,
    "negative": lambda a: a[tuple(slice(None, None, -1) for _ in a.shape)].copy()[
        tuple(slice(None, None, -1) for _ in a.shape)
    ],
    "every second": lambda a: np.repeat(a, 2, -1)[..., ::2],
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "read-only": lambda a: _frozen(a),
    "unaligned": lambda a: _unaligned(a),
}


def _frozen(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a.flags.writeable = False
    return a


def _unaligned(a: np.ndarray) -> np.ndarray:
    memory = np.zeros(a.nbytes + 1, np.uint8)
    view = memory[1:].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("groups", [1, 4])
def test_any_memory_compiles_nothing(order: str, groups: int) -> None:
    """Kernels take addresses: no memory order is a new type. The same numbers come out as of contiguous arrays."""
    case = conv((3, 4, 9, 10), (8, 4 // groups, 3, 3), padding=1, stride=(2, 1), groups=groups)
    arrays = {name: ORDERS[order](a) for name, a in inputs(case).items()}
    state = start(case, Backend.NUMPY_JIT, arrays)
    before = compiled()
    got, _ = steps("conv", arrays, state)
    assert compiled() == before
    wanted, _ = steps("conv", {name: a.copy() for name, a in arrays.items()}, state)
    for name, array in wanted.items():
        assert_array_equal(got[name], array, err_msg=name)


def compiled() -> int:
    """Kernel versions that Numba holds in this process."""
    import gc

    import numba.core.event  # noqa: F401
    from numba.core.registry import CPUDispatcher

    return sum(len(o.signatures) for o in gc.get_objects() if isinstance(o, CPUDispatcher))


def test_kernels_run() -> None:
    """The plan's results come from compiled code: with a kernel taken out the call fails."""
    x, w = np.ones((1, 2, 4)), np.ones((3, 2, 3))
    state = fn.conv_init(x, w, engine="jit")
    core = state.plan.core
    own = core.convolve_first
    core.convolve_first = {}
    try:
        with pytest.raises(KeyError):
            fn.conv(x, w, None, state)
    finally:
        core.convolve_first = own
    assert fn.conv(x, w, None, state)[0].tolist() == [[[6, 6]] * 3]


# ---- other processes -------------------------------------------------------------------------------------------------

SMALL = """
import itertools, time, warnings
import numpy as np, funcnn as fn
rng = np.random.default_rng(0)
for (c, o, g), order, dtype in itertools.product([(5, 9, 1), (6, 6, 6)], "CF", ["float32", "float64"]):
    x = rng.integers(-4, 5, (2, c, 9, 13)).astype(dtype)
    w = rng.integers(-4, 5, (o, c // g, 3, 3)).astype(dtype)
    if order == "F":
        x = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1)
    y = None
    for engine in ("xp", "jit"):
        s = fn.conv_init(x, w, padding=1, stride=(1, 2), groups=g, engine=engine)
        own, _ = fn.conv(x, w, None, s)
        dx, dw, db = fn.conv_backward(own, x, w, s)
        if y is not None:
            assert all(np.array_equal(a, b) for a, b in zip((own, dx, dw, db), y)), (c, g, order, dtype)
        y = own, dx, dw, db
"""


def python(code: str, folder: Path | None = None, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


# CPU, bytes of its registers, assembly that must not occur
CPUS = {"haswell": (32, r"zmm|[xy]mm(1[6-9]|2\d|3[01])"), "x86-64": (16, r"zmm|ymm|[xy]mm(1[6-9]|2\d|3[01])")}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the assembly is of x86-64")
@pytest.mark.parametrize("cpu", CPUS)
def test_narrower_cpus(cpu: str, tmp_path: Path) -> None:
    """Whole numbers are exact, registers are those of the CPU, and nothing in a kernel's inner loop is a function call."""
    width, forbidden = CPUS[cpu]
    check = f"""
import re
from funcnn._engines.jit import _gemm, _host
from funcnn._engines.jit._dense import tiles
from funcnn._engines.jit._kernels import kernel
assert _host.register_bytes() == {width} and _host.registers() == 16
text = next(iter(kernel(_gemm.weight_gradient, "float32", *tiles()[1]).inspect_asm().values()))
assert not re.search(r"{forbidden}", text)
assert ("vfmadd" in text) == ({cpu!r} == "haswell")
assert "fma" not in re.findall(r"call\\S*\\s+(\\S+)", text)
"""
    features = {"haswell": "+avx,+avx2,+fma,+sse4.2,+bmi,+bmi2,+f16c", "x86-64": "+sse2"}[cpu]
    python(SMALL + check, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=str(tmp_path))


def test_a_second_process_finds_the_kernels_and_another_tile_does_not(tmp_path: Path) -> None:
    """Numba's cache is keyed by the literals in a kernel's closure: a process with another tile must not load these."""
    code = """
from funcnn._engines.jit import _gemm
from funcnn._engines.jit._kernels import kernel
made = kernel(_gemm.weight_gradient, "float32", {mr}, 1)
hits, misses = (sum(counts.values()) for counts in (made.stats.cache_hits, made.stats.cache_misses))
text = "" if hits else next(iter(made.inspect_llvm().values()))  # what comes from the cache has none
print(hits, misses, text.count("fmuladd"))
"""
    runs = [python(code.format(mr=mr), NUMBA_CACHE_DIR=str(tmp_path)).split() for mr in (3, 3, 5, 5, 3)]
    hit, miss = ["1", "0"], ["0", "1"]
    assert [r[:2] for r in runs] == [miss, hit, miss, hit, hit]
    assert runs[0][2] != runs[2][2]  # multiply-adds of the two that were compiled


@pytest.mark.skipif(sys.platform != "linux", reason="the user's cache folder lies elsewhere")
def test_a_package_that_cannot_be_written_to_has_its_kernels_in_the_users_folder(tmp_path: Path) -> None:
    """And where there is no such folder either, every process compiles them for itself."""
    package = tmp_path / "site" / "funcnn"
    shutil.copytree(Path(fn.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (package, *(path for path in package.rglob("*") if path.is_dir())):
        (folder / "__pycache__").touch()  # a file in place of the folder stops root, too
    code = """
import numpy as np, funcnn as fn
x = np.ones((1, 2, 9, 9), np.float32)
state = fn.conv_init(x, np.ones((2, 1, 3, 3), np.float32), groups=2, engine="jit")
y, _ = fn.conv(x, np.ones((2, 1, 3, 3), np.float32), None, state)
stats = state.plan.core.first.stats
print(fn.__file__, (y == 9).all(), stats.cache_path, sum(stats.cache_hits.values()))
"""
    results = []
    for home in (tmp_path, tmp_path, Path(os.devnull)):
        unset = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": str(home / "cache")}
        results.append(python(code, tmp_path, PYTHONPATH=str(package.parent), HOME=str(home), **unset).split())
    imported = str(package / "__init__.py")
    users = next((tmp_path / "cache" / "numba").iterdir())
    assert results == [[imported, "True", str(users), hits] for hits in "01"] + [[imported, "True", "None", "0"]]


def test_every_kernel_can_do_without_a_cache() -> None:
    """Only the package's own `njit` goes on where Numba finds no folder for it."""
    sources = Path(_kernels.__file__).parent.glob("*.py")
    assert [path.name for path in sources if "from numba import njit" in path.read_text()] == []


def test_several_processes_start_at_once(tmp_path: Path) -> None:
    code = """
import numpy as np, funcnn as fn
x = np.ones((1, 1, 4))
print(fn.conv(x, x, None, fn.conv_init(x, x, engine="jit"))[0].item())
"""
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(python, code, NUMBA_CACHE_DIR=str(tmp_path / "cache")) for _ in range(3)]
        assert [job.result().strip() for job in jobs] == ["4.0"] * 3


def test_a_forked_child_computes() -> None:
    code = """
import os
import numpy as np, funcnn as fn
x = np.random.default_rng(0).standard_normal((4, 32, 40, 40), np.float32)
w = np.random.default_rng(1).standard_normal((32, 32, 3, 3), np.float32)
s = fn.conv_init(x, w, engine="jit", options=fn.Options(threads=2))
y, _ = fn.conv(x, w, None, s)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(fn.conv(x, w, None, s)[0], y) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    python(code)


def test_half_floats_are_converted_as_numpy_does() -> None:
    """All of float16; float32 between two neighbours of float16, beside the middle, and of random bits."""
    from funcnn._engines.jit._half import compile_casts, copy_cast

    compile_casts("float16")
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(64, 1024)
    with np.errstate(invalid="ignore", over="ignore"):
        middles = ((halves.astype(np.float64) + np.roll(halves, 1)) / 2).astype(np.float32)
        beside = [np.nextafter(middles, np.float32(end)) for end in (np.inf, -np.inf)]
        bits = np.random.default_rng(0).integers(0, 1 << 32, (500, 1001), dtype=np.uint32).view(np.float32)
        cases = [(halves, np.float32), *((a, np.float16) for a in (middles, *beside, bits, bits.T))]
        for source, dtype in cases:
            wanted, got = source.astype(dtype), np.empty_like(source, dtype)
            copy_cast(got, source, threads=2)
            assert_array_equal(got, wanted)
            assert_array_equal(np.signbit(got), np.signbit(wanted))
