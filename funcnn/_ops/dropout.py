"""dropout."""

from __future__ import annotations

import dataclasses

from funcnn._arrays import Array, ArraySpec, describe, library_of, named
from funcnn._engines import plan_for
from funcnn._ops._door import (
    check_array,
    check_batch,
    check_bool,
    check_same_batch,
    check_state,
    empty,
    to_engine,
    to_user,
)
from funcnn._spec import Options, dropout_spec
from funcnn.errors import StateError
from funcnn.state import DropoutState, clear, register_pytrees

_DEFAULT = Options()


def dropout_init(
    x: Array | ArraySpec,
    rate: float,
    *,
    seed: int,
    layout: str = "channels_first",
    engine: str = "auto",
    options: Options = _DEFAULT,
) -> DropoutState:
    """Make the op state of dropout.

    Parameters
    ----------
    x : array or ArraySpec, shape (N, ...)
        Of 1 axis or more. Floats or complex numbers.
    rate : float
        Probability that an element is zeroed, 0 .. 1.
    seed : int
        0 .. 2**64 - 1. The mask is a pure function of seed, step and the element's channels-first position, the same on
        every library, engine, thread count and memory order; the first n rows do not depend on N.
    layout, engine, options
        As for `conv_init`; "channels_last" matters for arrays of 3 axes or more.

    Returns
    -------
    DropoutState
        With `step` 0, and a `mask` that is zero-size until a training forward.

    Raises
    ------
    SpecError
        If rate or seed is out of its range, or x has no axis.
    TypeError
        For integers and bool.
    EngineError
        If the engine asked for by name cannot do it.

    Notes
    -----
    The hash is `lowbias32` of Chris Wellons' hash prospector (public domain), twice keyed: row n of the batch has two 32-bit
    keys made from seed, step and n; element i of the row is kept where the keyed hash of i, shifted to 31 bits, is at least
    round(rate * 2**31).

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> fn.dropout_init(np.ones((2, 5)), 0.5, seed=0, engine="blas")
    DropoutState(blas, numpy float64, x (N, 5) -> y (N, 5), rate 0.5; mask bool(0, 0), step 0, residuals 4 B)
    """
    register_pytrees()
    library, device, shape, dtype = describe("dropout_init", "x", x)
    spec = dropout_spec("dropout_init", shape, dtype, rate=rate, seed=seed, layout=layout)
    plan = plan_for("dropout_init", engine, spec, options, library.name, device)
    step = library.zeros((), "int32", device)
    return DropoutState(plan, empty(library, device, len(shape), "bool"), step, batch=shape[0])


def dropout(x: Array, state: DropoutState, train: bool = True) -> tuple[Array, DropoutState]:
    """Zero elements at random and scale the rest by 1 / (1 - rate).

    The same state twice gives the same mask; the returned state gives the next one. Elements are selected, not multiplied
    by 0: infinities and NaN vanish too, and rate 1 gives exact zeros.

    Parameters
    ----------
    x : array, shape (N, ...)
    state : DropoutState
    train : bool
        False is the identity (y is a copy of x) and returns a cleared state with the same step.

    Returns
    -------
    y : array, the shape and dtype of x
    state : DropoutState
        With `mask` (True: kept) and `step` one up.

    Raises
    ------
    StateError
        If x differs from what the state was made for, or the state is one of another op.
    TypeError
        If x is no array, or one of another library.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x = np.ones((1, 8))
    >>> y, state = fn.dropout(x, fn.dropout_init(x, 0.5, seed=1))
    >>> bool(np.all(y == np.where(state.mask, 2.0, 0.0))), int(state.step)
    (True, 1)
    """
    check_state("dropout", state, DropoutState)
    plan = state.plan
    check_batch("dropout", "x", x, plan, plan.spec.x_shape, plan.spec.dtype)
    check_bool("dropout", "train", train)
    library = named(plan.library)
    if not train:
        with library.on(library.device(x)):  # not x * 1, which turns complex infinities into NaN
            return library.xp.astype(x, library.dtype(plan.spec.dtype), copy=True), clear(state)
    check_array("dropout", "state.step", state.step, plan, (), "int32")
    y, mask = plan.forward(to_engine(x, plan), state.step)
    with library.on(library.device(state.step)):
        step = library.xp.asarray(state.step + 1, dtype=state.step.dtype)
    return to_user(y, plan), dataclasses.replace(state, mask=to_user(mask, plan), step=step)


def dropout_backward(dy: Array, state: DropoutState) -> Array:
    """Gradient of dropout: dy / (1 - rate) where `state.mask` kept the element, else 0.

    Parameters
    ----------
    dy : array, the shape of x
        Gradient of y, of y's dtype.
    state : DropoutState
        As a training forward returned it, or with a mask of your own.

    Returns
    -------
    dx : array, the shape of x

    Raises
    ------
    StateError
        Before a forward or after ``train=False``; if dy or mask has the wrong shape or dtype.
    TypeError
        If dy is no array, or one of another library.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x = np.ones((1, 8))
    >>> y, state = fn.dropout(x, fn.dropout_init(x, 0.5, seed=1))
    >>> bool(np.all(fn.dropout_backward(x, state) == y))
    True
    """
    function = "dropout_backward"
    check_state(function, state, DropoutState)
    plan = state.plan
    spec = plan.spec
    batch = check_batch(function, "dy", dy, plan, spec.x_shape, spec.dtype)
    library_of(function, "state.mask", state.mask)
    if not any(state.mask.shape) and any(dy.shape):
        raise StateError(
            f"{function}: state must come from dropout with train=True, got a state without mask; "
            f"pass the state that dropout returned"
        )
    check_same_batch(
        function, "dy", batch, "state.mask", check_batch(function, "state.mask", state.mask, plan, spec.x_shape, "bool")
    )
    return to_user(plan.backward(to_engine(dy, plan), to_engine(state.mask, plan)), plan)
