"""Which library an array belongs to, dtypes by name, and `ArraySpec`, which stands for an array in an init."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import array_api_compat
import numpy as np

from funcnn._spec import LAYOUTS, choice, integer

__all__ = ["Array", "ArraySpec", "Library", "describe", "dtype_name", "library_of"]

Array = Any
"""An array of any supported library: there is no common static type for them."""

_COMPAT = "array_api_compat."
_OWN_NAMESPACE = {"jax": "jax.numpy"}
_NUMPY_DTYPES = ("numpy", "cupy", "jax")


@dataclass(frozen=True, eq=False)
class Library:
    """An array library: its short name ("numpy", "torch", ...) and its Array-API namespace. One object per name."""

    name: str
    xp: ModuleType
    devices: dict[str, Any] = field(default_factory=dict)  # devices met so far, by their text

    def dtype(self, name: str) -> Any:
        """The library's dtype object of that name."""
        return np.dtype(name) if self.name in _NUMPY_DTYPES else getattr(self.xp, name)

    def device(self, array: Array) -> str | None:
        """The device as text, None where an array has no one device to compare (NumPy, JAX)."""
        if self.name in ("numpy", "jax"):
            return None
        if self.name in ("cupy", "torch"):  # what array_api_compat would find out anew in 3 microseconds
            return self.device_text(array.device)
        return self.device_text(array_api_compat.device(array))

    def device_text(self, device: Any) -> str | None:
        """A device as text, which can be hashed and pickled; `devices` leads back."""
        if device is None:
            return None
        text = str(device)
        self.devices.setdefault(text, device)
        return text

    def place(self, device: str | None) -> dict[str, Any]:
        """Keywords that make a new array on a device given as text; None: the library's default."""
        return {} if device is None else {"device": self.devices[device]}

    def on(self, device: str | None) -> AbstractContextManager[Any]:
        """Within it new arrays lie on a device given as text: array_api_compat drops what CuPy is told by `place`."""
        return nullcontext() if device is None or self.name != "cupy" else self.devices[device]

    def zeros(self, shape: tuple[int, ...], dtype: str, device: str | None) -> Array:
        """Zeros on a device given as text."""
        with self.on(device):
            return self.xp.zeros(shape, dtype=self.dtype(dtype), **self.place(device))

    @property
    def widest_int(self) -> str:
        """The widest signed integer: int64, but int32 on a JAX without x64. Asked anew each time: JAX can be switched."""
        if self.name == "numpy":
            return "int64"
        return "int64" if "int64" in self.xp.__array_namespace_info__().dtypes(kind="signed integer") else "int32"

    @property
    def index_dtypes(self) -> tuple[str, ...]:
        """Dtypes for an argmax, smallest first: torch computes with no unsigned type but uint8."""
        unsigned = ("uint8",) if self.name == "torch" else ("uint8", "uint16", "uint32")
        return (*unsigned, "int32", "int64")


_libraries: dict[str, Library] = {}
_library_of_type: dict[type, Library] = {}


def _library(name: str, xp: ModuleType) -> Library:
    return _libraries.setdefault(name, Library(name, xp))


def named(name: str) -> Library:
    """The library of that name, importing its namespace where need be."""
    if name in _libraries:
        return _libraries[name]
    try:
        xp = importlib.import_module(_COMPAT + name)
    except ImportError:
        xp = importlib.import_module(_OWN_NAMESPACE.get(name, name))
    return _library(name, xp)


def _name_of_namespace(xp: ModuleType) -> str:
    return xp.__name__.removeprefix(_COMPAT).split(".")[0]


# typed: array-api-strict's dtypes have the hash of NumPy's and warn when they are compared with one.
@lru_cache(256, typed=True)
def dtype_name(dtype: Any) -> str:
    """'float32' for every library's float32; told apart by name since bfloat16 is no standard dtype.

    >>> dtype_name(np.dtype(">f4"))
    'float32'
    """
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rsplit(".", 1)[-1]


