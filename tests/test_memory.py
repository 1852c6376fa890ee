"""Layouts and memory orders: any NumPy array gives the same results, in memory of its own and of the order of the input."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import MIXED_AVG, MIXED_CONV, MIXED_MAX, MIXED_TRANSPOSE, Arrays, Case, conv, digits, exact, expected, inputs
from conftest import Backend
from numpy.testing import assert_array_equal
from running import LAYOUTS, start, steps, to_layout

import funcnn as fn

CASES = [*MIXED_CONV, *MIXED_TRANSPOSE, *MIXED_MAX, *MIXED_AVG]
ENGINES = [Backend.NUMPY_XP, Backend.NUMPY_BLAS]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case}")


# ---- views: each takes an array and gives one of equal values --------------------------------------------------------


def read_only(a: Any) -> Any:
    a = a.copy()
    a.flags.writeable = False
    return a


def negative_strides(a: Any) -> Any:
    """All axes run backwards."""
    back = (slice(None, None, -1),) * a.ndim
    return np.ascontiguousarray(a[back])[back]


def transposed(a: Any) -> Any:
    """Fortran order."""
    return np.asfortranarray(a)


def channels_last_memory(a: Any) -> Any:
    """(N, C, *spatial) as it lies in a channels-last array; a weight (O, I, *k) as an OHWI one."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1) if a.ndim > 1 else a


def hwio(a: Any) -> Any:
    """A view of an array (*spatial, C, N)."""
    order = (*range(2, a.ndim), 1, 0)
    return np.ascontiguousarray(a.transpose(order)).transpose(np.argsort(order)) if a.ndim > 1 else a


def channels_last_rows_with_gaps(a: Any) -> Any:
    """Channels-last memory of which each pixel has more channels than are used."""
    if a.ndim < 2:
        return every_other(a)
    wide = np.full((a.shape[0], *a.shape[2:], a.shape[1] + 3), np.nan, a.dtype)
    view = np.moveaxis(wide[..., 1 : 1 + a.shape[1]], -1, 1)
    view[...] = a
    return view


def every_other(a: Any) -> Any:
    """Steps of 2 on every axis, NaN between."""
    wide = np.full([2 * n for n in a.shape], np.nan, a.dtype)
    view = wide[(slice(None, None, 2),) * a.ndim]
    view[...] = a
    return view


def swapped_bytes(a: Any) -> Any:
    return a.astype(a.dtype.newbyteorder("S"))


def unaligned(a: Any) -> Any:
    """At an odd address."""
    raw = np.empty(a.nbytes + 1, np.uint8)
    view = np.ndarray(a.shape, a.dtype, raw, offset=1)
    view[...] = a
    return view


def swapped_and_strided(a: Any) -> Any:
    return every_other(swapped_bytes(a))


VIEWS: list[Callable[[Any], Any]] = [
    read_only, negative_strides, transposed, channels_last_memory, hwio, channels_last_rows_with_gaps, every_other,
    swapped_bytes, unaligned, swapped_and_strided,
]  # fmt: skip


def check(backend: Backend, case: Case, arrays: Arrays, wanted: Arrays, layout: str = "channels_first") -> Arrays:
    """Results equal the wanted ones, are native, own their memory, and leave the inputs' memory as it was."""
    owners = [a if a.base is None else a.base for a in arrays.values()]
    owners = [owner for owner in owners if isinstance(owner, np.ndarray)]
    before = [owner.tobytes() for owner in owners]
    results, _ = steps(case.op, arrays, start(case, backend, arrays, layout))
    fn._scratch.poison()
    for name, array in wanted.items():
        got = results[name]
        assert type(got) is np.ndarray
        assert got.dtype.isnative
        assert got.flags.writeable
        assert_array_equal(got, to_layout(name, array, layout), err_msg=name, strict=name != "argmax")
        assert not any(np.shares_memory(got, other) for other in arrays.values()), name
    assert [owner.tobytes() for owner in owners] == before
    return results


@every_case
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_any_memory_gives_the_same_results(numpy_backend: Backend, case: Case, view: Callable[[Any], Any]) -> None:
    arrays, wanted = exact(case)
    mine = {name: view(array) for name, array in arrays.items()}
    for name, array in arrays.items():
        assert_array_equal(mine[name], array)
    check(numpy_backend, case, mine, wanted)


