"""`cupy.ndarray` of the double: a NumPy array that behaves like one of CuPy, and no NumPy array itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import numpy as np

from .cuda.device import Device, current
from .cuda.memory import Memory, MemoryPointer

Host = np.ndarray[Any, Any]
_SCALARS = (bool, int, float, complex, np.generic)


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array on a device. Full indexing and reductions give arrays of no axes: CuPy has no scalars of its own.

    `_host` is the same memory as a NumPy array, which only this package looks at; `_memory` is what it lies in.
    """

    __slots__ = ("__weakref__", "_host", "_memory", "base")
    __array_priority__ = 100

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        _check_dtype(dtype)
        if any(n < 0 for n in shape):
            raise ValueError("Negative dimensions are not allowed")
        if memptr is None:
            memptr = MemoryPointer(Memory(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize), 0)
        self.base: ndarray | None = None
        self._memory: Memory = memptr.mem
        buffer = self._memory.bytes[memptr.ptr - self._memory.ptr :]
        self._host: Host = np.ndarray(shape, dtype, buffer.data, 0, strides, order)

    # ---- what it is --------------------------------------------------------------------------------------------------

    dtype = property(lambda self: self._host.dtype)
    strides = property(lambda self: self._host.strides)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    itemsize = property(lambda self: self._host.itemsize)
    nbytes = property(lambda self: self._host.nbytes)
    device = property(lambda self: Device(self._memory.device_id))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._host.shape

    @property
    def data(self) -> MemoryPointer:
        return MemoryPointer(self._memory, _address(self._host) - self._memory.ptr)

    @property
    def flags(self) -> Flags:
        return Flags(self._host.flags, self.base is None)

    def __len__(self) -> int:
        return len(self._host)

    def __repr__(self) -> str:
        return repr(self._host)

    def __str__(self) -> str:
        return str(self._host)

    # ---- to the host -------------------------------------------------------------------------------------------------

    def get(self, stream: Any = None, order: str = "C", out: Host | None = None) -> Host:
        if out is None:
            return self._host.copy(order)
        out[...] = self._host
        return out

    def __array__(self, dtype: Any = None, copy: Any = None) -> Host:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def item(self) -> Any:
        return self._host.item()

    def tolist(self) -> Any:
        return self._host.tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self._host.tobytes(order)

    def __int__(self) -> int:
        return int(self._host)

    def __float__(self) -> float:
        return float(self._host)

    def __complex__(self) -> complex:
        return complex(self._host)

    def __bool__(self) -> bool:
        if self.size == 0:
            warnings.warn("The truth value of an empty array is ambiguous.", DeprecationWarning, stacklevel=2)
            return False
        return bool(self._host)

    def __reduce__(self) -> tuple[Any, ...]:
        return array, (self.get(),)

    # ---- indexing ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ndarray]:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> ndarray:
        index = _index(key)
        host = self._host[index]
        if not isinstance(host, np.ndarray):  # a full index, which gives a view of no axes where it has an ellipsis
            host = self._host[(*index, ...) if isinstance(index, tuple) else (index, ...)]
        return wrap(host, (self,))

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        with np.errstate(all="ignore"):
            self._host[_index(key)] = value._host if isinstance(value, ndarray) else value

    # ---- copies and views --------------------------------------------------------------------------------------------

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        if casting is not None or subok is not None:
            raise TypeError("casting and subok are not supported yet")
        if not copy and np.dtype(dtype) == self.dtype and order == "K":
            return self
        with np.errstate(all="ignore"):
            return wrap(self._host.astype(dtype, order, copy=True), (self,), order="K")

    def copy(self, order: str = "C") -> ndarray:
        return wrap(self._host.copy(order), order="K")

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> ndarray:
        with self.device:
            return self.copy()

    def fill(self, value: Any) -> None:
        self[...] = value

    def conj(self) -> ndarray:
        return wrap(self._host.conj(), (self,)) if self.dtype.kind == "c" else self

    conjugate = conj

    # ---- NumPy's protocols -------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = getattr(_namespace(), ufunc.__name__, None)
        operands = (*inputs, *kwargs.get("out", ()))
        if method != "__call__" or function is None or not all(isinstance(x, _OPERANDS) for x in operands):
            return NotImplemented
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        return function(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        function = getattr(_namespace(), func.__name__, None)
        if func.__module__ != "numpy" or function in (None, func) or not all(t in _HANDLED for t in types):
            return NotImplemented
        return function(*args, **kwargs)


_HANDLED = (ndarray, np.ndarray)
_OPERANDS = (ndarray, np.ndarray, *_SCALARS)  # a numpy.ndarray is refused by the function, with CuPy's words


class Flags:
    """Three facts about an array's memory; CuPy has no more of them."""

    def __init__(self, flags: Any, owndata: bool) -> None:
        self.c_contiguous, self.f_contiguous, self.owndata = flags.c_contiguous, flags.f_contiguous, owndata

    def __getitem__(self, name: str) -> bool:
        return vars(self)[name.lower()]


def _namespace() -> Any:
    import cupy

    return cupy


def _check_dtype(dtype: Any) -> None:
    if dtype.char not in "?bhilqBHILQefdFD" and dtype.name != "bfloat16":
        raise ValueError(f"Unsupported dtype {dtype}")


def _address(host: Host) -> int:
    return int(host.__array_interface__["data"][0])


def _index(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(_index, key))
    return key._host if isinstance(key, ndarray) else key


# ---- functions of NumPy as functions of CuPy -------------------------------------------------------------------------


def unwrap(value: Any, found: list[ndarray]) -> Any:
    """The arguments of a function of CuPy as NumPy's has them; the arrays among them go to `found`."""
    if isinstance(value, ndarray):
        found.append(value)
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, (tuple, list)):
        return type(value)(unwrap(v, found) for v in value)
    return value


