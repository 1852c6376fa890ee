"""max_pool against the oracle: values, the cell that won, gradients; ties, NaN, every dtype."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from cases import MAX_POOL, MIXED_MAX, Case, exact, expected, inputs, max_pool, relued
from conftest import Backend, need
from running import (
    FLOATS,
    LAYOUTS,
    assert_array,
    assert_autograd_agrees,
    assert_results,
    run,
    sample,
    spare_jax,
    start,
    to_layout,
)

import funcnn as fn

(MANY_CELLS,) = (case for case in MAX_POOL if case.name == "many cells")
REALS = [*FLOATS, "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"]


def argmax_dtype(backend: Backend, cells: int) -> str:
    """One byte up to 256 cells, else the next unsigned type that the library can compute with."""
    if cells <= 256:
        return "uint8"
    return "int32" if backend is Backend.TORCH else "uint16" if cells <= 65536 else "uint32"


@pytest.mark.parametrize("case", MAX_POOL, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_numbers_are_exact(backend: Backend, case: Case, layout: str) -> None:
    spare_jax(backend, case not in sample(MAX_POOL, layout))
    arrays, wanted = exact(case)
    dtypes = {"argmax": argmax_dtype(backend, case.taps)}
    assert_results(backend, run(case, backend, arrays, layout), wanted, layout, dtypes)


def test_without_jit(backend: Backend) -> None:
    arrays, wanted = exact(MIXED_MAX[1])
    assert_results(backend, run(MIXED_MAX[1], backend, arrays, jit=False), wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", MIXED_MAX, ids=str)
def test_without_training_y_is_the_same_and_no_argmax_is_made(
    backend: Backend, case: Case, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare_jax(backend, case is not MIXED_MAX[0])
    arrays, wanted = exact(case)
    x = backend.asarray(to_layout("x", arrays["x"], layout), backend.widest_float)
    first = start(case, backend, {"x": x}, layout)
    _, used = fn.max_pool(x, first)
    for state in (first, used):
        y, after = fn.max_pool(x, state, train=False)
        assert_array(backend, y, to_layout("y", wanted["y"], layout), backend.widest_float)
        assert after.argmax.shape == (0,) * x.ndim
        assert after.plan == state.plan


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def ends(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: int) -> Any:
    """The least and the largest number of a dtype (of floats: -inf and inf too) and 0, so that any fill value ties."""
    if dtype == "bool":
        return rng.random(shape) < 0.3
    if dtype in FLOATS:
        return rng.choice([-np.inf, np.inf, 0, -0.5], shape, p=[0.7, 0.1, 0.1, 0.1]).astype(dtype)
    info = np.iinfo(dtype)
    return rng.choice(np.asarray([info.min, 1, info.max], dtype), shape, p=[0.7, 0.2, 0.1])


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("case", MIXED_MAX, ids=str)
def test_every_real_dtype_with_ties_at_its_ends(backend: Backend, case: Case, dtype: str) -> None:
    if not backend.has_dtype(dtype):
        pytest.skip(f"{backend.module} has no {dtype}")
    spare_jax(backend, case is not MIXED_MAX[1])
    arrays = inputs(case, dtype=dtype, make=ends)
    wanted = expected(case, {**arrays, "dy": exact(case)[0]["dy"]})
    if dtype in FLOATS:
        arrays["dy"] = exact(case)[0]["dy"].astype(dtype)
    else:
        del wanted["dx"]
    assert_results(backend, run(case, backend, arrays), wanted, dtypes={"y": dtype, "dx": dtype})


def test_no_maximum_of_complex_numbers(backend: Backend) -> None:
    with pytest.raises(TypeError, match="x must have a real, integer or bool dtype, got complex64"):
        fn.max_pool_init(backend.asarray(np.ones((1, 1, 3)), "complex64"), 2, engine=backend.engine)


@pytest.mark.parametrize(("dtype", "limit"), [("float16", 2048), ("bfloat16", 256)])
def test_gradients_of_half_floats_add_up_in_float32(backend: Backend, dtype: str, limit: int) -> None:
    """Nine windows share one winner; a sum in the dtype itself loses each 1 that comes after the large one."""
    if not backend.has_dtype(dtype):
        pytest.skip(f"{backend.module} has no {dtype}")
    x, dy = np.zeros((1, 1, 17)), np.ones((1, 1, 9))
    x[..., 8], dy[..., 4] = 1, limit
    case = max_pool("shared winner", x.shape, (9,), stride=1)
    got = run(case, backend, {"x": x.astype(dtype), "dy": dy.astype(dtype)}, jit=False)
    assert_array(backend, got["dx"], x * (limit + 8), dtype)


# ---- NaN and infinities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [*MIXED_MAX, MANY_CELLS], ids=str)
def test_the_first_nan_of_a_window_wins(backend: Backend, case: Case, layout: str) -> None:
    spare_jax(backend, layout == "channels_last" or case is MANY_CELLS)
    arrays = dict(exact(case)[0])
    chance = np.random.default_rng(0).random(case.x) * case.taps
    arrays["x"] = np.select([chance < 0.9, chance < 1.2, chance < 1.8], [np.nan, np.inf, -np.inf], arrays["x"])
    wanted = expected(case, arrays)
    assert np.isnan(wanted["y"]).any()
    assert np.isfinite(wanted["y"]).any()
    assert_results(backend, run(case, backend, arrays, layout), wanted, layout)


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf, -7.0])
def test_where_all_are_equal_the_first_cell_of_the_input_wins(backend: Backend, value: float) -> None:
    case = MIXED_MAX[0]
    arrays = {"x": np.full(case.x, value), "dy": exact(case)[0]["dy"]}
    wanted = expected(case, arrays)
    assert (wanted["argmax"][:, :, 0] == 2).all()  # the first row of the first windows is padding
    assert_results(backend, run(case, backend, arrays), wanted)


def test_nan_and_infinite_gradients_go_to_their_winner_only(backend: Backend) -> None:
    case = MIXED_MAX[0]
    arrays = {name: array.copy() for name, array in exact(case)[0].items()}
    arrays["dy"].flat[[3, 8, 11]] = [np.nan, np.inf, -np.inf]
    assert_results(backend, run(case, backend, arrays), expected(case, arrays))


# ---- argmax ----------------------------------------------------------------------------------------------------------


def test_an_argmax_of_ones_own_is_obeyed(backend: Backend) -> None:
    """Indices that did not come from a forward: each dy goes where they say."""
    x = np.zeros((2, 3, 6, 7))
    case = max_pool("own argmax", x.shape, (3, 2), stride=(2, 3))
    rng = np.random.default_rng(0)
    argmax, dy = rng.integers(0, 6, (2, 3, 2, 2)), rng.integers(-4, 5, (2, 3, 2, 2)).astype(float)
    wanted = np.zeros_like(x)
    for n, c, i, j in np.ndindex(argmax.shape):
        wanted[n, c, 2 * i + argmax[n, c, i, j] // 2, 3 * j + argmax[n, c, i, j] % 2] += dy[n, c, i, j]
    state = start(case, backend, {"x": backend.asarray(x, backend.widest_float)})
    state = dataclasses.replace(state, argmax=backend.asarray(argmax, "uint8"))
    got = fn.max_pool_backward(backend.asarray(dy, backend.widest_float), state)
    assert_array(backend, got, wanted, backend.widest_float)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_argmax_of_ones_own_may_name_any_cell_of_the_input_and_none_of_the_padding(layout: str) -> None:
    x = to_layout("x", np.zeros((1, 2, 2, 4, 3)), layout)
    kernel, strides, dilation, low = (2, 3, 2), (1, 2, 1), (1, 2, 3), (1, 3, 2)
    state = fn.max_pool_init(
        x, kernel, stride=strides, dilation=dilation, padding=((1, 0), (3, 2), (2, 3)), layout=layout
    )
    y, state = fn.max_pool(x, state)
    windows = y.shape[2:] if layout == "channels_first" else y.shape[1:-1]
    for window in np.ndindex(*windows):
        for number, taps in enumerate(np.ndindex(*kernel)):
            cell = np.array(window) * strides - low + np.array(taps) * dilation
            argmax = state.argmax.copy()
            argmax[(0, 1, *window) if layout == "channels_first" else (0, *window, 1)] = number
            own = dataclasses.replace(state, argmax=argmax)
            if (cell >= 0).all() and (cell < (2, 4, 3)).all():
                fn.max_pool_backward(y, own)
            else:
                with pytest.raises(fn.StateError, match="got a cell of the padding"):
                    fn.max_pool_backward(y, own)


@pytest.mark.parametrize(("side", "dtype"), [(16, "uint8"), (17, "uint16"), (257, "uint32")])
def test_argmax_takes_the_smallest_type_that_numbers_the_window(backend: Backend, side: int, dtype: str) -> None:
    """A window of 16 x 16 fits a byte: its last cell is 255."""
    if side == 257 and not backend.is_numpy:
        pytest.skip("66,049 cells a window")
    spare_jax(backend, side != 16)
    x = np.zeros((1, 1, side, side))
    x[..., -1, -1] = 1
    mine = backend.asarray(x, backend.widest_float)
    y, state = fn.max_pool(mine, fn.max_pool_init(mine, side, engine=backend.engine))
    dtype = argmax_dtype(backend, side**2)
    assert_array(backend, state.argmax, [[[[side**2 - 1]]]], dtype)
    assert_array(backend, fn.max_pool_indices(state), [[[[side**2 - 1]]]], backend.widest_int)
    assert_array(backend, fn.max_pool_backward(y, state), x, backend.widest_float)


def test_tensor_indices_count_channels_first_in_both_layouts(numpy_backend: Backend) -> None:
    case = MIXED_MAX[0]
    arrays, wanted = exact(case)
    for layout in LAYOUTS:
        x = to_layout("x", arrays["x"], layout)
        y, state = fn.max_pool(x, start(case, numpy_backend, {"x": x}, layout))
        tensor = fn.max_pool_indices(state, base="tensor")
        np.testing.assert_array_equal(tensor, to_layout("tensor", wanted["tensor"], layout))
        np.testing.assert_array_equal(arrays["x"].reshape(-1)[tensor], y)


# ---- through the automatic differentiation of the libraries ----------------------------------------------------------


@pytest.mark.parametrize("library", [Backend.JAX, Backend.TORCH], ids=["jax", "torch"])
@pytest.mark.parametrize("value", [0, np.nan, -np.inf])
@pytest.mark.parametrize("case", MIXED_MAX, ids=str)
def test_autograd_through_max_pool_is_max_pool_backward(library: Backend, case: Case, value: float) -> None:
    """On a relu'd input, most of whose windows tie at zero; then with NaN or -inf among them."""
    need(library)
    arrays = inputs(case, make=relued)
    if value:
        arrays["x"][np.random.default_rng(1).random(case.x) < 0.2] = value
    assert_autograd_agrees(library, case, arrays)


