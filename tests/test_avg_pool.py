"""avg_pool against the oracle: sums, divisors, gradients; dtypes, NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import AVG_POOL, MIXED_AVG, Case, avg_pool, digits, exact, expected, inputs, relued
from conftest import Backend, need
from numpy.testing import assert_array_equal
from running import (
    COMPLEX,
    FLOATS,
    LAYOUTS,
    assert_array,
    assert_autograd_agrees,
    assert_close,
    assert_results,
    run,
    sample,
    spare_jax,
    start,
)

import funcnn as fn


@pytest.mark.parametrize("case", AVG_POOL, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_means_are_exact(backend: Backend, case: Case, layout: str) -> None:
    """x and dy are multiples of every divisor, so that means and spread gradients are whole numbers."""
    spare_jax(backend, case not in sample(AVG_POOL, layout))
    if backend is Backend.JAX:
        # XLA makes a product with the reciprocal of a division by a constant, which is not exact.
        assert_close(backend, case, "float32", layout, digits)
        return
    arrays, wanted = exact(case)
    assert_results(backend, run(case, backend, arrays, layout), wanted, layout)


def test_without_jit(backend: Backend) -> None:
    arrays, wanted = exact(MIXED_AVG[1])
    assert_results(backend, run(MIXED_AVG[1], backend, arrays, jit=False), wanted)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("case", [*MIXED_AVG, avg_pool("many terms", (1, 2, 40, 30), (20, 30), stride=(5, 1))], ids=str)
def test_floats_stay_within_the_computed_bound(backend: Backend, case: Case, dtype: str) -> None:
    spare_jax(backend, case in MIXED_AVG[1:])
    assert_close(backend, case, dtype, LAYOUTS[len(dtype) % 2])


def test_half_floats_are_summed_in_float32(backend: Backend) -> None:
    """4,096 ones: a float16 sum stops at 2,048; 60,000 overflows it; the gradient is subnormal."""
    if not backend.has_dtype("float16"):
        pytest.skip(f"{backend.module} has no float16")
    for value in (1.0, 60000.0):
        x = backend.asarray(np.full((1, 1, 64, 64), value), "float16")
        y, state = fn.avg_pool(x, fn.avg_pool_init(x, 64, engine=backend.engine))
        assert_array(backend, y, [[[[value]]]], "float16")
        dx = fn.avg_pool_backward(backend.asarray([[[[1 / 16]]]], "float16"), state)
        assert_array(backend, dx, np.full((1, 1, 64, 64), 2.0**-16), "float16")


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integers_must_be_cast_first(backend: Backend, dtype: str) -> None:
    with pytest.raises(TypeError, match=f"x must have a float or complex dtype, got {dtype}; cast x"):
        fn.avg_pool_init(backend.asarray(np.ones((1, 1, 3)), dtype), 2, engine=backend.engine)


# ---- what the divisor counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "divisors"),
    [
        ({}, (3, 3)),
        ({"ceil_mode": True}, (3, 3, 1)),  # the overhang never counts
        ({"padding": 1}, (3, 3, 3)),  # declared padding does, by default
        ({"padding": 1, "count_include_pad": False}, (2, 3, 2)),
        ({"padding": ((0, 1),), "ceil_mode": True}, (3, 3, 2)),  # one declared, one overhang
        ({"padding": ((0, 1),), "ceil_mode": True, "count_include_pad": False}, (3, 3, 1)),
        ({"padding": ((2, 3),), "stride": 4}, (3, 3, 3)),
        ({"padding": ((2, 3),), "stride": 4, "count_include_pad": False}, (1, 3, 1)),
        ({"padding": ((3, 0),), "count_include_pad": False}, (1, 3, 3)),  # the first window holds padding only: 0 / 1
        ({"padding": "same", "count_include_pad": False, "stride": 2}, (2, 3, 3, 2)),
    ],
)
def test_divisors_by_hand(backend: Backend, options: dict[str, Any], divisors: tuple[int, ...]) -> None:
    x = backend.asarray(np.full((1, 1, 7), 6.0), backend.widest_float)
    state = fn.avg_pool_init(x, 3, engine=backend.engine, **options)
    y, _ = fn.avg_pool(x, state)
    ones = np.ones((1, 1, len(divisors)))
    dx = backend.numpy(fn.avg_pool_backward(backend.asarray(ones * 6, backend.widest_float), state))
    numbers = ref_counts(options, len(divisors))
    assert_array(backend, y, [[[6 * n / d for n, d in zip(numbers, divisors, strict=True)]]], backend.widest_float)
    assert dx.sum() == sum(6 * n / d for n, d in zip(numbers, divisors, strict=True))


def ref_counts(options: dict[str, Any], windows: int) -> list[int]:
    """How many cells of an input of 7 each window of 3 holds."""
    padding, stride = options.get("padding", 0), options.get("stride", 3)
    low = 1 if padding in (1, "same") else 0 if padding == 0 else padding[0][0]
    return [sum(0 <= w * stride - low + t < 7 for t in range(3)) for w in range(windows)]


# ---- NaN and infinities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["x", "dy"])
@pytest.mark.parametrize("case", MIXED_AVG, ids=str)
def test_nan_and_infinities_stay_in_their_windows(backend: Backend, case: Case, name: str, value: float) -> None:
    spare_jax(backend, case is not MIXED_AVG[0])
    arrays = {key: array.copy() for key, array in exact(case)[0].items()}
    arrays[name].flat[arrays[name].size // 2] = value
    assert_results(backend, run(case, backend, arrays), expected(case, arrays))


def test_a_window_without_cells_gives_0_and_its_gradient_vanishes(backend: Backend) -> None:
    """Whether padding counts or not; even an infinite dy there goes nowhere."""
    for count in (True, False):
        case = avg_pool("empty window", (1, 1, 2), (2,), stride=2, padding=((2, 0),), count_include_pad=count)
        arrays = {"x": np.asarray([[[3.0, 5.0]]]), "dy": np.asarray([[[np.inf, 4.0]]])}
        wanted = {"y": [[[0.0, 4.0]]], "dx": [[[2.0, 2.0]]]}
        assert_results(backend, run(case, backend, arrays, jit=False), wanted)


# ---- through the automatic differentiation of the libraries ----------------------------------------------------------


@pytest.mark.parametrize("library", [Backend.JAX, Backend.TORCH], ids=["jax", "torch"])
@pytest.mark.parametrize("case", MIXED_AVG, ids=str)
def test_autograd_through_avg_pool_is_avg_pool_backward(library: Backend, case: Case) -> None:
    need(library)
    assert_autograd_agrees(library, case, inputs(case, make=relued))


@pytest.mark.parametrize("count_include_pad", [True, False])
def test_torch_itself_agrees(count_include_pad: bool) -> None:
    need(Backend.TORCH)
    import torch

    options: dict[str, Any] = {"stride": (2, 3), "padding": (1, 2), "ceil_mode": True}
    options["count_include_pad"] = count_include_pad
    case = avg_pool("torch", (2, 3, 8, 9), (3, 4), **options)
    arrays = inputs(case)
    x = torch.asarray(arrays["x"]).requires_grad_()
    y = torch.nn.functional.avg_pool2d(x, case.kernel, **options)
    y.backward(torch.asarray(arrays["dy"]))
    results = run(case, Backend.TORCH, arrays)
    for name, wanted in (("y", y), ("dx", x.grad)):
        assert_array(Backend.TORCH, results[name], wanted.detach().numpy(), "float64", name)


def test_a_large_window_costs_no_more_operations_under_jax() -> None:
    need(Backend.JAX)
    import jax

    def operations(side: int) -> int:
        x = Backend.JAX.asarray(np.zeros((1, 1, 40, 40), "float32"))
        state = start(avg_pool("", x.shape, (side, side), stride=1), Backend.JAX, {"x": x})
        return len(jax.make_jaxpr(lambda x: fn.avg_pool(x, state)[0])(x).eqns)

    assert operations(2) == operations(32)


def test_the_mean_of_one_cell_is_that_cell(backend: Backend) -> None:
    x = backend.asarray(np.arange(24.0).reshape(1, 2, 3, 4), backend.widest_float)
    y, _ = fn.avg_pool(x, fn.avg_pool_init(x, 1, engine=backend.engine))
    assert_array_equal(backend.numpy(y), backend.numpy(x))
