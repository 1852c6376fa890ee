"""Public bug reports: their exact values on every engine, and where each of them is tested."""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bug_reports import REPORTS, Report, array
from cases import Arrays, expected
from conftest import Backend, eps
from numpy.testing import assert_array_equal
from running import assert_array, run

import funcnn as fn

TESTS = Path(__file__).parents[1]
BENCHMARKS = TESTS.parent / "benchmarks"

# Where a property leaves a choice, what the design chose has exact values too.
CHOSEN: dict[str, dict[str, Any]] = {
    "B07": {"y": [[[0, 1.5, 3.5, 5, 0]]]},
    "B61": {"y": {"gen": "full", "shape": [50000, 4, 6, 6], "value": 9, "dtype": "float32"}},
    "B65": {"y": [[[400]]]},
    "B153": {"y": [[["nan"] * 101 + [0] * 700]]},
}
# Exact values that no plain call gives, and the test that has them.
APART = {
    "B05": "test_convolutions_round_down_and_pools_too_unless_told",
    "B17": "test_an_unknown_option_is_not_ignored",
    "B30": "test_backward_scatters_by_the_argmax_alone",
    "B32": "test_indices_beyond_31_bits",
    "B111": "test_dropout_of_rate_1",
    "B112": "test_dropout_obeys_the_mask",
}
# Ops that are not there yet.
LATER = ("max_unpool", "lp_pool", "lp_pool_bwd", "adaptive_avg_pool", "adaptive_max_pool")

# What is tested elsewhere: properties, of their whole kind, by file and test.
PROPERTIES = {
    "test_report_properties.py": {
        "test_windows_wholly_in_padding": "B07 B08",
        "test_backward_scatters_by_the_argmax_alone": "B30",
        "test_huge_options": "B34",
        "test_empty_batches": "B35 B38",
        "test_a_spatial_axis_of_size_0_is_named": "B38",
        "test_every_order_of_axes_in_memory": "B16 B42 B44",
        "test_one_rank_for_one_kernel": "B48",
        "test_true_convolution": "B53 B144",
        "test_mean_over_a_large_window_keeps_its_gradient": "B57",
        "test_half_floats_overflow_in_the_result_only": "B58",
        "test_an_image_does_not_depend_on_its_batch": "B60 B61",
        "test_no_result_reads_what_was_never_written": "B84",
        "test_calls_repeat_bit_for_bit": "B87 B131 B132",
        "test_any_number_of_channels": "B88 B91 B143",
        "test_output_padding_is_bounded": "B94",
        "test_the_message_names_what_was_expected": "B39 B115 B118 B119 B127",
        "test_swapped_axes_of_everything_swap_the_result": "B121",
        "test_plans_do_not_mix": "B123 B126",
        "test_chunks_of_dask": "B149 B150",
    },
    "test_avg_pool.py": {"test_a_window_without_cells_gives_0_and_its_gradient_vanishes": "B07 B08"},
    "test_conv.py": {
        "test_whole_numbers_are_exact": "B35 B39 B71 B78 B145 B152",
        "test_floats_stay_within_the_computed_bound": "B63",
        "test_half_floats_do_not_overflow_inside_the_sum": "B58",
        "test_integers_are_exact_over_their_whole_range": "B65 B66",
        "test_nan_and_infinities_stay_where_the_loops_have_them": "B153",
    },
    "test_dropout.py": {
        "test_a_mask_of_ones_own_is_obeyed": "B114",
        "test_same_state_same_mask_and_the_returned_state_the_next_one": "B114",
        "test_rate_1_gives_exact_zeros_and_rate_0_the_input": "B111",
    },
    "test_errors.py": {
        "test_an_engine_that_is_not_there_says_why": "B148",
        "test_backward_of_another_batch_than_its_forward": "B119",
        "test_backward_three_times_from_one_state": "B50",
        "test_bad_input": "B49 B115",
        "test_every_option_of_every_init": "B116",
        "test_results_stay_on_the_device": "B137",
        "test_what_is_no_array_of_the_library_is_a_type_error": "B138",
        "test_wrong_device_is_a_state_error": "B124 B137",
        "test_wrong_shape_and_dtype_are_state_errors": "B118 B127",
    },
    "test_laws.py": {
        "test_argmax_points_at_y": "B22",
        "test_backward_is_the_adjoint": "B62",
        "test_every_op_is_what_the_loops_say": "B78 B89 B92 B121",
        "test_gradients_of_max_pool_arrive_once": "B21",
        "test_groups_are_blocks": "B89 B92",
    },
    "test_max_pool.py": {
        "test_an_argmax_of_ones_own_is_obeyed": "B30",
        "test_argmax_takes_the_smallest_type_that_numbers_the_window": "B31",
        "test_no_maximum_of_complex_numbers": "B63",
        "test_the_first_nan_of_a_window_wins": "B18 B19",
        "test_where_all_are_equal_the_first_cell_of_the_input_wins": "B21",
    },
    "test_memory.py": {
        "test_any_memory_gives_the_same_results": "B16 B41 B47 B49",
        "test_eight_threads_with_mixed_batch_sizes_share_one_state": "B130 B133",
        "test_memory_mapped_arrays": "B47",
    },
    "test_spec.py": {
        "test_max_pool_refuses_a_window_exactly_where_the_oracle_finds_it_empty": "B08",
        "test_output_padding_reaches_every_output_size_that_stride_leaves": "B94",
        "test_same_gives_ceil_of_size_over_stride": "B74",
    },
    "test_state.py": {
        "test_out_spec_is_what_comes_out": "B147",
        "test_results_do_not_depend_on_the_number_of_threads": "B136",
    },
}
# Nothing to test on NumPy, JAX and torch, and why.
GPU_ONLY = {
    "B134": "streams: the engines of today launch nothing on a device",
    "B139": "workspace of cuDNN",
    "B140": "workspace of cuDNN",
    "B142": "memory of cuDNN's bfloat16 plans",
}