@pytest.mark.parametrize("value", [0, np.nan])
def test_torch_itself_has_the_same_indices_and_gradients(value: float) -> None:
    """On ties torch takes the first as we do; of several NaN it takes the last, so one NaN a window."""
    need(Backend.TORCH)
    import torch

    options: dict[str, Any] = {"stride": (2, 3), "padding": (1, 1), "dilation": (1, 2), "ceil_mode": True}
    case = max_pool("torch", (2, 3, 8, 9), (3, 2), **options)
    arrays = inputs(case, make=relued)
    if value:
        arrays["x"][:, :, 3, 4] = value
    x = torch.asarray(arrays["x"]).requires_grad_()
    y, indices = torch.nn.functional.max_pool2d(x, case.kernel, return_indices=True, **options)
    y.backward(torch.asarray(arrays["dy"]))
    results = run(case, Backend.TORCH, arrays)
    for name, wanted in (("y", y.detach()), ("plane", indices), ("dx", x.grad)):
        assert_array(Backend.TORCH, results[name], wanted.numpy(), "int64" if name == "plane" else "float64", name)


def test_jax_itself_has_the_same_gradients_without_ties() -> None:
    """lax.reduce_window on distinct numbers."""
    need(Backend.JAX)
    import jax

    case = max_pool("jax", (2, 3, 8, 9), (3, 2), stride=(2, 3), padding=((1, 0), (0, 1)))
    arrays = inputs(case, dtype="float32")
    arrays["x"] = np.random.default_rng(0).permutation(2 * 3 * 8 * 9).reshape(case.x).astype("float32")
    padding = ((0, 0), (0, 0), (1, 0), (0, 1))

    def theirs(x: Any) -> Any:
        return jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 1, 3, 2), (1, 1, 2, 3), padding)

    y, vjp = jax.vjp(theirs, Backend.JAX.asarray(arrays["x"]))
    results = run(case, Backend.JAX, arrays)
    assert_array(Backend.JAX, results["y"], np.asarray(y), "float32")
    assert_array(Backend.JAX, results["dx"], np.asarray(vjp(arrays["dy"])[0]), "float32")


