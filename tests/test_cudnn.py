"""Engine `cudnn`: which plans cuDNN makes for it, what it copies, splits and keeps. Results are in the tests of the ops.

Without a GPU cuDNN plans for a described one, and NumPy computes what the graphs say (`gpu/graphs.py`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import CONV, CONV_TRANSPOSE, MIXED_CONV, MIXED_TRANSPOSE, Arrays, Case, conv, conv_transpose, exact, inputs
from conftest import Backend, need
from numpy.testing import assert_array_equal
from running import FLOATS, LAYOUTS, assert_results, start, steps, to_layout

import funcnn as fn
from funcnn._engines import _gpu
from funcnn.errors import EngineError

CUDNN = Backend.CUPY_CUDNN
MIXED = [*MIXED_CONV, *MIXED_TRANSPOSE]
LAYER = conv("layer", (8, 64, 28, 28), (64, 64, 3, 3), padding=1)


pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def new_plans() -> None:
    """Plans are made anew in every test."""
    need(CUDNN)
    fn._engines._plans.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the engine asks for memory, graphs and runs."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += "uint8" not in args  # memory for bytes is workspace
            return function(*args, **kwargs)

        return call

    for name in ("empty", "new_graph", "execute"):
        monkeypatch.setattr(_gpu, name, counted(name, getattr(_gpu, name)))
    return counts


def on_gpu(arrays: Arrays, layout: str = "channels_first") -> Arrays:
    return {name: CUDNN.asarray(to_layout(name, array, layout)) for name, array in arrays.items()}


def specs(case: Case, dtype: str, layout: str = "channels_first") -> Arrays:
    """ArraySpecs in the place of arrays."""
    shapes = {"x": case.x, "weight": case.weight}
    if layout == "channels_last":
        n, c, *sizes = case.x
        shapes["x"] = (n, *sizes, c)
    return {name: fn.ArraySpec(shape, dtype, CUDNN.xp) for name, shape in shapes.items()}


def built(state: Any) -> dict[tuple[str, bool], Any]:
    """The graphs that a plan keeps, by kind and whether they add a bias."""
    (runner,) = state.plan._runners.values()
    return {(problem.kind, problem.biased): graph for problem, graph in runner._graphs.items()}


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [c for c in (*CONV, *CONV_TRANSPOSE) if len(c.x) < 6 and 0 not in (*c.x, *c.weight)], ids=str
)
def test_every_spec_of_the_cases_gets_plans(case: Case) -> None:
    for dtype, layout in itertools.product(FLOATS, LAYOUTS):
        state = start(case, CUDNN, specs(case, dtype, layout), layout)
        forward = "dgrad" if case.op == "conv_transpose" else "fprop"
        graphs = built(state)
        assert {kind for kind, _ in graphs} == {"fprop", "dgrad", "wgrad"}
        assert (forward, True) in graphs or (forward, False) in graphs
        for (kind, biased), graph in graphs.items():
            check_graph(case, kind, biased, graph, dtype, layout)
        assert state.plan.workspace_bytes == max(graph.workspace for graph in graphs.values()) <= 1 << 30


def check_graph(case: Case, kind: str, biased: bool, graph: Any, dtype: str, layout: str) -> None:
    """Tensors of a graph have the sizes of the case, a row made an image of one row, and packed strides of the layout."""
    y = (case.x[0], case.outputs, *exact(case)[1]["y"].shape[2:])
    near, far = (y, case.x) if case.op == "conv_transpose" else (case.x, y)
    shapes = {"image": near, "filter": case.weight, "response": far}
    node = graph.graph.nodes[0]
    assert node.node_type.name == f"CONV_{kind.upper()}"
    tensors = {
        tensor.uid: tensor for part in graph.graph.nodes for tensor in (*part.inputs.values(), *part.outputs.values())
    }
    for uid, (name, shape) in enumerate(shapes.items(), 1):
        tensor = tensors[uid]
        lifted = (*shape[:2], 1, *shape[2:]) if len(shape) == 3 else shape
        last = layout == "channels_last" and name != "filter"
        assert tensor.data_type.name == {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}.get(
            dtype, "DOUBLE"
        )
        assert all(a >= b for a, b in zip(lifted, tensor.dim, strict=True))  # less the cells that no window reads
        if tuple(tensor.dim) == lifted:
            steps_ = zip(lifted, tensor.stride, packed(lifted, last), strict=True)
            assert all(mine == other for size, mine, other in steps_ if size > 1), name
    assert (4 in tensors) == biased
    assert not biased or tuple(tensors[4].dim[:2]) == (1, case.outputs)


def packed(shape: tuple[int, ...], last: bool) -> tuple[int, ...]:
    array = (
        np.empty(shape, np.int8)
        if not last
        else np.moveaxis(np.empty((shape[0], *shape[2:], shape[1]), np.int8), -1, 1)
    )
    return array.strides


@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
def test_strict_float32_keeps_off_tf32_which_fast_takes(kind: str) -> None:
    names = {}
    for numerics in ("strict", "fast"):
        state = start(LAYER, CUDNN, specs(LAYER, "float32"), options=fn.Options(numerics=numerics))
        names[numerics] = built(state)[kind, False]
    assert carries(names["fast"], "TENSOR_CORE")
    assert not carries(names["strict"], "TENSOR_CORE", "DOWN_CONVERT_INPUTS")


@pytest.mark.parametrize("dtype", FLOATS)
def test_strict_sums_are_direct(dtype: str) -> None:
    state = start(LAYER, CUDNN, specs(LAYER, dtype))
    for graph in built(state).values():
        assert not carries(graph, "WINOGRAD", "FFT", "REDUCED_PRECISION_REDUCTION")


@pytest.mark.parametrize("numerics", ["strict", "fast"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_notes_that_are_barred(dtype: str, numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not this cuDNN has an engine for this device that carries them."""
    cudnn = _gpu.frontend()
    barred: list[set[str]] = []
    deselect = cudnn.pygraph.deselect_numeric_notes

    def noted(graph: Any, notes: list[Any]) -> Any:
        barred.append({note.name for note in notes})
        return deselect(graph, notes)

    monkeypatch.setattr(cudnn.pygraph, "deselect_numeric_notes", noted)
    start(SMALL, CUDNN, specs(SMALL, dtype), options=fn.Options(numerics=numerics, deterministic=False))
    wanted = {"REDUCED_PRECISION_REDUCTION"}
    if numerics == "strict":
        wanted |= {"WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13", "FFT"}
        wanted |= {"TENSOR_CORE", "DOWN_CONVERT_INPUTS"} if dtype == "float32" else set()
    assert barred
    assert all(names == wanted for names in barred)


