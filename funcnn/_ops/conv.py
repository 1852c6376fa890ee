"""conv and conv_transpose."""

from __future__ import annotations

from typing import Any

from funcnn._arrays import Array, ArraySpec, describe, same_library
from funcnn._engines import plan_for
from funcnn._ops._door import (
    canonical_wrt,
    check_array,
    check_batch,
    check_differentiable,
    check_same_batch,
    check_state,
    to_engine,
    to_user,
)
from funcnn._spec import Options, conv_spec, split_shape
from funcnn.errors import StateError
from funcnn.state import ConvState, ConvTransposeState, register_pytrees

_DEFAULT = Options()
_ALL = ("x", "weight", "bias")


def conv_init(
    x: Array | ArraySpec,
    weight: Array | ArraySpec,
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    flip: bool = False,
    layout: str = "channels_first",
    engine: str = "auto",
    options: Options = _DEFAULT,
) -> ConvState:
    """Make the op state of a convolution: choose the engine, plan the work, check every option.

    Only shapes, dtypes, library and device of the arguments are read. The state fits any batch size.

    Parameters
    ----------
    x : array or ArraySpec, shape (N, C, *spatial)
        Or (N, *spatial, C) with ``layout="channels_last"``. Spatial rank 1 or more. Floats, complex numbers, or
        integers: 8-bit ones give int32 (exact, at most 32,768 terms), 16- and 32-bit ones give int64, int64 wraps.
    weight : array or ArraySpec, shape (O, C/groups, *kernel)
        In both layouts. Of the dtype of x, or real of the same precision for a complex x.
    stride, dilation : int or sequence of int, one per spatial axis
        At least 1.
    padding : int, sequence of int or of (lo, hi) pairs, or str
        Zeros around x. "valid": none. "full": dilation * (kernel - 1) on both sides. "same": the output has
        ceil(size / stride) cells, an odd padding cell goes to the end; "same_lower": to the start.
    groups : int
        Divides C and O. Output channels of group i see input channels of group i only. With groups=C it is a depthwise
        convolution; O = m * C gives outputs 0 .. m-1 from channel 0, and so on.
    flip : bool
        Flip the kernel in every spatial axis (convolution in the sense of signal processing). Default: no flip, that is
        cross-correlation, as in every neural-net library.
    layout : {"channels_first", "channels_last"}
        Of x and y. The memory order of an array may differ from it; it is a hint for speed.
    engine : str
        "auto", or a name from `engines`.
    options : Options

    Returns
    -------
    ConvState

    Raises
    ------
    SpecError
        If an option or a shape is impossible: kernel larger than the padded input, groups that do not divide, ...
    TypeError
        For another library, a mixture, a wrong kind of dtype, a bool or float where an int belongs.
    EngineError
        If the engine asked for by name cannot do it.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x, weight = np.ones((1, 3, 8, 8)), np.ones((4, 3, 3, 3))
    >>> state = fn.conv_init(x, weight, stride=2, padding="same", engine="blas")
    >>> state
    ConvState(blas, numpy float64, x (N, 3, 8, 8) * weight (4, 3, 3, 3) -> y (N, 4, 4, 4), stride 2, padding (0, 1); residuals 0 B)
    """  # noqa: E501
    return _init(
        "conv_init", ConvState, x, weight, engine, options, stride=stride, padding=padding, dilation=dilation,
        groups=groups, flip=flip, layout=layout,
    )  # fmt: skip


def conv(x: Array, weight: Array, bias: Array | None, state: ConvState) -> tuple[Array, ConvState]:
    """Convolve x with weight (cross-correlation: no flip of the kernel) and add a bias per output channel.

    y[n, o, p] = bias[o] + sum over i, t of weight[o, i, t] * x[n, i, p * stride + t * dilation - lo]

    Padding is zeros that are multiplied: an infinite or NaN weight over padding gives NaN. Complex numbers are not
    conjugated. For true convolution pass ``flip=True`` to `conv_init`.

    Parameters
    ----------
    x : array, shape (N, C, *spatial)
        As `conv_init` was told, but for N.
    weight : array, shape (O, C/groups, *kernel)
    bias : array, shape (O,), or None
        Of the dtype of y.
    state : ConvState

    Returns
    -------
    y : array, shape (N, O, *out)
        out = (size + lo + hi - dilation * (kernel - 1) - 1) // stride + 1 on each axis.
    state : ConvState
        To pass on; a convolution keeps no residual.

    Raises
    ------
    StateError
        If an argument differs from what the state was made for, or the state is one of another op.
    TypeError
        If an argument is no array, or one of another library.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x, weight = np.arange(5.0)[None, None], np.asarray([[[1.0, 2.0, 3.0]]])
    >>> y, state = fn.conv(x, weight, None, fn.conv_init(x, weight, padding="same"))
    >>> y
    array([[[ 3.,  8., 14., 20., 11.]]])
    """
    return _forward("conv", ConvState, x, weight, bias, state), state


