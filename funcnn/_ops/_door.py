"""Checks at the door: what every public function asks of its arguments before it calls a plan, and layouts in and out."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from funcnn._arrays import Array, Library, library_of, named
from funcnn._arrays import dtype_name as name_of
from funcnn._spec import COMPLEX_DTYPES, FLOAT_DTYPES, Spec
from funcnn.errors import SpecError, StateError
from funcnn.state import OpState

T = TypeVar("T", bound=OpState)


def check_state(function: str, state: Any, kind: type[T]) -> None:
    """The state must be one of this op."""
    if type(state) is kind:
        return
    op = function.removesuffix("_backward").removesuffix("_indices")
    message = f"{function}: state must be a {kind.__name__} (made by {op}_init), got {type(state).__name__}"
    raise StateError(message) if isinstance(state, OpState) else TypeError(message)


def check_array(function: str, name: str, array: Array, plan: Any, shape: tuple[int, ...], dtype: str) -> None:
    """An argument whose whole shape the state fixes (weight, bias, a residual)."""
    _check_kind(function, name, array, plan, dtype)
    if tuple(array.shape) != shape:
        _wrong(function, name, f"shape {shape}", tuple(array.shape))


def check_batch(function: str, name: str, array: Array, plan: Any, shape: tuple[int, ...], dtype: str) -> int:
    """An argument whose first axis is the batch, which may be of any size: its size."""
    _check_kind(function, name, array, plan, dtype)
    got = tuple(array.shape)
    shape = in_layout(shape, plan.spec)
    if got[1:] != shape or not got:
        advice = "; add a batch axis by x[None]" if got == shape else ""
        _wrong(function, name, f"shape ({', '.join(['N', *map(str, shape)])})", got, advice)
    return got[0]


def _check_kind(function: str, name: str, array: Array, plan: Any, dtype: str) -> None:
    library = library_of(function, name, array)
    if library.name != plan.library:
        raise TypeError(
            f"{function}: {name} must be an array of {plan.library} as the state was made for, got {library.name}; "
            f"convert it, or call {_init(function)} with {library.name} arrays"
        )
    if name_of(array.dtype) != dtype:
        _wrong(function, name, f"dtype {dtype}", name_of(array.dtype))
    if plan.device is not None and library.device(array) != plan.device:
        _wrong(function, name, f"device {plan.device}", library.device(array))


def _init(function: str) -> str:
    if function == "out_spec":
        return "the init function"
    return f"{function.removesuffix('_backward').removesuffix('_indices')}_init"


def _wrong(function: str, name: str, required: str, got: Any, advice: str = "") -> NoReturn:
    advice = advice or f"; call {_init(function)} for another one"
    raise StateError(f"{function}: {name} must have {required} as the state was made for, got {got}{advice}")


def check_same_batch(function: str, name: str, batch: int, other: str, expected: int) -> None:
    """Two arguments must have one batch size."""
    if batch != expected:
        raise StateError(f"{function}: {name} must have the batch size {expected} of {other}, got {batch}")


def check_differentiable(function: str, dtype: str) -> None:
    """Integers have no gradient."""
    if dtype not in FLOAT_DTYPES and dtype not in COMPLEX_DTYPES:
        raise TypeError(f"{function}: x must have a float or complex dtype (integers have no gradient), got {dtype}")


def check_bool(function: str, name: str, value: Any) -> None:
    """A flag of a call must be a bool: a tracer or an array would be a hidden branch."""
    if type(value) is not bool:
        raise TypeError(f"{function}: {name} must be True or False, got {value!r}")


def canonical_wrt(function: str, wrt: Any) -> tuple[str, ...]:
    """`wrt` as a tuple of names."""
    names = (wrt,) if isinstance(wrt, str) else wrt
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{function}: wrt must be a name or a tuple of names, got {wrt!r}")
    for name in names:
        if name not in ("x", "weight", "bias"):
            raise SpecError(f"{function}: wrt must name 'x', 'weight' or 'bias', got {name!r}")
    return tuple(names)


# ---- layout ----------------------------------------------------------------------------------------------------------


def in_layout(shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
    """A (C, *spatial) shape as the user's layout has it."""
    return (*shape[1:], shape[0]) if spec.layout == "channels_last" and shape else shape


def to_engine(array: Array, plan: Any) -> Array:
    """The user's array as a channels-first shape: a view where the library has views."""
    if plan.spec.layout == "channels_first" or array.ndim < 3:
        return array
    return named(plan.library).xp.permute_dims(array, _to_first(array.ndim))


def to_user(array: Array, plan: Any) -> Array:
    """An engine's array in the user's layout."""
    if plan.spec.layout == "channels_first" or array.ndim < 3:
        return array
    return named(plan.library).xp.permute_dims(array, _to_last(array.ndim))


@lru_cache
def _to_first(ndim: int) -> tuple[int, ...]:
    return (0, ndim - 1, *range(1, ndim - 1))


@lru_cache
def _to_last(ndim: int) -> tuple[int, ...]:
    return (0, *range(2, ndim), 1)


def empty(library: Library, device: str | None, ndim: int, dtype: str) -> Array:
    """A residual of zero size, for a state that has not run."""
    return library.zeros((0,) * ndim, dtype, device)
