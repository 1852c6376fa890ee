"""The oracle against numbers worked out by hand, its own laws, and torch and jax where they are installed."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference as ref
from numpy.testing import assert_allclose, assert_array_equal

NAN, INF = float("nan"), float("inf")


def digits(*shape: int, seed: int = 0, kind: str = "real") -> Any:
    """Give small whole numbers as floats: their sums are exact in any order and any float type."""
    draw = np.random.default_rng([seed, *shape]).integers(-4, 5, (2, *shape)).astype(float)
    return draw[0] + 1j * draw[1] if kind == "complex" else draw[0]


def line(*values: Any) -> Any:
    """Give one image of one channel and one axis."""
    return np.array([[values]])


def inner(a: Any, b: Any) -> Any:
    """Give the inner product, conjugating the first factor."""
    return np.vdot(a, b)


def test_the_oracle_shares_no_code_with_the_package() -> None:
    tree = ast.parse(Path(ref.__file__).read_text())
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert modules == {"__future__", "itertools", "collections.abc", "typing", "numpy", "numpy.typing"}


# --- Sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        (1, ((1, 1), (1, 1))),
        ((2, 3), ((2, 2), (3, 3))),
        (((2, 3), (0, 1)), ((2, 3), (0, 1))),
        ("valid", ((0, 0), (0, 0))),
        ("full", ((2, 2), (6, 6))),  # extents 3 and 7
        ("same", ((0, 1), (2, 3))),  # 6 by 2: 3 windows reach 7; 5 by 3: 2 windows reach 10
        ("same_lower", ((1, 0), (3, 2))),
    ],
)
def test_pads_by_hand(padding: Any, expected: Any) -> None:
    assert ref.pads((6, 5), (3, 4), (2, 3), padding, (1, 2)) == expected


def test_pads_same_is_never_negative_and_unknown_names_fail() -> None:
    assert ref.pads((6,), 1, 2, "same", 1) == ((0, 0),)
    with pytest.raises(AssertionError, match="smae"):
        ref.pads((6,), 1, 2, "smae", 1)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pads", "dilation", "floor", "ceil"),
    [
        (64, 3, 2, (1, 1), 1, 32, 33),
        (5, 2, 2, (1, 1), 1, 3, 3),  # a fourth window would start in the trailing padding
        (5, 3, 3, (1, 1), 1, 2, 2),
        (7, 1, 2, (0, 0), 1, 4, 4),
        (9, 7, 3, (3, 3), 1, 3, 4),
        (5, 2, 4, (0, 0), 1, 1, 2),
        (7, 2, 5, (0, 0), 1, 2, 2),
        (10, 3, 2, (0, 1), 3, 3, 3),
        (9, 3, 2, (0, 1), 3, 2, 3),
        (4, 1, 1, (0, 0), 2**31 - 1, 4, 4),
        (2, 3, 1, (0, 0), 1, 0, 0),  # no window at all: the package refuses it
    ],
)
def test_out_sizes_by_hand(
    size: int, kernel: int, stride: int, pads: tuple[int, int], dilation: int, floor: int, ceil: int
) -> None:
    assert ref.out_sizes((size,), kernel, stride, (pads,), dilation) == (floor,)
    assert ref.out_sizes((size,), kernel, stride, (pads,), dilation, ceil_mode=True) == (ceil,)


def test_same_gives_ceil_of_size_over_stride_in_both_modes() -> None:
    for size, k, s, d, name, ceil_mode in itertools.product(
        range(1, 8), range(1, 5), range(1, 5), (1, 2), ("same", "same_lower"), (False, True)
    ):
        pairs = ref.pads((size,), k, s, name, d)
        assert ref.out_sizes((size,), k, s, pairs, d, ceil_mode) == (-(-size // s),), (size, k, s, d, name)


# --- conv and conv_transpose by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "w", "options", "expected"),
    [
        ((1, 2, 3, 4, 5), (1, 10, 100), {}, (321, 432, 543)),
        ((1, 2, 3, 4, 5), (1, 10, 100), {"flip": True}, (123, 234, 345)),
        ((1, 2, 3, 4, 5, 6), (1, 1, 1), {"stride": 2, "padding": "same"}, (6, 12, 11)),
        ((1, 2, 3, 4, 5, 6), (1, 1, 1), {"stride": 2, "padding": 1}, (3, 9, 15)),
        ((1, 2, 3), (1, 10, 100, 1000), {"padding": "same"}, (3210, 321, 32)),
        ((1, 2, 3), (1, 10, 100, 1000), {"padding": "same_lower"}, (2100, 3210, 321)),
        ((1, 2), (1, 10), {"padding": "full"}, (10, 21, 2)),
        ((1, 2), (1, 10), {"padding": "full", "flip": True}, (1, 12, 20)),
        ((1, 2, 3, 4, 5), (1, 10), {"dilation": 3}, (41, 52)),
        ((1, 2, 3, 4, 5), (1, 10), {"stride": 2, "dilation": 2}, (31, 53)),
        ((1, 2, 3), (1, 10), {"padding": ((0, 2),)}, (21, 32, 3, 0)),
        ((1,), (3, 5, 7), {"padding": "same"}, (5,)),
    ],
)
def test_conv_by_hand(x: Any, w: Any, options: dict[str, Any], expected: Any) -> None:
    assert_array_equal(ref.conv(line(*x), line(*w), **options), line(*expected))


def test_conv_takes_each_axis_by_its_own_numbers() -> None:
    x, w = np.arange(20).reshape(1, 1, 4, 5), np.array([[[[1, 10, 100]]]])
    y = ref.conv(x, w, np.array([7]), stride=(2, 1), padding=((0, 0), (0, 1)))
    assert_array_equal(y, [[[[217, 328, 439, 50], [1327, 1438, 1549, 160]]]])


def test_conv_groups_are_blocks() -> None:
    x = np.array([[[1], [10]]])
    w = np.array([[[0]], [[1]], [[2]], [[3]]])  # multiplier 2: outputs 0 and 1 see channel 0
    assert_array_equal(ref.conv(x, w, groups=2), [[[0], [1], [20], [30]]])
    x4, w2 = np.array([[[1], [10], [100], [1000]]]), np.array([[[1], [2]], [[3], [4]]])
    assert_array_equal(ref.conv(x4, w2, groups=2), [[[21], [4300]]])


@pytest.mark.parametrize(
    ("x", "w", "options", "expected"),
    [
        ((1, 2), (1, 10, 100), {"stride": 2}, (1, 10, 102, 20, 200)),
        ((1, 2), (1, 10, 100), {"stride": 2, "flip": True}, (100, 10, 201, 20, 2)),
        ((1, 2), (1, 10, 100), {"stride": 2, "padding": 1}, (10, 102, 20)),
        ((1, 2), (1, 10), {"dilation": 3}, (1, 2, 0, 10, 20)),
        ((1, 2, 3), (1, 1, 1), {"stride": 2, "output_padding": 1}, (1, 1, 3, 2, 5, 3, 3, 0)),
        ((1, 2, 3), (1, 10, 100), {"stride": 2, "padding": 1, "output_padding": 1}, (10, 102, 20, 203, 30, 300)),
        ((1, 2, 3), (1, 10, 100), {"stride": 2, "padding": 1, "output_size": 6}, (10, 102, 20, 203, 30, 300)),
        ((1, 2, 3), (1, 10, 100), {"stride": 2, "padding": ((2, 0),)}, (102, 20, 203, 30, 300)),
        ((1, 2, 3), (1, 10, 100), {"stride": 2, "padding": "same"}, (1, 10, 102, 20, 203, 30)),
        ((1, 2, 3), (1, 10, 100), {"stride": 2, "padding": "same_lower"}, (10, 102, 20, 203, 30, 300)),
        ((1, 2, 3), (1, 10, 100), {"stride": 2, "padding": "same", "output_size": 5}, (10, 102, 20, 203, 30)),
        ((1, 2, 3), (5,), {"stride": 2, "padding": "same"}, (5, 0, 10, 0, 15, 0)),
        ((1, 2, 3), (1, 10), {"padding": "full"}, (12, 23)),
        ((1, 2, 3), (1, 10), {"padding": "valid"}, (1, 12, 23, 30)),
    ],
)
def test_conv_transpose_by_hand(x: Any, w: Any, options: dict[str, Any], expected: Any) -> None:
    assert_array_equal(ref.conv_transpose(line(*x), line(*w), **options), line(*expected))


def test_conv_transpose_axes_groups_and_bias() -> None:
    w = np.arange(1, 10).reshape(1, 1, 3, 3)
    y = ref.conv_transpose(np.ones((1, 1, 1, 1)), w, stride=2, padding=1, output_padding=(1, 0))
    assert_array_equal(y, [[[[5], [8]]]])
    x, w = np.array([[[1], [10], [100], [1000]]]), np.arange(1, 9).reshape(4, 2, 1)
    y = ref.conv_transpose(x, w, np.array([0, 1, 2, 3]), groups=2)
    assert_array_equal(y, [[[31], [43], [7502], [8603]]])


@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": 1, "output_size": 4}])
def test_conv_transpose_refuses_output_padding_beside_another_size(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="output_padding"):
        ref.conv_transpose(line(1, 2), line(1, 2, 3), stride=2, output_padding=1, **options)


def test_conv_backward_by_hand() -> None:
    x, dy = line(0, 1, 2, 3, 4, 5), line(1, 10, 100)
    dx, dw, db = ref.conv_backward(dy, x, line(1, 2, 3), stride=2, padding=1)
    assert_array_equal(dx, line(2, 13, 20, 130, 200, 300))
    assert_array_equal(dw, line(310, 420, 531))
    assert_array_equal(db, [111])
    dx, dw, _ = ref.conv_backward(line(1, 10), line(1, 2, 3, 4), line(1, 2), dilation=2, flip=True)
    assert_array_equal(dx, line(2, 20, 1, 10))
    assert_array_equal(dw, line(43, 21))


def test_conv_transpose_backward_by_hand() -> None:
    x, w = line(1, 2, 3), line(1, 10, 100)
    dx, dw, db = ref.conv_transpose_backward(line(1, 2, 3, 4, 5, 6), x, w, stride=2, padding="same")
    assert_array_equal(dx, line(321, 543, 65))  # windows (1,2,3), (3,4,5), (5,6,-)
    assert_array_equal(dw, line(1 * 1 + 2 * 3 + 3 * 5, 1 * 2 + 2 * 4 + 3 * 6, 1 * 3 + 2 * 5))
    assert_array_equal(db, [21])


# --- Number types, inf and NaN ----------------------------------------------------------------------------------


def test_integers_are_exact_and_wrap_once() -> None:
    small = ref.conv(np.array([[[100, 100]]], np.int8), np.array([[[2, 2]]], np.int8))
    assert small.dtype == np.int64
    assert small.item() == 400
    assert ref.conv(line(2**62, 1), line(2, 5)).item() == -(2**63) + 5
    assert ref.conv(line(2**62, 1).astype(object), line(2, 5)).item() == 2**63 + 5
    assert ref.conv_transpose(line(2**62), line(4)).item() == 0
    assert ref.conv_backward(line(2**62), line(4), line(3))[1].item() == 0


def test_floats_of_any_width_give_float64() -> None:
    x = line(300, 300).astype(np.float16)
    y = ref.conv(x, line(300, -301).astype(">f2"))
    assert y.dtype == np.float64
    assert y.item() == -300


def test_complex_by_hand() -> None:
    x, w, one = line(1 + 2j), line(3 - 1j), line(1 + 0j)
    assert ref.conv(x, w).item() == 5 + 5j
    dx, dw, _ = ref.conv_backward(one, x, w)
    assert (dx.item(), dw.item()) == (3 + 1j, 1 - 2j)
    assert ref.conv_transpose(x, w).item() == 5 + 5j
    dx, dw, _ = ref.conv_transpose_backward(one, x, w)
    assert (dx.item(), dw.item()) == (3 + 1j, 1 - 2j)


@pytest.mark.parametrize("name", ["conv", "conv_transpose"])
def test_real_weight_of_complex_x_stays_real(name: str) -> None:
    forward, backward = getattr(ref, name), getattr(ref, f"{name}_backward")
    assert_array_equal(forward(line(1 - 2j), line(INF)).view(float), line(INF, -INF))
    dx, dw, db = backward(line(2 + 1j), line(1 - 2j), line(3.0))
    assert dw.dtype == np.float64
    assert (dx.item(), dw.item(), db.item()) == (6 + 3j, 0, 2 + 1j)  # Re (1+2j)(2+1j) = 0


def test_zeros_of_padding_are_multiplied_and_scattered_terms_are_real() -> None:
    x, w, spike = line(1.0, 2, 3), line(INF, 1, 1), line(INF, 0, 0)
    assert_array_equal(ref.conv(x, w, padding=1), line(NAN, INF, INF))
    dx, dw, _ = ref.conv_backward(line(1.0, 1, 1), x, w, padding=1)
    assert_array_equal(dx, line(INF, INF, 2))
    assert_array_equal(dw, line(3, 6, 5))
    assert_array_equal(ref.conv_backward(spike, x, w, padding=1)[1], line(NAN, INF, INF))
    assert_array_equal(ref.conv_transpose(x, w, padding=1), line(INF, INF, 5))
    dx, dw, _ = ref.conv_transpose_backward(line(1.0, 1, 1), x, w, padding=1)
    assert_array_equal(dx, line(NAN, INF, INF))
    assert_array_equal(ref.conv_transpose_backward(line(1.0, 1, 1), spike, w, padding=1)[1], line(NAN, INF, INF))


def test_empty_batch_and_no_channels() -> None:
    x, w = np.zeros((0, 2, 4, 5)), np.ones((3, 2, 2, 3))
    y = ref.conv(x, w, padding=(1, 0))
    assert y.shape == (0, 3, 5, 3)
    dx, dw, db = ref.conv_backward(y, x, w, padding=(1, 0))
    assert dx.shape == x.shape
    assert_array_equal(dw, np.zeros(w.shape))
    assert_array_equal(db, np.zeros(3))
    y = ref.conv(np.zeros((2, 0, 4)), np.zeros((3, 0, 2)), np.array([1.0, 2, 3]), padding=1)
    assert_array_equal(y, np.broadcast_to([[[1], [2], [3]]], (2, 3, 5)))
    assert ref.conv_transpose(np.zeros((0, 2, 4)), np.ones((2, 3, 2))).shape == (0, 3, 5)
    y, argmax = ref.max_pool(np.zeros((0, 3, 4, 6)), (2, 3))
    assert y.shape == argmax.shape == (0, 3, 2, 2)
    assert ref.avg_pool(np.zeros((0, 3, 4, 6)), (2, 3)).shape == (0, 3, 2, 2)


# --- conv: laws, torch, jax -------------------------------------------------------------------------------------

# sizes, kernel, options with numeric padding; I = 2 and O = 3 channels per group
CONVS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((7,), (3,), {}),
    ((8,), (3,), {"stride": 3, "padding": ((2, 1),), "dilation": 2, "groups": 2}),
    ((6, 5), (3, 2), {"stride": (1, 2), "padding": (1, 0)}),
    ((7, 6), (2, 3), {"stride": (2, 3), "padding": ((1, 2), (2, 0)), "dilation": (3, 1), "groups": 2}),
    ((5, 4), (1, 2), {"stride": 3}),
    ((4, 3, 5), (2, 1, 3), {"stride": (1, 2, 2), "padding": (1, 0, 2), "dilation": (2, 1, 1), "groups": 3}),
]
FLIPS = [(*case[:2], case[2] | {"flip": flip}) for case in CONVS for flip in (False, True)]
NAMED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((7,), (4,), {"stride": 2, "padding": "same"}),
    ((7, 6), (4, 3), {"stride": (2, 3), "padding": "same", "dilation": (1, 2), "groups": 2}),
    ((7, 6), (2, 4), {"stride": (3, 1), "padding": "same_lower", "dilation": (1, 2)}),
    ((4, 5), (2, 3), {"padding": "full", "dilation": (2, 1)}),
    ((4, 5, 3), (2, 3, 1), {"padding": "valid", "stride": (1, 2, 2)}),
    ((3, 2, 3, 2), (2, 1, 2, 2), {"padding": "same", "stride": (2, 1, 1, 1)}),
]


def operands(sizes: Any, kernel: Any, options: dict[str, Any], kind: str = "real") -> tuple[Any, Any, Any, Any]:
    """Give x, w, b and dy of a conv."""
    groups = options.get("groups", 1)
    x = digits(2, 2 * groups, *sizes, kind=kind, seed=1)
    w = digits(3 * groups, 2, *kernel, kind=kind, seed=2)
    b = digits(3 * groups, kind=kind, seed=3)
    return x, w, b, digits(*ref.conv(x, w, b, **options).shape, kind=kind, seed=4)


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize(("sizes", "kernel", "options"), FLIPS + NAMED)
def test_conv_backward_is_the_adjoint_and_conv_transpose_its_x_part(
    sizes: Any, kernel: Any, options: dict[str, Any], kind: str
) -> None:
    x, w, b, dy = operands(sizes, kernel, options, kind)
    dx, dw, db = ref.conv_backward(dy, x, w, **options)
    y = ref.conv(x, w, **options)
    assert inner(dy, y) == inner(dx, x) == inner(dw, w)
    assert inner(dy, ref.conv(x, w, b, **options) - y) == inner(db, b)
    assert_array_equal(ref.conv_transpose(dy, np.conj(w), output_size=sizes, **options), dx)


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize(("sizes", "kernel", "options"), FLIPS + NAMED)
def test_conv_transpose_backward_is_the_adjoint(sizes: Any, kernel: Any, options: dict[str, Any], kind: str) -> None:
    _, w, _, x = operands(sizes, kernel, options, kind)
    options = options | {"output_size": sizes}
    y = ref.conv_transpose(x, w, **options)
    b, dy = digits(y.shape[1], kind=kind), digits(*y.shape, kind=kind)
    dx, dw, db = ref.conv_transpose_backward(dy, x, w, **options)
    assert inner(dy, y) == inner(dx, x) == inner(dw, w)
    assert inner(dy, ref.conv_transpose(x, w, b, **options) - y) == inner(db, b)


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize(("sizes", "kernel", "options"), CONVS)
def test_conv_equals_torch(sizes: Any, kernel: Any, options: dict[str, Any], kind: str) -> None:
    torch = pytest.importorskip("torch")
    x, w, b, dy = operands(sizes, kernel, options, kind)
    tx, tw, tb = (torch.tensor(a, requires_grad=True) for a in (x, w, b))
    rank, rest = len(sizes), {k: v for k, v in options.items() if k != "padding"}
    edges = [p for pair in reversed(ref.pads(sizes, kernel, 1, options.get("padding", 0), 1)) for p in pair]
    op = getattr(torch.nn.functional, f"conv{rank}d")
    y = op(torch.nn.functional.pad(tx, edges), tw, tb, **rest)
    y.backward(torch.tensor(dy))
    assert_array_equal(ref.conv(x, w, b, **options), y.detach().numpy())
    for got, leaf in zip(ref.conv_backward(dy, x, w, **options), (tx, tw, tb), strict=True):
        assert_array_equal(got, leaf.grad.numpy())


@pytest.mark.parametrize(
    ("sizes", "kernel", "options"),
    [
        ((5,), (3,), {"stride": 3, "padding": 2, "output_padding": 2, "dilation": 2, "groups": 2}),
        ((4, 3), (2, 3), {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "groups": 3}),
        ((4, 3), (3, 2), {"dilation": (3, 1), "output_padding": (2, 0)}),  # 2 >= stride, below dilation
        ((2, 3, 4), (3, 1, 2), {"stride": (1, 2, 2), "padding": (1, 0, 1), "dilation": (1, 1, 2)}),
    ],
)
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_conv_transpose_equals_torch(sizes: Any, kernel: Any, options: dict[str, Any], kind: str) -> None:
    torch = pytest.importorskip("torch")
    groups = options.get("groups", 1)
    x, w = digits(2, 2 * groups, *sizes, kind=kind), digits(2 * groups, 3, *kernel, kind=kind)
    b = digits(3 * groups, kind=kind)
    tx, tw, tb = (torch.tensor(a, requires_grad=True) for a in (x, w, b))
    y = getattr(torch.nn.functional, f"conv_transpose{len(sizes)}d")(tx, tw, tb, **options)
    dy = digits(*y.shape, kind=kind)
    y.backward(torch.tensor(dy))
    assert_array_equal(ref.conv_transpose(x, w, b, **options), y.detach().numpy())
    for got, leaf in zip(ref.conv_transpose_backward(dy, x, w, **options), (tx, tw, tb), strict=True):
        assert_array_equal(got, leaf.grad.numpy())


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize(("sizes", "kernel", "options"), CONVS + [c for c in NAMED if c[2]["padding"] != "full"])
def test_conv_equals_jax(sizes: Any, kernel: Any, options: dict[str, Any], kind: str) -> None:
    jax = pytest.importorskip("jax")
    x, w, _, dy = operands(sizes, kernel, options, kind)
    rank, padding = len(sizes), options.get("padding", 0)

    def conv(jx: Any, jw: Any) -> Any:
        return jax.lax.conv_general_dilated(
            jx,
            jw,
            np.broadcast_to(options.get("stride", 1), rank).tolist(),
            padding.upper() if isinstance(padding, str) else ref.pads(sizes, kernel, 1, padding, 1),
            rhs_dilation=np.broadcast_to(options.get("dilation", 1), rank).tolist(),
            feature_group_count=options.get("groups", 1),
        )

    narrow = np.complex64 if kind == "complex" else np.float32
    y, vjp = jax.vjp(conv, x.astype(narrow), w.astype(narrow))
    assert_array_equal(ref.conv(x, w, **options), y)
    for got, want in zip(ref.conv_backward(dy, x, w, **options), vjp(np.conj(dy).astype(narrow)), strict=False):
        assert_array_equal(got, np.conj(want))


# --- max_pool ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "kernel", "options", "y", "argmax", "plane"),
    [
        ((1, 9, 2, 8, 3), 2, {}, (9, 8), (1, 1), (1, 3)),
        ((1, 9, 2, 8, 3), 2, {"ceil_mode": True}, (9, 8, 3), (1, 1, 0), (1, 3, 4)),
        (
            (1, 9, 2, 8, 3),
            2,
            {"stride": 1, "padding": 1, "dilation": 2},
            (9, 2, 9, 3, 8),
            (1, 1, 0, 1, 0),
            (1, 2, 1, 4, 3),
        ),
        ((-5, -2, -7, -1), 3, {"padding": ((1, 1),)}, (-2, -1), (2, 1), (1, 3)),
        ((1, 2, 3, 4, 5, 6, 7), 2, {"stride": 3, "padding": "same"}, (2, 5, 7), (1, 1, 0), (1, 4, 6)),
        ((1, 2, 2, 2), 4, {}, (2,), (1,), (1,)),
        ((1, NAN, 5, NAN), 4, {}, (NAN,), (1,), (1,)),
        ((NAN, INF, NAN, 0.0), 2, {}, (NAN, NAN), (0, 0), (0, 2)),
        ((-INF, -INF), 2, {"padding": 1}, (-INF, -INF), (1, 0), (0, 1)),
        ((0.0, -0.0), 2, {}, (0,), (0,), (0,)),
    ],
)
def test_max_pool_by_hand(x: Any, kernel: int, options: dict[str, Any], y: Any, argmax: Any, plane: Any) -> None:
    got, index = ref.max_pool(line(*x), kernel, **options)
    assert_array_equal(got, line(*y))
    assert_array_equal(index, line(*argmax))
    assert index.dtype == np.int64
    assert_array_equal(ref.plane_indices(index, (len(x),), kernel, **options), line(*plane))


def test_max_pool_keeps_dtypes() -> None:
    lowest = np.iinfo(np.int64).min
    for x, best in [
        (line(False, True, True), True),
        (np.array([[[2**64 - 2, 2**64 - 1]]], np.uint64), 2**64 - 1),
        (line(lowest, lowest), lowest),
        (line(1.5, 2.5).astype(">f2"), 2.5),
    ]:
        y, argmax = ref.max_pool(x, x.shape[2] + 2, padding=1)
        assert y.dtype == x.dtype.newbyteorder("=")
        assert y.item() == best
        assert argmax.item() == (1 if best == lowest else 2)


def test_max_pool_counts_beyond_a_byte() -> None:
    y, argmax = ref.max_pool(np.arange(16 * 18).reshape(1, 1, 16, 18), (16, 17), stride=1)
    assert_array_equal(y, [[[[286, 287]]]])
    assert_array_equal(argmax, [[[[271, 271]]]])
    assert_array_equal(ref.plane_indices(argmax, (16, 18), (16, 17), stride=1), y)


def test_max_pool_refuses_a_window_without_a_cell() -> None:
    with pytest.raises(AssertionError, match="holds no cell"):
        ref.max_pool(line(1.0), 2, padding=2)


def test_max_pool_backward_by_hand() -> None:
    dx = ref.max_pool_backward(line(1, 10, 100), line(1, 0, 0), (4,), 2, stride=1)
    assert_array_equal(dx, line(0, 11, 100, 0))
    x = np.array([[[[1, 4, 7], [2, 5, 8], [3, 6, 9]]]])
    options: dict[str, Any] = {"stride": (1, 2), "padding": ((0, 0), (1, 0))}
    y, argmax = ref.max_pool(x, (2, 2), **options)
    assert_array_equal(y, [[[[2, 8], [3, 9]]]])
    assert_array_equal(argmax, np.full((1, 1, 2, 2), 3))
    assert_array_equal(ref.plane_indices(argmax, (3, 3), (2, 2), **options), [[[[3, 5], [6, 8]]]])
    dx = ref.max_pool_backward(np.array([[[[1, 10], [100, 1000]]]]), argmax, (3, 3), (2, 2), **options)
    assert_array_equal(dx, [[[[0, 0, 0], [1, 0, 10], [100, 0, 1000]]]])


# sizes, kernel, options that torch takes
POOLS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((9,), (4,), {"stride": 3, "padding": 2, "ceil_mode": True}),
    ((5, 8), (2, 3), {}),
    ((5, 8), (2, 3), {"ceil_mode": True}),
    ((7, 6), (3, 2), {"stride": (2, 3), "padding": (1, 0)}),
    ((7, 6), (2, 3), {"stride": (2, 1), "padding": (1, 1), "ceil_mode": True}),
    ((5, 4), (1, 2), {"stride": (3, 3), "ceil_mode": True}),
    ((4, 3, 6), (2, 1, 3), {"stride": (1, 2, 2), "padding": (1, 0, 1), "ceil_mode": True}),
]


@pytest.mark.parametrize(
    ("sizes", "kernel", "options"),
    [
        *POOLS,
        ((9,), (3,), {"stride": 2, "padding": 1, "dilation": 2, "ceil_mode": True}),
        ((7, 9), (3, 2), {"stride": (2, 3), "padding": (1, 0), "dilation": (1, 4)}),
        ((5, 4, 6), (2, 2, 3), {"stride": (2, 1, 3), "padding": (1, 1, 0), "dilation": (3, 1, 2), "ceil_mode": True}),
    ],
)
def test_max_pool_equals_torch(sizes: Any, kernel: Any, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    x = digits(2, 3, *sizes)  # small integers: full of ties
    tx = torch.tensor(x, requires_grad=True)
    ty, tindex = getattr(torch.nn.functional, f"max_pool{len(sizes)}d")(tx, kernel, **options, return_indices=True)
    y, argmax = ref.max_pool(x, kernel, **options)
    assert_array_equal(y, ty.detach().numpy())
    assert_array_equal(ref.plane_indices(argmax, sizes, kernel, **options), tindex.numpy())
    dy = digits(*y.shape, seed=5)
    ty.backward(torch.tensor(dy))
    assert_array_equal(ref.max_pool_backward(dy, argmax, sizes, kernel, **options), tx.grad.numpy())


@pytest.mark.parametrize("padding", ["same", "same_lower", "full", ((0, 1), (2, 0)), ((1, 0), (0, 0))])
def test_max_pool_equals_jax(padding: Any) -> None:
    jax = pytest.importorskip("jax")
    sizes, kernel, stride = (6, 7), (3, 4), (2, 3)
    x = np.random.default_rng(0).permutation(2 * 3 * 6 * 7).reshape(2, 3, *sizes).astype(np.float32)  # no ties
    if padding == "full":
        kernel, padding = (2, 2), ((1, 1), (1, 1))
        assert ref.pads(sizes, kernel, stride, "full", 1) == padding
    pairs = padding.upper() if isinstance(padding, str) else ((0, 0), (0, 0), *padding)

    def pool(jx: Any) -> Any:
        return jax.lax.reduce_window(jx, -np.inf, jax.lax.max, (1, 1, *kernel), (1, 1, *stride), pairs)

    want, vjp = jax.vjp(pool, x)
    y, argmax = ref.max_pool(x, kernel, stride=stride, padding=padding)
    assert_array_equal(y, want)
    dy = digits(*y.shape).astype(np.float32)
    dx = ref.max_pool_backward(dy, argmax, sizes, kernel, stride=stride, padding=padding)
    assert_array_equal(dx, vjp(dy)[0])


# --- avg_pool ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "kernel", "options", "counted", "uncounted"),
    [
        ((1, 2, 3, 4, 5), 2, {"ceil_mode": True}, (1.5, 3.5, 5), (1.5, 3.5, 5)),
        ((1, 2), 2, {"stride": 1, "padding": 1}, (0.5, 1.5, 1), (1, 1.5, 2)),
        ((1, 2, 3), 2, {"stride": 1, "padding": ((1, 0),)}, (0.5, 1.5, 2.5), (1, 1.5, 2.5)),
        (range(1, 10), 7, {"stride": 3, "padding": 3, "ceil_mode": True}, (10 / 7, 4, 39 / 7, 4), (2.5, 4, 6.5, 8)),
        ((1, 2, 3, 4, 5), 2, {"stride": 1, "padding": 1, "dilation": 2}, (1, 2, 3, 4, 2), (2, 2, 3, 4, 4)),
        ((1, 2, 3, 4, 5), 2, {"padding": ((2, 3),)}, (0, 1.5, 3.5, 2.5, 0), (0, 1.5, 3.5, 5, 0)),
        ((2, 4, 6), 2, {"stride": 2, "padding": "same"}, (3, 3), (3, 6)),
        ((2, 4, 6), 2, {"stride": 2, "padding": "same_lower"}, (1, 5), (2, 5)),
    ],
)
def test_avg_pool_by_hand(x: Any, kernel: int, options: dict[str, Any], counted: Any, uncounted: Any) -> None:
    assert_allclose(ref.avg_pool(line(*x), kernel, **options), line(*counted), rtol=1e-15)
    assert_allclose(ref.avg_pool(line(*x), kernel, count_include_pad=False, **options), line(*uncounted), rtol=1e-15)


def test_avg_pool_backward_by_hand() -> None:
    dx = ref.avg_pool_backward(line(2, 4, 8), (5,), 2, ceil_mode=True)
    assert_array_equal(dx, line(1, 1, 2, 2, 8))
    options: dict[str, Any] = {"stride": 2, "padding": ((2, 1),), "count_include_pad": False}
    assert_array_equal(ref.avg_pool_backward(line(INF, 2, 4), (3,), 2, **options), line(1, 1, 4))


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(("sizes", "kernel", "options"), POOLS)
def test_avg_pool_equals_torch(sizes: Any, kernel: Any, options: dict[str, Any], include: bool) -> None:
    torch = pytest.importorskip("torch")
    x, options = digits(2, 3, *sizes), options | {"count_include_pad": include}
    tx = torch.tensor(x, requires_grad=True)
    ty = getattr(torch.nn.functional, f"avg_pool{len(sizes)}d")(tx, kernel, **options)
    y = ref.avg_pool(x, kernel, **options)
    assert_allclose(y, ty.detach().numpy(), rtol=1e-14, atol=1e-14)
    dy = digits(*y.shape, seed=5)
    ty.backward(torch.tensor(dy))
    assert_allclose(ref.avg_pool_backward(dy, sizes, kernel, **options), tx.grad.numpy(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("padding", ["same", "same_lower", ((0, 1), (2, 0)), ((2, 3), (0, 4))])
def test_avg_pool_is_a_conv_over_a_conv_of_ones(padding: Any, include: bool) -> None:
    sizes, kernel = (6, 7), (2, 3)
    options: dict[str, Any] = {"stride": (3, 2), "padding": padding, "dilation": (2, 1)}
    x, w = digits(2, 1, *sizes, kind="complex"), np.ones((1, 1, *kernel))
    divisor = 6 if include else np.maximum(1, ref.conv(np.ones(x.shape), w, **options))
    y = ref.avg_pool(x, kernel, count_include_pad=include, **options)
    assert_allclose(y, ref.conv(x, w, **options) / divisor, rtol=1e-14, atol=1e-14)
    dy = digits(*y.shape, kind="complex", seed=5)
    dx = ref.avg_pool_backward(dy, sizes, kernel, count_include_pad=include, **options)
    assert_allclose(inner(dy, y), inner(dx, x), rtol=1e-13)


# --- dropout ----------------------------------------------------------------------------------------------------


def test_dropout_hash_equals_a_c_program() -> None:
    # uint32_t arithmetic in C, from the same definition: rate 0.3, two rows of twelve
    assert [ref._mix(v) for v in (0, 1, 2, 2**32 - 1)] == [0, 1753845952, 3507691905, 1734902346]
    for seed, step, *rows in [
        (0, 0, "011100101110", "100011011111"),
        (7, 3, "110111111110", "111011111110"),
        (0x123456789ABCDEF0, 2**31 - 1, "101111111101", "011011001111"),
        (2**64 - 1, 2**32 - 1, "011111101101", "010001110101"),
    ]:
        mask = ref.dropout_mask((2, 3, 4), 0.3, seed, step)
        assert ["".join(str(int(keep)) for keep in row.ravel()) for row in mask] == rows
        assert_array_equal(ref.dropout_mask((1, 12), 0.3, seed, step), mask[:1].reshape(1, 12))
        assert_array_equal(ref.dropout_mask((2,), 0.3, seed, step), mask[:, 0, 0])


def test_dropout_adds_the_row_key_modulo_32_bits() -> None:
    assert ref._row_keys(951075162, 0, 0)[0] == 2**32 - 1  # so every element but the first wraps; bits from C again
    mask = ref.dropout_mask((1, 16), 0.5, 951075162, 0)
    assert "".join(str(int(keep)) for keep in mask[0]) == "0000101011011010"


def test_dropout_step_wraps_like_int32() -> None:
    assert_array_equal(ref.dropout_mask((3, 9), 0.5, 5, -1), ref.dropout_mask((3, 9), 0.5, 5, 2**32 - 1))


def test_dropout_rates() -> None:
    assert ref.dropout_mask((3, 50), 0.0, 1, 0).all()
    assert not ref.dropout_mask((3, 50), 1.0, 1, 0).any()
    masks = [ref.dropout_mask((8, 500), 0.3, seed, step) for seed, step in ((1, 0), (1, 1), (2, 0), (1 + 2**32, 0))]
    sigma = (0.3 * 0.7 / 4000) ** 0.5
    for mask in masks:
        assert abs(mask.mean() - 0.7) < 4 * sigma
    for a, b in itertools.combinations([m for mask in masks for m in mask], 2):  # rows are independent
        assert abs((a & b).mean() - 0.49) < 5 * (0.49 * 0.51 / 500) ** 0.5


def test_dropout_by_hand() -> None:
    mask = np.array([False, True, True])
    assert_array_equal(ref.dropout(np.array([INF, 5, -0.0]), mask, 0.5), [0, 10, 0])
    assert_array_equal(ref.dropout(np.array([1 + 1j, 3 + 6j, 3]), mask, 0.25), [0, 4 + 8j, 4])
    assert_array_equal(ref.dropout(np.array([1, INF, NAN]), np.zeros(3, bool), 1.0), [0, 0, 0])
    assert_array_equal(ref.dropout(np.array([1, INF, NAN]), np.ones(3, bool), 1.0), [0, 0, 0])