def library_of(function: str, name: str, array: Array) -> Library:
    """The library of one array; TypeError for what is not an array or hides values (masked arrays, matrices)."""
    known = _library_of_type.get(type(array))
    if known is not None:
        return known
    refused = (type, np.generic, np.ma.MaskedArray, np.matrix)  # a class of arrays has what array_api_compat looks for
    if isinstance(array, refused) or not array_api_compat.is_array_api_obj(array):
        advice = {np.matrix: "; use numpy.asarray", np.ma.MaskedArray: "; fill the masked values first"}
        what = next((text for kind, text in advice.items() if isinstance(array, kind)), "")
        raise TypeError(
            f"{function}: {name} must be an array (NumPy, CuPy, torch, JAX or another Array-API library), "
            f"got {type(array).__module__}.{type(array).__qualname__}{what}"
        )
    xp = array_api_compat.array_namespace(array)
    return _library_of_type.setdefault(type(array), _library(_name_of_namespace(xp), xp))


class ArraySpec:
    """Stands for an array in an init function: shape, dtype, library and device without data.

    Parameters
    ----------
    shape : sequence of int
        As the array would have it, batch first.
    dtype : str or dtype
        A name ("float32") or a dtype of the library.
    xp : module
        The array library: numpy, cupy, torch, jax.numpy, array_api_strict, ...
    device : optional
        A device of the library; None leaves it open (arrays of any device fit).
    order : {"channels_first", "channels_last"}
        The memory order that the array is going to have; a hint.

    Raises
    ------
    TypeError, SpecError
        For a shape that is no sequence of ints of at least 0, an unknown dtype or order.

    Examples
    --------
    >>> import funcnn as fn
    >>> state = fn.max_pool_init(fn.ArraySpec((8, 3, 32, 32), "float32"), 2)
    >>> fn.out_spec(state)
    ArraySpec((8, 3, 16, 16), float32, numpy)
    """

    __slots__ = ("device", "dtype", "library", "order", "shape")

    def __init__(
        self, shape: Any, dtype: Any, xp: ModuleType = np, *, device: Any = None, order: str = "channels_first"
    ) -> None:
        if not isinstance(shape, (tuple, list)):
            raise TypeError(f"ArraySpec: shape must be a sequence of ints, got {shape!r}")
        if not isinstance(xp, ModuleType):
            raise TypeError(f"ArraySpec: xp must be an array library (a module), got {xp!r}")
        self.shape = tuple(integer("ArraySpec", "shape", size, 0) for size in shape)
        self.library = named(_name_of_namespace(xp))
        self.dtype = self._dtype(dtype)
        self.device = device
        self.order = choice("ArraySpec", "order", order, LAYOUTS)

    def _dtype(self, dtype: Any) -> Any:
        try:
            if dtype is None:  # NumPy reads it as float64
                raise TypeError
            if not isinstance(dtype, str) and self.library.name in _NUMPY_DTYPES:
                dtype = np.dtype(dtype)
            return self.library.dtype(dtype if isinstance(dtype, str) else dtype_name(dtype))
        except (TypeError, AttributeError):
            raise TypeError(f"ArraySpec: dtype must be a dtype of {self.library.name}, got {dtype!r}") from None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def xp(self) -> ModuleType:
        return self.library.xp

    def __repr__(self) -> str:
        device = "" if self.device is None else f", device={self.device}"
        order = "" if self.order == "channels_first" else f", order={self.order!r}"
        return f"ArraySpec({self.shape}, {dtype_name(self.dtype)}, {self.library.name}{device}{order})"

    def _key(self) -> tuple[Any, ...]:
        """What makes it equal to another one. CuPy's devices cannot be hashed: their text stands for them."""
        device = self.library.device_text(self.device)
        return self.shape, dtype_name(self.dtype), self.library.name, device, self.order

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_spec, (self.shape, dtype_name(self.dtype), self.library.name, self.device, self.order)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, ArraySpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


def _unpickle_spec(shape: tuple[int, ...], dtype: str, library: str, device: Any, order: str) -> ArraySpec:
    return ArraySpec(shape, dtype, named(library).xp, device=device, order=order)


def describe(function: str, name: str, array: Array) -> tuple[Library, str | None, tuple[int, ...], str]:
    """Library, device, shape and dtype name of an array or ArraySpec."""
    if type(array) is ArraySpec:
        return array.library, array.library.device_text(array.device), array.shape, dtype_name(array.dtype)
    library = library_of(function, name, array)
    return library, library.device(array), tuple(array.shape), dtype_name(array.dtype)


def same_library(function: str, first: str, a: Library, second: str, b: Library) -> None:
    """TypeError where two arguments come from different libraries: funcnn copies nothing between them."""
    if a is not b:
        raise TypeError(
            f"{function}: {second} must be an array of the same library as {first} ({a.name}), "
            f"got {b.name}; convert it first"
        )
