"""What is special to the compiled pools: widths around a register, reads beside the array, tasks, orders that meet."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases import MIXED_AVG, MIXED_MAX, Case, avg_pool, exact, expected, inputs, max_pool
from conftest import Backend, need
from numpy.testing import assert_array_equal
from running import LAYOUTS, assert_results, run, start, steps, to_layout

import funcnn as fn
from funcnn._engines.jit import _pool

JIT = Backend.NUMPY_JIT
POOLS = (max_pool, avg_pool)


@pytest.fixture(autouse=True)
def _jit() -> None:
    need(JIT)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("make", POOLS)
def test_every_width(make: Any, stride: int) -> None:
    """Rows of one vector of four planes, of single vectors, of blocks of four, and what is left of each."""
    for width in (*range(1, 20), 31, 32, 33, 47, 48, 49, 63, 64, 65, 97, 130):
        case = make("width", (1, 6, 4, width), (2, min(3, width)), stride=(1, stride), padding=(0, min(1, width // 2)))
        arrays, wanted = exact(case)
        assert_results(JIT, run(case, JIT, arrays), wanted)


@pytest.mark.parametrize("channels", [*range(1, 20), 31, 32, 33, 47, 49, 64, 65, 130])
@pytest.mark.parametrize("make", POOLS)
def test_every_number_of_channels(make: Any, channels: int) -> None:
    case = make("channels", (2, channels, 3, 4), (2, 3), stride=(1, 2), padding=(0, 1))
    arrays, wanted = exact(case)
    for layout in LAYOUTS:
        assert_results(JIT, run(case, JIT, arrays, layout), wanted, layout)


@pytest.mark.parametrize("make", POOLS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cut_into_tasks_does_not_show(make: Any, dtype: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole images, groups of an image, rows of a plane: all give the bits of one task."""
    case = make("tasks", (3, 5, 9, 20), (3, 2), stride=(2, 1), padding=1, dilation=(1, 2))
    arrays = {name: to_layout(name, a, layout) for name, a in inputs(case, dtype=dtype).items()}
    results = []
    for size, threads in ((1 << 20, 1), (4000, 3), (700, 2), (100, 1)):
        monkeypatch.setattr(_pool, "TASK_BYTES", size)
        state = start(case, JIT, arrays, layout, options=fn.Options(threads=threads))
        results.append(steps(case.op, arrays, state)[0])
    for other in results[1:]:
        for name, array in results[0].items():
            assert_array_equal(other[name], array, err_msg=name)


@pytest.mark.parametrize("case", [MIXED_MAX[0], MIXED_AVG[0]], ids=str)
def test_dy_and_argmax_may_lie_in_other_orders_than_x(case: Case) -> None:
    arrays, wanted = exact(case)
    _, state = getattr(fn, case.op)(arrays["x"], start(case, JIT, arrays))
    for dy in (arrays["dy"], last(arrays["dy"]), np.asfortranarray(arrays["dy"]), arrays["dy"].astype(">f8")):
        for argmax in (lambda a: a, last, np.asfortranarray):
            mine = dataclasses.replace(state, argmax=argmax(state.argmax)) if case.op == "max_pool" else state
            assert_array_equal(getattr(fn, f"{case.op}_backward")(dy, mine), wanted["dx"])


def last(a: np.ndarray) -> np.ndarray:
    """The same array with channels innermost in memory."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1)


@pytest.mark.parametrize("make", POOLS)
def test_one_window_a_channel(make: Any) -> None:
    """A global pool runs along channels in either memory order."""
    case = make("global", (3, 37, 5, 6), (5, 6))
    arrays = inputs(case)
    if make is avg_pool:
        arrays = {name: 30 * a for name, a in arrays.items()}
    for view in (np.ascontiguousarray, last, np.asfortranarray):
        mine = {**arrays, "x": view(arrays["x"])}
        assert_results(JIT, run(case, JIT, mine), expected(case, arrays))
