"""conv against the oracle: every case exactly in whole numbers, dtypes within a computed tolerance, NaN, infinities."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from cases import CONV, GRADIENTS, MIXED_CONV, MIXED_TRANSPOSE, Case, conv, exact, expected, inputs, relued, spoilt
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

BOTH = [*MIXED_CONV, *MIXED_TRANSPOSE]


@pytest.mark.parametrize("case", CONV, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_numbers_are_exact(backend: Backend, case: Case, layout: str) -> None:
    spare_jax(backend, case not in sample(CONV, layout))
    arrays, wanted = exact(case)
    assert_results(backend, run(case, backend, arrays, layout), wanted, layout)


@pytest.mark.parametrize("case", BOTH, ids=str)
def test_without_jit(backend: Backend, case: Case) -> None:
    spare_jax(backend, case not in (MIXED_CONV[0], MIXED_TRANSPOSE[0]))
    arrays, wanted = exact(case)
    assert_results(backend, run(case, backend, arrays, jit=False), wanted)


def test_no_bias_is_a_zero_bias(backend: Backend) -> None:
    for case in MIXED_CONV:
        arrays, _ = exact(case)
        arrays = {**arrays, "bias": np.zeros(case.outputs)}
        mine = {name: backend.asarray(array, backend.widest_float) for name, array in arrays.items()}
        y, _ = fn.conv(mine["x"], mine["weight"], None, start(case, backend, mine))
        assert_array(backend, y, expected(case, arrays)["y"], backend.widest_float)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("case", [*BOTH, conv("many terms", (1, 40, 12, 11), (3, 40, 5, 4))], ids=str)
def test_floats_stay_within_the_computed_bound(backend: Backend, case: Case, dtype: str) -> None:
    spare_jax(backend, case in BOTH[1:])
    assert_close(backend, case, dtype, LAYOUTS[len(dtype) % 2])


def test_half_floats_do_not_overflow_inside_the_sum(backend: Backend) -> None:
    """4,096 ones: float16 sums stop at 2,048; 65,504 + 65,504 - 65,504 overflows on the way."""
    if not backend.has_dtype("float16"):
        pytest.skip(f"{backend.module} has no float16")
    for values, weights, total in (
        (np.ones(4096), np.ones(4096), 4096),
        (np.full(3, 65504.0), np.asarray([1.0, 1.0, -1.0]), 65504),
    ):
        x, weight = (backend.asarray(v[None, None], "float16") for v in (values, weights))
        y, _ = fn.conv(x, weight, None, fn.conv_init(x, weight, engine=backend.engine))
        assert_array(backend, y, [[[total]]], "float16")


@pytest.mark.parametrize("case", BOTH, ids=str)
def test_complex_x_with_a_real_weight_has_a_real_dweight(backend: Backend, case: Case) -> None:
    spare_jax(backend, case not in (MIXED_CONV[0], MIXED_TRANSPOSE[0]))
    complex_, real = ("complex64", "float32") if backend is Backend.JAX else ("complex128", "float64")
    arrays = inputs(case, dtype=complex_, weight_dtype=real)
    wanted = expected(case, arrays)
    dtypes = dict.fromkeys(("y", "dx", "dbias"), complex_) | {"dweight": real}
    assert_results(backend, run(case, backend, arrays), wanted, dtypes=dtypes)


@pytest.mark.parametrize("case", BOTH, ids=str)
def test_complex_gradients_are_adjoints(backend: Backend, case: Case) -> None:
    """Whole complex numbers, exactly: conjugates of weight and x in the backward, none in the forward."""
    spare_jax(backend, case not in (MIXED_CONV[0], MIXED_TRANSPOSE[0]))
    dtype = "complex64" if backend is Backend.JAX else "complex128"
    arrays = inputs(case, dtype=dtype)
    wanted = expected(case, arrays)
    assert_results(backend, run(case, backend, arrays), wanted, dtypes=dict.fromkeys(wanted, dtype))


INTEGERS = {
    "int8": "int32", "uint8": "int32", "int16": "int64", "uint16": "int64", "int32": "int64", "uint32": "int64",
    "int64": "int64",
}  # fmt: skip


def extremes(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: int) -> Any:
    """Integers of the whole range, most of them its ends."""
    info = np.iinfo(dtype)
    values = rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    ends = rng.choice(np.asarray([info.min, info.max], dtype), shape)
    return np.where(rng.random(shape) < 0.7, ends, values)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("case", BOTH, ids=str)
def test_integers_are_exact_over_their_whole_range(backend: Backend, case: Case, dtype: str) -> None:
    """8-bit inputs in int32, 16- and 32-bit ones in int64; int64 wraps. JAX: int32 at most, which wraps."""
    if not backend.has_dtype(dtype):
        pytest.skip(f"{backend.module} has no {dtype}")
    spare_jax(backend, case is not MIXED_CONV[0])
    y_dtype = "int32" if backend is Backend.JAX else INTEGERS[dtype]
    arrays = inputs(case, dtype=dtype, make=extremes)
    bias = extremes(np.random.default_rng(2), (case.outputs,), "int16", 1)
    arrays["bias"] = bias.astype(y_dtype)
    wanted = expected(case, {**arrays, "bias": bias.astype("int64")})["y"]
    got = run(case, backend, arrays)
    assert_array(backend, got["y"], wanted.astype("int64").astype(y_dtype), y_dtype)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_int32_holds_32768_terms_and_no_more(backend: Backend, dtype: str) -> None:
    worst = np.iinfo(dtype).min or np.iinfo(dtype).max
    x = backend.asarray(np.full((1, 2, 16384), worst, dtype))
    state = fn.conv_init(x, x, engine=backend.engine)
    y, _ = fn.conv(x, x, None, state)
    assert_array(backend, y, [[[worst * worst * 32768]]], "int32")
    longer = backend.asarray(np.zeros((1, 3, 10923), dtype))
    with pytest.raises(fn.SpecError, match="32768 terms"):
        fn.conv_init(longer, longer, engine=backend.engine)


def test_sums_of_16_bit_products_beyond_the_whole_numbers_of_float64(numpy_backend: Backend) -> None:
    """An odd sum above 2**53: 4,194,303 products of 65,535 by itself."""
    x = numpy_backend.asarray(np.full((1, 1, 2**22 - 1), 65535, "uint16"))
    y, _ = fn.conv(x, x, None, fn.conv_init(x, x, engine=numpy_backend.engine))
    assert_array(numpy_backend, y, [[[(2**22 - 1) * 65535**2]]], "int64")


@pytest.mark.parametrize("dtype", ["uint64", "bool"])
def test_no_conv_of_uint64_and_bool(backend: Backend, dtype: str) -> None:
    if not backend.has_dtype(dtype):
        pytest.skip(f"{backend.module} has no {dtype}")
    x = backend.asarray(np.ones((1, 1, 3), dtype))
    with pytest.raises(TypeError, match=f"x must have .* got {dtype}"):
        fn.conv_init(x, x, engine=backend.engine)


def test_integers_have_no_gradient(backend: Backend) -> None:
    x = backend.asarray(np.ones((1, 1, 3), "int8"))
    state = fn.conv_init(x, x, engine=backend.engine)
    y, _ = fn.conv(x, x, None, state)
    with pytest.raises(TypeError, match="no gradient"):
        fn.conv_backward(y, x, x, state)


# ---- wrt -------------------------------------------------------------------------------------------------------------

WORK = {"x": {"correlate", "adjoint"}, "weight": {"weight_gradient"}, "bias": {"bias_gradient"}}
SUBSETS = [(), ("x",), ("weight",), ("bias",), ("x", "weight"), ("weight", "bias"), ("x", "bias")]


@pytest.mark.parametrize("wrt", SUBSETS, ids="-".join)
@pytest.mark.parametrize("case", BOTH, ids=str)
def test_wrt_skips_the_work_of_what_is_not_asked_for(
    numpy_backend: Backend, case: Case, wrt: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, wanted = exact(case)
    mine = {name: numpy_backend.asarray(array) for name, array in arrays.items()}
    state = start(case, numpy_backend, mine)

    def refuse(self: Any, *args: Any) -> Any:
        raise AssertionError("work that was not asked for")

    for name, methods in WORK.items():
        for method in methods if name not in wrt else ():
            monkeypatch.setattr(type(state.plan), method, refuse)
    gradients = getattr(fn, f"{case.op}_backward")(mine["dy"], mine["x"], mine["weight"], state, wrt)
    for name, gradient in zip(GRADIENTS, gradients, strict=True):
        if name[1:] in wrt:
            assert_array(numpy_backend, gradient, wanted[name], "float64", name)
        else:
            assert gradient is None, name


def test_wrt_takes_one_name(backend: Backend) -> None:
    arrays, wanted = exact(MIXED_CONV[1])
    mine = {name: backend.asarray(array, backend.widest_float) for name, array in arrays.items()}
    state = start(MIXED_CONV[1], backend, mine)
    dx, dweight, dbias = fn.conv_backward(mine["dy"], None, mine["weight"], state, wrt="x")
    assert dweight is None
    assert dbias is None
    assert_array(backend, dx, wanted["dx"], backend.widest_float)


# ---- NaN and infinities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["x", "weight", "bias", "dy"])
@pytest.mark.parametrize("case", [*BOTH, conv("bare depthwise", (2, 3, 6, 7), (3, 1, 3, 2), groups=3)], ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_and_infinities_stay_where_the_loops_have_them(
    backend: Backend, case: Case, name: str, value: float
) -> None:
    """In the outputs whose window holds the cell, and no other; dx and a transposed y have only terms that exist."""
    spare_jax(backend, case is not MIXED_CONV[0] and name != "weight")
    arrays = spoilt(case, name, value)
    assert_results(backend, run(case, backend, arrays), expected(case, arrays))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_infinite_weight_over_padding_gives_nan_forward_and_only_real_terms_backward(backend: Backend) -> None:
    x, dy = (backend.asarray([[[1.0, 2.0, 3.0]]], backend.widest_float) for _ in range(2))
    weight = backend.asarray([[[np.inf, 1.0, 1.0]]], backend.widest_float)
    state = fn.conv_init(x, weight, padding="same", engine=backend.engine)
    y, _ = fn.conv(x, weight, None, state)
    assert_array(backend, y, [[[np.nan, np.inf, np.inf]]], backend.widest_float)
    dx, _, _ = fn.conv_backward(dy, None, weight, state, wrt="x")
    assert_array(backend, dx, [[[np.inf, np.inf, 5.0]]], backend.widest_float)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("op", ["conv", "conv_transpose"])
def test_infinities_do_not_cross_from_the_real_to_the_imaginary_part_by_a_real_weight(
    backend: Backend, op: str
) -> None:
    """Complex x with a real weight runs as two real convs: (inf+1j) * 2 is inf+2j, not inf+NaNj."""
    if backend is Backend.TORCH:
        pytest.skip("torch adds complex numbers as a + 1 * b, which lets NaN cross")
    complex_, real = ("complex64", "float32") if backend is Backend.JAX else ("complex128", "float64")
    x = np.empty((1, 1, 4), complex)
    x.real, x.imag = [np.inf, 3, 1, -1], [1, np.nan, np.inf, -np.inf]
    case = Case(op, op, (1, 1, 4), (1, 1, 1))
    arrays = {"x": x, "weight": np.full((1, 1, 1), 2.0), "bias": np.zeros(1, complex), "dy": x}
    arrays = {name: array.astype(real if name == "weight" else complex_) for name, array in arrays.items()}
    got = run(case, backend, arrays)
    for name in ("y", "dx"):
        assert_array_equal(backend.numpy(got[name]).real, [[[np.inf, 6, 2, -2]]], err_msg=name)
        assert_array_equal(backend.numpy(got[name]).imag, [[[2, np.nan, np.inf, -np.inf]]], err_msg=name)
    assert_array_equal(backend.numpy(got["dweight"]), [[[np.nan]]])


# ---- through the automatic differentiation of the libraries ----------------------------------------------------------


@pytest.mark.parametrize("library", [Backend.JAX, Backend.TORCH], ids=lambda b: b.name.lower())
@pytest.mark.parametrize("case", BOTH, ids=str)
def test_autograd_through_conv_is_conv_backward(library: Backend, case: Case) -> None:
    need(library)
    assert_autograd_agrees(library, case, inputs(case, make=relued))


def test_torch_itself_has_the_same_gradients() -> None:
    """conv2d and conv_transpose2d of torch, real and complex."""
    need(Backend.TORCH)
    import torch

    options = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2), "groups": 2}
    for op, weight_shape in (("conv", (6, 2, 3, 2)), ("conv_transpose", (4, 3, 3, 2))):
        case = Case(op, op, (2, 4, 7, 6), weight_shape, options)
        for dtype in ("float64", "complex128"):
            arrays = inputs(case, dtype=dtype)
            mine = {name: Backend.TORCH.asarray(array) for name, array in arrays.items()}
            leaves = {name: mine[name].clone().requires_grad_() for name in ("x", "weight", "bias")}
            y = getattr(torch.nn.functional, f"{op}2d")(*leaves.values(), **options)
            y.backward(mine["dy"])
            theirs = {"y": y, **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}
            theirs = {name: Backend.TORCH.numpy(array) for name, array in theirs.items()}
            assert_results(Backend.TORCH, run(case, Backend.TORCH, arrays), theirs, dtypes=dict.fromkeys(theirs, dtype))


def test_jax_itself_has_the_same_gradients() -> None:
    """lax.conv_general_dilated, real and complex: vjp of jax conjugates nothing, so conj(vjp(conj(dy)))."""
    need(Backend.JAX)
    import jax

    case = conv("jax", (2, 4, 7, 6), (6, 2, 3, 2), groups=2, stride=(2, 1), dilation=(1, 2), padding=((2, 1), (0, 3)))
    for dtype in ("float32", "complex64"):
        arrays = inputs(case, dtype=dtype)
        mine = {name: Backend.JAX.asarray(array) for name, array in arrays.items()}

        def theirs(x: Any, weight: Any) -> Any:
            return jax.lax.conv_general_dilated(
                x, weight, (2, 1), [(2, 1), (0, 3)], rhs_dilation=(1, 2), feature_group_count=2
            )

        y, vjp = jax.vjp(theirs, mine["x"], mine["weight"])
        dx, dweight = vjp(mine["dy"].conj())
        results = run(case, Backend.JAX, {**arrays, "bias": arrays["bias"] * 0})
        for name, wanted in (("y", y), ("dx", dx.conj()), ("dweight", dweight.conj())):
            assert_array(Backend.JAX, results[name], np.asarray(wanted), dtype, name)


def test_a_kernel_of_1024_taps_compiles_and_differentiates_under_jit() -> None:
    need(Backend.JAX)
    import jax

    x, weight = np.arange(2048.0) % 5, np.arange(1024.0) % 3
    mine = {name: Backend.JAX.asarray(a[None, None], "float32") for name, a in (("x", x), ("weight", weight))}
    state = fn.conv_init(mine["x"], mine["weight"], engine="xp")
    began = time.perf_counter()

    @jax.jit
    def gradient(x: Any, weight: Any, state: fn.ConvState) -> Any:
        return jax.grad(lambda x, weight: fn.conv(x, weight, None, state)[0].sum(), argnums=(0, 1))(x, weight)

    dx, dweight = gradient(mine["x"], mine["weight"], state)
    assert_array_equal(np.asarray(dx)[0, 0], np.convolve(np.ones(1025), weight))
    assert_array_equal(np.asarray(dweight)[0, 0], np.convolve(x, np.ones(1025), "valid"))
    assert time.perf_counter() - began < 10
