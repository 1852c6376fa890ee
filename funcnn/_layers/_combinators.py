"""Layers made of layers: serial, parallel, residual."""

from __future__ import annotations

from typing import Any

from funcnn._arrays import Array, ArraySpec, dtype_name, library_of
from funcnn._layers._base import (
    Layer,
    LayerState,
    Seed,
    check_state,
    child_seed,
    copied,
    like,
    namespace,
    rounded,
    spec_of,
    wide,
)
from funcnn._layers._ops import shape_of
from funcnn._spec import HALF_DTYPES, LAYOUTS, choice
from funcnn.errors import SpecError, StateError

__all__ = ["parallel", "residual", "serial"]


def _check_layers(function: str, layers: tuple[Any, ...]) -> None:
    for i, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise TypeError(f"{function}: layers must be Layer tuples, got {layer!r} at position {i}")


def _parts(function: str, layers: tuple[Layer, ...], params: Any, state: LayerState) -> list[tuple[Layer, Any, Any]]:
    """Each layer with its parameters and its state."""
    check_state(function, state)
    for name, value in (("params", params), ("state.op", state.op)):
        if not isinstance(value, (tuple, list)):
            raise TypeError(
                f"{function}: {name} must be a tuple with one item for each layer, got {type(value).__name__}"
            )
        if len(value) != len(layers):
            raise StateError(f"{function}: {name} must have {len(layers)} items, one for each layer, got {len(value)}")
    return list(zip(layers, params, state.op, strict=True))


def serial(*layers: Layer) -> Layer:
    """One layer after the other.

    Parameters
    ----------
    *layers : Layer

    Returns
    -------
    Layer
        Parameters: a tuple of the layers' parameters.

    Raises
    ------
    TypeError
        If something is no Layer.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> net = L.serial(L.conv(4, 3), L.relu(), L.flatten(), L.linear(2))
    >>> params, state, y = net.init(0, np.ones((1, 1, 5, 5)))
    >>> y.shape
    (1, 2)
    """
    _check_layers("serial", layers)

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        params, states = [], []
        spec = spec_of("serial", x)
        for i, layer in enumerate(layers):
            p, s, spec = layer.init(child_seed(seed, i), spec)
            params.append(p)
            states.append(s)
        return tuple(params), LayerState(tuple(states), ()), spec

    def forward(params: Any, state: LayerState, x: Array, train: bool = True) -> Any:
        states = []
        for layer, p, s in _parts("serial", layers, params, state):
            x, s = layer.forward(p, s, x, train=train)
            states.append(s)
        return x if layers else copied(x, x.shape), LayerState(tuple(states), ())

    def backward(params: Any, state: LayerState, dy: Array) -> Any:
        grads = []
        for layer, p, s in reversed(_parts("serial_backward", layers, params, state)):
            dy, g = layer.backward(p, s, dy)
            grads.append(g)
        return dy if layers else copied(dy, dy.shape), tuple(reversed(grads))

    return Layer(init, forward, backward)