@every_case
@pytest.mark.parametrize("name", ["x", "weight", "bias", "dy"])
def test_one_odd_array_among_usual_ones(numpy_backend: Backend, case: Case, name: str) -> None:
    """Each argument alone in another memory order than the rest."""
    arrays, wanted = exact(case)
    if name not in arrays:
        return
    for view in (channels_last_memory, hwio, negative_strides, swapped_bytes):
        check(numpy_backend, case, {**arrays, name: view(arrays[name])}, wanted)


@every_case
@pytest.mark.parametrize("view", [channels_last_memory, transposed, negative_strides, swapped_bytes],
                         ids=lambda view: view.__name__)  # fmt: skip
def test_any_memory_in_the_channels_last_layout(numpy_backend: Backend, case: Case, view: Callable[[Any], Any]) -> None:
    """channels_last_memory moves the first spatial axis of an (N, *spatial, C) array inside: as odd as any order."""
    arrays, wanted = exact(case)
    mine = {name: view(to_layout(name, array, "channels_last")) for name, array in arrays.items()}
    check(numpy_backend, case, mine, wanted, "channels_last")


@every_case
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2, 3), (0, 1, 2, 3)], ids=str)
def test_broadcast_arrays(numpy_backend: Backend, case: Case, axes: tuple[int, ...]) -> None:
    """Stride 0, as the gradient of a sum has it: read-only, one number for many cells."""
    arrays = dict(exact(case)[0])
    for name in ("x", "dy"):
        first = arrays[name][tuple(slice(0, 1) if i in axes else slice(None) for i in range(4))]
        arrays[name] = np.broadcast_to(first, arrays[name].shape)
    check(numpy_backend, case, arrays, expected(case, arrays))