def carries(chosen: Any, *notes: str) -> bool:
    """Whether cuDNN's notes on a plan have one of these: it then refuses to build it once they are deselected."""
    graph = chosen.graph
    graph.deselect_numeric_notes([getattr(_gpu.frontend().numerical_note, note) for note in notes])
    names = [graph.get_plan_name_at_index(number) for number in range(graph.get_execution_plan_count())]
    try:
        graph.build_plan_at_index(names.index(chosen.name))
    except Exception:
        return True
    return False


def test_deterministic_plans_only_unless_told() -> None:
    """cuDNN would rather sum the data gradient of this layer in any order."""
    case = conv("first layer", (8, 3, 224, 224), (64, 3, 7, 7), padding=3)
    found = {}
    for deterministic in (True, False):
        state = start(
            case, CUDNN, specs(case, "float32"), options=fn.Options(deterministic=deterministic, numerics="fast")
        )
        found[deterministic] = {kind: carries(graph, "NONDETERMINISTIC") for (kind, _), graph in built(state).items()}
    assert not any(found[True].values())
    assert found[False]["dgrad"]


# ---- what is copied --------------------------------------------------------------------------------------------------


def shifted(a: Any) -> Any:
    """A copy of an array that starts one element after a multiple of 16 bytes."""
    memory = CUDNN.xp.zeros(a.size + 1, a.dtype)
    view = memory[1:].reshape(a.shape)
    view[...] = a
    assert view.data.ptr % 16
    return view


