"""Every kind of bad input: its error class, its message, and that nothing has changed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import array_api_strict
import numpy as np
import optree
import pytest
from conftest import Backend

import funcnn as fn
from funcnn import layers as L

X = np.asarray(np.random.default_rng(0).standard_normal((2, 4, 6, 5)), np.float32)
W = np.asarray(np.random.default_rng(1).standard_normal((6, 2, 3, 2)), np.float32)
B = np.zeros(6, np.float32)
CONV = fn.conv_init(X, W, groups=2)
Y, _ = fn.conv(X, W, B, CONV)
WT = np.ones((4, 3, 3, 2), np.float32)
TRANSPOSED = fn.conv_transpose_init(X, WT, groups=2)
YT, _ = fn.conv_transpose(X, WT, B, TRANSPOSED)
FRESH = fn.max_pool_init(X, 2, padding=1)
YM, POOL = fn.max_pool(X, FRESH)
AVG = fn.avg_pool_init(X, 2)
YA, _ = fn.avg_pool(X, AVG)
DROP0 = fn.dropout_init(X, 0.5, seed=0)
YD, DROP = fn.dropout(X, DROP0)
STRICT = array_api_strict.asarray(X)
INTS = fn.conv_init(X.astype(np.int8), W.astype(np.int8), groups=2)
INT_POOL = fn.max_pool(X.astype(np.int8), fn.max_pool_init(X.astype(np.int8), 2))[1]

EVERYTHING = (X, W, B, Y, WT, YT, YM, YA, YD, CONV, TRANSPOSED, FRESH, POOL, AVG, DROP0, DROP)


def init(name: str, *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(fn, name)(*args, **options)


# (call, error, pattern of the message)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {}


def case(name: str, call: Callable[[], Any], error: type[Exception], pattern: str) -> None:
    assert name not in CASES
    CASES[name] = call, error, pattern


# not an array, another library, wrong kinds of dtype
for label, bad in {
    "list": X.tolist(),
    "masked": np.ma.masked_array(X),
    "matrix": np.ones((1, 1)).view(np.matrix),
    "scalar": np.float32(1),
    "none": None,
}.items():
    for op, call in {
        "conv": lambda bad=bad: fn.conv(bad, W, B, CONV),
        "conv weight": lambda bad=bad: fn.conv(X, bad, B, CONV),
        "conv_transpose": lambda bad=bad: fn.conv_transpose(bad, WT, B, TRANSPOSED),
        "conv_init": lambda bad=bad: fn.conv_init(bad, W),
        "conv_backward": lambda bad=bad: fn.conv_backward(bad, X, W, CONV),
        "max_pool": lambda bad=bad: fn.max_pool(bad, FRESH),
        "max_pool_init": lambda bad=bad: fn.max_pool_init(bad, 2),
        "max_pool_backward": lambda bad=bad: fn.max_pool_backward(bad, POOL),
        "avg_pool": lambda bad=bad: fn.avg_pool(bad, AVG),
        "avg_pool_backward": lambda bad=bad: fn.avg_pool_backward(bad, AVG),
        "dropout": lambda bad=bad: fn.dropout(bad, DROP),
        "dropout_backward": lambda bad=bad: fn.dropout_backward(bad, DROP),
    }.items():
        case(f"{op} of a {label}", call, TypeError, r"must be an array \(NumPy.*got ")
case(
    "conv of another library",
    lambda: fn.conv(STRICT, W, B, CONV),
    TypeError,
    "x must be an array of numpy.*got array_api_strict",
)
case(
    "conv weight of another library",
    lambda: fn.conv(X, array_api_strict.asarray(W), B, CONV),
    TypeError,
    "weight must be",
)
case(
    "conv_init of a mixture",
    lambda: fn.conv_init(X, array_api_strict.asarray(W)),
    TypeError,
    "weight must be an array of the same library as x",
)
case("max_pool of another library", lambda: fn.max_pool(STRICT, FRESH), TypeError, "x must be an array of numpy")
case("conv_init of bool", init("conv_init", X > 0, W > 0), TypeError, "x must have .* got bool")
case("conv_init of uint64", init("conv_init", X.astype(np.uint64), W.astype(np.uint64)), TypeError, "got uint64")
case(
    "conv_init of two dtypes",
    init("conv_init", X, W.astype(np.float64)),
    TypeError,
    "weight must have the dtype of x.*got float64",
)
case(
    "conv_init of real x and complex weight",
    init("conv_init", X, W.astype(np.complex64)),
    TypeError,
    "weight must have",
)
case("avg_pool_init of integers", init("avg_pool_init", X.astype(np.int32), 2), TypeError, "got int32")
case("max_pool_init of complex", init("max_pool_init", X.astype(np.complex64), 2), TypeError, "got complex64")
case("dropout_init of integers", init("dropout_init", X.astype(np.int32), 0.5, seed=0), TypeError, "got int32")
case(
    "conv_backward of integers",
    lambda: fn.conv_backward(np.zeros((2, 6, 4, 4), np.int32), X.astype(np.int8), W.astype(np.int8), INTS),
    TypeError,
    "integers have no gradient",
)
case(
    "max_pool_backward of integers",
    lambda: fn.max_pool_backward(YM.astype(np.int8), INT_POOL),
    TypeError,
    "integers have no gradient",
)
for name, value in {"stride": True, "dilation": 1.0, "groups": 2.0, "padding": 0.5, "flip": 1, "layout": 3}.items():
    case(
        f"conv_init with {name}={value}",
        init("conv_init", X, W, **{name: value}),
        TypeError,
        f"{name} must be .*got {value}",
    )
case(
    "conv_init with a bool in a tuple",
    init("conv_init", X, W, stride=(1, True)),
    TypeError,
    "stride must be an int, got True",
)
case(
    "max_pool_init with a float window", init("max_pool_init", X, 2.0), TypeError, "kernel_size must be an int, got 2.0"
)
case(
    "max_pool_init with ceil_mode=1",
    init("max_pool_init", X, 2, ceil_mode=1),
    TypeError,
    "ceil_mode must be True or False, got 1",
)
case(
    "avg_pool_init with count_include_pad=0",
    init("avg_pool_init", X, 2, count_include_pad=0),
    TypeError,
    "count_include_pad must be",
)
case("dropout_init with rate True", init("dropout_init", X, True, seed=0), TypeError, "rate must be a float")
case("dropout_init with seed 0.5", init("dropout_init", X, 0.5, seed=0.5), TypeError, "seed must be an int, got 0.5")
case("max_pool with train=1", lambda: fn.max_pool(X, FRESH, train=1), TypeError, "train must be True or False, got 1")
case(
    "options of another type",
    init("conv_init", X, W, groups=2, options={"threads": 1}),
    TypeError,
    "options must be a funcnn.Options",
)
case(
    "engine of another type",
    init("conv_init", X, W, groups=2, engine=None),
    TypeError,
    "engine must be a string, got None",
)
case(
    "a state that is none",
    lambda: fn.conv(X, W, B, None),
    TypeError,
    r"state must be a ConvState \(made by conv_init\), got NoneType",
)
case("wrt of another type", lambda: fn.conv_backward(Y, X, W, CONV, wrt=1), TypeError, "wrt must be")
case(
    "ArraySpec without a sequence",
    lambda: fn.ArraySpec(3, "float32"),
    TypeError,
    "shape must be a sequence of ints, got 3",
)
case(
    "ArraySpec of an unknown dtype",
    lambda: fn.ArraySpec((1,), "float31"),
    TypeError,
    "dtype must be a dtype of numpy, got 'float31'",
)
case("ArraySpec of a bad xp", lambda: fn.ArraySpec((1,), "float32", "numpy"), TypeError, "xp must be an array library")

# wrong shapes, dtypes, states
case(
    "conv of another size",
    lambda: fn.conv(X[..., 1:], W, B, CONV),
    fn.StateError,
    r"x must have shape \(N, 4, 6, 5\) .*got \(2, 4, 6, 4\); call conv_init",
)
case(
    "conv of another dtype",
    lambda: fn.conv(X.astype(np.float64), W, B, CONV),
    fn.StateError,
    "x must have dtype float32.*got float64",
)
case("conv without batch", lambda: fn.conv(X[0], W, B, CONV), fn.StateError, r"add a batch axis by x\[None\]")
case(
    "conv with another weight",
    lambda: fn.conv(X, W[:, :1], B, CONV),
    fn.StateError,
    r"weight must have shape \(6, 2, 3, 2\).*got \(6, 1, 3, 2\)",
)
case(
    "conv with a bias of length 1",
    lambda: fn.conv(X, W, B[:1], CONV),
    fn.StateError,
    r"bias must have shape \(6,\).*got \(1,\)",
)
case(
    "conv with a bias column",
    lambda: fn.conv(X, W, B[:, None], CONV),
    fn.StateError,
    r"bias must have shape \(6,\).*got \(6, 1\)",
)
case(
    "conv_transpose with a bias of length 1",
    lambda: fn.conv_transpose(X, WT, B[:1], TRANSPOSED),
    fn.StateError,
    r"bias must have shape \(6,\)",
)
case(
    "conv with a bias of another dtype",
    lambda: fn.conv(X, W, B.astype(np.float64), CONV),
    fn.StateError,
    "bias must have dtype float32",
)
case(
    "conv with the state of a pool",
    lambda: fn.conv(X, W, B, POOL),
    fn.StateError,
    "state must be a ConvState.*got MaxPoolState",
)
case(
    "conv with the state of conv_transpose",
    lambda: fn.conv(X, W, B, TRANSPOSED),
    fn.StateError,
    "got ConvTransposeState",
)
case(
    "avg_pool with the state of max_pool", lambda: fn.avg_pool(X, POOL), fn.StateError, "state must be an? AvgPoolState"
)
case(
    "conv_backward with dy of another shape",
    lambda: fn.conv_backward(Y[..., 1:], X, W, CONV),
    fn.StateError,
    "dy must have shape",
)
case(
    "conv_backward with dy of another batch",
    lambda: fn.conv_backward(Y[:1], X, W, CONV),
    fn.StateError,
    "dy must have the batch size 2 of x, got 1",
)
case(
    "conv_backward with dy of another dtype",
    lambda: fn.conv_backward(Y.astype(np.float64), X, W, CONV),
    fn.StateError,
    "dy must have dtype float32",
)
case(
    "conv_backward without x",
    lambda: fn.conv_backward(Y, None, W, CONV),
    fn.StateError,
    'x must be given for wrt="weight", got None',
)
case(
    "conv_backward without weight",
    lambda: fn.conv_backward(Y, X, None, CONV),
    fn.StateError,
    'weight must be given for wrt="x", got None',
)
case(
    "conv_transpose_backward without x",
    lambda: fn.conv_transpose_backward(YT, None, WT, TRANSPOSED),
    fn.StateError,
    "x must be given",
)
case(
    "wrt names something else",
    lambda: fn.conv_backward(Y, X, W, CONV, wrt=("x", "w")),
    fn.SpecError,
    "wrt must name 'x', 'weight' or 'bias', got 'w'",
)
case(
    "max_pool_backward before forward",
    lambda: fn.max_pool_backward(YM, FRESH),
    fn.StateError,
    "state must come from max_pool with train=True",
)
case(
    "max_pool_backward after train=False",
    lambda: fn.max_pool_backward(YM, fn.max_pool(X, POOL, train=False)[1]),
    fn.StateError,
    "state must come from",
)
case(
    "max_pool_backward after clear",
    lambda: fn.max_pool_backward(YM, fn.clear(POOL)),
    fn.StateError,
    "state must come from",
)
case("max_pool_indices before forward", lambda: fn.max_pool_indices(FRESH), fn.StateError, "state must come from")
case(
    "max_pool_indices of another base",
    lambda: fn.max_pool_indices(POOL, "image"),
    fn.SpecError,
    "base must be one of 'plane', 'tensor', got 'image'",
)
case(
    "max_pool_backward of another batch",
    lambda: fn.max_pool_backward(YM[:1], POOL),
    fn.StateError,
    "dy must have the batch size 2 of state.argmax, got 1",
)
case(
    "max_pool_backward of another shape",
    lambda: fn.max_pool_backward(YM[..., 1:], POOL),
    fn.StateError,
    r"dy must have shape \(N, 4, 4, 3\)",
)
case(
    "argmax of another dtype",
    lambda: fn.max_pool_backward(YM, dataclasses.replace(POOL, argmax=POOL.argmax.astype(np.int64))),
    fn.StateError,
    "state.argmax must have dtype uint8.*got int64",
)
case(
    "argmax outside its window",
    lambda: fn.max_pool_backward(YM, dataclasses.replace(POOL, argmax=np.full_like(POOL.argmax, 4))),
    fn.StateError,
    "state.argmax must hold indices within a window of 4 cells, got 4",
)
case(
    "argmax in the leading padding",
    lambda: fn.max_pool_backward(YM, dataclasses.replace(POOL, argmax=np.zeros_like(POOL.argmax))),
    fn.StateError,
    "state.argmax must name cells of the input, got a cell of the padding",
)
case(
    "argmax in the trailing padding",
    lambda: fn.max_pool_backward(YM, dataclasses.replace(POOL, argmax=np.full_like(POOL.argmax, 3))),
    fn.StateError,
    "state.argmax must name cells of the input, got a cell of the padding on spatial axis 0",
)
case(
    "dropout_backward before forward",
    lambda: fn.dropout_backward(YD, DROP0),
    fn.StateError,
    "state must come from dropout with train=True",
)
case(
    "dropout_backward after train=False",
    lambda: fn.dropout_backward(YD, fn.dropout(X, DROP, train=False)[1]),
    fn.StateError,
    "state must come from",
)
case(
    "mask of another dtype",
    lambda: fn.dropout_backward(YD, dataclasses.replace(DROP, mask=DROP.mask.astype(np.uint8))),
    fn.StateError,
    "state.mask must have dtype bool",
)
case(
    "mask of another shape",
    lambda: fn.dropout_backward(YD, dataclasses.replace(DROP, mask=DROP.mask[:1])),
    fn.StateError,
    "dy must have the batch size 1 of state.mask, got 2",
)
case("out_spec of another x", lambda: fn.out_spec(CONV, X[..., 1:]), fn.StateError, "x must have shape")
case(
    "out_spec of another ArraySpec",
    lambda: fn.out_spec(CONV, fn.ArraySpec((1, 4, 6, 4), "float32")),
    fn.StateError,
    "x must be",
)
case("out_spec of no state", lambda: fn.out_spec(X), TypeError, "state must be an op state, got ndarray")

# impossible options
SPEC = {
    "kernel larger than the padded input": (
        init("conv_init", X[:, :, :2, :2], W, groups=2),
        r"effective kernel \(3, 2\) and padded size \(2, 2\)",
    ),
    "dilated kernel larger than the padded input": (
        init("conv_init", X, W, groups=2, dilation=3),
        r"effective kernel \(7, 4\)",
    ),
    "empty spatial axis": (init("conv_init", X[:, :, :0], W, groups=2), "no spatial axis of size 0"),
    "empty spatial axis of a pool": (init("max_pool_init", X[..., :0], 1), "no spatial axis of size 0"),
    "empty kernel": (init("conv_init", X, W[:, :, :0], groups=2), "no kernel axis of size 0"),
    "stride 0": (init("conv_init", X, W, groups=2, stride=0), "stride must be at least 1, got 0"),
    "stride 0 of a pool": (init("avg_pool_init", X, 2, stride=(1, 0)), "stride must be at least 1, got 0"),
    "kernel_size 0": (init("max_pool_init", X, 0), "kernel_size must be at least 1, got 0"),
    "dilation 0": (init("max_pool_init", X, 2, dilation=0), "dilation must be at least 1, got 0"),
    "negative padding": (init("conv_init", X, W, groups=2, padding=-1), "padding must be at least 0, got -1"),
    "negative padding pair": (
        init("conv_init", X, W, groups=2, padding=((0, 0), (0, -1))),
        "padding must be at least 0",
    ),
    "padding of another rank": (
        init("conv_init", X, W, groups=2, padding=(1, 1, 1)),
        "padding must be an int, 2 ints or 2",
    ),
    "padding triple": (
        init("conv_init", X, W, groups=2, padding=((0, 0, 0), (0, 0))),
        r"padding must have \(lo, hi\) pairs",
    ),
    "unknown padding": (
        init("conv_init", X, W, groups=2, padding="reflect"),
        "padding must be one of 'valid', .*got 'reflect'",
    ),
    "stride of another rank": (init("conv_init", X, W, groups=2, stride=(1, 1, 1)), "stride must be an int or 2 ints"),
    "groups that do not divide": (
        init("conv_init", X, W, groups=3),
        "groups must divide the 4 input and 6 output channels, got 3",
    ),
    "groups that divide the inputs only": (
        init("conv_init", X, W[:5], groups=2),
        "groups must divide the 4 input and 5 output channels, got 2",
    ),
    "groups 0": (init("conv_init", X, W, groups=0), "groups must be at least 1, got 0"),
    "channels that do not fit": (init("conv_init", X, W), r"I/groups = 4 .*got \(6, 2, 3, 2\)"),
    "weight of another rank": (init("conv_init", X, W[..., 0], groups=2), "weight must have 4 axes"),
    "x without spatial axes": (init("conv_init", X[0, 0], W), r"x must have a batch axis.*x\[None\]"),
    "unknown layout": (init("conv_init", X, W, groups=2, layout="NHWC"), "layout must be one of"),
    "unknown engine": (init("conv_init", X, W, groups=2, engine="fast"), "engine must be one of 'auto', "),
    "pool window of another rank": (
        init("avg_pool_init", X[0], (2, 2)),
        r"x must have 4 axes .*got 3; add a batch axis by x\[None\]",
    ),
    "pool of a 1-d array": (init("avg_pool_init", X[0, 0, 0], (2, 2)), "x must have 4 axes"),
    "window of padding only": (
        init("max_pool_init", X, 2, padding=2),
        "padding must leave a cell of the input in every window",
    ),
    "dilated window of padding only": (
        init("max_pool_init", X[:, :, :1], (2, 1), padding=((1, 1), (0, 0)), dilation=(2, 1)),
        "every window",
    ),
    "too many 8-bit terms": (
        init("conv_init", np.ones((1, 32769, 1), np.int8), np.ones((1, 32769, 1), np.int8)),
        "at most 32768 terms",
    ),
    "transposed weight that does not fit": (
        init("conv_transpose_init", X, W),
        r"I = 4 channels of x, got \(6, 2, 3, 2\)",
    ),
    "transposed groups that do not divide": (
        init("conv_transpose_init", X, WT, groups=3),
        "groups must divide the 4 input channels, got 3",
    ),
    "output_padding too large": (
        init("conv_transpose_init", X, WT, output_padding=1),
        r"output_padding must be smaller than stride or dilation.*stride 1, dilation 1\), got 1",
    ),
    "output_padding with a named padding": (
        init("conv_transpose_init", X, WT, stride=2, padding="same", output_padding=1),
        "output_padding must be 0 with a named padding",
    ),
    "output_padding with output_size": (
        init("conv_transpose_init", X, WT, stride=2, output_padding=1, output_size=(14, 11)),
        "output_padding must be 0 where output_size",
    ),
    "output_size out of reach": (
        init("conv_transpose_init", X, WT, stride=2, output_size=(15, 11)),
        r"output_size must lie in 13 \.\. 14",
    ),
    "output_size that same does not map back": (
        init("conv_transpose_init", X, WT, stride=2, padding="same", output_size=(10, 9)),
        "output_size must have ceil",
    ),
    "output cropped to nothing": (
        init("conv_transpose_init", X[:, :, :1], WT, padding=(2, 0)),
        "padding must leave an output of at least 1 cell",
    ),
    "rate above 1": (init("dropout_init", X, 1.5, seed=0), r"rate must lie in 0 \.\. 1, got 1.5"),
    "rate nan": (init("dropout_init", X, float("nan"), seed=0), r"rate must lie in 0 \.\. 1, got nan"),
    "negative seed": (init("dropout_init", X, 0.5, seed=-1), "seed must be at least 0, got -1"),
    "seed of 65 bits": (init("dropout_init", X, 0.5, seed=2**64), "seed must be below"),
    "dropout of a 0-d array": (init("dropout_init", np.asarray(1.0), 0.5, seed=0), "x must have at least 1 axis"),
    "unknown numerics": (lambda: fn.Options(numerics="exact"), "numerics must be one of 'strict', 'fast', got 'exact'"),
    "threads 0": (lambda: fn.Options(threads=0), "threads must be at least 1, got 0"),
    "set_num_threads 0": (lambda: fn.set_num_threads(0), "n must be at least 1, got 0"),
    "ArraySpec of negative size": (lambda: fn.ArraySpec((-1,), "float32"), "shape must be at least 0, got -1"),
}
for label, (call, pattern) in SPEC.items():
    case(label, call, fn.SpecError, pattern)

case(
    "engine that is not there",
    init("conv_init", X, W, groups=2, engine="cudnn"),
    fn.EngineError,
    "engine must be able to do the job, got 'cudnn': ",
)
case(
    "engine for other arrays",
    init("max_pool_init", STRICT, 2, engine="blas"),
    fn.EngineError,
    "takes arrays of numpy, not of array_api_strict",
)


def assert_form(error: BaseException) -> None:
    """`<function>: <argument> <what is required>, got <value>[; <what to do>]`, one string on one line."""
    assert len(error.args) == 1
    assert re.fullmatch(r"[A-Za-z_]+: [\w.]+ must [^\n]*, got [^\n]+", str(error)), str(error)


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str) -> None:
    call, error, pattern = CASES[name]
    before = copy.deepcopy(EVERYTHING)
    with pytest.raises(error, match=pattern) as caught:
        call()
    assert type(caught.value) is error
    assert_form(caught.value)
    for old, new in zip(leaves(before), leaves(EVERYTHING), strict=True):
        np.testing.assert_array_equal(old, new, strict=True)


def leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, namespace="funcnn")


def test_wrong_device() -> None:
    here, there = (array_api_strict.Device(name) for name in ("CPU_DEVICE", "device1"))
    x = array_api_strict.asarray(X, device=here)
    state = fn.max_pool_init(x, 2)
    with pytest.raises(
        fn.StateError, match=r"x must have device .*CPU_DEVICE.* as the state was made for, got .*device1"
    ):
        fn.max_pool(array_api_strict.asarray(X, device=there), state)
    with pytest.raises(fn.StateError, match="weight must be on the device of x"):
        fn.conv_init(x, array_api_strict.asarray(W, device=there), groups=2)
    fn.max_pool(
        array_api_strict.asarray(X, device=there),
        fn.max_pool_init(fn.ArraySpec(X.shape, "float32", array_api_strict), 2),
    )


def test_results_stay_on_the_device() -> None:
    there = array_api_strict.Device("device1")
    x, w = (array_api_strict.asarray(a, device=there) for a in (X, W))
    y, _ = fn.conv(x, w, None, fn.conv_init(x, w, groups=2))
    z, pool = fn.max_pool(y, fn.max_pool_init(y, 2))
    d, drop = fn.dropout(z, fn.dropout_init(z, 0.5, seed=1))
    a, _ = fn.avg_pool(d, fn.avg_pool_init(d, 2))
    results = (y, z, pool.argmax, fn.max_pool_backward(z, pool), fn.max_pool_indices(pool), d, drop.mask, drop.step, a)
    assert {str(r.device) for r in (*results, fn.clear(pool).argmax)} == {str(there)}


def calls(asarray: Callable[[Any], Any], engine: str = "auto") -> dict[str, dict[str, Any]]:
    """Good arguments of every function that takes arrays or states."""
    x, w, b, wt = map(asarray, (X, W, B, WT))
    conv = fn.conv_init(x, w, groups=2, engine=engine)
    y, _ = fn.conv(x, w, b, conv)
    transposed = fn.conv_transpose_init(x, wt, groups=2, engine=engine)
    yt, _ = fn.conv_transpose(x, wt, b, transposed)
    ym, pool = fn.max_pool(x, fn.max_pool_init(x, 2, engine=engine))
    avg = fn.avg_pool_init(x, 2, engine=engine)
    ya, _ = fn.avg_pool(x, avg)
    yd, drop = fn.dropout(x, fn.dropout_init(x, 0.5, seed=0, engine=engine))
    return {
        "conv_init": {"x": x, "weight": w, "groups": 2},
        "conv": {"x": x, "weight": w, "bias": b, "state": conv},
        "conv_backward": {"dy": y, "x": x, "weight": w, "state": conv},
        "conv_transpose_init": {"x": x, "weight": wt, "groups": 2},
        "conv_transpose": {"x": x, "weight": wt, "bias": b, "state": transposed},
        "conv_transpose_backward": {"dy": yt, "x": x, "weight": wt, "state": transposed},
        "max_pool_init": {"x": x, "kernel_size": 2},
        "max_pool": {"x": x, "state": pool},
        "max_pool_backward": {"dy": ym, "state": pool},
        "max_pool_indices": {"state": pool},
        "avg_pool_init": {"x": x, "kernel_size": 2},
        "avg_pool": {"x": x, "state": avg},
        "avg_pool_backward": {"dy": ya, "state": avg},
        "dropout_init": {"x": x, "rate": 0.5, "seed": 0},
        "dropout": {"x": x, "state": drop},
        "dropout_backward": {"dy": yd, "state": drop},
        "out_spec": {"state": conv, "x": x},
    }


GOOD = calls(np.asarray)
ARRAYS = [(name, arg) for name, args in GOOD.items() for arg in args if arg in ("x", "weight", "bias", "dy")]
STATES = [name for name, args in GOOD.items() if "state" in args]


@pytest.mark.parametrize("function", [name for name in GOOD if name.endswith("_backward")])
def test_backward_three_times_from_one_state(function: str, backend: Backend) -> None:
    good = calls(backend.asarray, backend.engine)[function]
    before = copy.deepcopy(good)
    results = [leaves(getattr(fn, function)(**good)) for _ in range(3)]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(backend.numpy(a), backend.numpy(b))
    for a, b in zip(leaves(before), leaves(good), strict=True):
        np.testing.assert_array_equal(backend.numpy(a), backend.numpy(b))


LAYER_ERRORS = {
    "seed": (lambda: L.linear(3).init(0.5, X.reshape(2, -1)), TypeError, "init: seed must be an int, got 0.5"),
    "linear of 4 axes": (lambda: L.linear(3).init(0, X), fn.SpecError, r"linear: x must have shape \(N, F\).*flatten"),
    "units": (lambda: L.linear(0).init(0, X), fn.SpecError, "linear: units must be at least 1, got 0"),
    "no layer": (lambda: L.serial(L.relu), TypeError, "serial: layers must be Layer tuples, got "),
    "combine": (lambda: L.parallel(L.relu(), combine="mean"), fn.SpecError, "parallel: combine must be one of"),
    "no branches": (lambda: L.parallel(), fn.SpecError, "parallel: layers must be at least one, got none"),
    "branches that do not add": (
        lambda: L.parallel(L.conv(2, 1), L.conv(3, 1)).init(0, X),
        fn.SpecError,
        "must give one shape",
    ),
    "branches that do not join": (
        lambda: L.parallel(L.conv(2, 1), L.conv(3, 3), combine="concat").init(0, X),
        fn.SpecError,
        "differ only in channels",
    ),
    "residual of another shape": (
        lambda: L.residual(L.conv(3, 1)).init(0, X),
        fn.SpecError,
        "residual: layers must keep the shape",
    ),
    "logits of 3 axes": (
        lambda: L.softmax_cross_entropy(X[0], np.zeros(4, int)),
        fn.StateError,
        "logits must have shape",
    ),
    "labels of floats": (
        lambda: L.softmax_cross_entropy(X[0, 0], np.zeros(6)),
        TypeError,
        "labels must have an integer dtype, got float64",
    ),
    "labels of another length": (
        lambda: L.softmax_cross_entropy(X[0, 0], np.zeros(5, int)),
        fn.StateError,
        "labels must have shape",
    ),
    "labels out of range": (
        lambda: L.softmax_cross_entropy(X[0, 0], np.full(6, 5)),
        fn.StateError,
        r"labels must lie in 0 \.\. 4, got 5",
    ),
    "target of another shape": (lambda: L.mean_squared_error(X, X[0]), fn.StateError, "target must have the shape"),
    "activation of integers": (
        lambda: run_relu(X.astype(int)),
        TypeError,
        "relu: x must have a float",
    ),
    "backward before forward": (
        lambda: backward_of(L.relu(), train=None),
        fn.StateError,
        "relu_backward: state must come from forward with train=True",
    ),
    "backward after train=False": (
        lambda: backward_of(L.conv(2, 1), train=False),
        fn.StateError,
        "conv_backward: state must come from forward",
    ),
    "max_pool backward after train=False": (
        lambda: backward_of(L.max_pool(2), train=False),
        fn.StateError,
        "max_pool_backward: state",
    ),
}


def run_relu(x: Any) -> Any:
    layer = L.relu()
    _, state, _ = layer.init(0, X)
    return layer.forward((), state, x)


def backward_of(layer: Any, train: bool | None) -> Any:
    params, state, y = layer.init(0, X)
    if train is not None:
        _, state = layer.forward(params, state, X, train=train)
    return layer.backward(params, state, np.zeros(y.shape, np.float32))


@pytest.mark.parametrize("name", LAYER_ERRORS)
def test_bad_input_of_layers(name: str) -> None:
    call, error, pattern = LAYER_ERRORS[name]
    with pytest.raises(error, match=pattern) as caught:
        call()
    assert_form(caught.value)


# ---- every argument of every function --------------------------------------------------------------------------------


def refuses(function: str, error: type[Exception], good: dict[str, Any], **bad: Any) -> None:
    """The call raises exactly this error, in form, that begins with the function and the bad argument."""
    (argument,) = bad
    before = copy.deepcopy(good)
    with pytest.raises(error) as caught:
        getattr(fn, function)(**{**good, **bad})
    assert type(caught.value) is error, caught.value
    assert_form(caught.value)
    assert str(caught.value).startswith((f"{function}: {argument} ", f"{function}: {argument}.")), caught.value
    for old, new in zip(leaves(before), leaves(good), strict=True):
        np.testing.assert_array_equal(np.asarray(old), np.asarray(new), strict=True)


@pytest.mark.parametrize(("function", "argument"), ARRAYS)
def test_what_is_no_array_of_the_library_is_a_type_error(function: str, argument: str) -> None:
    good = GOOD[function]
    array = good[argument]
    not_arrays = [array.tolist(), (1, 2), 1.0, "x", object(), np.ndarray, np.float32(1)]
    not_arrays += [np.ma.masked_array(array), np.ones((2, 2), np.float32).view(np.matrix)]
    for bad in not_arrays:
        refuses(function, TypeError, good, **{argument: bad})
    if not function.endswith("_init") or argument == "weight":
        refuses(function, TypeError, good, **{argument: array_api_strict.asarray(array)})
    if function.endswith("_init"):
        for dtype in (object, "U8", "M8[s]", [("a", np.float32)]):
            refuses(function, TypeError, good, **{argument: np.zeros(array.shape, dtype)})
    if function.endswith("_backward") and argument != "dy":
        refuses(function, fn.StateError, good, **{argument: None})
    elif argument != "bias" and function != "out_spec":
        refuses(function, TypeError, good, **{argument: None})


@pytest.mark.parametrize(("function", "argument"), [pair for pair in ARRAYS if not pair[0].endswith("_init")])
def test_wrong_shape_and_dtype_are_state_errors(function: str, argument: str) -> None:
    good = GOOD[function]
    array = good[argument]
    bad = [array.astype(np.float64), array.astype(np.int32), array.astype(np.complex64), array.astype(object)]
    bad += [array[None], array[..., :-1], np.zeros((), array.dtype)]
    if array.ndim > 1:
        bad += [array[0], array.reshape(-1), np.moveaxis(array, 1, -1)]
    if argument in ("weight", "bias"):
        bad.append(array[:1])
    for value in bad:
        refuses(function, fn.StateError, good, **{argument: value})
    if argument in ("x", "dy"):
        with pytest.raises(fn.StateError, match=r"; add a batch axis by x\[None\]$"):
            getattr(fn, function)(**{**good, argument: array[0]})


@pytest.mark.parametrize(
    "function", ["conv_backward", "conv_transpose_backward", "max_pool_backward", "dropout_backward"]
)
def test_backward_of_another_batch_than_its_forward(function: str) -> None:
    good = GOOD[function]
    with pytest.raises(fn.StateError) as caught:
        getattr(fn, function)(**{**good, "dy": good["dy"][:1]})
    assert_form(caught.value)


@pytest.mark.parametrize(
    ("function", "argument"), [pair for pair in ARRAYS if pair[0][-4:] != "init" or pair[1] != "x"]
)
def test_wrong_device_is_a_state_error(function: str, argument: str) -> None:
    good = calls(array_api_strict.asarray)[function]
    there = array_api_strict.asarray(GOOD[function][argument], device=array_api_strict.Device("device1"))
    refuses(function, fn.StateError, good, **{argument: there})


@pytest.mark.parametrize("function", STATES)
def test_another_state(function: str) -> None:
    good = GOOD[function]
    for bad in (None, "state", 1, object(), fn.ConvState, good["state"].plan, (good["state"],)):
        refuses(function, TypeError, good, state=bad)
    op = function.removesuffix("_backward").removesuffix("_indices")
    for other in ("conv", "conv_transpose", "max_pool", "avg_pool", "dropout"):
        if other != op and function != "out_spec":
            refuses(function, fn.StateError, good, state=GOOD[other]["state"])


@pytest.mark.parametrize("function", ["max_pool_backward", "max_pool_indices", "dropout_backward"])
def test_a_residual_that_does_not_fit(function: str) -> None:
    good = GOOD[function]
    name = "mask" if function == "dropout_backward" else "argmax"
    residual = getattr(good["state"], name)
    for error, bad in [
        (fn.StateError, residual.astype(np.int64)),
        (fn.StateError, residual[..., 1:]),
        (fn.StateError, residual[0]),
        (fn.StateError, residual[:0, :0, :0, :0]),
        (TypeError, residual.tolist()),
        (TypeError, None),
        (TypeError, "a leaf that a pytree library filled in"),
        (TypeError, array_api_strict.asarray(residual)),
    ]:
        refuses(function, error, good, state=dataclasses.replace(good["state"], **{name: bad}))


INT_OPTIONS = ("stride", "dilation", "padding", "output_padding", "output_size", "kernel_size", "groups", "seed")
INITS = ["conv_init", "conv_transpose_init", "max_pool_init", "avg_pool_init", "dropout_init"]
OPTIONS = [
    (init, option)
    for init in INITS
    for option in inspect.signature(getattr(fn, init)).parameters
    if option not in ("x", "weight")
]


def bad_values(option: str) -> tuple[list[Any], list[Any]]:
    """What is a TypeError for an option, and what is a SpecError."""
    if option in INT_OPTIONS:
        types = [
            True,
            1.0,
            float("nan"),
            b"1",
            np.float32(2),
            np.bool_(True),
            {1: 2},
            {1, 2},
            1j,
            np.asarray([1.0, 1.0]),
        ]
        values: list[Any] = [-1, -(2**70)]
        if option in ("groups", "seed"):
            types += [None, "1", (1, 1), [1]]
        else:
            types += [(1, True), (1, 1.0), (1, None), (1, "1")]
            values += [(1, -1), (1,), (1, 1, 1), ()]
        if option == "padding":
            types += [None, ((1, True), (0, 0)), ((0.5, 0), (0, 0)), ((None, 0), 1)]
            values += ["1", "SAME", ((1, 2), (3,)), ((1, 2, 3), (0, 0)), ((0, -1), (0, 0)), ((1, 1),)]
        if option not in ("padding", "output_padding", "seed"):
            values.append(0)
        return types, values
    if option in ("flip", "ceil_mode", "count_include_pad"):
        return [0, 1, None, "True", np.bool_(True), np.asarray(True)], []
    if option in ("layout", "engine"):
        return [None, 1, b"auto", ["auto"]], ["NHWC", "", "Auto"]
    if option == "options":
        return [None, {}, "strict", fn.Options], []
    assert option == "rate"
    return [True, "0.5", None, 1j, [0.5]], [-0.1, 1.1, 2, float("nan"), float("inf"), np.float64(3)]


@pytest.mark.parametrize(("function", "option"), OPTIONS)
def test_every_option_of_every_init(function: str, option: str) -> None:
    types, values = bad_values(option)
    for bad in types:
        refuses(function, TypeError, GOOD[function], **{option: bad})
    for bad in values:
        if option == "kernel_size" and isinstance(bad, tuple) and len(bad) != 2:
            with pytest.raises(fn.SpecError, match=r"x must have .* axes"):  # x may as well be the one at fault
                getattr(fn, function)(**{**GOOD[function], option: bad})
        else:
            refuses(function, fn.SpecError, GOOD[function], **{option: bad})


@pytest.mark.parametrize("engine", [name for name, info in fn.engines().items() if not info.available])
@pytest.mark.parametrize("function", INITS)
def test_an_engine_that_is_not_there_says_why(function: str, engine: str) -> None:
    refuses(function, fn.EngineError, GOOD[function], engine=engine)


@pytest.mark.parametrize("function", INITS)
def test_an_init_needs_a_batch_and_a_spatial_axis(function: str) -> None:
    x = np.asarray(1.0, np.float32) if function == "dropout_init" else X[0, 0]
    with pytest.raises(fn.SpecError, match=r"; add a batch axis by x\[None\]$") as caught:
        getattr(fn, function)(**{**GOOD[function], "x": x})
    assert_form(caught.value)


@pytest.mark.parametrize(
    ("name", "types", "values"),
    [
        ("numerics", [None, 1], ["exact", ""]),
        ("deterministic", [0, None, "True"], []),
        ("autotune", [1, None], []),
        ("threads", [True, 1.0, "2", (1,)], [0, -1]),
        ("workspace_limit", [True, 1.0, "2"], [-1]),
    ],
)
def test_options(name: str, types: list[Any], values: list[Any]) -> None:
    for error, bad in [*((TypeError, b) for b in types), *((fn.SpecError, b) for b in values)]:
        with pytest.raises(error, match=rf"Options: {name} must") as caught:
            fn.Options(**{name: bad})
        assert_form(caught.value)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (TypeError, (3, "float32")),
        (TypeError, ("12", "float32")),
        (TypeError, ({1, 2}, "float32")),
        (TypeError, ((1.0,), "float32")),
        (TypeError, ((True,), "float32")),
        (TypeError, ((None,), "float32")),
        (fn.SpecError, ((1, -1), "float32")),
        (TypeError, ((1,), None)),
        (TypeError, ((1,), 3)),
        (TypeError, ((1,), "float31")),
        (TypeError, ((1,), object())),
        (TypeError, ((1,), "float16", array_api_strict)),
        (TypeError, ((1,), "float32", "numpy")),
        (TypeError, ((1,), "float32", None)),
    ],
)
def test_array_spec(error: type[Exception], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(error, match=r"^ArraySpec: (shape|dtype|xp) ") as caught:
        fn.ArraySpec(*arguments)
    assert_form(caught.value)


@pytest.mark.parametrize(("error", "order"), [(fn.SpecError, "F"), (TypeError, None)])
def test_order_of_an_array_spec(error: type[Exception], order: Any) -> None:
    with pytest.raises(
        error, match=r"^ArraySpec: order must be one of 'channels_first', 'channels_last', got "
    ) as caught:
        fn.ArraySpec((1,), "float32", order=order)
    assert_form(caught.value)


@pytest.mark.parametrize(("function", "argument"), [pair for pair in ARRAYS if not pair[0].endswith("_init")])
def test_advice_names_an_init_that_exists(function: str, argument: str) -> None:
    array = GOOD[function][argument]
    for bad in (array.astype(np.float64), array_api_strict.asarray(array)):
        with pytest.raises((fn.StateError, TypeError)) as caught:
            getattr(fn, function)(**{**GOOD[function], argument: bad})
        names = re.findall(r"\w+_init\b", str(caught.value))
        assert names or function == "out_spec"
        assert all(hasattr(fn, name) for name in names)