# ---- exact values ----------------------------------------------------------------------------------------------------


def values(report: Report) -> dict[str, Any]:
    return report.expected or CHOSEN[report.id]


def compared(key: str, value: Any, results: Arrays) -> tuple[Any, Any]:
    """A result, and what a report says about it; `results` are NumPy arrays."""
    name, _, rest = key.partition("_")
    got = results[{"argmax": "plane", "gx": "dx", "gw": "dweight", "gb": "dbias", "y": "y"}.get(name, "y")]
    if key.endswith("shape"):
        return np.asarray(got.shape), np.asarray(value)
    if key == "first_rows":
        return got[:, :, : len(value)], np.broadcast_to(value, got[:, :, : len(value)].shape)
    if key == "per_channel_constant":
        return got, np.broadcast_to(np.reshape(value, (-1, *[1] * (got.ndim - 2))), got.shape)
    wanted = _numbers(value)
    return got, wanted / int(rest.removeprefix("times_")) if rest else wanted


def _numbers(value: Any) -> np.ndarray:
    if isinstance(value, dict):
        return array(value)
    complex_ = any(isinstance(item, str) and "j" in item for item in np.asarray(value, object).flat)
    return array({"values": value, "dtype": "complex128" if complex_ else "float64"})


def assert_value(got: np.ndarray, wanted: np.ndarray, terms: int, dtype: str) -> None:
    """Equal where the wanted numbers are short binary fractions; else (a mean of numbers of one sign) each of the sums
    and products may have rounded once.
    """
    assert got.shape == wanted.shape
    finite = wanted[np.isfinite(wanted)]
    if (finite * 16 == np.round(finite * 16)).all():
        assert_array_equal(got, wanted)
    else:
        assert (np.abs(got - wanted) <= (terms + 1) * eps(dtype) * np.abs(wanted)).all()


EXACT = [
    report
    for report in REPORTS.values()
    if (report.expected or report.id in CHOSEN) and report.id not in APART and report.op not in LATER
]


def marked(report: Report) -> Any:
    return pytest.param(report, id=report.id, marks=[pytest.mark.gpu] if report.run == "gpu" else [])


@pytest.mark.parametrize("report", [marked(report) for report in EXACT])
def test_exact_values(backend: Backend, report: Report) -> None:
    arrays = report.arrays
    if report.is_view and not backend.is_numpy:
        pytest.skip(f"{backend.module}: no strides and byte orders to choose")
    for dtype in {a.dtype.name for a in arrays.values()} - {"float64", "complex128", "int64"}:
        if not backend.has_dtype(dtype):
            pytest.skip(f"{backend.module} has no {dtype}")
    results = run(report.case, backend, arrays)
    named = {name: backend.numpy(a) for name, a in results.items()}
    for key, value in values(report).items():
        got, wanted = compared(key, value, named)
        assert_value(got, wanted, report.case.taps, str(named["y"].dtype))
    y_dtype = backend.dtype_name(backend.asarray(arrays["dy"]))
    assert type(results["y"]) is backend.array_type
    assert backend.dtype_name(results["y"]) == y_dtype


