"""The nine classic networks that onnx carries without their weights, here with random ones.

As they come, every weight is the same constant, and they give the same answer with average pools in place of max pools.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from packages import package

onnx = package("onnx")

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
LIGHT = {  # and what they exercise
    "bvlc_alexnet": "Conv 5: 11x11 with stride 4, 2 groups; MaxPool 3 with overlap and one-sided padding",
    "densenet121": "Conv 121: 1x1, 3x3, 7x7; MaxPool, AveragePool 3, GlobalAveragePool",
    "inception_v1": "Conv 57: 1x1, 3x3, 5x5, 7x7; MaxPool 13 with stride 1 and 2; AveragePool",
    "inception_v2": "Conv 69; MaxPool 5; AveragePool 8 with padding left out of the count",
    "resnet50": "Conv 53: 1x1 with stride 2; MaxPool; AveragePool",
    "shufflenet": "Conv 49: 4 groups, and depthwise 3x3; MaxPool; AveragePool 4",
    "squeezenet": "Conv 26; MaxPool 3; GlobalAveragePool",
    "vgg19": "Conv 16: 3x3, up to 4,608 terms; MaxPool 5",
    "zfnet512": "Conv 5: 7x7 and 5x5 with stride 2; MaxPool 3",
}

Use = tuple[str, int]  # which input of which operator


def light_model(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """A network whose weights are inputs, and values for these and the image."""
    model = onnx.load(FOLDER / f"light_{name}.onnx")
    graph = model.graph
    shapes = _weight_shapes(graph)
    uses = _uses(graph)
    rng = np.random.default_rng(0)
    feeds = {weight: _random(rng, uses[weight], shape) for weight, shape in shapes.items() if weight in uses}
    stored = {tensor.name for tensor in graph.initializer}
    (image,) = [x.name for x in graph.input if x.name not in stored]
    feeds[image] = rng.standard_normal((1, 3, 224, 224), np.float32)

    _keep(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in shapes])
    _keep(graph.node, [node for node in graph.node if node.op_type != "ConstantOfShape"])
    model.ir_version = 4  # from here on an initializer is no input
    _keep(graph.input, [_tensor(name, value.shape) for name, value in feeds.items()])
    return model, feeds


def _weight_shapes(graph: Any) -> dict[str, tuple[int, ...]]:
    """Small weights are stored, the others are a shape and a constant."""
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "ConstantOfShape"}
    return {name: array.shape for name, array in stored.items() if array.dtype == np.float32} | {
        name: tuple(stored[shape].tolist()) for name, shape in made.items()
    }


def _uses(graph: Any) -> dict[str, Use]:
    """What each value is for, looking through Unsqueeze."""
    uses: dict[str, Use] = {}
    for node in reversed(graph.node):
        for i, name in enumerate(node.input):
            uses[name] = uses[node.output[0]] if node.op_type == "Unsqueeze" else (node.op_type, i)
    return uses


def _random(rng: np.random.Generator, use: Use, shape: tuple[int, ...]) -> np.ndarray:
    """He's scale for the weights of sums, factors around 1, terms around 0."""
    if use in (("Conv", 1), ("Gemm", 1)):
        return rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(2 / math.prod(shape[1:])))
    if use in (("BatchNormalization", 1), ("BatchNormalization", 4), ("Mul", 1)):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return rng.standard_normal(shape, np.float32) * np.float32(0.1)


def _keep(field: Any, values: list[Any]) -> None:
    del field[:]
    field.extend(values)


def _tensor(name: str, shape: tuple[int, ...]) -> Any:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
