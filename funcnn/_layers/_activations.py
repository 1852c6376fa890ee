"""Activations: pure functions of arrays and their derivatives, as layers without parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from funcnn._arrays import Array, ArraySpec
from funcnn._layers._base import (
    Layer,
    LayerState,
    Seed,
    check_forward,
    check_kind,
    check_like,
    filled,
    float_name,
    rounded,
    saving,
    spec_of,
    unsaved,
    wide,
)
from funcnn._spec import integer
from funcnn.errors import SpecError, StateError

__all__ = ["gelu", "leaky_relu", "relu", "sigmoid", "softmax", "tanh"]

Function = Callable[..., Any]


def _activation(
    name: str, value: Function, slope: Function, keeps: str, check: Callable[[ArraySpec], None] | None = None
) -> Layer:
    """A layer from value(xp, x) and slope(xp, kept, dy), where kept is x or y. `check` is what init asks of x."""
    backward_name = f"{name}_backward"

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        float_name(name, "x", x, real=True)
        spec = spec_of(name, x)
        if check is not None:
            check(spec)
        return (), LayerState((), unsaved(spec, spec.ndim)), spec

    def forward(params: Any, state: LayerState, x: Array, train: bool = True) -> Any:
        check_forward(name, state, train)
        library, xp, a = wide(name, "x", x)
        (saved,) = state.saved
        check_kind(name, "x", x, "the state", saved)
        if x.ndim != saved.ndim:
            raise StateError(f"{name}: x must have {saved.ndim} axes as the state was made for, got {x.ndim}")
        y = rounded(library, value(xp, a), x)
        return y, saving((), (x if keeps == "x" else y,), train)

    def backward(params: Any, state: LayerState, dy: Array) -> Any:
        (kept,) = filled(backward_name, state)
        check_like(backward_name, "dy", dy, keeps, kept)
        library, xp, d = wide(backward_name, "dy", dy)
        _, _, a = wide(backward_name, keeps, kept)
        return rounded(library, slope(xp, a, d), dy), ()

    return Layer(init, forward, backward)


def relu() -> Layer:
    """max(x, 0). NaN stays NaN; the slope at 0 is 0.

    Returns
    -------
    Layer

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> x = np.asarray([[-1.0, 0.0, 2.0]])
    >>> layer = L.relu()
    >>> _, state, _ = layer.init(0, x)
    >>> layer.forward((), state, x)[0]
    array([[0., 0., 2.]])
    """
    return leaky_relu(0.0)


def leaky_relu(slope: float = 0.01) -> Layer:
    """x where x > 0, else slope * x. NaN stays NaN; the slope at 0 is the lower one.

    Parameters
    ----------
    slope : float
        Factor of x below 0.

    Returns
    -------
    Layer

    Raises
    ------
    TypeError
        If slope is no number.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> x = np.asarray([[-1.0, 0.0, 2.0]])
    >>> layer = L.leaky_relu(0.5)
    >>> _, state, _ = layer.init(0, x)
    >>> layer.forward((), state, x)[0]
    array([[-0.5,  0. ,  2. ]])
    """
    if isinstance(slope, bool) or not isinstance(slope, (int, float)):
        raise TypeError(f"leaky_relu: slope must be a float, got {slope!r}")

    def below(xp: Any, x: Array, a: Array) -> Array:
        # A slope of 0 is a select: -inf times 0 would be NaN.
        return xp.where(x <= 0, a * slope if slope else xp.zeros_like(a), a)

    return _activation(
        "leaky_relu" if slope else "relu",
        lambda xp, x: below(xp, x, x),
        lambda xp, x, dy: below(xp, x, dy),
        keeps="x",
    )


def tanh() -> Layer:
    """Hyperbolic tangent.

    Returns
    -------
    Layer

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> layer = L.tanh()
    >>> _, state, _ = layer.init(0, np.zeros((1, 2)))
    >>> layer.forward((), state, np.zeros((1, 2)))[0]
    array([[0., 0.]])
    """
    return _activation("tanh", lambda xp, x: xp.tanh(x), lambda xp, y, dy: dy * (1 - y * y), keeps="y")


def sigmoid() -> Layer:
    """1 / (1 + exp(-x)), as (1 + tanh(x / 2)) / 2, which cannot overflow.

    Returns
    -------
    Layer

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> x = np.asarray([[-1e6, 0.0]])
    >>> layer = L.sigmoid()
    >>> _, state, _ = layer.init(0, x)
    >>> layer.forward((), state, x)[0]
    array([[0. , 0.5]])
    """
    return _activation("sigmoid", lambda xp, x: (1 + xp.tanh(x / 2)) / 2, lambda xp, y, dy: dy * y * (1 - y), keeps="y")


def gelu() -> Layer:
    """x times the normal distribution function, in the tanh form of Hendrycks and Gimpel (2016).

    Returns
    -------
    Layer

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> x = np.asarray([[0.0, 1.0]])
    >>> layer = L.gelu()
    >>> _, state, _ = layer.init(0, x)
    >>> layer.forward((), state, x)[0].round(4)
    array([[0.    , 0.8412]])
    """
    scale, cubic = math.sqrt(2 / math.pi), 0.044715

    def bend(xp: Any, x: Array) -> tuple[Array, Array]:
        # Beyond 12 the tanh is 1 in every dtype; a cube of 1e30 would overflow.
        u = xp.clip(x, -12.0, 12.0)
        return u, xp.tanh(scale * (u + cubic * u * u * u))

    def value(xp: Any, x: Array) -> Array:
        return x * (1 + bend(xp, x)[1]) / 2

    def slope(xp: Any, x: Array, dy: Array) -> Array:
        u, t = bend(xp, x)
        return dy * ((1 + t) / 2 + u * (1 - t * t) * scale * (1 + 3 * cubic * u * u) / 2)

    return _activation("gelu", value, slope, keeps="x")


def softmax(axis: int = -1) -> Layer:
    """exp(x) over its sum along one axis; the largest x is subtracted first, so that no exp overflows.

    Parameters
    ----------
    axis : int
        The last axis by default.

    Returns
    -------
    Layer

    Raises
    ------
    SpecError
        By the layer's init, if x has no such axis or the axis has size 0.
    TypeError
        If axis is no int.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> x = np.asarray([[1e6, 1e6]])
    >>> layer = L.softmax()
    >>> _, state, _ = layer.init(0, x)
    >>> layer.forward((), state, x)[0]
    array([[0.5, 0.5]])
    """
    integer("softmax", "axis", axis, -(2**31))

    def check(x: ArraySpec) -> None:
        if not -x.ndim <= axis < x.ndim:
            raise SpecError(f"softmax: axis must lie in {-x.ndim} .. {x.ndim - 1} for shape {x.shape}, got {axis}")
        if x.shape[axis] == 0:
            raise SpecError(f"softmax: x must have at least one element along axis {axis}, got shape {x.shape}")

    def value(xp: Any, x: Array) -> Array:
        e = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
        return e / xp.sum(e, axis=axis, keepdims=True)

    def slope(xp: Any, y: Array, dy: Array) -> Array:
        return y * (dy - xp.sum(dy * y, axis=axis, keepdims=True))

    return _activation("softmax", value, slope, keeps="y", check=check)
