"""Reading `bug_reports.json`: faults that users reported in other libraries, as cases and arrays.

An entry has `id`, `source` (the report), `kind`, `op`, `fault`, `params`, and `expected` (exact values) or `property` (what
must hold). Shapes are funcnn's; `padding` is [[before, after], ...] or "same_upper". `gx`, `gw`, `gb`, `gy` are gradients,
`argmax` is the flat index in the plane. An array is nested lists (in the dtype of x), or {"values", "dtype"}, or
{"gen", "shape"} with "start", "value", "seed", "dtype", "set" ([index, value] pairs), each with a "view" or not. `run` is
cpu, cpu-large (over 2 GB), gpu, multi-gpu, perf or env. A float64 there is the widest float of a library here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from cases import Arrays, Case, inputs

INTEGER_SUMS = {"int8": "int32", "int32": "int64"}
OPTIONS = ("stride", "padding", "dilation", "groups", "ceil_mode", "count_include_pad", "output_padding")
NAMES = {"x": "x", "w": "weight", "b": "bias", "gy": "dy"}


@dataclass(frozen=True, eq=False)
class Report:
    """One report; `expected` is empty where the report states a property only."""

    id: str
    run: str
    op: str
    params: dict[str, Any]
    expected: dict[str, Any]
    property: str

    def __str__(self) -> str:
        return self.id

    @property
    def is_view(self) -> bool:
        """Whether it is about an array that lies in memory in an odd way, which only NumPy arrays do."""
        arrays = [value for value in self.params.values() if isinstance(value, dict)]
        return "x_view" in self.params or any("view" in a or a.get("dtype", "").startswith(("<", ">")) for a in arrays)

    @cached_property
    def case(self) -> Case:
        """The call that it is about; a parameter that nobody reads is an error."""
        unknown = self.params.keys() - {*OPTIONS, *NAMES, "kernel", "x_view"}
        assert not unknown, (self.id, unknown)
        options = {name: _option(self.params[name]) for name in OPTIONS if name in self.params}
        second = self.params.get("kernel") or array(self.params["w"]).shape
        return Case(self.id, self.op.removesuffix("_bwd"), array(self.params["x"]).shape, tuple(second), options)

    @property
    def arrays(self) -> Arrays:
        """x, weight, bias, dy; where the report has none: a bias of zeros and a dy of ones."""
        x = array(self.params["x"])
        given = {NAMES[name]: array(value, x.dtype.name) for name, value in self.params.items() if name in NAMES}
        if self.params.get("x_view") == "reverse_last":
            given["x"] = given["x"][..., ::-1]
        dtype = np.dtype(INTEGER_SUMS.get(x.dtype.name, x.dtype.name) if self.case.is_conv else x.dtype.name)
        rest = inputs(self.case, dtype=dtype, make=lambda rng, shape, dtype, scale: np.zeros(shape, dtype))
        return rest | {"dy": rest["dy"] + dtype.type(1)} | given


def array(value: Any, dtype: str = "float64") -> np.ndarray:
    """What the file says about an array, as a NumPy array; nested lists alone in the given dtype."""
    if isinstance(value, list):
        return _numbers(value, dtype)
    known = {"gen", "values", "shape", "start", "value", "seed", "dtype", "set", "view", "chunks"}
    assert not value.keys() - known, value
    made = _numbers(value["values"], value["dtype"]) if "values" in value else _generated(value)
    for index, item in value.get("set", []):
        made[tuple(index)] = float(item)
    return _viewed(made, value["view"]) if "view" in value else made


def _numbers(values: Any, dtype: str) -> np.ndarray:
    """Nested lists of numbers, some of them written as strings: "nan", "-inf", "1+2j"."""
    if np.dtype(dtype).kind == "c":
        return np.vectorize(complex, otypes=[dtype])(values)
    return np.asarray(values, dtype=object).astype(dtype)


def _generated(value: dict[str, Any]) -> np.ndarray:
    shape, dtype = value["shape"], value["dtype"]
    match value["gen"]:
        case "arange":
            return (value["start"] + np.arange(np.prod(shape))).reshape(shape).astype(dtype)
        case "normal":
            return np.random.default_rng(value["seed"]).standard_normal(shape).astype(dtype)
        case "checkerboard":
            return (np.indices(shape).sum(0) % 2).astype(dtype)
        case kind:
            return np.full(shape, {"zeros": 0, "ones": 1, "full": value.get("value")}[kind], dtype)


def _viewed(a: np.ndarray, view: str) -> np.ndarray:
    """An array of equal values that lies in memory as the view says; a transpose: that view of the array."""
    if view == "nhwc-strides":
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1)
    if view.startswith("transpose:"):
        return a.transpose([int(axis) for axis in view.removeprefix("transpose:").split(",")])
    assert view == "broadcast, read-only, all strides 0", view
    return np.broadcast_to(a[(0,) * a.ndim], a.shape)


def _option(value: Any) -> Any:
    """Lists as tuples; "same_upper" is called "same" here."""
    if isinstance(value, list):
        return tuple(_option(item) for item in value)
    return "same" if value == "same_upper" else value


REPORTS = {
    entry["id"]: Report(
        entry["id"], entry["run"], entry["op"], entry["params"], entry.get("expected", {}), entry.get("property", "")
    )
    for entry in json.loads(Path(__file__).with_name("bug_reports.json").read_text())
}
