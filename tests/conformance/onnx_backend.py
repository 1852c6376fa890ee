"""An ONNX backend on funcnn: convolutions, pools and dropout are its calls, every other operator is plain NumPy.

An operator is a function of the node and its inputs, a missing one being None, that returns an array or a tuple of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from packages import package

import funcnn as fn

onnx = package("onnx")
base = package("onnx.backend.base")

Array = np.ndarray


@dataclass(frozen=True)
class Node:
    """A node of the graph, with what its meaning depends on beside its attributes."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    opset: int
    engine: str

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)


Operator = Callable[..., Any]


# ---- funcnn ----------------------------------------------------------------------------------------------------------


def _geometry(node: Node, rank: int) -> dict[str, Any]:
    """Options that the inits of convolutions and pools share."""
    pads = node.get("pads", (0,) * (2 * rank))
    named = {"VALID": "valid", "SAME_UPPER": "same", "SAME_LOWER": "same_lower"}
    return {
        "stride": node.get("strides", (1,) * rank),
        "dilation": node.get("dilations", (1,) * rank),
        "padding": named.get(node.get("auto_pad", "NOTSET"), list(zip(pads[:rank], pads[rank:], strict=True))),
        "engine": node.engine,
    }


def conv(node: Node, x: Array, weight: Array, bias: Array | None = None) -> Array:
    state = fn.conv_init(x, weight, groups=node.get("group", 1), **_geometry(node, x.ndim - 2))
    return fn.conv(x, weight, bias, state)[0]


def conv_integer(node: Node, x: Array, weight: Array, x_zero: Array | None = None, zero: Array | None = None) -> Array:
    centred = x.astype(np.int32) - (0 if x_zero is None else x_zero.astype(np.int32))
    zeros = np.zeros(1, np.int32) if zero is None else zero.astype(np.int32)  # one, or one per output channel
    return conv(node, centred, weight.astype(np.int32) - zeros.reshape(-1, *(1,) * (x.ndim - 1))).astype(np.int32)


def conv_transpose(node: Node, x: Array, weight: Array, bias: Array | None = None) -> Array:
    options = _geometry(node, x.ndim - 2)
    if "output_padding" in node.attributes:
        options["output_padding"] = node.get("output_padding")
    if "output_shape" in node.attributes:
        options |= _fitted(node, x.shape[2:], weight.shape[2:], options)
    state = fn.conv_transpose_init(x, weight, groups=node.get("group", 1), **options)
    return fn.conv_transpose(x, weight, bias, state)[0]


