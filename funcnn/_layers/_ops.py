"""Layers around the ops: conv, conv_transpose, the pools, dropout; and linear and flatten."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from funcnn import ops
from funcnn._arrays import Array, ArraySpec, dtype_name, library_of
from funcnn._layers._base import (
    Layer,
    LayerState,
    Seed,
    check_forward,
    check_kind,
    check_shape,
    check_state,
    copied,
    filled,
    glorot_uniform,
    he_normal,
    int_seed,
    like,
    namespace,
    rounded,
    saving,
    spec_of,
    unsaved,
    wide,
    zeros,
)
from funcnn._spec import LAYOUTS, Options, choice, flag, integer, per_axis, split_shape
from funcnn.errors import SpecError, StateError

_DEFAULT = Options()


def conv(
    channels: int,
    kernel_size: Any,
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    bias: bool = True,
    engine: str = "auto",
    layout: str = "channels_first",
    options: Options = _DEFAULT,
) -> Layer:
    """Convolution to `channels` output channels.

    Parameters
    ----------
    channels : int
        O; x is (N, C, *spatial), y is (N, O, *out).
    kernel_size : int or sequence of int
    stride, padding, dilation, groups, engine, layout, options
        As for `funcnn.conv_init`.
    bias : bool
        Whether there is a bias per output channel; it starts at zero.

    Returns
    -------
    Layer
        Parameters ``{"weight": (O, C/groups, *kernel), "bias": (O,)}``; the weight starts He normal.

    Raises
    ------
    SpecError, TypeError, EngineError
        By the layer's init, as `funcnn.conv_init`.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> params, state, y = L.conv(4, 3, padding="same").init(0, np.ones((1, 2, 8, 8)))
    >>> params["weight"].shape, y.shape
    ((4, 2, 3, 3), (1, 4, 8, 8))
    """

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        spec, c, kernel = _conv_arguments("conv", x, channels, kernel_size, bias, groups, layout)
        shape = (channels, c // groups, *kernel)
        weight = he_normal("conv", seed, shape, math.prod(shape[1:]), spec)
        op = ops.conv_init(
            spec, weight, stride=stride, padding=padding, dilation=dilation, groups=groups, layout=layout,
            engine=engine, options=options,
        )  # fmt: skip
        return _conv_params(weight, bias, channels, spec), LayerState(op, unsaved(spec, spec.ndim)), ops.out_spec(op)

    return Layer(init, *_conv_passes(ops.conv, ops.conv_backward, bias))


def conv_transpose(
    channels: int,
    kernel_size: Any,
    *,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    output_size: Any = None,
    dilation: Any = 1,
    groups: int = 1,
    bias: bool = True,
    engine: str = "auto",
    layout: str = "channels_first",
    options: Options = _DEFAULT,
) -> Layer:
    """Transposed convolution to `channels` output channels.

    Parameters
    ----------
    channels : int
        O; x is (N, I, *spatial), y is (N, O, *out).
    kernel_size : int or sequence of int
    stride, padding, output_padding, output_size, dilation, groups, engine, layout, options
        As for `funcnn.conv_transpose_init`.
    bias : bool
        Whether there is a bias per output channel; it starts at zero.

    Returns
    -------
    Layer
        Parameters ``{"weight": (I, O/groups, *kernel), "bias": (O,)}``; the weight starts He normal, with a fan-in of the
        products in an average output: I/groups * taps / product of strides.

    Raises
    ------
    SpecError, TypeError, EngineError
        By the layer's init, as `funcnn.conv_transpose_init`.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> params, state, y = L.conv_transpose(4, 2, stride=2).init(0, np.ones((1, 2, 8, 8)))
    >>> y.shape
    (1, 4, 16, 16)
    """

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        spec, c, kernel = _conv_arguments("conv_transpose", x, channels, kernel_size, bias, groups, layout)
        if channels % groups:
            raise SpecError(f"conv_transpose: groups must divide the {channels} output channels, got {groups}")
        strides = per_axis("conv_transpose", "stride", stride, len(kernel), 1)
        shape = (c, channels // groups, *kernel)
        fan_in = c // groups * math.prod(kernel) / math.prod(strides)
        weight = he_normal("conv_transpose", seed, shape, fan_in, spec)
        op = ops.conv_transpose_init(
            spec, weight, stride=stride, padding=padding, output_padding=output_padding, output_size=output_size,
            dilation=dilation, groups=groups, layout=layout, engine=engine, options=options,
        )  # fmt: skip
        return _conv_params(weight, bias, channels, spec), LayerState(op, unsaved(spec, spec.ndim)), ops.out_spec(op)

    return Layer(init, *_conv_passes(ops.conv_transpose, ops.conv_transpose_backward, bias))


def _conv_arguments(
    function: str, x: Array | ArraySpec, channels: int, kernel_size: Any, bias: bool, groups: int, layout: str
) -> tuple[ArraySpec, int, tuple[int, ...]]:
    spec = spec_of(function, x)
    integer(function, "channels", channels, 1)
    integer(function, "groups", groups, 1)
    flag(function, "bias", bias)
    choice(function, "layout", layout, LAYOUTS)
    if spec.ndim < 3:
        raise SpecError(
            f"{function}: x must have a batch axis, a channel axis and at least one spatial axis, got shape {spec.shape}"
        )
    return spec, split_shape(spec.shape, layout)[1], per_axis(function, "kernel_size", kernel_size, spec.ndim - 2, 1)


def _conv_params(weight: Array, bias: bool, channels: int, spec: ArraySpec) -> dict[str, Array]:
    return {"weight": weight, "bias": zeros((channels,), spec)} if bias else {"weight": weight}


def _check_params(function: str, params: Any, bias: bool) -> None:
    names = ("weight", "bias") if bias else ("weight",)
    if not isinstance(params, Mapping):
        raise TypeError(f"{function}: params must be a dict with {' and '.join(names)}, got {type(params).__name__}")
    if set(params) != set(names):
        raise StateError(f"{function}: params must be a dict with {' and '.join(names)}, got {sorted(params)}")


def _conv_passes(run: Any, run_backward: Any, bias: bool) -> tuple[Any, Any]:
    def forward(params: Any, state: LayerState, x: Array, train: bool = True) -> Any:
        check_forward(run.__name__, state, train)
        _check_params(run.__name__, params, bias)
        y, op = run(x, params["weight"], params.get("bias"), state.op)
        return y, saving(op, (x,), train)

    def backward(params: Any, state: LayerState, dy: Array) -> Any:
        (x,) = filled(run_backward.__name__, state)
        _check_params(run_backward.__name__, params, bias)
        wrt = ("x", *params)
        dx, dweight, dbias = run_backward(dy, x, params["weight"], state.op, wrt=wrt)
        grads = {"weight": dweight, "bias": dbias}
        return dx, {name: grads[name] for name in params}

    return forward, backward


def _plain_passes(run: Any, run_backward: Any, takes_train: bool = False) -> tuple[Any, Any]:
    """Forward and backward of an op without parameters, whose state holds all that the backward needs."""

    def forward(params: Any, state: LayerState, x: Array, train: bool = True) -> Any:
        check_forward(run.__name__, state, train)
        y, op = run(x, state.op, train) if takes_train else run(x, state.op)
        return y, LayerState(op, ())

    def backward(params: Any, state: LayerState, dy: Array) -> Any:
        check_state(run_backward.__name__, state)
        return run_backward(dy, state.op), ()

    return forward, backward


def max_pool(
    kernel_size: Any,
    *,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    engine: str = "auto",
    layout: str = "channels_first",
    options: Options = _DEFAULT,
) -> Layer:
    """Max pool; the parameters are those of `funcnn.max_pool_init`.

    Returns
    -------
    Layer
        Without parameters.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> layer = L.max_pool(2)
    >>> params, state, y = layer.init(0, np.ones((1, 2, 8, 8)))
    >>> y.shape
    (1, 2, 4, 4)
    """

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        op = ops.max_pool_init(
            x, kernel_size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode, layout=layout,
            engine=engine, options=options,
        )  # fmt: skip
        return (), LayerState(op, ()), ops.out_spec(op)

    return Layer(init, *_plain_passes(ops.max_pool, ops.max_pool_backward, takes_train=True))


def avg_pool(
    kernel_size: Any,
    *,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    engine: str = "auto",
    layout: str = "channels_first",
    options: Options = _DEFAULT,
) -> Layer:
    """Average pool; the parameters are those of `funcnn.avg_pool_init`.

    Returns
    -------
    Layer
        Without parameters.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> params, state, y = L.avg_pool(3, stride=2).init(0, np.ones((1, 2, 9, 9)))
    >>> y.shape
    (1, 2, 4, 4)
    """

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        op = ops.avg_pool_init(
            x, kernel_size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode,
            count_include_pad=count_include_pad, layout=layout, engine=engine, options=options,
        )  # fmt: skip
        return (), LayerState(op, ()), ops.out_spec(op)

    return Layer(init, *_plain_passes(ops.avg_pool, ops.avg_pool_backward))


def global_avg_pool(*, engine: str = "auto", layout: str = "channels_first", options: Options = _DEFAULT) -> Layer:
    """Mean over all spatial cells: (N, C, *spatial) to (N, C).

    Returns
    -------
    Layer
        Without parameters.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> params, state, y = L.global_avg_pool().init(0, np.ones((1, 2, 9, 9)))
    >>> y.shape
    (1, 2)
    """

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        spec = spec_of("global_avg_pool", x)
        choice("global_avg_pool", "layout", layout, LAYOUTS)
        sizes = split_shape(spec.shape, layout)[2] if spec.ndim > 2 else ()
        op = ops.avg_pool_init(spec, sizes or 1, layout=layout, engine=engine, options=options)
        y = ops.out_spec(op)
        return (), LayerState(op, ()), like(y, tuple(split_shape(y.shape, layout)[:2]))

    def forward(params: Any, state: LayerState, x: Array, train: bool = True) -> Any:
        check_forward("global_avg_pool", state, train)
        y, op = ops.avg_pool(x, state.op)
        return namespace(y).reshape(y, (y.shape[0], math.prod(y.shape[1:]))), LayerState(op, ())

    def backward(params: Any, state: LayerState, dy: Array) -> Any:
        function = "global_avg_pool_backward"
        check_state(function, state)
        xp = library_of(function, "dy", dy).xp
        channels, *spatial = state.op.plan.spec.y_shape
        if dy.ndim != 2 or dy.shape[1] != channels:
            raise StateError(f"{function}: dy must have shape (N, {channels}), got {tuple(dy.shape)}")
        ones = [1] * len(spatial)
        shape = (dy.shape[0], channels, *ones) if layout == "channels_first" else (dy.shape[0], *ones, channels)
        return ops.avg_pool_backward(xp.reshape(dy, shape), state.op), ()

    return Layer(init, forward, backward)


def dropout(rate: float, *, engine: str = "auto", layout: str = "channels_first", options: Options = _DEFAULT) -> Layer:
    """Dropout; its seed is folded from the seed of init and the layer's place in the net.

    Parameters
    ----------
    rate : float
        Probability that an element is zeroed.
    engine, layout, options
        As for `funcnn.dropout_init`.

    Returns
    -------
    Layer
        Without parameters; the identity when ``train=False``.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> layer = L.dropout(0.5)
    >>> params, state, y = layer.init(0, np.ones((1, 8)))
    >>> y, state = layer.forward(params, state, np.ones((1, 8)))
    >>> int(state.op.step)
    1
    """

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        op = ops.dropout_init(x, rate, seed=int_seed(seed), layout=layout, engine=engine, options=options)
        return (), LayerState(op, ()), ops.out_spec(op)

    return Layer(init, *_plain_passes(ops.dropout, ops.dropout_backward, takes_train=True))


def linear(units: int, *, bias: bool = True) -> Layer:
    """Affine map of the last axis: y = x @ weight.T + bias, (N, F) to (N, units).

    Half floats are multiplied and summed in float32 and rounded once.

    Parameters
    ----------
    units : int
    bias : bool
        Whether there is a bias; it starts at zero.

    Returns
    -------
    Layer
        Parameters ``{"weight": (units, F), "bias": (units,)}``; the weight starts Glorot uniform.

    Raises
    ------
    SpecError
        By the layer's init, if x does not have 2 axes.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> params, state, y = L.linear(3).init(0, np.ones((2, 5)))
    >>> params["weight"].shape, y.shape
    ((3, 5), (2, 3))
    """

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        spec = spec_of("linear", x)
        integer("linear", "units", units, 1)
        flag("linear", "bias", bias)
        if spec.ndim != 2:
            raise SpecError(f"linear: x must have shape (N, F), got {spec.shape}; put flatten() before it")
        features = spec.shape[1]
        params = {"weight": glorot_uniform("linear", seed, (units, features), features, units, spec)}
        if bias:
            params["bias"] = zeros((units,), spec)
        return params, LayerState((), unsaved(spec, 2)), like(spec, (spec.shape[0], units))

    def forward(params: Any, state: LayerState, x: Array, train: bool = True) -> Any:
        check_forward("linear", state, train)
        _check_linear("linear", params, bias, x)
        library, xp, a = wide("linear", "x", x, real=False)
        y = xp.matmul(a, xp.matrix_transpose(_as(xp, params["weight"], a)))
        if bias:
            y = y + _as(xp, params["bias"], a)
        return rounded(library, y, x), saving((), (x,), train)

    def backward(params: Any, state: LayerState, dy: Array) -> Any:
        function = "linear_backward"
        (x,) = filled(function, state)
        _check_linear(function, params, bias, x)
        weight = params["weight"]
        check_kind(function, "dy", dy, "x", x)
        check_shape(function, "dy", dy, (x.shape[0], weight.shape[0]))
        library, xp, d = wide(function, "dy", dy, real=False)
        dx = xp.matmul(d, _conj(xp, _as(xp, weight, d)))
        dweight = xp.matmul(xp.matrix_transpose(d), _conj(xp, _as(xp, x, d)))
        grads = {"weight": rounded(library, dweight, weight)}
        if bias:
            grads["bias"] = rounded(library, xp.sum(d, axis=0), weight)
        return rounded(library, dx, x), {name: grads[name] for name in params}

    return Layer(init, forward, backward)


def _check_linear(function: str, params: Any, bias: bool, x: Array) -> None:
    """There is no op state here that knows the shapes: they must fit together."""
    _check_params(function, params, bias)
    weight = params["weight"]
    check_kind(function, "x", x, "weight", weight)
    if weight.ndim != 2:
        raise StateError(f"{function}: weight must have shape (units, F), got {tuple(weight.shape)}")
    if x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise StateError(f"{function}: x must have shape (N, {weight.shape[1]}), got {tuple(x.shape)}")
    if bias:
        check_kind(function, "bias", params["bias"], "weight", weight)
        check_shape(function, "bias", params["bias"], (weight.shape[0],))


def _as(xp: Any, array: Array, other: Array) -> Array:
    return xp.astype(array, other.dtype, copy=False)


def _conj(xp: Any, array: Array) -> Array:
    return xp.conj(array) if dtype_name(array.dtype).startswith("complex") else array


def flatten() -> Layer:
    """All axes but the first as one: (N, ...) to (N, F), row-major as the array comes.

    Returns
    -------
    Layer
        Without parameters.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> params, state, y = L.flatten().init(0, np.ones((2, 3, 4)))
    >>> y.shape
    (2, 12)
    """

    def init(seed: Seed, x: Array | ArraySpec) -> Any:
        spec = spec_of("flatten", x)
        if spec.ndim < 2:
            raise SpecError(f"flatten: x must have a batch axis and at least one other, got shape {spec.shape}")
        y = like(spec, (spec.shape[0], math.prod(spec.shape[1:])))
        return (), LayerState((), (shape_of(spec),)), y

    def forward(params: Any, state: LayerState, x: Array, train: bool = True) -> Any:
        check_forward("flatten", state, train)
        (sample,) = state.saved
        check_kind("flatten", "x", x, "the state", sample)
        check_shape("flatten", "x", x, (*x.shape[:1], *sample.shape[1:]))
        return copied(x, (x.shape[0], math.prod(x.shape[1:]))), state

    def backward(params: Any, state: LayerState, dy: Array) -> Any:
        check_state("flatten_backward", state)
        (sample,) = state.saved
        check_kind("flatten_backward", "dy", dy, "the state", sample)
        check_shape("flatten_backward", "dy", dy, (*dy.shape[:1], math.prod(sample.shape[1:])))
        return copied(dy, (dy.shape[0], *sample.shape[1:])), ()

    return Layer(init, forward, backward)


def shape_of(spec: ArraySpec) -> Array:
    """An array (0, ...) without memory that holds the shape of one sample; a state is made of arrays."""
    return zeros((0, *spec.shape[1:]), spec)


__all__ = [
    "avg_pool",
    "conv",
    "conv_transpose",
    "dropout",
    "flatten",
    "global_avg_pool",
    "linear",
    "max_pool",
]
