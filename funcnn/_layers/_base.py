"""What every layer is made of: the Layer tuple, its state, seeds, parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from funcnn._arrays import Array, ArraySpec, Library, describe, dtype_name, library_of
from funcnn._spec import COMPLEX_DTYPES, FLOAT_DTYPES, HALF_DTYPES, flag
from funcnn.errors import SpecError, StateError
from funcnn.state import Node, clear, empty_like, pytree

__all__ = [
    "Layer",
    "LayerState",
    "Seed",
    "check_forward",
    "check_like",
    "child_seed",
    "filled",
    "glorot_uniform",
    "he_normal",
    "saving",
    "spec_of",
    "wide",
]

Seed = int | np.random.SeedSequence


class Layer(NamedTuple):
    """A layer: three closures.

    ``init(seed, x)`` gives ``(params, state, y_spec)``; x is an array or an `ArraySpec`, only its shape, dtype, library and
    device are read. ``forward(params, state, x, train=True)`` gives ``(y, state)``; train=False saves nothing for a backward.
    ``backward(params, state, dy)`` gives ``(dx, grads)``, grads with the structure of params.
    """

    init: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]


@pytree
@dataclass(frozen=True, eq=False, slots=True)
class LayerState(Node):
    """State of a layer, a pytree.

    Attributes
    ----------
    op : op state, tuple of states, or ()
        What the layer's op keeps between calls; the states of a combinator's layers.
    saved : tuple of arrays
        What the backward needs: the caller's own x or the y that forward returned, not a copy of it (so do not write into
        either before the backward). Zero-size until a training forward.
    """

    op: Any
    saved: tuple[Any, ...]
    leaves: ClassVar[tuple[str, ...]] = ("op", "saved")

    def cleared(self) -> LayerState:
        return LayerState(clear(self.op), tuple(map(empty_like, self.saved)))


def spec_of(function: str, x: Array | ArraySpec) -> ArraySpec:
    """The ArraySpec of an array; an ArraySpec as it is."""
    if type(x) is ArraySpec:
        return x
    library, device, shape, dtype = describe(function, "x", x)
    return ArraySpec(shape, dtype, library.xp, **library.place(device))


def like(x: ArraySpec, shape: tuple[int, ...]) -> ArraySpec:
    """The same dtype, library and device with another shape."""
    return ArraySpec(shape, x.dtype, x.xp, device=x.device)


def place(x: ArraySpec) -> dict[str, Any]:
    """The device keyword for a new array beside x."""
    return {} if x.device is None else {"device": x.device}


def check_state(function: str, state: Any) -> None:
    """The state of a layer must be a LayerState, not the op state in it."""
    if type(state) is not LayerState:
        raise TypeError(
            f"{function}: state must be a LayerState (made by the layer's init), got {type(state).__name__}"
        )


def check_forward(function: str, state: Any, train: Any) -> None:
    """What every forward asks of its state and its flag."""
    check_state(function, state)
    flag(function, "train", train)


def check_kind(function: str, name: str, array: Array, other_name: str, other: Array) -> None:
    """Two arrays must have one library, dtype and device."""
    library, mine = library_of(function, other_name, other), library_of(function, name, array)
    if mine is not library:
        raise TypeError(
            f"{function}: {name} must be an array of {library.name} as {other_name} is, got {mine.name}; convert it first"
        )
    if dtype_name(array.dtype) != dtype_name(other.dtype):
        raise StateError(
            f"{function}: {name} must have the dtype {dtype_name(other.dtype)} of {other_name}, "
            f"got {dtype_name(array.dtype)}"
        )
    if library.device(array) != library.device(other):
        raise StateError(
            f"{function}: {name} must have the device {library.device(other)} of {other_name}, "
            f"got {library.device(array)}"
        )


def check_shape(function: str, name: str, array: Array, shape: tuple[int, ...]) -> None:
    """An array must have exactly this shape: broadcasting would hide a mistake."""
    if tuple(array.shape) != shape:
        raise StateError(f"{function}: {name} must have shape {shape}, got {tuple(array.shape)}")


def check_like(function: str, name: str, array: Array, other_name: str, other: Array) -> None:
    """Two arrays must have one library, dtype, device and shape."""
    check_kind(function, name, array, other_name, other)
    if tuple(array.shape) != tuple(other.shape):
        raise StateError(
            f"{function}: {name} must have the shape {tuple(other.shape)} of {other_name}, got {tuple(array.shape)}"
        )


def filled(function: str, state: LayerState) -> tuple[Any, ...]:
    """The saved arrays; StateError where no training forward has filled them."""
    check_state(function, state)
    if any(not any(array.shape) for array in state.saved):
        raise StateError(
            f"{function}: state must come from forward with train=True, got a state that saved nothing; "
            f"pass the state that forward returned"
        )
    return state.saved


def saving(op: Any, arrays: tuple[Any, ...], train: bool) -> LayerState:
    """The state after a forward: the arrays when training, else nothing."""
    state = LayerState(op, arrays)
    return state if train else state.cleared()


def unsaved(x: ArraySpec, *ndims: int) -> tuple[Any, ...]:
    """Zero-size stand-ins for saved arrays with these numbers of axes."""
    return tuple(zeros((0,) * ndim, x) for ndim in ndims)


def wide(function: str, name: str, x: Array, *, real: bool = True) -> tuple[Library, Any, Array]:
    """Library, namespace and x in the dtype to compute in: float32 for half floats, which round once at the end.

    In native byte order: NumPy's clip refuses another one.
    """
    library = library_of(function, name, x)
    xp: Any = library.xp
    dtype = float_name(function, name, x, real)
    return library, xp, xp.astype(x, library.dtype("float32" if dtype in HALF_DTYPES else dtype), copy=False)


def rounded(library: Library, y: Array, x: Array) -> Array:
    """What was computed from `wide` in the dtype of x, in native byte order."""
    return library.xp.astype(y, library.dtype(dtype_name(x.dtype)), copy=False)


def copied(x: Array, shape: tuple[int, ...]) -> Array:
    """A new array with the values of x in another shape, in native byte order: no result shares memory with an input."""
    library = library_of("layer", "x", x)
    xp: Any = library.xp
    return xp.astype(xp.reshape(x, shape), library.dtype(dtype_name(x.dtype)), copy=True)


def float_name(function: str, name: str, x: Array | ArraySpec, real: bool) -> str:
    """The dtype's name; TypeError where it is not a float or, unless real, a complex one."""
    _, _, _, dtype = describe(function, name, x)
    if dtype not in FLOAT_DTYPES and (real or dtype not in COMPLEX_DTYPES):
        raise TypeError(f"{function}: {name} must have a {'float' if real else 'float or complex'} dtype, got {dtype}")
    return dtype


