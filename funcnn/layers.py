"""Layers: thin closures that thread parameters and op states through the ops.

``params, state, y_spec = net.init(seed, x)``; ``y, state = net.forward(params, state, x)``;
``dx, grads = net.backward(params, state, dy)``. Everything is a value: nothing is kept in a layer. Moving to another array
library is giving `init` an array of that library.
"""

from funcnn._layers._activations import gelu, leaky_relu, relu, sigmoid, softmax, tanh
from funcnn._layers._base import Layer, LayerState
from funcnn._layers._combinators import parallel, residual, serial
from funcnn._layers._losses import mean_squared_error, softmax_cross_entropy
from funcnn._layers._ops import avg_pool, conv, conv_transpose, dropout, flatten, global_avg_pool, linear, max_pool

__all__ = [
    "Layer",
    "LayerState",
    "avg_pool",
    "conv",
    "conv_transpose",
    "dropout",
    "flatten",
    "gelu",
    "global_avg_pool",
    "leaky_relu",
    "linear",
    "max_pool",
    "mean_squared_error",
    "parallel",
    "relu",
    "residual",
    "serial",
    "sigmoid",
    "softmax",
    "softmax_cross_entropy",
    "tanh",
]
