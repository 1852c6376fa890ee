"""max_pool and avg_pool."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from funcnn._arrays import Array, ArraySpec, describe, library_of, named
from funcnn._engines import plan_for
from funcnn._ops._door import (
    check_batch,
    check_bool,
    check_differentiable,
    check_same_batch,
    check_state,
    empty,
    to_engine,
    to_user,
)
from funcnn._spec import MaxPoolSpec, Options, avg_pool_spec, choice, max_pool_spec
from funcnn.errors import StateError
from funcnn.state import AvgPoolState, MaxPoolState, clear, register_pytrees

_DEFAULT = Options()


def max_pool_init(
    x: Array | ArraySpec,
    kernel_size: Any,
    *,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    layout: str = "channels_first",
    engine: str = "auto",
    options: Options = _DEFAULT,
) -> MaxPoolState:
    """Make the op state of a max pool.

    Parameters
    ----------
    x : array or ArraySpec, shape (N, C, *spatial)
        Or (N, *spatial, C) with ``layout="channels_last"``. Real floats, integers or bool.
    kernel_size : int or sequence of int, one per spatial axis
        At least 1.
    stride : int or sequence of int, optional
        None: kernel_size, windows side by side.
    padding : int, sequence of int or of (lo, hi) pairs, or str
        As in `conv_init`. Padding never wins; every window must hold a cell of the input.
    dilation : int or sequence of int
        Distance between the cells of a window.
    ceil_mode : bool
        Round the output size up: the last window may overhang, unless it would start in the trailing padding (torch,
        ONNX). No effect with "same".
    layout, engine, options
        As for `conv_init`.

    Returns
    -------
    MaxPoolState
        Its `argmax` is zero-size until a training forward.

    Raises
    ------
    SpecError
        If an option is impossible, or a window would hold padding only.
    TypeError
        For complex numbers, or a bool or float where an int belongs.
    EngineError
        If the engine asked for by name cannot do it.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> fn.max_pool_init(np.ones((1, 3, 7, 7)), 3, stride=2, padding=1, engine="blas")
    MaxPoolState(blas, numpy float64, x (N, 3, 7, 7) -> y (N, 3, 4, 4), kernel 3, stride 2, padding 1; argmax uint8(0, 0, 0, 0), residuals 0 B)
    """  # noqa: E501
    register_pytrees()
    library, device, shape, dtype = describe("max_pool_init", "x", x)
    spec = max_pool_spec(
        "max_pool_init", shape, dtype, library.index_dtypes, kernel_size=kernel_size, stride=stride, padding=padding,
        dilation=dilation, ceil_mode=ceil_mode, layout=layout,
    )  # fmt: skip
    plan = plan_for("max_pool_init", engine, spec, options, library.name, device)
    return MaxPoolState(plan, empty(library, device, len(shape), spec.argmax_dtype), batch=shape[0])


def max_pool(x: Array, state: MaxPoolState, train: bool = True) -> tuple[Array, MaxPoolState]:
    """Largest cell of each window.

    Ties: the first cell in row order wins. NaN propagates: the first NaN of a window wins. Padding never wins.

    Parameters
    ----------
    x : array, shape (N, C, *spatial)
    state : MaxPoolState
    train : bool
        False computes no argmax and returns a cleared state.

    Returns
    -------
    y : array, shape (N, C, *out)
        Of the dtype of x.
    state : MaxPoolState
        With `argmax`, the row-major index of each winner *within its window*: uint8 for windows of up to 256 cells.

    Raises
    ------
    StateError
        If x differs from what the state was made for, or the state is one of another op.
    TypeError
        If x is no array, or one of another library.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x = np.asarray([[[1.0, 9.0, 9.0, 4.0]]])
    >>> y, state = fn.max_pool(x, fn.max_pool_init(x, 2))
    >>> y, state.argmax
    (array([[[9., 9.]]]), array([[[1, 0]]], dtype=uint8))
    """
    check_state("max_pool", state, MaxPoolState)
    plan = state.plan
    check_batch("max_pool", "x", x, plan, plan.spec.x_shape, plan.spec.dtype)
    check_bool("max_pool", "train", train)
    y, argmax = plan.forward(to_engine(x, plan), train)
    state = clear(state) if argmax is None else dataclasses.replace(state, argmax=to_user(argmax, plan))
    return to_user(y, plan), state


def max_pool_backward(dy: Array, state: MaxPoolState) -> Array:
    """Gradient of a max pool: each dy goes to the cell that won its window, as `state.argmax` says.

    Parameters
    ----------
    dy : array, shape (N, C, *out)
        Gradient of y, of y's dtype.
    state : MaxPoolState
        As a training forward returned it, or with an argmax of your own (`dataclasses.replace(state, argmax=...)`).

    Returns
    -------
    dx : array, shape (N, C, *spatial)
        Where windows overlap, contributions add up; cells that won nothing get 0.

    Raises
    ------
    StateError
        Before a forward or after ``train=False``; if dy or argmax has the wrong shape or dtype; on NumPy also if an index of
        argmax lies outside its window or in the padding.
    TypeError
        If dy is no array, one of another library, or the state's dtype is an integer or bool.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x = np.asarray([[[1.0, 9.0, 9.0, 4.0]]])
    >>> y, state = fn.max_pool(x, fn.max_pool_init(x, 2))
    >>> fn.max_pool_backward(np.asarray([[[1.0, 2.0]]]), state)
    array([[[0., 1., 2., 0.]]])
    """
    function = "max_pool_backward"
    check_state(function, state, MaxPoolState)
    plan = state.plan
    check_differentiable(function, plan.spec.dtype)
    batch = check_batch(function, "dy", dy, plan, plan.spec.y_shape, plan.spec.dtype)
    _check_argmax(function, state, batch)
    return to_user(plan.backward(to_engine(dy, plan), to_engine(state.argmax, plan)), plan)


def max_pool_indices(state: MaxPoolState, base: str = "plane") -> Array:
    """Where each winner is, as a flat index into the input: what torch and ONNX return.

    Parameters
    ----------
    state : MaxPoolState
        As a training forward returned it.
    base : {"plane", "tensor"}
        "plane": row-major index in one unpadded (*spatial) plane (torch's return_indices). "tensor": row-major index in the
        whole channels-first input (N, C, *spatial) (ONNX).

    Returns
    -------
    indices : array of int64, the shape of y
        Of the widest integer where a library lacks int64.

    Raises
    ------
    StateError
        As `max_pool_backward`.
    SpecError
        For another base.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x = np.asarray([[[1.0, 9.0, 9.0, 4.0]]])
    >>> y, state = fn.max_pool(x, fn.max_pool_init(x, 2))
    >>> fn.max_pool_indices(state)
    array([[[1, 2]]])
    """
    function = "max_pool_indices"
    check_state(function, state, MaxPoolState)
    choice(function, "base", base, ("plane", "tensor"))
    plan = state.plan
    spec: MaxPoolSpec = plan.spec
    _check_argmax(function, state, None)
    library = named(plan.library)
    xp, integer = library.xp, library.dtype(library.widest_int)

    def counted(axis: int, count: int, ndim: int) -> Array:
        """0 .. count - 1 along one axis, to broadcast against the argmax."""
        shape = [1] * ndim
        shape[axis] = count
        return xp.reshape(xp.arange(count, dtype=integer, **library.place(library.device(state.argmax))), tuple(shape))

    with library.on(library.device(state.argmax)):
        argmax = xp.astype(to_engine(state.argmax, plan), integer)
        flat: Array = 0
        inner = spec.taps
        for i, axis in enumerate(spec.axes):
            inner //= axis.kernel
            tap = argmax // inner % axis.kernel
            flat = (
                flat * axis.size + counted(i + 2, axis.out, argmax.ndim) * axis.stride + tap * axis.dilation - axis.lo
            )
        if base == "tensor":
            plane = math.prod(axis.size for axis in spec.axes)
            channel = counted(0, argmax.shape[0], argmax.ndim) * spec.channels + counted(1, spec.channels, argmax.ndim)
            flat = flat + channel * plane
        return to_user(flat, plan)


def avg_pool_init(
    x: Array | ArraySpec,
    kernel_size: Any,
    *,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    layout: str = "channels_first",
    engine: str = "auto",
    options: Options = _DEFAULT,
) -> AvgPoolState:
    """Make the op state of an average pool.

    Parameters
    ----------
    x : array or ArraySpec, shape (N, C, *spatial)
        Or (N, *spatial, C) with ``layout="channels_last"``. Floats or complex numbers.
    kernel_size, stride, padding, dilation, ceil_mode
        As for `max_pool_init`; windows of padding only are allowed: their mean is 0, and so is their gradient.
    count_include_pad : bool
        Whether declared padding counts in the divisor. The overhang of ceil_mode never counts.
    layout, engine, options
        As for `conv_init`.

    Returns
    -------
    AvgPoolState

    Raises
    ------
    SpecError
        If an option is impossible.
    TypeError
        For integers (cast them first), or a bool or float where an int belongs.
    EngineError
        If the engine asked for by name cannot do it.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> fn.out_spec(fn.avg_pool_init(np.ones((1, 3, 7, 7)), 2, ceil_mode=True)).shape
    (1, 3, 4, 4)
    """
    register_pytrees()
    library, device, shape, dtype = describe("avg_pool_init", "x", x)
    spec = avg_pool_spec(
        "avg_pool_init", shape, dtype, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation,
        ceil_mode=ceil_mode, count_include_pad=count_include_pad, layout=layout,
    )  # fmt: skip
    return AvgPoolState(plan_for("avg_pool_init", engine, spec, options, library.name, device), batch=shape[0])


def avg_pool(x: Array, state: AvgPoolState) -> tuple[Array, AvgPoolState]:
    """Mean of each window.

    Sums of float16 and bfloat16 are kept in float32 and rounded once.

    Parameters
    ----------
    x : array, shape (N, C, *spatial)
    state : AvgPoolState

    Returns
    -------
    y : array, shape (N, C, *out)
        Of the dtype of x.
    state : AvgPoolState

    Raises
    ------
    StateError
        If x differs from what the state was made for, or the state is one of another op.
    TypeError
        If x is no array, or one of another library.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x = np.arange(1.0, 6.0)[None, None]
    >>> y, _ = fn.avg_pool(x, fn.avg_pool_init(x, 2, ceil_mode=True))
    >>> y
    array([[[1.5, 3.5, 5. ]]])
    """
    check_state("avg_pool", state, AvgPoolState)
    plan = state.plan
    check_batch("avg_pool", "x", x, plan, plan.spec.x_shape, plan.spec.dtype)
    return to_user(plan.forward(to_engine(x, plan)), plan), state


def avg_pool_backward(dy: Array, state: AvgPoolState) -> Array:
    """Gradient of an average pool: each dy, over its window's divisor, goes to every cell of the window.

    Parameters
    ----------
    dy : array, shape (N, C, *out)
        Gradient of y, of y's dtype.
    state : AvgPoolState

    Returns
    -------
    dx : array, shape (N, C, *spatial)

    Raises
    ------
    StateError
        If dy differs from what the state was made for, or the state is one of another op.
    TypeError
        If dy is no array, or one of another library.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> state = fn.avg_pool_init(np.ones((1, 1, 5)), 2, ceil_mode=True)
    >>> fn.avg_pool_backward(np.ones((1, 1, 3)), state)
    array([[[0.5, 0.5, 0.5, 0.5, 1. ]]])
    """
    check_state("avg_pool_backward", state, AvgPoolState)
    plan = state.plan
    check_batch("avg_pool_backward", "dy", dy, plan, plan.spec.y_shape, plan.spec.dtype)
    return to_user(plan.backward(to_engine(dy, plan)), plan)


def _check_argmax(function: str, state: MaxPoolState, batch: int | None) -> None:
    """The argmax must be there, fit the batch, and on NumPy point into the input."""
    spec: MaxPoolSpec = state.plan.spec
    argmax = state.argmax
    library_of(function, "state.argmax", argmax)
    got = tuple(argmax.shape)
    if not any(got):
        raise StateError(
            f"{function}: state must come from max_pool with train=True, got a state without argmax; "
            f"pass the state that max_pool returned"
        )
    n = check_batch(function, "state.argmax", argmax, state.plan, spec.y_shape, spec.argmax_dtype)
    if batch is not None:
        check_same_batch(function, "dy", batch, "state.argmax", n)
    if isinstance(argmax, np.ndarray) and argmax.size:
        _check_argmax_values(function, to_engine(argmax, state.plan), spec)


def _check_argmax_values(function: str, argmax: np.ndarray, spec: MaxPoolSpec) -> None:
    highest = int(argmax.max())
    if highest >= spec.taps:
        raise StateError(
            f"{function}: state.argmax must hold indices within a window of {spec.taps} cells, got {highest}"
        )
    # Only windows at the borders can name a cell of the padding.
    inner = spec.taps
    for i, axis in enumerate(spec.axes):
        inner //= axis.kernel
        first = min(axis.out, -(-axis.lo // axis.stride))
        last = max(first, (axis.size - axis.span + axis.lo) // axis.stride + 1)
        for window in (*range(first), *range(last, axis.out)):
            part = argmax[(slice(None),) * (i + 2) + (window,)].ravel("K")
            lowest, highest = _extreme_taps(part, inner, axis.kernel, spec.taps)
            start = window * axis.stride - axis.lo
            if start + lowest * axis.dilation < 0 or start + highest * axis.dilation >= axis.size:
                raise StateError(
                    f"{function}: state.argmax must name cells of the input, got a cell of the padding "
                    f"on spatial axis {i}"
                )


def _extreme_taps(argmax: np.ndarray, inner: int, kernel: int, taps: int) -> tuple[int, int]:
    """The least and the largest tap on an axis with `inner` cells of the kernel behind each."""
    if inner * kernel < taps:  # what outer axes add; NumPy has vector code for // but not for %
        argmax = argmax - argmax // (inner * kernel) * (inner * kernel)
    return int(argmax.min()) // inner, int(argmax.max()) // inner