VIEWS = {
    "one element further": shifted,
    "mirrored": lambda a: CUDNN.asarray(a.get()[..., ::-1].copy())[..., ::-1],
    "every second": lambda a: CUDNN.asarray(np.repeat(a.get(), 2, -1))[..., ::2],
    "part of a larger one": lambda a: CUDNN.asarray(np.pad(a.get(), [(0, 1)] * a.ndim))[
        tuple(slice(n) for n in a.shape)
    ],
    "axes in another order": lambda a: CUDNN.asarray(a.get().T.copy()).T,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["x", "weight", "bias", "dy"])
@pytest.mark.parametrize("case", MIXED, ids=str)
def test_views_of_every_argument(case: Case, name: str, view: str, layout: str) -> None:
    arrays, wanted = exact(case)
    mine = on_gpu(arrays, layout)
    viewed = VIEWS[view](mine[name])
    assert_array_equal(viewed.get(), mine[name].get())
    state = start(case, CUDNN, mine, layout)
    got, _ = steps(case.op, {**mine, name: viewed}, state)
    assert_results(CUDNN, got, wanted, layout)


def test_arrays_that_all_are_one_number_are_copied() -> None:
    case = MIXED_CONV[0]
    arrays = inputs(case)
    for name in ("x", "weight", "bias", "dy"):
        arrays[name] = np.broadcast_to(np.float64(2), arrays[name].shape)
    mine = {name: CUDNN.xp.broadcast_to(CUDNN.asarray(np.array(2.0)), a.shape) for name, a in arrays.items()}
    got, _ = steps("conv", mine, start(case, CUDNN, mine))
    state = fn.conv_init(arrays["x"], arrays["weight"], engine="xp", **case.options)
    wanted, _ = steps("conv", arrays, state)
    assert_results(CUDNN, got, wanted)


def test_what_cudnn_can_read_is_not_copied(calls: Counter[str]) -> None:
    """Channels-last views, weights of another memory order, crops: only the result is new."""
    case = conv("odd", (2, 3, 7, 6), (5, 3, 3, 2), padding=1)
    mine = on_gpu(inputs(case, dtype="float32"))
    state = start(case, CUDNN, mine)
    last = CUDNN.asarray(np.moveaxis(mine["x"].get(), 1, -1).copy()).transpose(0, 3, 1, 2)
    ohwi = CUDNN.asarray(np.moveaxis(mine["weight"].get(), 1, -1).copy()).transpose(0, 3, 1, 2)
    crop = VIEWS["part of a larger one"](mine["x"])
    ways = ((mine["x"], mine["weight"]), (last, mine["weight"]), (mine["x"], ohwi), (last, ohwi), (crop, ohwi))
    calls.clear()
    results = [fn.conv(x, weight, None, state)[0].get() for x, weight in ways]
    assert calls["empty"] == len(ways)
    for y in results[1:]:
        assert_array_equal(y, results[0])
    y, _ = fn.conv(last, ohwi, None, state)
    assert y.strides[1] == y.itemsize  # in x's memory order


def overlapping(shape: tuple[int, ...]) -> Any:
    """Each row begins one element after the one before."""
    memory = CUDNN.xp.ones(4096, "float32")
    _, c, h, w = shape
    return CUDNN.xp.ndarray(shape, "float32", memory.data, tuple(4 * step for step in (c * (h + w), h + w, 1, 1)))


@pytest.mark.parametrize("strides", ["negative", "zero", "overlapping"])
def test_strides_that_no_graph_has_cost_one_copy(strides: str, calls: Counter[str]) -> None:
    """cuDNN is not even asked: it may take rows that overlap."""
    mine = on_gpu(inputs(SMALL, dtype="float32"))
    state = start(SMALL, CUDNN, mine)
    views = {
        "negative": lambda: mine["x"][..., ::-1],
        "zero": lambda: CUDNN.xp.broadcast_to(mine["x"][:, :1], SMALL.x),
        "overlapping": lambda: overlapping(SMALL.x),
    }
    x = views[strides]()
    calls.clear()
    y, _ = fn.conv(x, mine["weight"], None, state)
    assert calls == {"empty": 2, "execute": 1}
    calls.clear()
    wanted, _ = fn.conv(CUDNN.asarray(x.get()), mine["weight"], None, state)
    assert_array_equal(y.get(), wanted.get())