def conv_backward(
    dy: Array, x: Array | None, weight: Array | None, state: ConvState, wrt: str | tuple[str, ...] = _ALL
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of a convolution: the adjoint in x, in weight and in bias, applied to dy.

    For complex numbers these are adjoints (conjugates of weight and x), as torch's autograd has them.

    Parameters
    ----------
    dy : array, shape (N, O, *out)
        Gradient of y, of y's dtype.
    x : array, shape (N, C, *spatial), or None
        May be None unless "weight" is in wrt.
    weight : array, shape (O, C/groups, *kernel), or None
        May be None unless "x" is in wrt. With dy and weight alone this is the adjoint operator.
    state : ConvState
    wrt : str or tuple of str
        Among "x", "weight", "bias"; what is not named costs nothing.

    Returns
    -------
    dx, dweight, dbias : array or None
        Shapes and dtypes of x, weight, bias; None where wrt does not name it. Cells of x that no window covers get 0.

    Raises
    ------
    StateError
        If an argument differs from what the state was made for, or is None where it is needed.
    SpecError
        If wrt names something else.
    TypeError
        If an argument is no array, one of another library, or the state's dtype is an integer.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x, weight = np.arange(5.0)[None, None], np.asarray([[[1.0, 2.0, 3.0]]])
    >>> state = fn.conv_init(x, weight)
    >>> dx, dweight, _ = fn.conv_backward(np.ones((1, 1, 3)), x, weight, state, wrt=("x", "weight"))
    >>> dx, dweight
    (array([[[1., 3., 6., 5., 3.]]]), array([[[3., 6., 9.]]]))
    """
    return _backward("conv_backward", ConvState, dy, x, weight, state, wrt)


def conv_transpose_init(
    x: Array | ArraySpec,
    weight: Array | ArraySpec,
    *,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    output_size: Any = None,
    dilation: Any = 1,
    groups: int = 1,
    flip: bool = False,
    layout: str = "channels_first",
    engine: str = "auto",
    options: Options = _DEFAULT,
) -> ConvTransposeState:
    """Make the op state of a transposed convolution: the adjoint of `conv` with the same options.

    Every option describes that convolution: its padding crops the output here.

    Parameters
    ----------
    x : array or ArraySpec, shape (N, I, *spatial)
        Or (N, *spatial, I) with ``layout="channels_last"``. Dtypes as for `conv_init`.
    weight : array or ArraySpec, shape (I, O/groups, *kernel)
    stride, dilation : int or sequence of int, one per spatial axis
        At least 1.
    padding : int, sequence of int or of (lo, hi) pairs, or str
        Of the convolution whose adjoint this is, on the *output* size. "same" gives outputs of size * stride, unless
        output_size says otherwise.
    output_padding : int or sequence of int
        Extra output cells at the end of each axis, with real values; below max(stride, dilation).
    output_size : int or sequence of int, optional
        The spatial output size, where stride leaves several: n with "same" needs ceil(n / stride) == size.
    groups, flip, layout, engine, options
        As for `conv_init`.

    Returns
    -------
    ConvTransposeState

    Raises
    ------
    SpecError, TypeError, EngineError
        As `conv_init`; also for an output_padding out of its bound or with a named padding.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x, weight = np.ones((1, 3, 8, 8)), np.ones((3, 4, 3, 3))
    >>> fn.out_spec(fn.conv_transpose_init(x, weight, stride=2, padding="same")).shape
    (1, 4, 16, 16)
    """
    return _init(
        "conv_transpose_init", ConvTransposeState, x, weight, engine, options, stride=stride, padding=padding,
        output_padding=output_padding, output_size=output_size, dilation=dilation, groups=groups, flip=flip,
        layout=layout, transposed=True,
    )  # fmt: skip


def conv_transpose(
    x: Array, weight: Array, bias: Array | None, state: ConvTransposeState
) -> tuple[Array, ConvTransposeState]:
    """Transposed convolution: every cell of x adds its weighted kernel to the output; then a bias per channel.

    y[n, o, p * stride + t * dilation - lo] += weight[i, o, t] * x[n, i, p]

    It is the adjoint of `conv` (fractionally strided convolution, sometimes called deconvolution).

    Parameters
    ----------
    x : array, shape (N, I, *spatial)
        As `conv_transpose_init` was told, but for N.
    weight : array, shape (I, O/groups, *kernel)
    bias : array, shape (O,), or None
        Of the dtype of y.
    state : ConvTransposeState

    Returns
    -------
    y : array, shape (N, O, *out)
        out = (size - 1) * stride - lo - hi + dilation * (kernel - 1) + output_padding + 1 on each axis.
    state : ConvTransposeState

    Raises
    ------
    StateError, TypeError
        As `conv`.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x, weight = np.asarray([[[1.0, 2.0]]]), np.asarray([[[1.0, 10.0, 100.0]]])
    >>> y, state = fn.conv_transpose(x, weight, None, fn.conv_transpose_init(x, weight, stride=2))
    >>> y
    array([[[  1.,  10., 102.,  20., 200.]]])
    """
    return _forward("conv_transpose", ConvTransposeState, x, weight, bias, state), state


def conv_transpose_backward(
    dy: Array, x: Array | None, weight: Array | None, state: ConvTransposeState, wrt: str | tuple[str, ...] = _ALL
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of a transposed convolution in x (a convolution of dy), in weight and in bias.

    Parameters
    ----------
    dy : array, shape (N, O, *out)
        Gradient of y, of y's dtype.
    x : array, shape (N, I, *spatial), or None
        May be None unless "weight" is in wrt.
    weight : array, shape (I, O/groups, *kernel), or None
        May be None unless "x" is in wrt.
    state : ConvTransposeState
    wrt : str or tuple of str
        Among "x", "weight", "bias"; what is not named costs nothing.

    Returns
    -------
    dx, dweight, dbias : array or None
        Shapes and dtypes of x, weight, bias; None where wrt does not name it.

    Raises
    ------
    StateError, SpecError, TypeError
        As `conv_backward`.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x, weight = np.asarray([[[1.0, 2.0]]]), np.asarray([[[1.0, 10.0, 100.0]]])
    >>> state = fn.conv_transpose_init(x, weight, stride=2)
    >>> fn.conv_transpose_backward(np.ones((1, 1, 5)), x, weight, state)
    (array([[[111., 111.]]]), array([[[3., 3., 3.]]]), array([5.]))
    """
    return _backward("conv_transpose_backward", ConvTransposeState, dy, x, weight, state, wrt)


def _init(function: str, kind: Any, x: Any, weight: Any, engine: str, options: Options, **raw: Any) -> Any:
    register_pytrees()
    library, device, x_shape, dtype = describe(function, "x", x)
    other, weight_device, weight_shape, weight_dtype = describe(function, "weight", weight)
    same_library(function, "x", library, "weight", other)
    if device is not None and weight_device is not None and device != weight_device:
        raise StateError(f"{function}: weight must be on the device of x ({device}), got {weight_device}")
    spec = conv_spec(function, x_shape, weight_shape, dtype, weight_dtype, library.widest_int, **raw)
    plan = plan_for(function, engine, spec, options, library.name, device or weight_device, x, weight)
    return kind(plan, batch=split_shape(x_shape, spec.layout)[0])


def _forward(function: str, kind: Any, x: Array, weight: Array, bias: Array | None, state: Any) -> Array:
    check_state(function, state, kind)
    plan = state.plan
    spec = plan.spec
    check_batch(function, "x", x, plan, spec.x_shape, spec.dtype)
    check_array(function, "weight", weight, plan, spec.weight_shape, spec.weight_dtype)
    if bias is not None:
        check_array(function, "bias", bias, plan, spec.y_shape[:1], spec.y_dtype)
    if spec.layout == "channels_first":
        return plan.forward(x, weight, bias)
    return to_user(plan.forward(to_engine(x, plan), weight, bias), plan)


def _backward(
    function: str, kind: Any, dy: Array, x: Array | None, weight: Array | None, state: Any, wrt: Any
) -> tuple[Array | None, Array | None, Array | None]:
    check_state(function, state, kind)
    plan = state.plan
    spec = plan.spec
    names = canonical_wrt(function, wrt)
    check_differentiable(function, spec.dtype)
    batch = check_batch(function, "dy", dy, plan, spec.y_shape, spec.y_dtype)
    for needed_by, name, array in (("weight", "x", x), ("x", "weight", weight)):
        if array is None and needed_by in names:
            raise StateError(f'{function}: {name} must be given for wrt="{needed_by}", got None')
    if x is not None:
        check_same_batch(function, "dy", batch, "x", check_batch(function, "x", x, plan, spec.x_shape, spec.dtype))
        x = to_engine(x, plan)
    if weight is not None:
        check_array(function, "weight", weight, plan, spec.weight_shape, spec.weight_dtype)
    dx, dweight, dbias = plan.backward(to_engine(dy, plan), x, weight, names)
    return (None if dx is None else to_user(dx, plan)), dweight, dbias