def wrap(result: Any, sources: Any = (), order: str = "C") -> Any:
    """A result of NumPy as one of CuPy: a view of a source where it is one, else an allocation of its own.

    CuPy's kernels write in C order whatever the order of what they read; `order="K"` leaves it as NumPy made it.
    """
    if isinstance(result, (tuple, list)):
        return type(result)(wrap(r, sources, order) for r in result)
    if not isinstance(result, (np.ndarray, np.generic)):
        return result
    host = np.asarray(result)
    for source in sources:
        if host is source._host:
            return source
        if 0 <= _address(host) - source._memory.ptr < max(source._memory.size, 1):
            return _view(host, source)
    for source in sources:
        if source._memory.device_id != current():
            raise ValueError(f"Array device must be same as the current device: {source.device}, current {current()}")
    new = _view(np.empty_like(host, order=order, subok=False), None)
    new._host[...] = host
    return new


def _view(host: Host, source: ndarray | None) -> ndarray:
    """`host`, which lies in the memory of `source`; None: the like of it in an allocation of its own."""
    view = object.__new__(ndarray)
    if source is not None:
        view.base, view._memory, view._host = source.base if source.base is not None else source, source._memory, host
        return view
    _check_dtype(host.dtype)
    view.base, view._memory = None, Memory(host.nbytes)
    view._host = np.ndarray(host.shape, host.dtype, view._memory.bytes.data, 0, host.strides)
    return view


def function(name: str, order: str = "C") -> Callable[..., Any]:
    """NumPy's function of that name as CuPy has it: no arrays of NumPy, no scalars, no warnings about numbers."""
    numpy_function = getattr(np, name)

    @wraps(numpy_function)
    def on_device(*args: Any, **kwargs: Any) -> Any:
        found: list[ndarray] = []
        out = kwargs.get("out")
        args = tuple(unwrap(arg, found) for arg in args)
        kwargs = {key: unwrap(value, found) for key, value in kwargs.items()}
        with np.errstate(all="ignore"):
            result = numpy_function(*args, **kwargs)
        return wrap(result, found, order) if out is None else out

    return on_device


def method(name: str) -> Callable[..., Any]:
    """NumPy's method of that name as CuPy has it."""

    def on_device(self: ndarray, *args: Any, **kwargs: Any) -> Any:
        found = [self]
        out = kwargs.get("out")
        args = tuple(unwrap(arg, found) for arg in args)
        kwargs = {key: unwrap(value, found) for key, value in kwargs.items()}
        with np.errstate(all="ignore"):
            result = getattr(self._host, name)(*args, **kwargs)
        return wrap(result, found) if out is None else out

    on_device.__name__ = name
    return on_device


for _name in (
    *(
        "all",
        "any",
        "argmax",
        "argmin",
        "argsort",
        "clip",
        "cumprod",
        "cumsum",
        "diagonal",
        "dot",
        "flatten",
        "max",
        "mean",
    ),
    *(
        "min",
        "nonzero",
        "prod",
        "ravel",
        "repeat",
        "reshape",
        "round",
        "squeeze",
        "std",
        "sum",
        "swapaxes",
        "take",
        "trace",
    ),
    *("transpose", "var", "view"),
):
    setattr(ndarray, _name, method(_name))
ndarray.T = property(lambda self: self if self.ndim < 2 else self.transpose())
for _name in ("mT", "real", "imag"):
    setattr(ndarray, _name, property(lambda self, name=_name: wrap(getattr(self._host, name), (self,))))


def array(
    obj: Any, dtype: Any = None, copy: Any = True, order: str = "K", subok: bool = False, ndmin: int = 0
) -> ndarray:
    """A copy on the current device. Memory order is kept only where it is plain C or F, or from CuPy's own arrays."""
    if isinstance(obj, ndarray):
        dtype = obj.dtype if dtype is None else dtype
        if obj._memory.device_id == current():
            return obj.astype(dtype, order=order or "K", copy=bool(copy))
        return wrap(obj._host.astype(dtype), order="K")
    if isinstance(obj, (list, tuple)):
        obj = _lists(obj)
    host = np.array(obj, dtype, ndmin=ndmin)
    host = host.astype(host.dtype.newbyteorder("="), copy=False)
    kept = "F" if isinstance(obj, np.ndarray) and obj.flags.f_contiguous else "C"
    order = kept if order in (None, "K", "A") else order
    return wrap(np.array(host, order=order), order="K")


def _lists(obj: Any) -> Any:
    """Nested lists with the arrays in them as NumPy arrays."""
    if isinstance(obj, (list, tuple)):
        return [_lists(o) for o in obj]
    return obj._host if isinstance(obj, ndarray) else obj


def asarray(a: Any, dtype: Any = None, order: str | None = None, *, blocking: bool = False) -> ndarray:
    return array(a, dtype, copy=False, order=order or "K")


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    a = asarray(a, dtype)
    a = a if a.flags.c_contiguous else a.copy()
    return a if a.ndim else a.reshape(1)


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Host | None = None) -> Host:
    return a.get(stream, order, out) if isinstance(a, ndarray) else np.asarray(a)