def test_strides_that_cudnn_refuses_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from funcnn._engines.cudnn import _runner

    case = MIXED_CONV[0]
    arrays, wanted = exact(case)
    mine = on_gpu(arrays)
    mine["x"] = VIEWS["part of a larger one"](mine["x"])
    planned = _runner.candidates

    def only_packed(problem: Any, options: Any, limit: int, refusals: list[Any]) -> Any:
        if problem.image.strides[0] != np.prod(problem.image.shape[1:]):
            refusals.append(_runner.Refusal("strides"))
            return iter(())
        return planned(problem, options, limit, refusals)

    monkeypatch.setattr(_runner, "candidates", only_packed)
    got, _ = steps("conv", mine, start(case, CUDNN, mine))
    assert_results(CUDNN, got, wanted)


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_a_call_like_those_of_the_init_builds_no_graph(calls: Counter[str]) -> None:
    case = MIXED_CONV[0]
    mine = on_gpu(inputs(case))
    state = start(case, CUDNN, mine)
    assert calls["new_graph"] >= 4
    calls.clear()
    for _ in range(3):
        steps("conv", mine, state)
    assert calls["new_graph"] == 0
    assert calls["execute"] == 9


def test_an_init_prepares_for_the_memory_of_the_weight(calls: Counter[str]) -> None:
    mine = on_gpu(inputs(SMALL, dtype="float32"))
    mine["weight"] = VIEWS["axes in another order"](mine["weight"])
    state = start(SMALL, CUDNN, mine)
    calls.clear()
    fn.conv(mine["x"], mine["weight"], None, state)
    assert calls["new_graph"] == 0


def test_an_init_prepares_for_the_memory_order_that_a_spec_promises(calls: Counter[str]) -> None:
    x = fn.ArraySpec(SMALL.x, "float32", CUDNN.xp, order="channels_last")
    mine = on_gpu(inputs(SMALL, dtype="float32"))
    state = fn.conv_init(x, mine["weight"], engine="cudnn", **SMALL.options)
    calls.clear()
    last = CUDNN.asarray(np.moveaxis(mine["x"].get(), 1, -1).copy()).transpose(0, 3, 1, 2)
    fn.conv(last, mine["weight"], None, state)
    assert calls["new_graph"] == 0


