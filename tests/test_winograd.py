"""Winograd's filtering on engine jit: where it is taken, that it is exact where numbers are, and its error elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Arrays, Case, inputs, normal
from conftest import Backend, need
from numpy.testing import assert_array_equal
from running import start, steps, to_layout

import funcnn as fn

LAST = "channels_last"


@pytest.fixture(autouse=True)
def _jit() -> None:
    need(Backend.NUMPY_JIT)


def conv(x: tuple[int, ...], outputs: int, op: str = "conv", **options: Any) -> Case:
    weight = (outputs, x[1], 3, 3) if op == "conv" else (x[1], outputs, 3, 3)
    return Case(op, op, x, weight, options)


# Odd sizes end in half a square; 256 squares at least are needed, 97 channels are no multiple of a register or a tile.
CASES = {
    "same": conv((2, 96, 24, 27), 97, padding=1),
    "ragged": conv((1, 97, 45, 31), 96, padding=((0, 2), (3, 1))),
    "valid": conv((3, 102, 26, 25), 99),
    "flipped": conv((2, 96, 25, 24), 96, padding=1, flip=True),
    "wide": conv((1, 96, 3, 600), 96, padding=((1, 1), (0, 0))),
    "transposed": conv((2, 96, 22, 25), 98, "conv_transpose", padding=1),
}


def results(case: Case, arrays: Arrays, **options: Any) -> Arrays:
    return steps(case.op, arrays, start(case, Backend.NUMPY_JIT, arrays, LAST, options=fn.Options(**options)))[0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exact_on_small_integers(case: Case, dtype: str) -> None:
    """The transforms only add and halve: nothing is rounded where numbers are small and whole, here or in direct sums."""
    arrays = {k: to_layout(k, a, LAST) for k, a in inputs(case, dtype=dtype).items()}
    wanted = results(case, arrays)
    for name, array in results(case, arrays, numerics="fast").items():
        assert_array_equal(array, wanted[name], err_msg=name, strict=True)
        fn._scratch.poison()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_at_most_four_times_the_error_of_direct_sums(case: Case) -> None:
    arrays = {k: to_layout(k, a, LAST) for k, a in inputs(case, dtype="float32", make=normal).items()}
    exact = results(case, {k: a.astype("float64", order="K") for k, a in arrays.items()})
    direct, squares = (
        {k: np.abs(results(case, arrays, numerics=numerics)[k] - exact[k]).max() for k in ("y", "dx")}
        for numerics in ("strict", "fast")
    )
    assert squares != direct  # another algorithm has run
    for name, error in squares.items():
        assert error <= 4 * direct[name], name


def test_the_same_bits_for_every_number_of_threads() -> None:
    case = CASES["same"]
    arrays = {k: to_layout(k, a, LAST) for k, a in inputs(case, dtype="float32", make=normal).items()}
    first, *others = (results(case, arrays, numerics="fast", threads=threads) for threads in (1, 2, 3))
    for other in others:
        for name, array in first.items():
            assert_array_equal(other[name], array, err_msg=name)


def algorithm(weight: tuple[int, ...], numerics: str, dtype: str = "float32", **options: Any) -> str:
    x = np.zeros((1, weight[1] * options.get("groups", 1), 9, 9), dtype)
    state = fn.conv_init(x, np.zeros(weight, dtype), engine="jit", options=fn.Options(numerics=numerics), **options)
    return state.plan.algorithm


def test_where_it_is_taken() -> None:
    assert algorithm((96, 96, 3, 3), "fast") == "winograd"
    assert algorithm((96, 96, 3, 3), "strict") == "tiles"
    for weight, options in (
        ((96, 96, 3, 3), {"stride": 2}),
        ((96, 96, 3, 3), {"dilation": 2}),
        ((96, 96, 3, 3), {"groups": 2}),
        ((96, 96, 3, 5), {}),
        ((95, 96, 3, 3), {}),
        ((512, 512, 3, 3), {}),
        ((96, 96, 3, 3), {"dtype": "int32"}),
    ):
        assert algorithm(weight, "fast", **options) == "tiles"
