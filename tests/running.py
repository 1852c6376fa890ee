"""Running a case through the public functions of funcnn on a backend, and comparing what comes out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from cases import CONVS, GRADIENTS, Arrays, Case, bounds, expected, inputs, normal
from conftest import Backend
from numpy.testing import assert_array_equal

import funcnn as fn

LAYOUTS = ("channels_first", "channels_last")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
SPATIAL = ("x", "y", "dx", "dy", "argmax", "plane", "tensor")  # what a layout moves


def spare_jax(backend: Backend, needless: bool) -> None:
    """Skip what JAX, which compiles for a fifth of a second for each case, need not repeat."""
    if backend is Backend.JAX and needless:
        pytest.skip("JAX compiles for each case: here some of them are enough")


def sample(cases: list[Case], layout: str) -> list[Case]:
    """Those for JAX: a third of all, a ninth in the second layout. Geometry is the engine's, the same on every library."""
    return cases[::3] if layout == "channels_first" else cases[1::9]


def to_layout(name: str, array: Any, layout: str) -> Any:
    """A channels-first NumPy array as the layout has it, contiguous."""
    if layout == "channels_last" and name in SPATIAL and array.ndim > 1:
        return np.ascontiguousarray(np.moveaxis(array, 1, -1))
    return array


def start(case: Case, backend: Backend, arrays: Arrays, layout: str = "channels_first", **options: Any) -> Any:
    """The op state for arrays of a backend (or ArraySpecs)."""
    init = getattr(fn, f"{case.op}_init")
    second = arrays["weight"] if case.is_conv else case.kernel
    return init(arrays["x"], second, layout=layout, **{"engine": backend.engine, **case.options, **options})


def steps(op: str, arrays: Arrays, state: Any, differentiable: bool = True) -> tuple[Arrays, Any]:
    """Forward and backward through the public functions: results by name and the state after the forward."""
    forward, backward = getattr(fn, op), getattr(fn, f"{op}_backward")
    results = {}
    if op in CONVS:
        results["y"], state = forward(arrays["x"], arrays["weight"], arrays["bias"], state)
        if differentiable:
            gradients = backward(arrays["dy"], arrays["x"], arrays["weight"], state)
            results |= zip(GRADIENTS, gradients, strict=True)
        return results, state
    results["y"], state = forward(arrays["x"], state)
    if op == "max_pool":
        results["argmax"] = state.argmax
        results |= {base: fn.max_pool_indices(state, base) for base in ("plane", "tensor")}
    if differentiable:
        results["dx"] = backward(arrays["dy"], state)
    return results, state


def run(
    case: Case,
    backend: Backend,
    arrays: Arrays,
    layout: str = "channels_first",
    jit: bool = True,
    poison: bool = True,
) -> Arrays:
    """Results of a case as arrays of the backend, in the layout; JAX under jax.jit, which is ten times faster to test.

    On the way: inputs must come out as they went in, and no result may share memory with an input or with scratch.
    """
    mine = {name: backend.asarray(to_layout(name, array, layout)) for name, array in arrays.items()}
    before = {name: backend.numpy(array).tobytes() for name, array in mine.items()}
    state = start(case, backend, mine, layout)
    differentiable = arrays["x"].dtype.kind not in "biu"
    if backend is Backend.JAX and jit:
        results, _ = _jitted()(case.op, mine, state, differentiable)
    else:
        results, _ = steps(case.op, mine, state, differentiable)
    for name, array in mine.items():
        assert backend.numpy(array).tobytes() == before[name], f"{name} was written to"
        if backend.is_numpy:
            assert not any(np.may_share_memory(array, result) for result in results.values()), name
    if poison:
        fn._scratch.poison()
    return results


@cache
def _jitted() -> Any:
    import jax

    return jax.jit(steps, static_argnums=(0, 3))


def assert_results(
    backend: Backend, got: Arrays, wanted: Arrays, layout: str = "channels_first", dtypes: dict[str, str] | None = None
) -> None:
    """Every result: library, dtype, shape, values; `dtypes` names those that are not the backend's float dtype."""
    assert got.keys() == wanted.keys()
    index = {"plane": backend.widest_int, "tensor": backend.widest_int, "argmax": "uint8"}
    for name, array in wanted.items():
        dtype = {**index, **(dtypes or {})}.get(name, backend.widest_float)
        assert_array(backend, got[name], to_layout(name, array, layout), dtype, name)


def assert_array(backend: Backend, got: Any, wanted: Any, dtype: str, name: str = "") -> None:
    """One array of the backend: type, dtype (native byte order), shape and exact values, NaN where NaN is."""
    assert type(got) is backend.array_type, name
    assert backend.dtype_name(got) == dtype, name
    assert_array_equal(
        backend.numpy(got), np.asarray(wanted).astype(backend.numpy(got).dtype), err_msg=name, strict=True
    )


def assert_close(
    backend: Backend, case: Case, dtype: str, layout: str = "channels_first", make: Callable[..., Any] = normal
) -> None:
    """Random numbers of a dtype: every result has that dtype and lies within `bounds` of the exact one."""
    if not backend.has_dtype(dtype):
        pytest.skip(f"{backend.module} has no {dtype}")
    arrays = inputs(case, seed=1, dtype=dtype, make=make)
    results = run(case, backend, arrays, layout)
    for name, (bound, wanted) in bounds(case, arrays, dtype).items():
        got = backend.numpy(results[name])
        bound, wanted = to_layout(name, bound, layout), to_layout(name, wanted, layout)
        assert backend.dtype_name(results[name]) == dtype, name
        assert got.shape == wanted.shape, name
        error = np.abs(got.astype(wanted.dtype) - wanted)
        assert (error <= bound).all(), (name, float((error / np.maximum(bound, 1e-300)).max()))


# ---- the automatic differentiation of the libraries ------------------------------------------------------------------


def jax_gradients(op: str, mine: Arrays, state: Any) -> Arrays:
    """jax.grad through the forward of an op."""
    import jax

    inner = {name: array for name, array in mine.items() if name != "dy"}

    def loss(arrays: Arrays) -> Any:
        results, _ = steps(op, {**arrays, "dy": mine["dy"]}, state, differentiable=False)
        return (results["y"] * mine["dy"]).sum()

    return {f"d{name}": gradient for name, gradient in jax.jit(jax.grad(loss))(inner).items()}


def torch_gradients(op: str, mine: Arrays, state: Any) -> Arrays:
    """torch's autograd through the forward of an op."""
    leaves = {name: array.clone().requires_grad_() for name, array in mine.items() if name != "dy"}
    results, _ = steps(op, {**leaves, "dy": mine["dy"]}, state, differentiable=False)
    results["y"].backward(mine["dy"])
    return {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def assert_autograd_agrees(backend: Backend, case: Case, arrays: Arrays) -> None:
    """The library's gradients of a forward are the op's own backward, and the oracle's."""
    mine = {name: backend.asarray(array, backend.widest_float) for name, array in arrays.items()}
    gradients = (jax_gradients if backend is Backend.JAX else torch_gradients)(
        case.op, mine, start(case, backend, mine)
    )
    own, wanted = run(case, backend, arrays), expected(case, arrays)
    for name, gradient in gradients.items():
        assert_array(backend, gradient, wanted[name], backend.widest_float, name)
        assert_array(backend, own[name], backend.numpy(gradient), backend.widest_float, name)
