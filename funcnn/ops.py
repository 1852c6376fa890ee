"""The ops: every one a trio `X_init`, `X`, `X_backward`; and `out_spec`, the shape of what comes out."""

from __future__ import annotations

from typing import Any

from funcnn._arrays import Array, ArraySpec, dtype_name, named
from funcnn._ops._door import check_batch, in_layout
from funcnn._ops.conv import (
    conv,
    conv_backward,
    conv_init,
    conv_transpose,
    conv_transpose_backward,
    conv_transpose_init,
)
from funcnn._ops.dropout import dropout, dropout_backward, dropout_init
from funcnn._ops.pool import (
    avg_pool,
    avg_pool_backward,
    avg_pool_init,
    max_pool,
    max_pool_backward,
    max_pool_indices,
    max_pool_init,
)
from funcnn.errors import StateError
from funcnn.state import OpState

__all__ = [
    "avg_pool",
    "avg_pool_backward",
    "avg_pool_init",
    "conv",
    "conv_backward",
    "conv_init",
    "conv_transpose",
    "conv_transpose_backward",
    "conv_transpose_init",
    "dropout",
    "dropout_backward",
    "dropout_init",
    "max_pool",
    "max_pool_backward",
    "max_pool_indices",
    "max_pool_init",
    "out_spec",
]


def out_spec(state: OpState, x: Array | ArraySpec | None = None) -> ArraySpec:
    """Shape, dtype, library and device of the y that a state's op gives, without running it.

    Parameters
    ----------
    state : op state
    x : array or ArraySpec, optional
        Whose batch size to take; None: the one given to init.

    Returns
    -------
    ArraySpec

    Raises
    ------
    StateError
        If x differs from what the state was made for; or if x is None and a pytree library rebuilt the state (which
        forgets the batch of init).
    TypeError
        If state is no op state, or x no array.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x, weight = np.ones((2, 3, 8, 8), np.float32), np.ones((4, 3, 3, 3), np.float32)
    >>> fn.out_spec(fn.conv_init(x, weight, stride=2))
    ArraySpec((2, 4, 3, 3), float32, numpy)
    """
    if not isinstance(state, OpState):
        raise TypeError(f"out_spec: state must be an op state, got {type(state).__name__}")
    plan, spec = state.plan, state.plan.spec
    batch = state.batch if x is None else _batch_of(x, plan)
    if batch is None:
        raise StateError("out_spec: x must be given for a state that a pytree library rebuilt, got None")
    library = named(plan.library)
    shape = (batch, *in_layout(spec.y_shape, spec))
    return ArraySpec(shape, spec.y_dtype, library.xp, device=library.devices.get(plan.device))


def _batch_of(x: Array | ArraySpec, plan: Any) -> int:
    if type(x) is not ArraySpec:
        return check_batch("out_spec", "x", x, plan, plan.spec.x_shape, plan.spec.dtype)
    expected = (*in_layout(plan.spec.x_shape, plan.spec), plan.spec.dtype, plan.library)
    got = (*x.shape[1:], dtype_name(x.dtype), x.library.name)
    if got != expected:
        raise StateError(f"out_spec: x must be (N, {', '.join(map(str, expected))}) as the state was made for, got {x}")
    return x.shape[0]
