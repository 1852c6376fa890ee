"""Laws that hold for every spec, over pairs of options: 200 examples of each law, op and NumPy engine.

Faults of convolutions hide in pairs of options (stride with groups, dilation with padding, ceil_mode with counted padding),
so an example takes two options that are not at their defaults, whatever else is drawn. Arrays are small whole numbers:
laws hold exactly. A failing example that hypothesis prints belongs into `cases`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference as ref
from cases import CONVS, GRADIENTS, Arrays, Case, divisible, expected, inputs
from conftest import Backend, selected_backends
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from running import assert_results, run

import funcnn as fn

# Read-only arrays run the same engine: once is enough here.
ENGINES = [b for b in selected_backends() if b in (Backend.NUMPY_JIT, Backend.NUMPY_XP, Backend.NUMPY_BLAS)]
each_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda b: b.name.lower())

CONV_OPTIONS = ("stride", "padding", "named padding", "dilation", "groups", "multiplier", "flip", "layout", "complex",
                "batch")  # fmt: skip
POOL_OPTIONS = ("stride", "padding", "named padding", "dilation", "ceil_mode", "layout", "batch")
AVG_OPTIONS = (*POOL_OPTIONS, "count_include_pad", "complex")
_OPTIONS = {"conv": CONV_OPTIONS, "conv_transpose": CONV_OPTIONS, "max_pool": POOL_OPTIONS, "avg_pool": AVG_OPTIONS}


class Example(NamedTuple):
    case: Case
    layout: str
    dtype: str
    seed: int

    def inputs(self, **more: Any) -> Arrays:
        return inputs(self.case, self.seed, self.dtype, **more)

    def run(self, engine: Backend, arrays: Arrays) -> Arrays:
        """Results channels-first, whatever the layout."""
        results = run(self.case, engine, arrays, self.layout, poison=False)
        if self.layout == "channels_first":
            return results
        fixed = ("dweight", "dbias")
        return {name: a if name in fixed else np.moveaxis(a, -1, 1) for name, a in results.items()}


@st.composite
def examples(draw: st.DrawFn, op: str, always: str = "", never: str = "") -> Example:
    """A case of the op with a pair of options that are not at their defaults; `always` one of them, `never` another."""
    names = [name for name in _OPTIONS[op] if name != never]
    pairs = [set(p) for p in itertools.combinations(names, 2) if set(p) != {"padding", "named padding"}]
    chosen = draw(st.sampled_from([pair for pair in pairs if not always or always in pair]))
    rank = draw(st.integers(1, 3))

    def axes(high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(1, high)) for _ in range(rank))

    def per_axis(name: str, high: int) -> tuple[int, ...]:
        """Ones, or numbers of which one at least is larger."""
        if name not in chosen:
            return (1,) * rank
        values = axes(high)
        return values if max(values) > 1 else (*values[1:], 2)

    kernel = axes(3)
    if "dilation" in chosen and max(kernel) == 1:
        kernel = (2, *kernel[1:])
    stride, dilation = per_axis("stride", 4), per_axis("dilation", 3)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    # A pool's stride is its kernel unless it is told.
    options: dict[str, Any] = {"stride": stride if op in CONVS or "stride" in chosen else kernel, "dilation": dilation}
    pads: tuple[tuple[int, int], ...] = ((0, 0),) * rank
    if "padding" in chosen:
        pads = tuple((draw(st.integers(0, 3)), draw(st.integers(0, 3))) for _ in range(rank))
        options["padding"] = pads = pads if any(map(any, pads)) else (*pads[1:], (0, 1))
    if "named padding" in chosen:
        options["padding"] = draw(st.sampled_from(["same", "same_lower", "full"]))
        pads = ((9, 9),) * rank  # any size is large enough
    least = [max(1, s - sum(p)) for s, p in zip(spans, pads, strict=True)]
    sizes = tuple(draw(st.integers(size, size + 4)) for size in least)
    batch = draw(st.sampled_from((3, 1, 0))) if "batch" in chosen else 2
    layout = "channels_last" if "layout" in chosen else "channels_first"
    dtype = "complex128" if "complex" in chosen else "float64"
    seed = draw(st.integers(0, 2**32 - 1))
    if op not in CONVS:
        options |= {name: name == "ceil_mode" for name in ("ceil_mode", "count_include_pad") if name in chosen}
        return Example(Case(op, op, (batch, draw(st.integers(1, 3)), *sizes), kernel, options), layout, dtype, seed)
    groups = draw(st.integers(2, 3)) if {"groups", "multiplier"} & chosen else 1
    # Channels of a group on the side of the convolution's input, and on that of its output.
    near, far = 1 if "multiplier" in chosen else draw(st.integers(1, 2)), draw(st.integers(1, 3))
    options |= {"groups": groups, "flip": "flip" in chosen}
    shape = (batch, near * groups, *sizes)
    if op == "conv_transpose":
        padding = ref.pads(sizes, kernel, stride, options.get("padding", 0), dilation)
        shape = (batch, far * groups, *ref.out_sizes(sizes, kernel, stride, padding, dilation))
        options["output_size"] = sizes
    return Example(Case(op, op, shape, (far * groups, near, *kernel), options), layout, dtype, seed)


def inner(a: Any, b: Any) -> complex:
    """<a, b>, conjugating a."""
    return complex(np.vdot(a, b))


def has_empty_window(case: Case) -> bool:
    """Whether some window holds padding only: max_pool must refuse it."""
    mean = ref.avg_pool(np.ones((1, 1, *case.x[2:])), case.kernel, **case.options, count_include_pad=False)
    return bool((mean == 0).any())


# ---- the loops -------------------------------------------------------------------------------------------------------


@each_engine
@given(data=st.data())
@pytest.mark.parametrize("op", _OPTIONS)
def test_every_op_is_what_the_loops_say(engine: Backend, op: str, data: st.DataObject) -> None:
    """Forward and backward."""
    example = data.draw(examples(op))
    if op == "max_pool" and has_empty_window(example.case):
        with pytest.raises(fn.SpecError, match="a cell of the input in every window"):
            example.run(engine, example.inputs())
        return
    arrays = example.inputs()
    wanted = expected(example.case, arrays)
    results = example.run(engine, arrays)
    assert_results(engine, results, wanted, dtypes=dict.fromkeys(("y", *GRADIENTS), example.dtype))


# ---- conv and conv_transpose -----------------------------------------------------------------------------------------


@each_engine
@given(data=st.data())
@pytest.mark.parametrize("op", CONVS)
def test_backward_is_the_adjoint(engine: Backend, op: str, data: st.DataObject) -> None:
    """<op(x), dy> = <x, dx> = <weight, dweight>, and <bias, dbias> is what the bias adds."""
    example = data.draw(examples(op))
    arrays = example.inputs()
    results = example.run(engine, arrays)
    bias = arrays["bias"].reshape(-1, *(1 for _ in example.case.kernel))
    product = inner(results["y"] - bias, arrays["dy"])
    assert inner(arrays["x"], results["dx"]) == product
    assert inner(arrays["weight"], results["dweight"]) == product
    assert inner(arrays["bias"], results["dbias"]) == inner(results["y"], arrays["dy"]) - product


@each_engine
@given(data=st.data())
@pytest.mark.parametrize("op", CONVS)
def test_linear_in_x_and_in_weight(engine: Backend, op: str, data: st.DataObject) -> None:
    example = data.draw(examples(op))
    first, second = example.inputs(), example._replace(seed=example.seed + 1).inputs()
    y = example.run(engine, first)["y"]
    for name in ("x", "weight"):
        other = example.run(engine, {**first, name: second[name]})["y"]
        mixed = example.run(engine, {**first, name: 2 * first[name] - 3 * second[name]})["y"]
        bias = first["bias"].reshape(-1, *(1 for _ in example.case.kernel))
        assert_array_equal(mixed, 2 * y - 3 * other + 2 * bias, err_msg=name)


@each_engine
@given(data=st.data())
@pytest.mark.parametrize("op", CONVS)
def test_groups_are_blocks(engine: Backend, op: str, data: st.DataObject) -> None:
    """A grouped op is its groups side by side; also in the backward."""
    example = data.draw(examples(op, always="groups"))
    case, groups = example.case, example.case.options["groups"]
    arrays = example.inputs()
    results = example.run(engine, arrays)
    axis = {"x": 1, "dy": 1, "weight": 0, "bias": 0}
    parts = []
    for i in range(groups):
        mine = {name: np.split(array, groups, axis[name])[i] for name, array in arrays.items()}
        one = Case(op, op, mine["x"].shape, mine["weight"].shape, {**case.options, "groups": 1})
        parts.append(example._replace(case=one).run(engine, mine))
    for name, result in results.items():
        joined = np.concatenate([part[name] for part in parts], axis=1 if name in ("y", "dx") else 0)
        assert_array_equal(result, joined, err_msg=name)


@each_engine
@given(data=st.data())
def test_a_delta_kernel_is_a_shift(engine: Backend, data: st.DataObject) -> None:
    """One tap of 1 with the padding that centres it is the identity, read at every stride-th cell; flipped or not."""
    rank = data.draw(st.integers(1, 3))
    kernel, dilation, stride, sizes = (
        tuple(data.draw(st.integers(1, high)) for _ in range(rank)) for high in (4, 3, 3, 6)
    )
    tap = tuple(data.draw(st.integers(0, k - 1)) for k in kernel)
    flip, channels = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    seen = tuple(k - 1 - t for k, t in zip(kernel, tap, strict=True)) if flip else tap
    padding = tuple((t * d, (k - 1 - t) * d) for t, k, d in zip(seen, kernel, dilation, strict=True))
    depthwise = data.draw(st.booleans())
    weight = np.zeros((channels, 1 if depthwise else channels, *kernel))
    for c in range(channels):
        weight[(c, 0 if depthwise else c, *tap)] = 1
    options = {"stride": stride, "dilation": dilation, "padding": padding, "flip": flip}
    options["groups"] = channels if depthwise else 1
    case = Case("delta", "conv", (2, channels, *sizes), weight.shape, options)
    arrays = {**inputs(case, 5), "weight": weight, "bias": np.zeros(channels)}
    picked = (..., *(slice(None, None, s) for s in stride))
    results = run(case, engine, arrays)
    assert_array_equal(results["y"], arrays["x"][picked])
    spread = np.zeros(case.x)
    spread[picked] = arrays["dy"]
    assert_array_equal(results["dx"], spread)


@each_engine
@given(example=examples("conv"))
def test_conv_transpose_is_dx_of_conv(engine: Backend, example: Example) -> None:
    """Without conjugation: of the conjugate weight, then."""
    case, arrays = example.case, example.inputs()
    results = example.run(engine, arrays)
    options = {**case.options, "output_size": case.x[2:]}
    back = Case("back", "conv_transpose", results["y"].shape, case.weight, options)
    mine = {"x": arrays["dy"], "weight": arrays["weight"].conj(), "dy": arrays["x"]}
    mine["bias"] = np.zeros(case.x[1], example.dtype)
    assert_array_equal(example._replace(case=back).run(engine, mine)["y"], results["dx"])


@each_engine
@given(data=st.data())
@pytest.mark.parametrize("op", CONVS)
def test_wrt_changes_no_bit(engine: Backend, op: str, data: st.DataObject) -> None:
    """A subset gives None for the rest and for itself the same bits as all three together; of rounded numbers."""
    example = data.draw(examples(op))
    wrt = data.draw(st.lists(st.sampled_from(("x", "weight", "bias")), unique=True, max_size=2).map(tuple))
    rng = np.random.default_rng(example.seed)
    arrays = {name: array * rng.standard_normal() for name, array in example.inputs().items()}
    state = getattr(fn, f"{op}_init")(arrays["x"], arrays["weight"], **example.case.options, engine=engine.engine)
    backward = getattr(fn, f"{op}_backward")
    every = backward(arrays["dy"], arrays["x"], arrays["weight"], state)
    x = arrays["x"] if "weight" in wrt or data.draw(st.booleans()) else None
    weight = arrays["weight"] if "x" in wrt or data.draw(st.booleans()) else None
    some = backward(arrays["dy"], x, weight, state, wrt=wrt)
    for name, whole, part in zip(("x", "weight", "bias"), every, some, strict=True):
        if name in wrt:
            assert part.tobytes() == whole.tobytes()
        else:
            assert part is None


# ---- pools -----------------------------------------------------------------------------------------------------------


@each_engine
@given(example=examples("avg_pool"))
def test_avg_pool_is_linear_and_its_backward_the_adjoint(engine: Backend, example: Example) -> None:
    arrays, other = example.inputs(), example._replace(seed=example.seed + 1).inputs()
    results = example.run(engine, arrays)
    assert inner(results["y"], arrays["dy"]) == inner(arrays["x"], results["dx"])
    mixed = example.run(engine, {**arrays, "x": 2 * arrays["x"] - 3 * other["x"]})["y"]
    assert_array_equal(mixed, 2 * results["y"] - 3 * example.run(engine, other)["y"])


@each_engine
@given(example=examples("max_pool"))
def test_argmax_points_at_y(engine: Backend, example: Example) -> None:
    """y is x at the indices, in both bases; nothing in the window is larger; the argmax is local to its window."""
    case = example.case
    assume(not has_empty_window(case))
    arrays = example.inputs()
    results = example.run(engine, arrays)
    y, x = results["y"], arrays["x"]
    planes = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    picked = np.take_along_axis(planes, results["plane"].reshape(*y.shape[:2], math.prod(y.shape[2:])), axis=2)
    assert_array_equal(picked.reshape(y.shape), y)
    assert_array_equal(x.reshape(-1)[results["tensor"]], y)
    assert not results["argmax"].size or results["argmax"].max() < case.taps
    counted = example.run(engine, {**arrays, "x": x - 10})  # padding must not win over negative cells
    assert_array_equal(counted["y"], y - 10)
    assert_array_equal(counted["argmax"], results["argmax"])


@each_engine
@given(example=examples("max_pool"))
def test_gradients_of_max_pool_arrive_once(engine: Backend, example: Example) -> None:
    """Each dy goes to one cell: sums per image and channel are kept, and <x, dx> = <y, dy>."""
    assume(not has_empty_window(example.case))
    arrays = example.inputs()
    results = example.run(engine, arrays)
    spatial = tuple(range(2, arrays["x"].ndim))
    assert_array_equal(results["dx"].sum(spatial), arrays["dy"].sum(spatial))
    assert inner(arrays["x"], results["dx"]) == inner(results["y"], arrays["dy"])


# ---- all -------------------------------------------------------------------------------------------------------------


@each_engine
@given(data=st.data())
@pytest.mark.parametrize("op", _OPTIONS)
def test_gradients_are_differences(engine: Backend, op: str, data: st.DataObject) -> None:
    """Central differences of <y, dy> in every cell of x, all as one batch; exact, for ops are linear between ties.

    Cells are distinct and a multiple of 1 apart, the step is 1/4, so that no winner changes.
    """
    example = data.draw(examples(op, never="complex"))
    assume(op != "max_pool" or not has_empty_window(example.case))
    case = example.case
    case = Case(op, op, (1, *case.x[1:]), case.weight, case.options)
    arrays = inputs(case, example.seed)
    cells = int(np.prod(case.x))
    arrays["x"] = np.random.default_rng(example.seed).permutation(cells).reshape(case.x).astype(float) * divisible(case)
    step = np.eye(cells).reshape(cells, *case.x[1:]) * divisible(case) / 4
    many = Case(op, op, step.shape, case.weight, case.options)
    dy = np.broadcast_to(arrays["dy"], (cells, *arrays["dy"].shape[1:]))
    batch = example._replace(case=many)
    up, down = (batch.run(engine, {**arrays, "x": arrays["x"] + s, "dy": dy})["y"] for s in (step, -step))
    differences = ((up - down) * dy).sum(axis=tuple(range(1, dy.ndim))) * 2 / divisible(case)
    dx = example._replace(case=case).run(engine, arrays)["dx"]
    assert_array_equal(dx.reshape(-1), differences)


@each_engine
@given(data=st.data())
@pytest.mark.parametrize("op", _OPTIONS)
def test_a_batch_is_its_images(engine: Backend, op: str, data: st.DataObject) -> None:
    """Images do not see each other, whatever the batch and their place in it."""
    example = data.draw(examples(op))
    assume(op != "max_pool" or not has_empty_window(example.case))
    case = Case(op, op, (3, *example.case.x[1:]), example.case.weight, example.case.options)
    example = example._replace(case=case)
    arrays = example.inputs()
    whole = example.run(engine, arrays)
    parts = []
    for images in ([2], [0, 1]):
        part = Case(op, op, (len(images), *case.x[1:]), case.weight, case.options)
        mine = {name: a[images] if name in ("x", "dy") else a for name, a in arrays.items()}
        parts.append(example._replace(case=part).run(engine, mine))
    for name in ("y", "dx", "argmax", "plane"):
        if name in whole:
            assert_array_equal(np.concatenate([part[name] for part in parts]), whole[name][[2, 0, 1]], err_msg=name)
    for name in ("dweight", "dbias"):
        if name in whole:
            assert_array_equal(sum(part[name] for part in parts), whole[name], err_msg=name)