@every_case
def test_memory_mapped_arrays(numpy_backend: Backend, case: Case, tmp_path: Path) -> None:
    arrays, wanted = exact(case)
    mine = {}
    for name, array in arrays.items():
        np.save(tmp_path / name, array)
        mine[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
        assert isinstance(mine[name], np.memmap)
    check(numpy_backend, case, mine, wanted)


def test_dropout_of_any_memory(numpy_backend: Backend) -> None:
    x = digits(np.random.default_rng(0), (2, 3, 4, 5))
    wanted, used = fn.dropout(x, fn.dropout_init(x, 0.5, seed=3, engine="xp"))
    for view in VIEWS:
        mine = view(x)
        y, state = fn.dropout(mine, fn.dropout_init(mine, 0.5, seed=3, engine=numpy_backend.engine))
        for got, array in ((y, wanted), (state.mask, used.mask), (fn.dropout_backward(mine, state), wanted)):
            assert_array_equal(got, array, err_msg=view.__name__, strict=True)
            assert got.dtype.isnative
            assert not np.shares_memory(got, mine)
        identity, _ = fn.dropout(mine, state, train=False)
        assert_array_equal(identity, x, err_msg=view.__name__, strict=True)
        assert identity.dtype.isnative
        assert not np.shares_memory(identity, mine)


# ---- memory order of the results -------------------------------------------------------------------------------------


def is_channels_last(a: Any) -> bool:
    return bool(np.moveaxis(a, 1, -1).flags.c_contiguous)


@every_case
def test_results_lie_in_memory_as_the_inputs_do(case: Case) -> None:
    """y and argmax as x, dx as dy: channels-last memory in, channels-last memory out. (Engine xp: no such promise.)"""
    arrays, wanted = exact(case)
    last = {name: channels_last_memory(a) if name in ("x", "dy") else a for name, a in arrays.items()}
    first = check(Backend.NUMPY_BLAS, case, arrays, wanted)
    for name, result in check(Backend.NUMPY_BLAS, case, last, wanted).items():
        if name in ("y", "dx", "argmax"):
            assert is_channels_last(result), name
            assert first[name].flags.c_contiguous, name


@pytest.mark.parametrize("op", ["conv", "conv_transpose", "max_pool", "avg_pool"])
@pytest.mark.parametrize("shape", [(2, 1, 4, 5), (2, 3, 1, 1)], ids=["one channel", "one pixel"])
def test_where_both_orders_fit_y_is_channels_first(op: str, shape: tuple[int, ...]) -> None:
    weight = (shape[1], 2, 1, 1) if op == "conv_transpose" else (2, shape[1], 1, 1)
    case = Case(op, op, shape, weight if op.startswith("conv") else (1, 1))
    arrays, wanted = exact(case)
    assert check(Backend.NUMPY_BLAS, case, arrays, wanted)["y"].flags.c_contiguous


@every_case
def test_layout_channels_last_gives_contiguous_results(case: Case) -> None:
    arrays, wanted = exact(case)
    mine = {name: to_layout(name, array, "channels_last") for name, array in arrays.items()}
    results = check(Backend.NUMPY_BLAS, case, mine, wanted, "channels_last")
    for name in ("y", "dx", "argmax"):
        assert name not in results or results[name].flags.c_contiguous, name


# ---- larger than one block -------------------------------------------------------------------------------------------

LARGE = [
    conv("large 3x3", (2, 17, 61, 47), (9, 17, 3, 3), padding=1),
    conv("large strided groups", (2, 32, 50, 61), (8, 16, 5, 3), groups=2, stride=(2, 1), padding=((1, 2), (0, 1))),
    conv("large 1x1", (3, 64, 33, 31), (48, 64, 1, 1)),
    conv("large depthwise", (2, 40, 60, 70), (40, 1, 3, 5), groups=40, stride=(1, 2), padding=(1, 2)),
    conv("large depthwise two channels", (1, 2, 1100, 300), (4, 1, 3, 2), groups=2, padding=(1, 0)),
    Case("large transpose", "conv_transpose", (2, 24, 30, 31), (24, 16, 4, 3), {"stride": 2, "padding": (1, 0)}),
    Case("large max", "max_pool", (2, 40, 90, 101), (3, 2), {"stride": (2, 1), "padding": (1, 0)}),
    Case("large max one channel", "max_pool", (1, 1, 1200, 600), (3, 2), {"stride": (2, 1), "padding": (1, 0)}),
    Case("large avg", "avg_pool", (2, 40, 90, 101), (2, 4), {"stride": (2, 1), "padding": (1, 0), "ceil_mode": True}),
    Case("large avg one channel", "avg_pool", (1, 1, 1200, 600), (2, 4),
         {"stride": (2, 1), "padding": (1, 0), "count_include_pad": False}),
]  # fmt: skip


@pytest.mark.parametrize("case", LARGE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_many_blocks(case: Case, layout: str) -> None:
    """blas cuts its work into blocks of a few MB and into tasks for threads; xp does not: they must agree exactly."""
    arrays = {name: to_layout(name, a, layout) for name, a in inputs(case).items()}
    wanted, _ = steps(case.op, arrays, start(case, Backend.NUMPY_XP, arrays, layout))
    for threads in (1, 3):
        state = start(case, Backend.NUMPY_BLAS, arrays, layout, options=fn.Options(threads=threads))
        results, _ = steps(case.op, arrays, state)
        fn._scratch.poison()
        for name, array in wanted.items():
            assert_array_equal(results[name], array, err_msg=name, strict=True)
    fn.release_scratch()


# ---- threads ---------------------------------------------------------------------------------------------------------


@every_case
def test_eight_threads_with_mixed_batch_sizes_share_one_state(numpy_backend: Backend, case: Case) -> None:
    """Each has its own scratch: results are those of one thread alone."""
    arrays, _ = exact(case)
    state = start(case, numpy_backend, arrays)
    work = []
    for n in (1, 5, 2, 7, 0, 3, 4, 6):
        sized = Case(case.name, case.op, (n, *case.x[1:]), case.weight, case.options)
        mine = inputs(sized, seed=n)
        work.append((mine, steps(case.op, mine, state)[0]))
    together = threading.Barrier(8)

    def repeat(job: tuple[Arrays, Arrays]) -> None:
        mine, wanted = job
        together.wait()
        for _ in range(20):
            results, _ = steps(case.op, mine, state)
            for name, array in wanted.items():
                assert_array_equal(results[name], array, err_msg=name)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(repeat, work))