def _fitted(node: Node, size: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The padding for an `output_shape`, by ONNX's formula; what is missing instead is output padding."""
    extra = options.get("output_padding", (0,) * len(size))
    stride, dilation, wanted = options["stride"], options["dilation"], node.get("output_shape")[-len(size) :]
    axes = zip(size, kernel, stride, dilation, extra, wanted, strict=True)
    total = [s * (n - 1) + e + d * (k - 1) + 1 - w for n, k, s, d, e, w in axes]
    halves = [(max(t, 0) // 2, max(t, 0) - max(t, 0) // 2) for t in total]
    return {
        "padding": halves if node.get("auto_pad") == "SAME_UPPER" else [(hi, lo) for lo, hi in halves],
        "output_padding": [e + max(-t, 0) for e, t in zip(extra, total, strict=True)],
    }


def max_pool(node: Node, x: Array) -> Array | tuple[Array, Array]:
    options = {"ceil_mode": bool(node.get("ceil_mode", 0)), **_geometry(node, x.ndim - 2)}
    state = fn.max_pool_init(x, node.get("kernel_shape"), **options)
    indexed = len(node.outputs) > 1
    y, state = fn.max_pool(x, state, train=indexed)
    if not indexed:
        return y
    return y, _column_major(state, x.shape) if node.get("storage_order", 0) else fn.max_pool_indices(state, "tensor")


def _column_major(state: fn.MaxPoolState, shape: tuple[int, ...]) -> Array:
    """Indices over the whole tensor whose planes are counted column by column."""
    cells = np.unravel_index(fn.max_pool_indices(state, "plane"), shape[2:])
    within = np.ravel_multi_index(cells, shape[2:], order="F")
    planes = np.arange(shape[0] * shape[1]).reshape(*shape[:2], *(1,) * (len(shape) - 2))
    return within + planes * math.prod(shape[2:])


def average_pool(node: Node, x: Array) -> Array:
    options = {name: bool(node.get(name, 0)) for name in ("ceil_mode", "count_include_pad")}
    state = fn.avg_pool_init(x, node.get("kernel_shape"), **options, **_geometry(node, x.ndim - 2))
    return fn.avg_pool(x, state)[0]


def global_max_pool(node: Node, x: Array) -> Array:
    return fn.max_pool(x, fn.max_pool_init(x, x.shape[2:], engine=node.engine), train=False)[0]


def global_average_pool(node: Node, x: Array) -> Array:
    return fn.avg_pool(x, fn.avg_pool_init(x, x.shape[2:], engine=node.engine))[0]


def dropout(node: Node, x: Array, ratio: Array | None = None, training: Array | None = None) -> tuple[Array, Array]:
    rate = node.get("ratio", 0.5) if ratio is None else float(ratio)
    train = training is not None and bool(training)
    y, state = fn.dropout(x, fn.dropout_init(x, rate, seed=node.get("seed", 0), engine=node.engine), train=train)
    return y, state.mask if train else np.ones(x.shape, bool)


FUNCNN: dict[str, Operator] = {
    "Conv": conv,
    "ConvInteger": conv_integer,
    "ConvTranspose": conv_transpose,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "GlobalMaxPool": global_max_pool,
    "GlobalAveragePool": global_average_pool,
    "Dropout": dropout,
}

# ---- NumPy -----------------------------------------------------------------------------------------------------------


def _axes(node: Node, given: Array | None) -> tuple[int, ...] | None:
    """Axes are an attribute in old opsets and an input in new ones."""
    axes = node.get("axes") if given is None else given.tolist()
    return None if axes is None else tuple(axes)


def _dtype(number: int) -> Any:
    return onnx.helper.tensor_dtype_to_np_dtype(number)


def constant(node: Node) -> Array:
    return np.asarray(next(iter(node.attributes.values())))


def constant_of_shape(node: Node, shape: Array) -> Array:
    value = node.get("value", np.zeros(1, np.float32))
    return np.full(shape, value[0], value.dtype)


def sigmoid(node: Node, x: Array) -> Array:
    small = np.exp(-np.abs(x))  # of -|x|: it cannot overflow
    return np.where(x < 0, small, 1) / (1 + small)


def hard_sigmoid(node: Node, x: Array) -> Array:
    return np.clip(x * np.float32(node.get("alpha", 0.2)) + np.float32(node.get("beta", 0.5)), 0, 1)


def softmax(node: Node, x: Array) -> Array:
    """Over one axis; before opset 13 over all axes from that one on."""
    axis = node.get("axis", -1 if node.opset >= 13 else 1) % x.ndim
    axes = axis if node.opset >= 13 else tuple(range(axis, x.ndim))
    powers = np.exp(x - x.max(axes, keepdims=True))
    return powers / powers.sum(axes, keepdims=True)


def clip(node: Node, x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    return np.clip(x, node.get("min") if low is None else low, node.get("max") if high is None else high)


def gemm(node: Node, a: Array, b: Array, c: Array | None = None) -> Array:
    product = (a.T if node.get("transA") else a) @ (b.T if node.get("transB") else b)
    product *= np.float32(node.get("alpha", 1.0))
    return product if c is None else product + np.float32(node.get("beta", 1.0)) * c


def reshape(node: Node, x: Array, shape: Array) -> Array:
    kept = [x.shape[i] if n == 0 and not node.get("allowzero") else n for i, n in enumerate(shape.tolist())]
    return x.reshape(kept)


def slice_(
    node: Node, x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> Array:
    index = [slice(None)] * x.ndim
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        index[i if axes is None else int(axes[i])] = slice(start, end, None if steps is None else int(steps[i]))
    return x[tuple(index)]


def pad(node: Node, x: Array, pads: Array, value: Array | None = None) -> Array:
    widths = np.reshape(pads, (2, -1)).T
    if node.get("mode", "constant") == "constant":
        return np.pad(x, widths, constant_values=0 if value is None else value)
    return np.pad(x, widths, mode=node.get("mode"))


def split(node: Node, x: Array) -> tuple[Array, ...]:
    return tuple(np.array_split(x, len(node.outputs), axis=node.get("axis", 0)))


def resize(node: Node, x: Array, roi: Array | None, scales: Array) -> Array:
    """Nearest neighbour, the one kind that the networks have."""
    kind = [node.get(name) for name in ("mode", "coordinate_transformation_mode", "nearest_mode")]
    assert kind == ["nearest", "asymmetric", "floor"], kind
    for axis, scale in enumerate(scales.tolist()):
        cells = np.floor(np.arange(int(x.shape[axis] * scale)) / scale).astype(int)
        x = np.take(x, cells, axis)
    return x


NUMPY: dict[str, Operator] = {
    "Add": lambda node, a, b: a + b,
    "Cast": lambda node, x: x.astype(_dtype(node.get("to"))),
    "CastLike": lambda node, x, like: x.astype(like.dtype),
    "Clip": clip,
    "Concat": lambda node, *parts: np.concatenate(parts, node.get("axis")),
    "Constant": constant,
    "ConstantOfShape": constant_of_shape,
    "Div": lambda node, a, b: a / b,
    "Equal": lambda node, a, b: a == b,
    "Gather": lambda node, x, index: np.take(x, index, node.get("axis", 0)),
    "Gemm": gemm,
    "HardSigmoid": hard_sigmoid,
    "Identity": lambda node, x: x,
    "MatMul": lambda node, a, b: a @ b,
    "Mul": lambda node, a, b: a * b,
    "Pad": pad,
    "Pow": lambda node, a, b: a**b,
    "ReduceMean": lambda node, x, axes=None: x.mean(_axes(node, axes), keepdims=bool(node.get("keepdims", 1))),
    "Relu": lambda node, x: np.maximum(x, 0),
    "Reshape": reshape,
    "Resize": resize,
    "Shape": lambda node, x: np.asarray(x.shape, np.int64)[node.get("start", 0) : node.get("end")],
    "Sigmoid": sigmoid,
    "Slice": slice_,
    "Softmax": softmax,
    "Split": split,
    "Sqrt": lambda node, x: np.sqrt(x),
    "Squeeze": lambda node, x, axes=None: np.squeeze(x, _axes(node, axes)),
    "Sub": lambda node, a, b: a - b,
    "Sum": lambda node, *terms: sum(terms),
    "Tanh": lambda node, x: np.tanh(x),
    "Transpose": lambda node, x: np.transpose(x, node.get("perm")),
    "Unsqueeze": lambda node, x, axes=None: np.expand_dims(x, _axes(node, axes)),
}

# ---- NumPy in place of what funcnn has not yet: the networks need it, the suite runs without it ----------------------


def batch_normalization(node: Node, x: Array, scale: Array, bias: Array, mean: Array, variance: Array) -> Array:
    deviation = np.sqrt(variance + np.float32(node.get("epsilon", 1e-5)))
    scale, bias, mean, deviation = (a.reshape(-1, *(1,) * (x.ndim - 2)) for a in (scale, bias, mean, deviation))
    return (x - mean) / deviation * scale + bias


def local_response_normalization(node: Node, x: Array) -> Array:
    size = node.get("size")
    around = ((0, 0), ((size - 1) // 2, size // 2), *((0, 0),) * (x.ndim - 2))
    squares = np.lib.stride_tricks.sliding_window_view(np.pad(x * x, around), size, axis=1).sum(-1)
    weight = np.float32(node.get("alpha", 1e-4) / size)
    return x / (np.float32(node.get("bias", 1.0)) + weight * squares) ** np.float32(node.get("beta", 0.75))


STAND_INS: dict[str, Operator] = {"BatchNormalization": batch_normalization, "LRN": local_response_normalization}

# ---- the interpreter -------------------------------------------------------------------------------------------------


class Graph:
    """A graph whose attributes and constants are Python and NumPy values."""

    def __init__(self, proto: Any, opset: int, engine: str, operators: Mapping[str, Operator]) -> None:
        def value(attribute: Any) -> Any:
            raw = onnx.helper.get_attribute_value(attribute)
            if isinstance(raw, onnx.GraphProto):
                return Graph(raw, opset, engine, operators)
            if isinstance(raw, onnx.TensorProto):
                return onnx.numpy_helper.to_array(raw)
            return raw.decode() if isinstance(raw, bytes) else raw

        self.operators = operators
        self.constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.initializer}
        self.inputs = [x.name for x in proto.input if x.name not in self.constants]
        self.outputs = [y.name for y in proto.output]
        self.nodes = [
            Node(n.op_type, tuple(n.input), tuple(n.output), {a.name: value(a) for a in n.attribute}, opset, engine)
            for n in proto.node
        ]

    def run(self, inputs: Mapping[str, Array]) -> tuple[Array, ...]:
        """The outputs for named inputs, among which a branch also finds the values of the graph around it."""
        values = {"": None, **self.constants, **inputs}
        for node in self.nodes:
            arguments = [values[name] for name in node.inputs]
            if node.op == "If":
                results = node.get("then_branch" if arguments[0] else "else_branch").run(values)
            elif node.op in self.operators:
                results = self.operators[node.op](node, *arguments)
            else:
                raise NotImplementedError(node.op)
            results = results if isinstance(results, tuple) else (results,)
            values |= {name: np.asarray(y) for name, y in zip(node.outputs, results, strict=False)}
        return tuple(values[name] for name in self.outputs)


class Prepared(base.BackendRep):
    """A model ready to run."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Array, ...]:
        return self.graph.run(dict(zip(self.graph.inputs, map(np.asarray, inputs), strict=True)))


class FuncnnBackend(base.Backend):
    """The backend; a subclass names another engine or other operators."""

    engine: ClassVar[str] = "auto"
    operators: ClassVar[Mapping[str, Operator]] = FUNCNN | NUMPY

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> Prepared:
        super().prepare(model, device, **kwargs)
        (opset,) = {o.version for o in model.opset_import if o.domain in ("", "ai.onnx")}
        return Prepared(Graph(model.graph, opset, cls.engine, cls.operators))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


def backend_of(engine: str, operators: Mapping[str, Operator] = FuncnnBackend.operators) -> type[FuncnnBackend]:
    """The backend on one engine."""
    return type(f"Funcnn_{engine}", (FuncnnBackend,), {"engine": engine, "operators": operators})