@pytest.mark.parametrize(("dtype", "fused"), [("float32", False), ("bfloat16", True)])
def test_a_bias_is_fused_where_the_heuristics_have_an_engine_for_it(
    dtype: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For float32 only fallbacks add one, which are slow: another pass over y is the better way."""
    mine = on_gpu(inputs(LAYER, dtype=dtype))
    state = start(LAYER, CUDNN, mine)
    found: list[set[int]] = []
    monkeypatch.setattr(_gpu, "execute", lambda graph, pointers, workspace: found.append(set(pointers)))
    fn.conv(mine["x"], mine["weight"], mine["bias"], state)
    assert found == [{1, 2, 3, 4} if fused else {1, 2, 3}]


def test_what_was_not_used_for_longest_goes_first() -> None:
    from funcnn._engines.cudnn._runner import _Bounded

    kept: Any = _Bounded(2)
    kept.keep("a", 1)
    kept.keep("b", 2)
    assert kept.find("a") == 1
    kept.keep("c", 3)
    assert list(kept) == ["a", "c"]


def test_another_batch_size_gets_graphs_of_its_own_and_keeps_them(calls: Counter[str]) -> None:
    case = MIXED_CONV[0]
    mine = on_gpu(inputs(case))
    state = start(case, CUDNN, mine)
    larger = replace(case, x=(5, *case.x[1:]))
    arrays = inputs(larger)
    for first in (True, False):
        calls.clear()
        got, _ = steps("conv", on_gpu(arrays), state)
        assert (calls["new_graph"] > 0) == first
        wanted, _ = steps("conv", arrays, start(larger, Backend.NUMPY_XP, arrays))
        assert_results(CUDNN, got, wanted)


def test_graphs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from funcnn._engines.cudnn import _runner

    monkeypatch.setattr(_runner, "MOST_GRAPHS", 3)
    case = MIXED_CONV[1]
    state = start(case, CUDNN, on_gpu(inputs(case)))
    (runner,) = state.plan._runners.values()
    for n in range(1, 20):
        x = CUDNN.asarray(np.ones((n, *case.x[1:])))
        fn.conv(x, CUDNN.asarray(np.ones(case.weight)), None, state)
    assert len(runner._graphs) == 3
    assert len(runner._ways) == 3


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("case", MIXED, ids=str)
def test_what_is_too_large_for_one_graph_goes_image_by_image(
    case: Case, dtype: str, monkeypatch: pytest.MonkeyPatch, calls: Counter[str]
) -> None:
    from funcnn._engines.cudnn import _runner

    case = replace(case, x=(5, *case.x[1:]))
    arrays = inputs(case, dtype=dtype)
    mine = on_gpu(arrays)
    largest = max(np.prod(case.x[1:]), arrays["dy"][0].size)
    fn._engines._plans.clear()
    monkeypatch.setattr(_runner, "MOST_ELEMENTS", 2 * int(largest))
    got, _ = steps(case.op, mine, start(case, CUDNN, mine))
    assert calls["execute"] >= 3 * 3  # 2, 2 and 1 image for each of three maps
    wanted, _ = steps(case.op, arrays, start(case, Backend.NUMPY_XP, arrays))
    for name, array in wanted.items():
        assert_array_equal(got[name].get(), array, err_msg=name)


def test_workspace_over_the_limit_is_filtered_and_then_split(monkeypatch: pytest.MonkeyPatch) -> None:
    free = start(LAYER, CUDNN, specs(LAYER, "bfloat16", "channels_first"))
    assert free.plan.workspace_bytes > 0
    none = start(LAYER, CUDNN, specs(LAYER, "bfloat16"), options=fn.Options(workspace_limit=0))
    assert none.plan.workspace_bytes == 0
    assert all(graph.workspace == 0 for graph in built(none).values())


def test_no_plan_within_the_limit_is_an_error_that_names_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from funcnn._engines.cudnn import _runner

    case = MIXED_CONV[0]
    mine = on_gpu(inputs(case))
    state = start(case, CUDNN, mine)

    def none(problem: Any, options: Any, limit: int, refusals: list[Any]) -> Any:
        refusals.append(_runner.Refusal("eng7 needs 99 bytes", over_limit=True))
        return iter(())

    monkeypatch.setattr(_runner, "candidates", none)
    x = CUDNN.asarray(np.ones((3, *case.x[1:])))
    reason = r"got 3 \(cuDNN has no fprop plan within [\d,]+ bytes of workspace: eng7 needs 99 bytes\)$"
    with pytest.raises(EngineError, match=f"^conv: x must have a batch size that cuDNN can serve, {reason}"):
        fn.conv(x, mine["weight"], None, state)
    dy = CUDNN.asarray(np.ones((3, *mine["dy"].shape[1:])))
    with pytest.raises(EngineError, match=r"^conv_backward: x must have .* got 3 \(cuDNN has no wgrad plan"):
        fn.conv_backward(dy, x, None, state, wrt="weight")
    fn._engines._plans.clear()
    with pytest.raises(EngineError, match=r"^conv_init: engine must be able to do the job, got 'cudnn': cuDNN has"):
        start(case, CUDNN, mine)


def test_a_choice_of_another_limit_is_held_to_this_one() -> None:
    from funcnn._engines.cudnn._runner import Runner

    state = start(LAYER, CUDNN, specs(LAYER, "bfloat16"))
    (free,) = state.plan._runners.values()
    assert free.workspace_bytes > 0
    none = Runner(free.spec, free.options, 0)
    none.choices.update(free.choices)
    none.prepare((("fprop", True), ("dgrad", False), ("wgrad", False)), LAYER.x[0], "channels_first", None)
    assert len(none._graphs) == 3
    assert none.workspace_bytes == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_reason_of_an_error_is_the_workspace_where_it_was_that(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that an engine is barred by the options, nor what the fallbacks say."""
    from funcnn._engines.cudnn import _conv

    made = _conv.Runner
    monkeypatch.setattr(_conv, "Runner", lambda spec, options, limit: made(spec, options, -1))
    reason = r"cuDNN has no fprop plan within -1 bytes of workspace: eng\S+ needs [\d,]+ bytes of workspace, over"
    with pytest.raises(EngineError, match=reason):
        start(LAYER, CUDNN, specs(LAYER, dtype))


def test_a_reason_is_one_line() -> None:
    from funcnn._engines.cudnn._graph import refusal

    assert refusal(RuntimeError("\n no engine\nat line 5\n")).reason == "no engine"
    assert refusal(ValueError()).reason == "ValueError"


@pytest.mark.parametrize(("free", "given", "limit"), [(4000, None, 1000), (1 << 40, None, 1 << 30), (4000, 7, 7)])
def test_the_workspace_limit(free: int, given: int | None, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu, "free_bytes", lambda: free)
    state = start(SMALL, CUDNN, specs(SMALL, "float32"), options=fn.Options(workspace_limit=given))
    (runner,) = state.plan._runners.values()
    assert runner.limit == limit


def test_auto_goes_to_the_next_engine_where_cudnn_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from funcnn._engines.cudnn import _runner

    mine = on_gpu(inputs(MIXED_CONV[0]))
    assert start(MIXED_CONV[0], CUDNN, mine, engine="auto").plan.engine == "cudnn"
    fn._engines._plans.clear()
    monkeypatch.setattr(_runner, "candidates", lambda *_: iter(()))
    assert start(MIXED_CONV[0], CUDNN, mine, engine="auto").plan.engine != "cudnn"


@pytest.mark.parametrize(
    ("x", "weight"), [((0, 3, 5, 5), (4, 3, 2, 2)), ((2, 0, 5, 5), (4, 0, 2, 2)), ((2, 3, 5, 5), (0, 3, 2, 2))]
)
def test_nothing_to_compute_is_answered_without_cudnn(
    x: tuple[int, ...], weight: tuple[int, ...], calls: Counter[str]
) -> None:
    case = conv("empty", x, weight)
    mine = on_gpu(inputs(case))
    steps("conv", mine, start(case, CUDNN, mine))
    assert not calls["new_graph"] + calls["execute"]


def test_windows_may_read_nothing_but_padding() -> None:
    """A conv_transpose whose windows are all cropped away: cuDNN has no image of no cells."""
    options = {"dilation": 2, "padding": ((1, 0), (0, 0)), "output_padding": (1, 0)}
    case = conv_transpose("cropped", (1, 2, 1, 1), (2, 3, 1, 1), **options)
    arrays, wanted = exact(case)
    mine = on_gpu(arrays)
    got, _ = steps(case.op, mine, start(case, CUDNN, mine))
    assert_results(CUDNN, got, wanted)


# ---- choices that are kept -------------------------------------------------------------------------------------------


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times that candidates take, one after the other; the fourth is the fastest, again and again."""
    times: list[float] = []

    def milliseconds(run: Any, repeats: int) -> float:
        run()
        times.append(1.0 if len(times) % 7 == 3 else 2.0)
        return times[-1]

    monkeypatch.setattr(_gpu, "milliseconds", milliseconds)
    return times


SMALL = conv("small", (2, 8, 6, 6), (8, 8, 3, 3), padding=1)


def test_autotune_takes_the_fastest(timed: list[float]) -> None:
    first = start(SMALL, CUDNN, specs(SMALL, "bfloat16"))
    assert not timed
    tuned = start(SMALL, CUDNN, specs(SMALL, "bfloat16"), options=fn.Options(autotune=True))
    assert len(timed) > 20
    assert built(tuned)["fprop", True].name != built(first)["fprop", True].name


def test_autotune_keeps_no_plan_but_the_fastest_and_passes_over_those_that_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans hold kernels. What cuDNN refuses when it runs is no candidate."""
    times: list[float] = []

    def milliseconds(run: Any, repeats: int) -> float:
        if repeats > 1:
            return times[-1]
        times.append(1 / (1 + len(times)))  # the last is the fastest
        if len(times) % 2 == 0:
            raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
        return times[-1]

    def failing(run: Any, repeats: int) -> float:
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(_gpu, "milliseconds", milliseconds)
    state = start(SMALL, CUDNN, specs(SMALL, "bfloat16"), options=fn.Options(autotune=True))
    assert len(times) > 20
    for chosen in built(state).values():
        assert ready(chosen.graph) == [chosen.name]
    monkeypatch.setattr(_gpu, "milliseconds", failing)
    with pytest.raises(EngineError, match=r"CUDNN_STATUS_EXECUTION_FAILED"):
        start(LAYER, CUDNN, specs(LAYER, "bfloat16"), options=fn.Options(autotune=True))


def ready(graph: Any) -> list[str]:
    """Names of the plans of a graph that are built."""
    names = []
    for number in range(graph.get_execution_plan_count()):
        try:
            graph.get_workspace_size_plan_at_index(number)
        except RuntimeError:
            continue
        names.append(graph.get_plan_name_at_index(number))
    return names


def test_a_pickle_keeps_the_choice_and_does_not_tune_again(timed: list[float]) -> None:
    state = start(SMALL, CUDNN, specs(SMALL, "bfloat16"), options=fn.Options(autotune=True))
    data = pickle.dumps(state)
    choices = {key: graph.name for key, graph in built(state).items()}
    fn._engines._plans.clear()
    timed.clear()
    again = pickle.loads(data)
    assert again.plan == state.plan
    assert again.plan is not state.plan
    mine = on_gpu(inputs(SMALL, dtype="bfloat16"))
    steps("conv", mine, again)
    assert not timed
    graphs = {key: graph.name for key, graph in built(again).items()}
    assert graphs == {key: choices[key] for key in graphs}


def test_a_pickle_brings_its_choices_to_a_plan_in_use() -> None:
    state = start(SMALL, CUDNN, specs(SMALL, "float32"))
    data = pickle.dumps(state)
    (runner,) = state.plan._runners.values()
    choices = dict(runner.choices)
    runner.choices.clear()
    assert pickle.loads(data).plan is state.plan
    assert runner.choices == choices


def test_a_pickle_of_other_libraries_is_planned_anew_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:

    state = start(SMALL, CUDNN, specs(SMALL, "float32"))
    data = pickle.dumps(state)
    fn._engines._plans.clear()
    monkeypatch.setattr(_gpu, "stack", lambda: "cuDNN 99")
    with pytest.warns(RuntimeWarning, match="plans were made for .*; they are made anew for cuDNN 99"):
        again = pickle.loads(data)
    assert not again.plan.keepsake()[1]
    mine = on_gpu(inputs(SMALL, dtype="float32"))
    got, _ = steps("conv", mine, again)
    wanted, _ = steps("conv", mine, state)
    assert_array_equal(got["y"].get(), wanted["y"].get())


def test_another_process_loads_the_choice(tmp_path: Any) -> None:
    state = start(SMALL, CUDNN, specs(SMALL, "float32"), options=fn.Options(autotune=True))
    path = tmp_path / "state"
    path.write_bytes(pickle.dumps(state))
    code = (
        "import pickle, sys; from pathlib import Path; from gpu import double; double.real_gpu() or double.install()\n"
        "from funcnn._engines import _gpu; _gpu.milliseconds = None\n"
        "state = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
        "import cupy, funcnn as fn; x, w = cupy.ones((2, 8, 6, 6), 'float32'), cupy.ones((8, 8, 3, 3), 'float32')\n"
        "y, _ = fn.conv(x, w, None, state); print(int(y.sum()), *state.plan.keepsake()[1])"
    )
    root = Path(__file__).parent
    environ = os.environ | {"PYTHONPATH": f"{root}:{root.parent}"}
    done = subprocess.run([sys.executable, "-c", code, path], env=environ, capture_output=True, text=True, check=True)
    total, choices = done.stdout.strip().split(" ", 1)
    assert int(total) == 2 * 8 * 8 * 16 * 16
    assert choices == " ".join(map(str, state.plan.keepsake()[1]))


def test_a_process_without_cudnn_takes_another_engine(tmp_path: Any) -> None:
    path = tmp_path / "state"
    path.write_bytes(pickle.dumps(start(SMALL, CUDNN, specs(SMALL, "float32"))))
    code = (
        "import pickle, sys; from pathlib import Path; from gpu import double; double.real_gpu() or double.install()\n"
        "import warnings; from funcnn._engines import _gpu\n"
        "def missing(): raise ImportError('nvidia-cudnn-frontend is not installed')\n"
        "_gpu.require_cudnn = missing\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always'); state = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
        "print(state.plan.engine, caught[0].message)"
    )
    root = Path(__file__).parent
    environ = os.environ | {"PYTHONPATH": f"{root}:{root.parent}"}
    done = subprocess.run([sys.executable, "-c", code, path], env=environ, capture_output=True, text=True, check=True)
    engine, warning = done.stdout.strip().split(" ", 1)
    assert engine == "cuda"
    assert "nvidia-cudnn-frontend is not installed; using engine 'cuda'" in warning


def test_states_for_different_batches_have_one_plan() -> None:
    """A state may be carried where trees are compared: the batch of its init must not show."""
    a, b = (
        start(replace(SMALL, x=(n, *SMALL.x[1:])), CUDNN, specs(replace(SMALL, x=(n, *SMALL.x[1:])), "float32"))
        for n in (2, 5)
    )
    assert a.plan is b.plan


@pytest.mark.parametrize("weight", ["float32", "complex64"])
def test_complex_arrays_of_a_device_that_is_not_the_current_one(weight: str) -> None:
    """Gradients conjugate x and weight before the maps: there too the device of the arrays must be the current one."""
    cuda = CUDNN.xp.cuda
    if cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one device only")
    arrays = inputs(MIXED_CONV[0], dtype="complex64", weight_dtype=weight)
    with cuda.Device(1):
        mine = on_gpu(arrays)
    got, _ = steps("conv", mine, start(MIXED_CONV[0], CUDNN, mine))
    assert {array.device.id for array in got.values()} == {1}
    assert cuda.runtime.getDevice() == 0
    wanted, _ = steps("conv", arrays, start(MIXED_CONV[0], Backend.NUMPY_XP, arrays))
    for name, array in wanted.items():
        assert_array_equal(got[name].get(), array, err_msg=name)


def test_no_plan_runs_in_two_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = on_gpu(inputs(MIXED_CONV[0]))
    state = start(MIXED_CONV[0], CUDNN, mine)
    running, most = 0, 0
    lock = threading.Lock()

    def execute(*arguments: Any) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    monkeypatch.setattr(_gpu, "execute", execute)
    call = partial(fn.conv, mine["x"], mine["weight"], mine["bias"], state)
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


@pytest.mark.parametrize("autotune", [False, True])
def test_the_frontend_itself_runs_the_chosen_plan(autotune: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to where it leaves Python: by addresses, and without asking of every plan whether a filter excludes it."""
    spec = importlib.util.spec_from_file_location("narrow", _gpu.__file__)
    narrow = importlib.util.module_from_spec(spec)  # as it is on disk
    spec.loader.exec_module(narrow)
    monkeypatch.setattr(narrow, "_handle", lambda: None)
    times = iter(range(1000, 0, -1))
    monkeypatch.setattr(_gpu, "milliseconds", lambda run, repeats: next(times))
    state = start(SMALL, CUDNN, specs(SMALL, "bfloat16"), options=fn.Options(autotune=autotune))
    for (_, biased), chosen in built(state).items():
        lowered = chosen.graph._lowered_graph
        runs: list[Any] = []

        def run(address: int, count: int, *rest: Any, runs: list[Any] = runs) -> None:
            runs.append((list((ctypes.c_uint64 * count).from_address(address)), *rest))

        monkeypatch.setattr(chosen.graph, "_lowered_graph", SimpleNamespace(_execute_with_raw_ptrs=run))
        monkeypatch.setattr(chosen.graph, "_barred_indices", None)
        narrow.execute(chosen.graph, {1: 512, 2: 1024, 3: 2048, **({4: 4096} if biased else {})}, 0)
        ((addresses, workspace, handle, index),) = runs
        assert addresses == [512, 1024, 2048, *([4096] if biased else [])]
        assert (workspace, handle) == (0, 0)
        assert lowered.get_plan_name_at_index(index) == chosen.name


def test_one_state_from_two_threads() -> None:
    case = MIXED_CONV[0]
    arrays, wanted = exact(case)
    mine = on_gpu(arrays)
    state = start(case, CUDNN, mine)
    results: list[Any] = []

    def work(n: int) -> None:
        part = {name: a[:n] if name in ("x", "dy") else a for name, a in mine.items()}
        results.extend((n, steps("conv", part, state)[0]) for _ in range(5))

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 15
    for n, result in results:
        assert_array_equal(result["y"].get(), wanted["y"][:n])
