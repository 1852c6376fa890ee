"""Losses: pure functions that give the loss and its gradient."""

from __future__ import annotations

import math

import numpy as np

from funcnn._arrays import Array, dtype_name, library_of, same_library
from funcnn._layers._base import check_like, rounded, wide
from funcnn._spec import INTEGER_DTYPES
from funcnn.errors import StateError

__all__ = ["mean_squared_error", "softmax_cross_entropy"]


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Mean over the batch of -log softmax(logits)[label], and its gradient.

    Stable for logits of any size: the largest one of a row is subtracted first.

    Parameters
    ----------
    logits : array of floats, shape (N, K)
    labels : array of integers, shape (N,)
        0 .. K - 1.

    Returns
    -------
    loss : 0-d array
        Of float32 for half floats. 0 for an empty batch.
    dy : array, shape (N, K)
        Gradient of the loss in logits, of their dtype; 1/N is in it.

    Raises
    ------
    StateError
        For wrong shapes; on NumPy also for a label outside 0 .. K - 1.
    TypeError
        For wrong kinds of dtype, another library.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> loss, dy = L.softmax_cross_entropy(np.asarray([[1000.0, 1000.0]]), np.asarray([0]))
    >>> round(float(loss), 4), dy
    (0.6931, array([[-0.5,  0.5]]))
    """
    function = "softmax_cross_entropy"
    library, xp, a = wide(function, "logits", logits)
    same_library(function, "logits", library, "labels", library_of(function, "labels", labels))
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise StateError(f"{function}: logits must have shape (N, K) with K at least 1, got {tuple(logits.shape)}")
    n, k = logits.shape
    if dtype_name(labels.dtype) not in INTEGER_DTYPES:
        raise TypeError(f"{function}: labels must have an integer dtype, got {dtype_name(labels.dtype)}")
    if tuple(labels.shape) != (n,):
        raise StateError(f"{function}: labels must have shape ({n},), got {tuple(labels.shape)}")
    if isinstance(labels, np.ndarray) and n and not (labels.min() >= 0 and labels.max() < k):
        raise StateError(f"{function}: labels must lie in 0 .. {k - 1}, got {labels.min()} .. {labels.max()}")
    shifted = a - xp.max(a, axis=1, keepdims=True)
    exponential = xp.exp(shifted)
    total = xp.sum(exponential, axis=1, keepdims=True)
    classes = xp.arange(k, dtype=library.dtype("int32"), **library.place(library.device(logits)))
    hit = xp.reshape(xp.astype(labels, library.dtype("int32")), (n, 1)) == classes
    # A select, not a product: a logit of -inf that is no label must not make 0 * -inf.
    losses = xp.where(hit, xp.log(total) - shifted, xp.zeros_like(a))
    count = max(n, 1)
    dy = (exponential / total - xp.astype(hit, a.dtype)) / count
    return xp.sum(losses) / count, rounded(library, dy, logits)


def mean_squared_error(y: Array, target: Array) -> tuple[Array, Array]:
    """Mean over all elements of (y - target)**2, and its gradient.

    Parameters
    ----------
    y, target : arrays of real floats, of one shape and dtype

    Returns
    -------
    loss : 0-d array
        Of float32 for half floats. 0 for empty arrays.
    dy : array, the shape and dtype of y
        Gradient of the loss in y.

    Raises
    ------
    StateError
        If shapes or dtypes differ.
    TypeError
        For wrong kinds of dtype, another library.

    Examples
    --------
    >>> import numpy as np
    >>> from funcnn import layers as L
    >>> L.mean_squared_error(np.asarray([1.0, 3.0]), np.asarray([1.0, 1.0]))
    (np.float64(2.0), array([0., 2.]))
    """
    function = "mean_squared_error"
    library, xp, a = wide(function, "y", y)
    check_like(function, "target", target, "y", y)
    difference = a - xp.astype(target, a.dtype, copy=False)
    count = max(math.prod(y.shape), 1)
    return xp.sum(difference * difference) / count, rounded(library, difference * (2 / count), y)