# ---- seeds and parameters --------------------------------------------------------------------------------------------


def _sequence(seed: Seed) -> np.random.SeedSequence:
    if isinstance(seed, np.random.SeedSequence):
        return seed
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"init: seed must be an int, got {seed!r}")
    if seed < 0:
        raise SpecError(f"init: seed must be at least 0, got {seed}")
    return np.random.SeedSequence(int(seed))


def child_seed(seed: Seed, index: int) -> np.random.SeedSequence:
    """The seed of a combinator's layer: its path in the net is part of it, so that equal layers differ."""
    parent = _sequence(seed)
    return np.random.SeedSequence(parent.entropy, spawn_key=(*parent.spawn_key, index))


def int_seed(seed: Seed) -> int:
    """A 64-bit int from a seed."""
    return int(_sequence(seed).generate_state(1, np.uint64)[0])


def he_normal(function: str, seed: Seed, shape: tuple[int, ...], fan_in: float, x: ArraySpec) -> Array:
    """Normal numbers of variance 2 / fan_in: He et al., "Delving deep into rectifiers" (2015)."""
    return _draw(function, seed, x, lambda rng: rng.standard_normal(shape) * math.sqrt(2 / max(fan_in, 1)))


def glorot_uniform(function: str, seed: Seed, shape: tuple[int, ...], fan_in: int, fan_out: int, x: ArraySpec) -> Array:
    """Uniform numbers of variance 2 / (fan_in + fan_out): Glorot and Bengio, "Understanding the difficulty ..." (2010)."""
    limit = math.sqrt(6 / max(fan_in + fan_out, 1))
    return _draw(function, seed, x, lambda rng: rng.uniform(-limit, limit, shape))


def _draw(function: str, seed: Seed, x: ArraySpec, draw: Callable[[np.random.Generator], Any]) -> Array:
    """Numbers drawn by NumPy in float64 and rounded: the same on every library. Complex: two draws of half the variance."""
    rng = np.random.default_rng(_sequence(seed))
    dtype = float_name(function, "x", x, real=False)
    values = draw(rng)
    if dtype in COMPLEX_DTYPES:
        values = (values + 1j * draw(rng)) / math.sqrt(2)
        values = values.astype(dtype)
    elif dtype != "float64":
        values = values.astype(np.float32)
    with x.library.on(x.library.device_text(x.device)):
        return x.xp.astype(x.xp.asarray(values, **place(x)), x.dtype, copy=False)


def zeros(shape: tuple[int, ...], x: ArraySpec) -> Array:
    return x.library.zeros(shape, dtype_name(x.dtype), x.library.device_text(x.device))


def namespace(array: Array) -> Any:
    """The Array-API namespace of an array that has passed a door."""
    return library_of("layer", "x", array).xp
