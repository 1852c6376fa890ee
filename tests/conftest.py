"""The backends that the tests run on, as one enum, and the fixture that gives them to a test."""

from __future__ import annotations

import enum
import gc
import importlib
import os
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from gpu import double

import funcnn as fn

# Packages under gpu/ are named as what they stand for: collected for doctests, they would be imported as it.
collect_ignore = ["gpu"]

hypothesis.settings.register_profile("fixed", max_examples=200, deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fixed")


class Backend(enum.Enum):
    """An engine on the arrays of a library: (module, engine, read-only inputs)."""

    NUMPY_JIT = ("numpy", "jit", False)
    NUMPY_XP = ("numpy", "xp", False)
    NUMPY_BLAS = ("numpy", "blas", False)
    NUMPY_BLAS_READONLY = ("numpy", "blas", True)
    STRICT = ("array_api_strict", "xp", False)
    JAX = ("jax.numpy", "xp", False)
    TORCH = ("torch", "xp", False)
    CUPY_XP = ("cupy", "xp", False)
    CUPY_CUDNN = ("cupy", "cudnn", False)
    CUPY_CUDA = ("cupy", "cuda", False)

    @property
    def module(self) -> str:
        return str(self.value[0])

    @property
    def engine(self) -> str:
        return str(self.value[1])

    @property
    def is_numpy(self) -> bool:
        return self.module == "numpy"

    @property
    def is_cupy(self) -> bool:
        return self.module == "cupy"

    @property
    def xp(self) -> Any:
        return importlib.import_module(self.module)

    def has_dtype(self, dtype: str) -> bool:
        """Whether the library has a dtype at all (array-api-strict: no float16; torch: no wide unsigned arithmetic)."""
        if self is Backend.JAX and dtype in ("float64", "complex128", "int64", "uint64"):
            return False
        if self is Backend.TORCH and dtype in ("uint16", "uint32", "uint64"):
            return False
        if self.is_numpy or self.is_cupy or self is Backend.JAX:
            return True
        return hasattr(self.xp, dtype)

    @property
    def widest_float(self) -> str:
        """The float dtype for exact tests: float64, but float32 on JAX as it comes."""
        return "float32" if self is Backend.JAX else "float64"

    @property
    def widest_int(self) -> str:
        return "int32" if self is Backend.JAX else "int64"

    @property
    def array_type(self) -> type:
        """What a result must be an instance of, exactly."""
        return type(self.asarray(np.zeros(1)))

    def dtype_name(self, array: Any) -> str:
        """'float32' for every library's float32, '>f4' where NumPy's byte order is not native."""
        return str(array.dtype).rsplit(".", 1)[-1]

    def asarray(self, values: Any, dtype: str | None = None) -> Any:
        """A NumPy array as an array of the backend."""
        array = np.asarray(values, dtype=None if dtype is None else np.dtype(dtype))
        if self.is_numpy:
            array = array.view()
            array.flags.writeable = not self.value[2]
            return array
        if array.dtype.name == "bfloat16" and self is Backend.TORCH:
            return self.xp.asarray(array.astype(np.float32)).to(self.xp.bfloat16)
        return self.xp.asarray(np.array(array))

    def numpy(self, array: Any) -> np.ndarray:
        """An array of the backend as a NumPy array (bfloat16 of torch as float32)."""
        if self is Backend.TORCH:
            array = array.detach()
            return array.float().numpy() if str(array.dtype) == "torch.bfloat16" else array.numpy()
        return array.get() if self.is_cupy else np.asarray(array)


# The README's test command has neither torch nor what the GPU engines need; CI asks for them by name.
DEFAULT_BACKENDS = [backend for backend in Backend if backend is not Backend.TORCH and not backend.is_cupy]


def selected_backends() -> list[Backend]:
    """FUNCNN_TEST_BACKENDS="numpy_blas,torch", or "all"; an unknown name is an error, so that a typo skips nothing."""
    names = os.environ.get("FUNCNN_TEST_BACKENDS", "")
    if not names:
        return DEFAULT_BACKENDS
    if names == "all":
        return list(Backend)
    known = {backend.name.lower(): backend for backend in Backend}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise pytest.UsageError(f"FUNCNN_TEST_BACKENDS: unknown {unknown}; known: {sorted(known)}")
    return [known[name] for name in names.split(",")]


if any(backend.is_cupy for backend in selected_backends()) and not double.real_gpu():
    double.install()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs on CuPy arrays: `-m gpu` chooses it where there is a GPU."""
    for item in items:
        on = getattr(item, "callspec", None) and item.callspec.params.get("backend")
        if isinstance(on, Backend) and on.is_cupy:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(params=selected_backends(), ids=lambda backend: backend.name.lower())
def backend(request: pytest.FixtureRequest) -> Backend:
    """One backend; a requested one that does not import is a failure, not a skip."""
    importlib.import_module(request.param.module)
    return request.param


@pytest.fixture(params=[b for b in selected_backends() if b.is_numpy], ids=lambda backend: backend.name.lower())
def numpy_backend(request: pytest.FixtureRequest) -> Backend:
    """One backend on NumPy arrays."""
    return request.param


@pytest.fixture(autouse=True)
def poisoned_scratch() -> Any:
    """Fill the scratch arenas with NaN patterns after each test: no result may be a view of them or read them."""
    yield
    fn._scratch.poison()
    gc.collect(0)


@pytest.fixture(autouse=True, scope="module")
def small_scratch() -> Any:
    """Large arrays of one module leave MBs of scratch, which the tests of the next one would poison a thousand times."""
    yield
    fn.release_scratch()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Skip what an engine leaves to the next one in the table: it says so by the refusal of a whole kind of Spec."""
    try:
        return (yield)
    except fn.errors.EngineError as error:
        if " it has no " in str(error):
            pytest.skip(str(error).split(": ", 1)[1])
        raise


def need(backend: Backend) -> None:
    """Skip the rest of a test that is about one library, where that backend was not selected."""
    if backend not in selected_backends():
        pytest.skip(f"{backend.name.lower()} is not among the selected backends")
    importlib.import_module(backend.module)


def eps(dtype: str) -> float:
    """Distance from 1 to the next number of a float or complex dtype."""
    return float(ml_dtypes.finfo(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).eps)
