"""ONNX's own backend suite, run by its own runner: every case of an op that funcnn has, and which ones it has not."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import each_engine
from onnx_backend import backend_of
from packages import package

onnx = package("onnx")
base = package("onnx.backend.base")
onnxruntime = package("onnxruntime")

KINDS = ("node", "pytorch-converted", "pytorch-operator")

# How many cases of each kind are about an op: a new version of onnx that adds or loses some must be looked at.
DONE = {
    "Conv": (6, 26, 1),
    "ConvTranspose": (11, 2, 1),
    "ConvInteger": (2, 0, 0),
    "MaxPool": (19, 8, 1),
    "AveragePool": (20, 7, 0),
    "GlobalAveragePool": (2, 0, 0),
    "GlobalMaxPool": (2, 0, 0),
    "Dropout": (12, 0, 0),
    "CausalConvWithState, expanded": (13, 0, 0),
}
MISSING = {
    "Col2Im": (5, 0, 0),
    "LpPool": (8, 0, 0),
    "MaxUnpool": (2, 0, 0),
    "BatchNormalization": (4, 5, 0),
    "InstanceNormalization": (2, 0, 1),
    "LRN": (2, 0, 0),
    "CausalConvWithState": (13, 0, 0),
}

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
ROUNDED = {
    "test_averagepool_2d_ceil_last_window_starts_on_pad": {"rtol": 0.0, "atol": 1e-4},  # stored with four decimals
}


def _op(case: Any) -> str | None:
    model = case.model or onnx.load(os.path.join(case.model_dir, "model.onnx"))
    if case.name.startswith("test_causal_conv_with_state") and case.name.endswith("_expanded"):
        return "CausalConvWithState, expanded"
    return next((node.op_type for node in model.graph.node if node.op_type in DONE | MISSING), None)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # onnx casts infinities and divides by zero where it generates its cases
    from onnx.backend.test import BackendTest
    from onnx.backend.test.loader import load_model_tests

    CASES = {case.name: (_op(case), kind, case) for kind in KINDS for case in load_model_tests(kind=kind)}

TRAINING = sorted(name for name in CASES if name.startswith("test_training_dropout"))
DRAWN = {name for name in TRAINING if "zero_ratio" not in name}  # what they store is NumPy's Mersenne Twister's draw


def suite(backend: Any) -> dict[str, Callable[[None], None]]:
    """The tests of ONNX's runner on a backend, by name."""
    tolerances = {name: ROUNDED.get(name, TOLERANCE) for name in CASES}
    classes = BackendTest(backend, __name__, tolerances).test_cases.values()
    tests = {name: function for case in classes for name, function in vars(case).items()}
    return {name: tests[f"{name}_cpu"] for name in CASES}


@cache
def on_engine(engine: str) -> dict[str, Callable[[None], None]]:
    return suite(backend_of(engine))


def names(ops: Iterable[str]) -> list[str]:
    """The cases about these ops."""
    return sorted(name for name, (op, _, _) in CASES.items() if op in ops)


def test_number_of_cases() -> None:
    counts = Counter((op, kind) for op, kind, _ in CASES.values() if op)
    assert {op: tuple(counts[op, kind] for kind in KINDS) for op in DONE | MISSING} == DONE | MISSING
    assert (len(TRAINING), len(DRAWN)) == (6, 4)


@pytest.mark.parametrize("name", sorted(set(names(DONE)) - DRAWN))
@each_engine
def test_case(name: str, engine: str) -> None:
    on_engine(engine)[name](None)


@pytest.mark.parametrize("name", names(MISSING))
@pytest.mark.xfail(raises=NotImplementedError, reason="funcnn has no such op yet")
def test_missing(name: str) -> None:
    on_engine("auto")[name](None)


# ---- the cases that draw: another generator, the same distribution ---------------------------------------------------


@pytest.mark.parametrize("name", TRAINING)
@each_engine
def test_training_dropout(name: str, engine: str) -> None:
    _, _, case = CASES[name]
    ((inputs, stored),) = case.data_sets
    x, ratio, _ = inputs
    outputs = backend_of(engine).prepare(case.model).run(inputs)
    assert [(a.shape, a.dtype) for a in outputs] == [(a.shape, a.dtype) for a in stored]
    y, kept = outputs if len(outputs) == 2 else (*outputs, outputs[0] != 0)
    np.testing.assert_array_equal(y, np.where(kept, x / (1 - ratio), 0))
    assert abs(kept.sum() - x.size * (1 - ratio)) <= 4 * math.sqrt(x.size * ratio * (1 - ratio))


# ---- what no case has: indices into more than one plane --------------------------------------------------------------


@pytest.mark.parametrize("storage_order", [0, 1])
@pytest.mark.parametrize("size", [(7,), (6, 5), (4, 5, 6)])
@each_engine
def test_indices_run_over_the_whole_tensor(storage_order: int, size: tuple[int, ...], engine: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, *size), np.float32)
    options = {"kernel_shape": [3] * len(size), "strides": [2] * len(size), "pads": [1] * 2 * len(size)}
    node = onnx.helper.make_node("MaxPool", ["x"], ["y", "indices"], storage_order=storage_order, **options)
    types = {"x": onnx.TensorProto.FLOAT, "y": onnx.TensorProto.FLOAT, "indices": onnx.TensorProto.INT64}
    values = {name: onnx.helper.make_tensor_value_info(name, type_, [None] * x.ndim) for name, type_ in types.items()}
    graph = onnx.helper.make_graph([node], "pool", [values["x"]], [values["y"], values["indices"]])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 12)], ir_version=7)
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    for mine, its in zip(backend_of(engine).prepare(model).run([x]), wanted, strict=True):
        np.testing.assert_array_equal(mine, its, strict=True)


# ---- the recipe of the docs ------------------------------------------------------------------------------------------

DOC = Path(__file__).parents[2] / "docs" / "onnx.md"
COLUMN_MAJOR = "test_maxpool_with_argmax_2d_precomputed_strides"  # the recipe leaves this option out


class Evaluator(base.BackendRep):
    def __init__(self, evaluator: Any) -> None:
        self.evaluator = evaluator

    def run(self, inputs: Any, **kwargs: Any) -> Any:
        return self.evaluator.run(None, dict(zip(self.evaluator.input_names, inputs, strict=False)))


@cache
def by_recipe() -> dict[str, Callable[[None], None]]:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    recipe: dict[str, Any] = {}
    exec(compile(code, str(DOC), "exec"), recipe)

    class Recipe(base.Backend):
        @classmethod
        def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> Evaluator:
            return Evaluator(recipe["evaluator"](model))

    return suite(Recipe)


@pytest.mark.parametrize("name", sorted(set(names({"Conv", "MaxPool", "AveragePool"})) - {COLUMN_MAJOR}))
def test_recipe(name: str) -> None:
    by_recipe()[name](None)
