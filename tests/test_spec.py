"""Sizes and paddings: numbers by hand, the oracle over a grid of small geometries, and what a Spec is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import reference as ref

import funcnn as fn


def axis(state: Any) -> tuple[int, int, int]:
    """Padding before, padding after, windows of a rank-1 state."""
    (only,) = state.plan.spec.axes
    return only.lo, only.hi, only.out


def conv(size: int, kernel: int, **options: Any) -> Any:
    return fn.conv_init(fn.ArraySpec((1, 1, size), "float32"), fn.ArraySpec((1, 1, kernel), "float32"), **options)


def conv_transpose(size: int, kernel: int, **options: Any) -> Any:
    return fn.conv_transpose_init(
        fn.ArraySpec((1, 1, size), "float32"), fn.ArraySpec((1, 1, kernel), "float32"), **options
    )


def avg_pool(size: int, kernel: int, **options: Any) -> Any:
    return fn.avg_pool_init(fn.ArraySpec((1, 1, size), "float32"), kernel, **options)


def max_pool(size: int, kernel: int, **options: Any) -> Any:
    return fn.max_pool_init(fn.ArraySpec((1, 1, size), "float32"), kernel, **options)


@pytest.mark.parametrize(
    ("size", "kernel", "options", "wanted"),
    [
        (7, 3, {}, (0, 0, 5)),
        (7, 3, {"padding": "valid"}, (0, 0, 5)),
        (7, 3, {"padding": 2}, (2, 2, 9)),
        (7, 3, {"padding": (2,)}, (2, 2, 9)),
        (7, 3, {"padding": ((2, 0),)}, (2, 0, 7)),
        (7, 3, {"padding": [[0, 1]]}, (0, 1, 6)),
        (7, 3, {"padding": np.int64(1)}, (1, 1, 7)),
        (7, 3, {"padding": "full"}, (2, 2, 9)),
        (7, 3, {"padding": "full", "dilation": 3}, (6, 6, 13)),
        (7, 3, {"padding": "full", "stride": 2}, (2, 2, 5)),
        (7, 3, {"stride": 2}, (0, 0, 3)),
        (8, 3, {"stride": 2}, (0, 0, 3)),  # one cell is left over
        (7, 2, {"stride": 5}, (0, 0, 2)),  # stride over kernel
        (7, 2, {"dilation": 6}, (0, 0, 1)),
        (224, 7, {"stride": 2, "padding": 3}, (3, 3, 112)),
        (7, 3, {"padding": "same"}, (1, 1, 7)),
        (7, 4, {"padding": "same"}, (1, 2, 7)),  # the odd cell at the end
        (7, 4, {"padding": "same_lower"}, (2, 1, 7)),
        (6, 3, {"padding": "same", "stride": 2}, (0, 1, 3)),
        (6, 3, {"padding": "same_lower", "stride": 2}, (1, 0, 3)),
        (7, 3, {"padding": "same", "stride": 2}, (1, 1, 4)),
        (7, 2, {"padding": "same", "stride": 4}, (0, 0, 2)),  # windows 0 and 4: nothing to pad, never negative
        (5, 2, {"padding": "same", "stride": 4}, (0, 1, 2)),
        (7, 3, {"padding": "same", "dilation": 3}, (3, 3, 7)),
        (1, 9, {"padding": "same"}, (4, 4, 1)),
    ],
)
def test_conv_by_hand(size: int, kernel: int, options: dict[str, Any], wanted: tuple[int, int, int]) -> None:
    assert axis(conv(size, kernel, **options)) == wanted


@pytest.mark.parametrize(
    ("size", "kernel", "options", "wanted"),
    [
        (4, 3, {}, 6),
        (4, 3, {"stride": 2}, 9),
        (4, 3, {"stride": 2, "padding": 1}, 7),
        (4, 3, {"stride": 2, "padding": 1, "output_padding": 1}, 8),
        (4, 3, {"stride": 2, "padding": ((0, 1),)}, 8),
        (4, 3, {"stride": 2, "output_size": 10}, 10),
        (4, 3, {"dilation": 2}, 8),
        (4, 3, {"dilation": 2, "output_padding": 1}, 9),
        (4, 3, {"padding": "full"}, 2),
        (4, 3, {"padding": "full", "stride": 2, "output_size": 6}, 6),
        (4, 3, {"padding": "valid", "stride": 3}, 12),
        (4, 3, {"padding": "same"}, 4),
        (4, 3, {"padding": "same", "stride": 3}, 12),
        (4, 3, {"padding": "same", "stride": 3, "output_size": 10}, 10),
        (4, 2, {"padding": "same_lower", "stride": 5}, 20),
        (14, 4, {"stride": 2, "padding": 1}, 28),
    ],
)
def test_conv_transpose_by_hand(size: int, kernel: int, options: dict[str, Any], wanted: int) -> None:
    assert fn.out_spec(conv_transpose(size, kernel, **options)).shape == (1, 1, wanted)


@pytest.mark.parametrize(
    ("size", "kernel", "options", "floor", "ceil"),
    [
        (7, 2, {}, 3, 4),
        (7, 3, {"stride": 2}, 3, 3),
        (8, 3, {"stride": 2}, 3, 4),
        (5, 2, {"stride": 2, "padding": 1}, 3, 3),  # the fourth would start in the trailing padding
        (5, 3, {"stride": 3, "padding": 1}, 2, 2),
        (6, 3, {"stride": 3, "padding": ((0, 1),)}, 2, 2),
        (64, 3, {"stride": 2, "padding": 1}, 32, 33),
        (9, 7, {"stride": 3, "padding": 3}, 3, 4),
        (5, 2, {"stride": 4}, 1, 2),
        (7, 1, {"stride": 2}, 4, 4),
        (10, 3, {"stride": 2, "padding": ((0, 1),), "dilation": 3}, 3, 3),
        (9, 3, {"stride": 2, "padding": ((0, 1),), "dilation": 3}, 2, 3),
        (8, 3, {"stride": 3, "padding": "same"}, 3, 3),  # no effect
        (7, 3, {"stride": 2, "padding": "same_lower"}, 4, 4),
        (4, 1, {"stride": 1, "dilation": 2**31 - 1}, 4, 4),
    ],
)
@pytest.mark.parametrize("pool", [max_pool, avg_pool])
def test_pools_by_hand(pool: Any, size: int, kernel: int, options: dict[str, Any], floor: int, ceil: int) -> None:
    assert axis(pool(size, kernel, **options))[2] == floor
    assert axis(pool(size, kernel, **options, ceil_mode=True))[2] == ceil


def test_stride_of_a_pool_is_its_kernel() -> None:
    spec = fn.avg_pool_init(fn.ArraySpec((1, 1, 9, 9), "float32"), (2, 3)).plan.spec
    assert [a.stride for a in spec.axes] == [2, 3]


# ---- the oracle over a grid ------------------------------------------------------------------------------------------

PADDINGS = ["valid", "full", "same", "same_lower", 0, 1, ((0, 2),), ((3, 1),)]
GRID = list(itertools.product(range(1, 8), (1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3), PADDINGS))


def test_every_small_geometry_is_the_oracles() -> None:
    """Paddings and counts of conv and of the pools, floor and ceil; or a refusal where no window fits."""
    fits = 0
    for size, kernel, stride, dilation, padding in GRID:
        options = {"stride": stride, "dilation": dilation, "padding": padding}
        (pair,) = pads = ref.pads((size,), kernel, stride, padding, dilation)
        (floor,) = ref.out_sizes((size,), kernel, stride, pads, dilation)
        (ceil,) = ref.out_sizes((size,), kernel, stride, pads, dilation, ceil_mode=True)
        if floor == 0:
            for init in (conv, avg_pool):
                with pytest.raises(fn.SpecError, match="kernel must fit into the padded input"):
                    init(size, kernel, **options)
            continue
        fits += 1
        assert axis(conv(size, kernel, **options)) == (*pair, floor), options
        assert axis(avg_pool(size, kernel, **options)) == (*pair, floor), options
        if padding not in ("same", "same_lower"):
            assert axis(avg_pool(size, kernel, **options, ceil_mode=True)) == (*pair, ceil), options
    assert fits > 2000


def test_same_gives_ceil_of_size_over_stride() -> None:
    for size, kernel, stride, dilation, padding in GRID:
        if padding in ("same", "same_lower"):
            lo, hi, out = axis(conv(size, kernel, stride=stride, dilation=dilation, padding=padding))
            assert out == -(-size // stride)
            assert (hi - lo if padding == "same" else lo - hi) in (0, 1)


def test_every_output_size_maps_back() -> None:
    """conv_transpose takes as output_size what conv maps to its x, every such size and no other; by default the least,
    or size * stride with "same".
    """
    for size, kernel, stride, dilation, padding in GRID:
        options = {"stride": stride, "dilation": dilation, "padding": padding}
        named_same = padding in ("same", "same_lower")
        # Beyond stride there is the room that dilation gives output_padding: these sizes do not map back.
        back = [n for n in range(1, 60) if _windows(n, kernel, options) == size]
        for n in back:
            state = conv_transpose(size, kernel, **options, output_size=n)
            assert fn.out_spec(state).shape[2] == n
            assert axis(state)[:2] == ref.pads((n,), kernel, stride, padding, dilation)[0]
        if named_same:
            assert fn.out_spec(conv_transpose(size, kernel, **options)).shape[2] == size * stride
        elif padding in ("valid", 0) and back:  # with a padding that crops, the least may be no size at all
            assert fn.out_spec(conv_transpose(size, kernel, **options)).shape[2] == back[0]
        for n in (min(back, default=1) - 1, max(back, default=1) + max(stride, dilation)):
            if n >= 1 and back:
                with pytest.raises(fn.SpecError, match="output_size must"):
                    conv_transpose(size, kernel, **options, output_size=n)


def _windows(size: int, kernel: int, options: dict[str, Any]) -> int:
    (pair,) = ref.pads((size,), kernel, options["stride"], options["padding"], options["dilation"])
    return ref.out_sizes((size,), kernel, options["stride"], (pair,), options["dilation"])[0]


def test_output_padding_reaches_every_output_size_that_stride_leaves() -> None:
    for kernel, stride, dilation in itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 4)):
        least = fn.out_spec(conv_transpose(3, kernel, stride=stride, dilation=dilation)).shape[2]
        for extra in range(max(stride, dilation)):
            options = {"stride": stride, "dilation": dilation}
            state = conv_transpose(3, kernel, **options, output_padding=extra)
            assert fn.out_spec(state).shape[2] == least + extra
            assert state.plan.spec == conv_transpose(3, kernel, **options, output_size=least + extra).plan.spec
        with pytest.raises(fn.SpecError, match="output_padding must be smaller than stride or dilation"):
            conv_transpose(3, kernel, stride=stride, dilation=dilation, output_padding=max(stride, dilation))


def test_max_pool_refuses_a_window_exactly_where_the_oracle_finds_it_empty() -> None:
    refused = 0
    for size, kernel, stride, dilation, padding in GRID:
        options = {"stride": stride, "dilation": dilation, "padding": padding}
        if _windows(size, kernel, options) == 0:
            continue
        mean = ref.avg_pool(np.ones((1, 1, size)), kernel, **options, count_include_pad=False)
        if mean.all():
            max_pool(size, kernel, **options)
        else:
            refused += 1
            with pytest.raises(fn.SpecError, match="a cell of the input in every window"):
                max_pool(size, kernel, **options)
    assert refused > 100


# ---- what a Spec is --------------------------------------------------------------------------------------------------


def test_different_ways_to_say_the_same_give_equal_specs() -> None:
    base = conv(9, 3, stride=2, padding=1).plan.spec
    for options in (
        {"stride": (2,), "padding": (1,)},
        {"stride": [2], "padding": ((1, 1),)},
        {"stride": np.int32(2), "padding": [(1, 1)]},
        {"stride": 2, "padding": "same"},
        {"stride": 2, "padding": 1, "dilation": (1,), "groups": 1, "flip": False},
    ):
        other = conv(9, 3, **options).plan.spec
        assert other == base
        assert hash(other) == hash(base)
    for options in ({"stride": 2}, {"stride": 2, "padding": ((1, 2),)}, {"stride": 2, "padding": 1, "flip": True}):
        assert conv(9, 3, **options).plan.spec != base


def test_a_spec_holds_no_batch_and_only_plain_values() -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, tuple):
            return all(map(plain, value))
        return type(value) in (int, float, str, bool)

    x, weight = np.ones((4, 2, 9, 8)), np.ones((3, 2, 2, 3))
    for make in (
        lambda x: fn.conv_init(x, weight, stride=np.int64(2)),
        lambda x: fn.conv_transpose_init(x, np.ones((2, 3, 2, 3)), output_padding=np.int8(0)),
        lambda x: fn.max_pool_init(x, np.int64(2)),
        lambda x: fn.avg_pool_init(x, [2, np.int64(3)]),
        lambda x: fn.dropout_init(x, 0.5, seed=np.int64(1)),
    ):
        spec = make(x).plan.spec
        assert spec == make(x[:1]).plan.spec
        fields = [getattr(spec, name) for name in spec.__dataclass_fields__]
        assert all(map(plain, fields)), fields
        with pytest.raises(AttributeError):
            spec.layout = "channels_last"


def test_conv_and_conv_transpose_share_one_class_of_spec() -> None:
    """And the spec of a conv_transpose describes the conv whose adjoint it is."""
    forward, back = (
        conv(8, 3, stride=2, padding=((0, 1),)),
        conv_transpose(4, 3, stride=2, padding=((0, 1),), output_size=8),
    )
    assert type(forward.plan.spec) is type(back.plan.spec)
    assert forward.plan.spec.axes == back.plan.spec.axes
    assert forward.plan.spec != back.plan.spec