def parallel(*layers: Layer, combine: str = "sum", layout: str = "channels_first") -> Layer:
    """Several layers on one x; their outputs are added or joined along the channels.

    Parameters
    ----------
    *layers : Layer
        At least one.
    combine : {"sum", "concat"}
    layout : {"channels_first", "channels_last"}
        Where "concat" finds the channels: axis 1 or the last.

    Returns
    -------
    Layer
        Parameters: a tuple of the layers' parameters.

    Raises
    ------
    SpecError
        By init, if the outputs do not fit together.
    TypeError
        If something is no Layer.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> net = L.parallel(L.conv(4, 1), L.conv(2, 3, padding="same"), combine="concat")
    >>> params, state, y = net.init(0, np.ones((1, 1, 5, 5)))
    >>> y.shape
    (1, 6, 5, 5)
    """
    _check_layers("parallel", layers)
    if not layers:
        raise SpecError("parallel: layers must be at least one, got none")
    choice("parallel", "combine", combine, ("sum", "concat"))
    choice("parallel", "layout", layout, LAYOUTS)
    axis = 1 if layout == "channels_first" else -1

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        spec = spec_of("parallel", x)
        made = [layer.init(child_seed(seed, i), spec) for i, layer in enumerate(layers)]
        params, states, outs = zip(*made, strict=True)
        y = _combined(outs, combine, axis)
        return params, LayerState(states, tuple(map(shape_of, outs)) if combine == "concat" else ()), y

    def forward(params: Any, state: LayerState, x: Array, train: bool = True) -> Any:
        passes = _parts("parallel", layers, params, state)
        ys, states = zip(*(layer.forward(p, s, x, train=train) for layer, p, s in passes), strict=True)
        y = namespace(x).concat(ys, axis=axis) if combine == "concat" else _total(ys)
        return y, LayerState(states, state.saved)

    def backward(params: Any, state: LayerState, dy: Array) -> Any:
        passes = _parts("parallel_backward", layers, params, state)
        dys = _split(dy, [a.shape[axis] for a in state.saved], axis) if combine == "concat" else [dy] * len(layers)
        dxs, grads = zip(*(layer.backward(p, s, d) for (layer, p, s), d in zip(passes, dys, strict=True)), strict=True)
        return _total(dxs), grads

    return Layer(init, forward, backward)


def _total(arrays: Any) -> Array:
    """The sum of the branches."""
    if len(arrays) == 1:
        return arrays[0]
    library = library_of("parallel", "y", arrays[0])
    half = dtype_name(arrays[0].dtype) in HALF_DTYPES  # summed in float32 and rounded once
    total, *rest = [wide("parallel", "y", array)[2] for array in arrays] if half else arrays
    for array in rest:
        total = total + array
    return rounded(library, total, arrays[0])


def _split(dy: Array, sizes: list[int], axis: int) -> list[Array]:
    """Parts of dy along the channels."""
    if dy.shape[axis] != sum(sizes):
        raise StateError(
            f"parallel_backward: dy must have the {sum(sizes)} channels of y on axis {axis}, got shape {tuple(dy.shape)}"
        )
    parts, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        parts.append(dy[:, part, ...] if axis == 1 else dy[..., part])
        start += size
    return parts


def _combined(outs: tuple[ArraySpec, ...], combine: str, axis: int) -> ArraySpec:
    shapes = [out.shape for out in outs]
    if combine == "sum":
        if len(set(shapes)) > 1:
            raise SpecError(f'parallel: layers must give one shape for combine="sum", got {shapes}')
        return outs[0]
    rests = {(*s[:axis], None, *(s[axis + 1 :] if axis != -1 else ())) for s in shapes}
    if len(rests) > 1:
        raise SpecError(
            f'parallel: layers must give shapes that differ only in channels for combine="concat", got {shapes}'
        )
    shape = list(shapes[0])
    shape[axis] = sum(s[axis] for s in shapes)
    return like(outs[0], tuple(shape))


def residual(*layers: Layer) -> Layer:
    """x + serial(*layers)(x).

    Parameters
    ----------
    *layers : Layer

    Returns
    -------
    Layer
        Parameters as those of `serial`.

    Raises
    ------
    SpecError
        By init, if the layers change the shape.
    TypeError
        If something is no Layer.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> params, state, y = L.residual(L.conv(2, 3, padding="same"), L.relu()).init(0, np.ones((1, 2, 5, 5)))
    >>> y.shape
    (1, 2, 5, 5)
    """
    _check_layers("residual", layers)
    inner = serial(*layers)

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        spec = spec_of("residual", x)
        params, state, y = inner.init(seed, spec)
        if y.shape != spec.shape:
            raise SpecError(f"residual: layers must keep the shape {spec.shape}, got {y.shape}")
        return params, state, y

    def forward(params: Any, state: LayerState, x: Array, train: bool = True) -> Any:
        y, state = inner.forward(params, state, x, train=train)
        return x + y, state

    def backward(params: Any, state: LayerState, dy: Array) -> Any:
        dx, grads = inner.backward(params, state, dy)
        return dy + dx, grads

    return Layer(init, forward, backward)
