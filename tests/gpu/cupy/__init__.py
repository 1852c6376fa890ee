"""A double of CuPy on the CPU, for tests: the part of it that funcnn and array_api_compat use, on NumPy.

It behaves like CuPy where CuPy differs from NumPy: its arrays are no NumPy arrays and do not become some by themselves, a
reduction gives an array, results lie in C order at 512 bytes, and memory not written yet reads as NaN. It is stricter where
CuPy only warns or wraps: arrays of a device that is not the current one and indices out of range are errors.
"""

from __future__ import annotations

import numpy as np

from . import cuda, fft, linalg
from ._array import array, asarray, ascontiguousarray, asnumpy, empty, function, ndarray

__all__ = ["array", "asarray", "ascontiguousarray", "asnumpy", "cuda", "empty", "fft"]
__all__ += ["get_default_memory_pool", "is_available", "linalg", "ndarray"]
__version__ = "14.2.0"

_THE_SAME = """
    bool_ broadcast_shapes can_cast complex128 complex64 complexfloating dtype e euler_gamma finfo float16 float32 float64
    floating generic iinfo inexact inf int16 int32 int64 int8 integer intp isdtype issubdtype nan newaxis number pi
    promote_types signedinteger uint16 uint32 uint64 uint8 unsignedinteger
""".split()  # noqa: SIM905

_FUNCTIONS = """
    abs absolute add all allclose any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort
    array_equal atleast_1d bitwise_and bitwise_or bitwise_xor broadcast_arrays broadcast_to ceil clip concatenate conj
    conjugate copysign cos cosh count_nonzero cumprod cumsum diagonal diff divide divmod dot einsum equal exp exp2
    expand_dims expm1 eye flip floor floor_divide fmax fmin fmod full greater greater_equal hypot imag invert isclose
    isfinite isin isinf isnan left_shift less less_equal linspace log log10 log1p log2 logaddexp logical_and logical_not
    logical_or logical_xor matmul matrix_transpose max maximum mean meshgrid min minimum mod moveaxis multiply negative
    nextafter nonzero not_equal ones outer pad permute_dims positive power prod ravel real reciprocal remainder repeat
    reshape result_type right_shift rint roll round searchsorted sign signbit sin sinh sort split sqrt square squeeze stack
    std subtract sum swapaxes take take_along_axis tan tanh tensordot tile trace transpose tril triu true_divide trunc
    unique var vdot where zeros
""".split()  # noqa: SIM905

_IN_ORDER_OF_THE_ARGUMENT = ["copy", "empty_like", "full_like", "ones_like", "zeros_like"]

globals().update({name: getattr(np, name) for name in _THE_SAME})
globals().update({name: function(name) for name in _FUNCTIONS})
globals().update({name: function(name, order="K") for name in _IN_ORDER_OF_THE_ARGUMENT})
__all__ += [*_THE_SAME, *_FUNCTIONS, *_IN_ORDER_OF_THE_ARGUMENT]


class _Pool:
    def free_bytes(self) -> int:
        return 0

    def free_all_blocks(self) -> None:
        """Nothing is kept for reuse: what is freed must not be read again."""


def get_default_memory_pool() -> _Pool:
    return _Pool()


def is_available() -> bool:
    return True