def test_a_window_of_32_by_32_compiles_and_differentiates_under_jit() -> None:
    need(Backend.JAX)
    import jax

    x = np.random.default_rng(0).permutation(2 * 64 * 64).reshape(1, 2, 64, 64).astype("float32")
    case = max_pool("32 by 32", x.shape, (32, 32), stride=(32, 16))
    wanted = expected(case, {"x": x, "dy": np.ones((1, 2, 2, 3))})
    mine = Backend.JAX.asarray(x)
    state = start(case, Backend.JAX, {"x": mine})
    began = time.perf_counter()

    @jax.jit
    def both(x: Any, state: fn.MaxPoolState) -> Any:
        y, state = fn.max_pool(x, state)
        through = jax.grad(lambda x: fn.max_pool(x, state)[0].sum())(x)
        return y, through, fn.max_pool_backward(y * 0 + 1, state)

    y, through, dx = both(mine, state)
    for got, name in ((y, "y"), (through, "dx"), (dx, "dx")):
        assert_array(Backend.JAX, got, wanted[name], "float32", name)
    assert time.perf_counter() - began < 10


def test_the_number_of_operations_does_not_grow_with_the_window() -> None:
    """What keeps compile times bounded: a chain of one `where` per cell takes JAX a minute for 256 cells."""
    need(Backend.JAX)
    import jax

    def operations(side: int) -> int:
        x = Backend.JAX.asarray(np.zeros((1, 1, 40, 40), "float32"))
        state = fn.max_pool_init(x, side, stride=1)
        return len(jax.make_jaxpr(lambda x: fn.max_pool(x, state)[0])(x).eqns)

    assert operations(2) == operations(32)