@pytest.mark.parametrize("report", [r for r in EXACT if r.expected], ids=str)
def test_exact_values_of_the_oracle(report: Report) -> None:
    """The loops that the properties are measured by give what the reports say."""
    results = expected(report.case, report.arrays)
    for key, value in report.expected.items():
        assert_value(
            *compared(key, value, results),
            report.case.taps,
            "float16" if "float16" in str(report.params) else "float64",
        )


def test_convolutions_round_down_and_pools_too_unless_told(backend: Backend) -> None:
    report = REPORTS["B05"]
    kernel = report.params["kernel"]
    options = {"stride": tuple(report.params["stride"]), "padding": tuple(map(tuple, report.params["padding"]))}
    x, weight = (
        backend.asarray(np.ones((1, 1, *sizes)), backend.widest_float) for sizes in (report.params["size"], kernel)
    )

    def size(init: Any, second: Any, **more: Any) -> list[int]:
        return list(fn.out_spec(init(x, second, engine=backend.engine, **options, **more)).shape[2:])

    assert size(fn.conv_init, weight) == report.expected["floor"]
    for init in (fn.max_pool_init, fn.avg_pool_init):
        assert size(init, tuple(kernel)) == report.expected["floor"]
        assert size(init, tuple(kernel), ceil_mode=True) == report.expected["ceil"]


def dropout(report: Report, backend: Backend) -> tuple[Any, Any]:
    """x of a report, and a state with the mask of the report."""
    x, mask = array(report.params["x"]), np.asarray(report.params["mask"])
    x = backend.asarray(x, backend.widest_float)
    _, state = fn.dropout(x, fn.dropout_init(x, report.params["rate"], seed=0, engine=backend.engine))
    return x, dataclasses.replace(state, mask=backend.asarray(mask))


def test_dropout_of_rate_1(backend: Backend) -> None:
    report = REPORTS["B111"]
    x, given = dropout(report, backend)
    y, state = fn.dropout(x, fn.dropout_init(x, report.params["rate"], seed=0, engine=backend.engine))
    assert_array(backend, state.mask, report.params["mask"], "bool")
    for got in (y, fn.dropout_backward(x, state), fn.dropout_backward(x, given)):
        assert_array(backend, got, report.expected["y"], backend.widest_float)


def test_dropout_obeys_the_mask(backend: Backend) -> None:
    """The backward is the same select as the forward: of x it gives y."""
    report = REPORTS["B112"]
    x, state = dropout(report, backend)
    dy = backend.asarray(array(report.params["gy"]), backend.widest_float)
    assert_array(backend, fn.dropout_backward(x, state), report.expected["y"], backend.widest_float)
    assert_array(backend, fn.dropout_backward(dy, state), report.expected["gx"], backend.widest_float)


# ---- ops to come -----------------------------------------------------------------------------------------------------


@pytest.mark.xfail(raises=AttributeError, strict=True, reason="the op does not exist yet")
@pytest.mark.parametrize("report", [r for r in REPORTS.values() if r.op in LATER], ids=str)
def test_ops_to_come(report: Report) -> None:
    init = getattr(fn, f"{report.op.removesuffix('_bwd')}_init")
    pytest.fail(f"{init.__name__} exists: run {report} as the other reports are run, on every engine")


# ---- nothing is left out ---------------------------------------------------------------------------------------------


def by_test() -> dict[str, set[str]]:
    """'file::test' -> the reports whose property it is."""
    return {f"{file}::{test}": set(ids.split()) for file, tests in PROPERTIES.items() for test, ids in tests.items()}


@cache
def functions(file: str) -> set[str]:
    (path,) = TESTS.rglob(file)
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_report_is_accounted_for() -> None:
    """Its exact values in one test and its property in another; or in the benchmark; or, with a reason, nowhere."""
    properties = set().union(*by_test().values())
    measured = {id for id in REPORTS if f'"{id}"' in (BENCHMARKS / "rows.py").read_text()}
    later = {id for id, report in REPORTS.items() if report.op in LATER}
    exact = {report.id for report in EXACT}
    assert len(REPORTS) == 120
    for id, report in REPORTS.items():
        if id in later:
            assert id not in exact | properties | measured | APART.keys() | GPU_ONLY.keys()
            continue
        assert (id in exact) + (id in APART) == bool(report.expected or id in CHOSEN), id
        homes = (id in properties) + (id in measured) + (id in GPU_ONLY)
        assert homes == bool(report.property), id
        assert (report.run == "perf") == (id in measured), id


def test_every_test_that_is_named_exists() -> None:
    for name, ids in by_test().items():
        file, test = name.split("::")
        assert test in functions(file), name
        assert ids <= REPORTS.keys(), name
    here = functions(Path(__file__).name) | functions("test_report_properties.py")
    assert set(APART.values()) <= here
