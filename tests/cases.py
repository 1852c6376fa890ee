"""One table of cases for conv, conv_transpose and the pools, arrays for them, and what the oracle says about each.

Arrays here are channels-first NumPy arrays, most of them of small whole numbers: every sum and mean is exact in every
float type, so that tests ask for equality. `running` takes them through an engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import reference as ref
from conftest import eps

Arrays = dict[str, Any]
CONVS = ("conv", "conv_transpose")
GRADIENTS = ("dx", "dweight", "dbias")


@dataclass(frozen=True, eq=False)
class Case:
    """One call of one op: x is (N, C, *spatial), `weight` the shape of a conv's weight or a pool's kernel_size."""

    name: str
    op: str
    x: tuple[int, ...]
    weight: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def is_conv(self) -> bool:
        return self.op in CONVS

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight[2:] if self.is_conv else self.weight

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def outputs(self) -> int:
        """Channels of y."""
        if self.op == "conv_transpose":
            return self.weight[1] * self.options.get("groups", 1)
        return self.weight[0] if self.is_conv else self.x[1]


def conv(name: str, x: tuple[int, ...], weight: tuple[int, ...], **options: Any) -> Case:
    return Case(name, "conv", x, weight, options)


def conv_transpose(name: str, x: tuple[int, ...], weight: tuple[int, ...], **options: Any) -> Case:
    return Case(name, "conv_transpose", x, weight, options)


def max_pool(name: str, x: tuple[int, ...], kernel: tuple[int, ...], **options: Any) -> Case:
    return Case(name, "max_pool", x, kernel, options)


def avg_pool(name: str, x: tuple[int, ...], kernel: tuple[int, ...], **options: Any) -> Case:
    return Case(name, "avg_pool", x, kernel, options)


# No axis repeats a number of another one where it can help it: a swapped axis must not go unseen.
CONV = [
    conv("rank 1", (2, 3, 11), (4, 3, 3)),
    conv("rank 2", (2, 3, 5, 7), (4, 3, 2, 3)),
    conv("rank 3", (2, 2, 5, 4, 6), (3, 2, 2, 3, 4), stride=(2, 1, 2), padding=((0, 1), (2, 0), (1, 1))),
    conv("rank 4", (1, 2, 3, 4, 5, 3), (2, 2, 2, 1, 3, 2), stride=(1, 2, 2, 1), padding=(0, 1, 1, 0)),
    conv("padding int", (1, 2, 4, 5), (3, 2, 3, 2), padding=2),
    conv("padding per axis", (1, 2, 4, 5), (3, 2, 3, 2), padding=(0, 2)),
    conv("padding asymmetric", (1, 2, 4, 5), (3, 2, 3, 2), padding=((2, 0), (1, 3))),
    conv("padding causal", (2, 2, 9), (3, 2, 3), padding=((4, 0),), dilation=2),
    conv("padding valid", (1, 2, 4, 5), (3, 2, 3, 2), padding="valid", stride=(1, 2)),
    conv("padding full", (1, 2, 4, 5), (3, 2, 3, 2), padding="full", dilation=(1, 2)),
    conv("padding same", (1, 2, 6, 7), (3, 2, 4, 2), padding="same", stride=(3, 2)),
    conv("padding same_lower", (1, 2, 6, 7), (3, 2, 4, 2), padding="same_lower", stride=(3, 2)),
    conv("padding same with dilation", (1, 2, 6, 5), (3, 2, 2, 3), padding="same", dilation=(3, 2)),
    conv("padding same with stride over kernel", (1, 2, 7, 5), (2, 2, 2, 1), padding="same", stride=(4, 3)),
    conv("padding beyond the kernel", (1, 2, 3, 2), (2, 2, 2, 1), padding=((4, 3), (3, 2)), stride=(2, 3)),
    conv("stride that does not divide", (2, 2, 12, 9), (3, 2, 3, 2), stride=(4, 3)),
    conv("stride over kernel", (2, 2, 9, 11), (3, 2, 2, 1), stride=(4, 5)),
    conv("dilation", (1, 2, 8, 7), (3, 2, 3, 2), dilation=(2, 4)),
    conv("dilation with stride and padding", (1, 2, 8, 7), (3, 2, 3, 2), dilation=(2, 3), stride=(3, 2),
         padding=(3, 1)),
    conv("dilation over the input", (1, 2, 3, 2), (3, 2, 2, 2), dilation=(5, 3), padding=((3, 4), (1, 2))),
    conv("flip", (1, 2, 5, 6), (3, 2, 2, 3), flip=True),
    conv("flip with stride, dilation and padding", (1, 2, 8, 6), (3, 2, 2, 3), flip=True, stride=(3, 1),
         dilation=(3, 2), padding=((1, 2), (0, 3))),
    conv("groups", (2, 4, 5, 6), (6, 2, 3, 2), groups=2),
    conv("groups with stride and padding", (2, 6, 5, 7), (3, 2, 2, 3), groups=3, stride=(2, 3),
         padding=((1, 0), (0, 2))),
    conv("groups with flip and dilation", (1, 4, 6, 7), (2, 2, 3, 2), groups=2, flip=True, dilation=(2, 3)),
    conv("depthwise", (2, 3, 6, 7), (3, 1, 3, 2), groups=3),
    conv("depthwise with multiplier", (2, 3, 5, 6), (6, 1, 2, 3), groups=3, padding=((0, 1), (2, 0))),
    conv("depthwise with dilation", (1, 2, 8, 9), (2, 1, 3, 2), groups=2, dilation=(2, 3)),
    conv("depthwise with three outputs a channel", (1, 2, 5, 4), (6, 1, 2, 3), groups=2, stride=(2, 1)),
    conv("depthwise with everything", (1, 2, 9, 8), (4, 1, 3, 2), groups=2, stride=(3, 2), dilation=(2, 3), flip=True,
         padding=((2, 1), (0, 4))),
    conv("depthwise same", (1, 3, 7, 4), (3, 1, 4, 3), groups=3, stride=(2, 3), padding="same"),
    conv("depthwise rank 1", (2, 3, 10), (3, 1, 4), groups=3, stride=3, padding=2),
    conv("depthwise rank 3", (1, 2, 4, 5, 3), (2, 1, 2, 3, 1), groups=2, stride=(2, 1, 2), padding=(1, 0, 1)),
    conv("1x1", (2, 3, 4, 5), (4, 3, 1, 1)),
    conv("1x1 with groups", (2, 4, 4, 3), (6, 2, 1, 1), groups=2),
    conv("1x1 with stride", (2, 3, 4, 5), (4, 3, 1, 1), stride=(3, 2)),
    conv("1x1 with padding", (2, 3, 4, 5), (4, 3, 1, 1), padding=((1, 0), (0, 2))),
    conv("1x1 with stride and as many outputs", (2, 3, 3, 4), (4, 3, 1, 1), stride=(2, 1), padding=((0, 2), (0, 0))),
    conv("1x1 with trailing padding", (2, 3, 4, 5), (4, 3, 1, 1), padding=((0, 0), (0, 2))),
    conv("1x1 at the ends", (1, 2, 5), (3, 2, 1), stride=4),
    conv("kernel as large as the input", (3, 2, 4, 5), (4, 2, 4, 5)),
    conv("kernel larger than the input", (2, 2, 3, 2), (3, 2, 5, 4), padding=((1, 2), (2, 1))),
    conv("one window with dilation", (2, 2, 5, 7), (3, 2, 3, 2), dilation=(2, 5)),
    conv("one cell", (2, 3, 1, 1), (4, 3, 3, 3), padding=1),
    conv("one channel", (2, 1, 6, 5), (1, 1, 3, 2)),
    conv("no input channels", (2, 0, 4, 5), (3, 0, 2, 3), padding=(1, 0), stride=(1, 2)),
    conv("no output channels", (2, 2, 4, 5), (0, 2, 2, 3), padding=(1, 0), stride=(1, 2)),
    conv("empty batch", (0, 2, 4, 5), (3, 2, 2, 3), stride=(2, 1)),
    conv("empty batch, depthwise", (0, 2, 4, 5), (2, 1, 2, 3), groups=2),
    conv("empty batch, 1x1", (0, 2, 4, 5), (3, 2, 1, 1)),
]  # fmt: skip

CONV_TRANSPOSE = [
    conv_transpose("rank 1", (2, 3, 5), (3, 4, 3)),
    conv_transpose("rank 2", (2, 3, 3, 4), (3, 2, 2, 3), stride=(3, 2)),
    conv_transpose("rank 3", (1, 2, 3, 2, 4), (2, 3, 2, 3, 1), stride=(2, 1, 3), padding=((0, 1), (1, 0), (0, 0))),
    conv_transpose("rank 4", (1, 2, 2, 3, 2, 1), (2, 2, 2, 1, 3, 2), stride=(1, 2, 2, 1), padding=(0, 0, 1, 0)),
    conv_transpose("padding asymmetric", (1, 3, 4, 3), (3, 2, 3, 4), padding=((2, 0), (1, 3)), stride=(2, 3)),
    conv_transpose("padding valid", (1, 3, 4, 3), (3, 2, 3, 2), padding="valid", stride=(1, 2)),
    conv_transpose("padding full", (1, 3, 6, 5), (3, 2, 3, 2), padding="full", dilation=(1, 2)),
    conv_transpose("padding same", (1, 3, 3, 4), (3, 2, 4, 3), padding="same", stride=(3, 2)),
    conv_transpose("padding same_lower", (1, 3, 3, 4), (3, 2, 4, 3), padding="same_lower", stride=(3, 2)),
    conv_transpose("padding same, stride over kernel", (1, 3, 3, 2), (3, 2, 2, 1), padding="same", stride=(4, 3)),
    conv_transpose("output_size with same", (1, 3, 3, 4), (3, 2, 4, 3), padding="same", stride=(3, 2),
                   output_size=(7, 7)),
    conv_transpose("output_size", (1, 3, 3, 4), (3, 2, 3, 2), padding=((1, 0), (0, 1)), stride=(3, 2),
                   output_size=(10, 8)),
    conv_transpose("output_padding", (1, 3, 3, 4), (3, 2, 3, 2), stride=(3, 2), output_padding=(2, 1)),
    conv_transpose("output_padding below dilation", (1, 3, 3, 4), (3, 2, 2, 2), dilation=(3, 2), stride=(1, 2),
                   output_padding=(2, 1), padding=(1, 0)),
    conv_transpose("dilation with stride", (1, 3, 3, 4), (3, 2, 3, 2), stride=(2, 3), dilation=(3, 2)),
    conv_transpose("flip", (1, 3, 3, 4), (3, 2, 3, 2), stride=(2, 1), dilation=(1, 2), flip=True),
    conv_transpose("groups", (2, 4, 3, 2), (4, 3, 2, 3), groups=2, stride=(2, 3), padding=((1, 0), (0, 2))),
    conv_transpose("depthwise", (2, 3, 4, 3), (3, 1, 3, 2), groups=3, stride=(2, 3)),
    conv_transpose("depthwise with multiplier", (2, 3, 4, 3), (3, 2, 3, 2), groups=3, stride=(2, 3), flip=True),
    conv_transpose("groups that share an output", (2, 4, 3, 4), (4, 1, 2, 3), groups=2, stride=(1, 2), padding=(0, 1)),
    conv_transpose("1x1", (2, 3, 4, 3), (3, 2, 1, 1)),
    conv_transpose("1x1 with stride", (2, 3, 4, 3), (3, 2, 1, 1), stride=(2, 3), output_padding=(1, 2)),
    conv_transpose("1x1 with padding and as many outputs", (2, 3, 4, 3), (3, 2, 1, 1), dilation=2,
                   padding=((1, 0), (0, 0)), output_padding=(1, 0)),
    conv_transpose("one cell", (2, 3, 1, 1), (3, 2, 2, 3)),
    conv_transpose("output smaller than the input", (1, 2, 7, 6), (2, 3, 2, 1), padding=((2, 3), (1, 2))),
    conv_transpose("no input channels", (2, 0, 3, 4), (0, 2, 2, 3), stride=(1, 2)),
    conv_transpose("empty batch", (0, 3, 3, 4), (3, 2, 2, 3), stride=(2, 1)),
]  # fmt: skip

# (name, x, kernel, options) of both pools.
_POOLS: list[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ("rank 1", (2, 3, 11), (3,), {}),
    ("rank 2", (2, 3, 7, 8), (3, 2), {}),
    ("rank 3", (2, 2, 4, 5, 6), (2, 3, 1), {"stride": (1, 2, 3)}),
    ("rank 4", (1, 2, 3, 4, 5, 3), (2, 1, 3, 2), {"stride": (1, 2, 2, 1), "padding": (1, 0, 1, 0)}),
    ("overlap", (2, 2, 6, 7), (3, 4), {"stride": (1, 2)}),
    ("stride over kernel", (2, 2, 9, 11), (2, 1), {"stride": (4, 5)}),
    ("padding asymmetric", (1, 2, 6, 5), (4, 3), {"stride": (2, 3), "padding": ((2, 1), (0, 2))}),
    ("padding before windows side by side", (2, 4, 4, 8), (2, 2), {"padding": ((0, 0), (1, 0))}),
    ("padding same", (1, 2, 7, 5), (4, 3), {"stride": (3, 2), "padding": "same"}),
    ("padding same_lower", (1, 2, 7, 5), (4, 2), {"stride": (3, 2), "padding": "same_lower", "ceil_mode": True}),
    ("padding valid", (1, 2, 7, 5), (4, 2), {"stride": (2, 1), "padding": "valid"}),
    ("padding full", (1, 2, 4, 5), (2, 3), {"stride": 1, "padding": "full"}),
    ("dilation", (2, 2, 9, 8), (3, 2), {"stride": (1, 2), "dilation": (2, 3)}),
    ("dilation with padding", (2, 2, 8, 9), (3, 2),
     {"stride": (3, 2), "dilation": (2, 4), "padding": ((2, 1), (1, 3))}),
    ("ceil_mode", (2, 2, 8, 6), (3, 4), {"stride": (2, 3), "ceil_mode": True}),
    ("ceil_mode that drops a window", (1, 2, 5, 7), (2, 3),
     {"stride": (2, 3), "padding": ((1, 1), (0, 1)), "ceil_mode": True}),
    ("ceil_mode with padding", (1, 2, 6, 8), (3, 4),
     {"stride": (4, 3), "padding": ((1, 0), (0, 1)), "ceil_mode": True}),
    ("ceil_mode with dilation", (1, 2, 8, 9), (2, 3), {"stride": (3, 2), "dilation": (3, 2), "ceil_mode": True}),
    ("1x1", (2, 2, 4, 5), (1, 1), {}),
    ("1x1 with stride", (2, 2, 4, 5), (1, 1), {"stride": (3, 2)}),
    ("kernel as large as the input", (2, 3, 4, 5), (4, 5), {}),
    ("kernel larger than the input", (2, 2, 2, 3), (3, 5), {"stride": 1, "padding": ((1, 1), (1, 2))}),
    ("many cells", (2, 3, 9, 11), (5, 7), {"stride": (2, 3), "padding": ((2, 1), (3, 0))}),
    ("one channel", (2, 1, 6, 5), (3, 2), {"stride": (2, 1)}),
    ("no channels", (2, 0, 6, 5), (3, 2), {"stride": (2, 1)}),
    ("empty batch", (0, 2, 6, 5), (3, 2), {"stride": (2, 1)}),
]  # fmt: skip

MAX_POOL = [
    *(max_pool(name, x, kernel, **options) for name, x, kernel, options in _POOLS),
    max_pool("many cells with dilation", (1, 2, 14, 15), (5, 7), stride=2, dilation=(3, 2), padding=((2, 0), (0, 1))),
    max_pool("257 cells", (1, 1, 300), (257,), stride=20),  # one more than a byte can number
]

AVG_POOL = [
    *(avg_pool(name, x, kernel, **options) for name, x, kernel, options in _POOLS),
    *(
        avg_pool(f"{name}, padding not counted", x, kernel, count_include_pad=False, **options)
        for name, x, kernel, options in _POOLS
        if "padding" in options or "ceil_mode" in options
    ),
    avg_pool("windows of padding only", (1, 2, 3, 2), (2, 1), stride=(1, 2), padding=((3, 4), (2, 3))),
    avg_pool("windows of padding only, padding not counted", (1, 2, 3, 2), (2, 1), stride=(1, 2),
             padding=((3, 4), (2, 3)), count_include_pad=False),
    avg_pool("windows that step over the input", (1, 2, 1, 5), (2, 2), stride=1, dilation=(3, 2),
             padding=((2, 2), (1, 0)), count_include_pad=False),
]  # fmt: skip

CASES = [*CONV, *CONV_TRANSPOSE, *MAX_POOL, *AVG_POOL]

# A few small cases that together use every option: for tests that repeat them over dtypes, engines or values.
MIXED_CONV = [
    conv("mixed", (2, 4, 7, 6), (6, 2, 3, 2), groups=2, stride=(2, 1), dilation=(1, 2), flip=True,
         padding=((2, 1), (0, 3))),
    conv("mixed 1x1", (2, 3, 4, 5), (4, 3, 1, 1)),
    conv("mixed depthwise", (2, 3, 7, 6), (6, 1, 2, 3), groups=3, stride=(3, 2), padding=((1, 0), (2, 1))),
]  # fmt: skip
MIXED_TRANSPOSE = [
    conv_transpose("mixed transpose", (2, 4, 3, 4), (4, 3, 2, 3), groups=2, stride=(2, 3), dilation=(3, 1), flip=True,
                   padding=((1, 0), (0, 2)), output_padding=(2, 1)),
    conv_transpose("mixed transpose depthwise", (2, 3, 4, 3), (3, 1, 3, 2), groups=3, stride=(2, 3), padding=(1, 0)),
]  # fmt: skip
MIXED_MAX = [
    max_pool("mixed overlap", (2, 3, 6, 7), (3, 2), stride=(2, 1), padding=((1, 1), (0, 1))),
    max_pool("mixed dilation", (2, 3, 9, 8), (2, 3), stride=(3, 2), dilation=(2, 3), padding=((1, 0), (2, 1)),
             ceil_mode=True),
    max_pool("mixed plain", (2, 3, 6, 7), (3, 2)),
]  # fmt: skip
MIXED_AVG = [
    avg_pool("mixed overlap", (2, 3, 6, 7), (3, 2), stride=(2, 1), padding=((1, 1), (0, 1))),
    avg_pool("mixed dilation", (2, 3, 9, 8), (2, 3), stride=(3, 2), dilation=(2, 3), padding=((1, 0), (2, 1)),
             ceil_mode=True, count_include_pad=False),
    avg_pool("mixed plain", (2, 3, 6, 7), (3, 2)),
]  # fmt: skip


# ---- what goes in ----------------------------------------------------------------------------------------------------


def digits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float64", scale: int = 1) -> Any:
    """Whole numbers -4 .. 4 (0 .. 8 for unsigned dtypes) times `scale`; ties are frequent."""
    low, high = (0, 9) if np.dtype(dtype).kind == "u" else (-4, 5)
    values = scale * rng.integers(low, high, shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * scale * rng.integers(low, high, shape)
    return values.astype(dtype)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: int = 1) -> Any:
    """Standard normal numbers, rounded to the dtype."""
    values = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def relued(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float64", scale: int = 1) -> Any:
    """What a ReLU gives: more than half of it zeros, so that windows are full of ties."""
    return np.maximum(digits(rng, shape, dtype, scale), 0)


def spoilt(case: Case, name: str, value: float) -> Arrays:
    """Whole numbers, and one cell of one array that is NaN or infinite."""
    arrays = {key: array.copy() for key, array in exact(case)[0].items()}
    arrays[name].flat[arrays[name].size // 2] = value
    return arrays


def divisible(case: Case) -> int:
    """A number that every divisor of an average divides, so that means are whole numbers; 1 for other ops."""
    if case.op != "avg_pool":
        return 1
    return math.prod(math.lcm(*range(1, k + 1)) for k in case.kernel)


def inputs(
    case: Case, seed: int = 0, dtype: str = "float64", weight_dtype: str | None = None, make: Any = digits
) -> Arrays:
    """x, dy and, for a conv, weight and bias, by `make(rng, shape, dtype, scale)`."""
    rng = np.random.default_rng(seed)
    scale = divisible(case)
    arrays = {"x": make(rng, case.x, dtype, scale)}
    if case.is_conv:
        arrays["weight"] = make(rng, case.weight, weight_dtype or dtype, scale)
        arrays["bias"] = make(rng, (case.outputs,), dtype, scale)
    arrays["dy"] = make(rng, _y_shape(case), dtype, scale)
    return arrays


@cache
def _y_shape(case: Case) -> tuple[int, ...]:
    """The shape of y by the oracle: of one image with one channel a group, to be quick."""
    n, _, *spatial = case.x
    if case.op == "conv_transpose":
        if case.options.get("output_size"):
            return (n, case.outputs, *case.options["output_size"])
        zeros = np.zeros((1, 1, *spatial)), np.zeros((1, 1, *case.kernel))
        sizes = ref.conv_transpose(*zeros, **{k: v for k, v in case.options.items() if k != "groups"}).shape[2:]
    else:
        options = {k: case.options[k] for k in ("stride", "padding", "dilation") if k in case.options}
        kernel, rank = case.kernel, len(case.kernel)
        stride = options.get("stride") or (1 if case.is_conv else kernel)
        dilation = options.get("dilation", 1)
        stride, dilation = ((v,) * rank if isinstance(v, int) else v for v in (stride, dilation))
        pads = ref.pads(spatial, kernel, stride, options.get("padding", 0), dilation)
        sizes = ref.out_sizes(spatial, kernel, stride, pads, dilation, case.options.get("ceil_mode", False))
    return (n, case.outputs, *sizes)


# ---- what comes out --------------------------------------------------------------------------------------------------


def expected(case: Case, arrays: Arrays) -> Arrays:
    """What the oracle says: y and the gradients; for max_pool also argmax and its flat indices."""
    x, dy, options = arrays["x"], arrays["dy"], case.options
    if case.is_conv:
        forward, backward = getattr(ref, case.op), getattr(ref, f"{case.op}_backward")
        result = {"y": forward(x, arrays["weight"], arrays["bias"], **options)}
        if x.dtype.kind in "fcV":
            result |= zip(GRADIENTS, backward(dy, x, arrays["weight"], **options), strict=True)
        return result
    sizes, kernel = x.shape[2:], case.kernel
    if case.op == "avg_pool":
        y = ref.avg_pool(x, kernel, **options)
        return {"y": y, "dx": ref.avg_pool_backward(dy, sizes, kernel, **options)}
    y, argmax = ref.max_pool(x, kernel, **options)
    plane = ref.plane_indices(argmax, sizes, kernel, **options)
    planes = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *(1 for _ in sizes)) * math.prod(sizes)
    dx = ref.max_pool_backward(dy, argmax, sizes, kernel, **options)
    return {"y": y, "argmax": argmax, "plane": plane, "tensor": plane + planes, "dx": dx}


@cache
def exact(case: Case) -> tuple[Arrays, Arrays]:
    """Inputs of small whole numbers and what comes of them."""
    arrays = inputs(case)
    return arrays, expected(case, arrays)


def terms(case: Case) -> dict[str, int]:
    """Most products (or summands) in one element of each result."""
    n, _, *sizes = case.x
    windows = math.prod(_y_shape(case)[2:])
    if not case.is_conv:
        return {"y": case.taps + 1, "dx": case.taps + 1}
    groups = case.options.get("groups", 1)
    pixels = n * (math.prod(sizes) if case.op == "conv_transpose" else windows)
    return {
        "y": case.x[1] // groups * case.taps + 1,
        "dx": case.outputs // groups * case.taps,
        "dweight": pixels,
        "dbias": n * windows,
    }


def bounds(case: Case, arrays: Arrays, dtype: str) -> Arrays:
    """(bound, exact result) by name; how far a result may be off: K eps(sum) sum|terms| + eps(dtype) |exact|.

    Every one of K products and sums rounds by at most eps/2 of a partial sum, which sum|terms| bounds; float16 and
    bfloat16 sum in float32 and round once more. A component of a complex product has two real terms: twice as much.
    """
    magnitudes = expected(case, {name: np.abs(array.astype(_wide(array))) for name, array in arrays.items()})
    exact = expected(case, {name: array.astype(_wide(array)) for name, array in arrays.items()})
    sums = eps("float32" if dtype in ("float16", "bfloat16") else dtype)
    parts = 2 if dtype.startswith("complex") else 1
    return {
        name: (parts * count * sums * magnitudes[name] + parts * eps(dtype) * np.abs(exact[name]), exact[name])
        for name, count in terms(case).items()
    }


def _wide(array: Any) -> str:
    return "complex128" if array.dtype.kind == "c" else "float64"
