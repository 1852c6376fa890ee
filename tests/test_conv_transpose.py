"""conv_transpose against the oracle, and as the adjoint of conv. Dtypes, NaN and `wrt` are in test_conv for both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import CONV, CONV_TRANSPOSE, Case, conv_transpose, digits, exact, inputs
from conftest import Backend, need
from running import LAYOUTS, assert_array, assert_results, run, sample, spare_jax, start

import funcnn as fn


@pytest.mark.parametrize("case", CONV_TRANSPOSE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_numbers_are_exact(backend: Backend, case: Case, layout: str) -> None:
    spare_jax(backend, case not in sample(CONV_TRANSPOSE, layout))
    arrays, wanted = exact(case)
    assert_results(backend, run(case, backend, arrays, layout), wanted, layout)


@pytest.mark.parametrize("case", CONV, ids=str)
def test_it_is_dx_of_conv_with_the_same_options(numpy_backend: Backend, case: Case) -> None:
    """output_size tells which size it was, where stride leaves several; "same" and "full" included."""
    arrays, wanted = exact(case)
    there_and_back = Case(
        case.name, "conv_transpose", wanted["y"].shape, case.weight, {**case.options, "output_size": case.x[2:]}
    )
    mine = {"x": arrays["dy"], "weight": arrays["weight"], "bias": np.zeros(case.x[1]), "dy": arrays["x"]}
    got = run(there_and_back, numpy_backend, mine)
    assert_array(numpy_backend, got["y"], wanted["dx"], "float64")
    # and its own dx is conv, its dweight that of conv
    no_bias = wanted["y"] - arrays["bias"].reshape(-1, *(1 for _ in case.kernel))
    assert_array(numpy_backend, got["dx"], no_bias, "float64")
    assert_array(numpy_backend, got["dweight"], wanted["dweight"], "float64")


@pytest.mark.parametrize("name", ["same", "same_lower"])
def test_same_is_the_adjoint_of_same_on_every_size_that_maps_back(numpy_backend: Backend, name: str) -> None:
    rng = np.random.default_rng(0)
    for size in range(1, 10):
        for kernel, stride, dilation in ((3, 2, 1), (4, 3, 1), (2, 4, 1), (3, 2, 3)):
            x, weight = digits(rng, (1, 2, size)), digits(rng, (3, 2, kernel))
            options: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": name}
            options["engine"] = numpy_backend.engine
            y, _ = fn.conv(x, weight, None, fn.conv_init(x, weight, **options))
            dy = digits(rng, y.shape)
            state = fn.conv_transpose_init(dy, weight, output_size=size, **options)
            dx, _ = fn.conv_transpose(dy, weight, None, state)
            assert (dx * x).sum() == (dy * y).sum(), (size, kernel, stride, dilation)
            full, _ = fn.conv_transpose(dy, weight, None, fn.conv_transpose_init(dy, weight, **options))
            assert full.shape[2] == y.shape[2] * stride


def test_output_padding_shows_cells_that_were_cropped(numpy_backend: Backend) -> None:
    """With cropping at the end, the extra cells have real values: they are the first of what padding cut off."""
    x, weight = digits(np.random.default_rng(0), (1, 2, 5)), digits(np.random.default_rng(1), (2, 3, 4))
    engine = numpy_backend.engine

    def y(**options: Any) -> Any:
        state = fn.conv_transpose_init(x, weight, stride=3, engine=engine, **options)
        return fn.conv_transpose(x, weight, None, state)[0]

    whole = y()
    np.testing.assert_array_equal(y(padding=((0, 3),), output_padding=2), whole[..., :-1])
    np.testing.assert_array_equal(y(output_padding=2), np.pad(whole, ((0, 0), (0, 0), (0, 2))))


@pytest.mark.parametrize("library", [Backend.TORCH], ids=["torch"])
def test_torch_itself_agrees_on_output_padding(library: Backend) -> None:
    need(library)
    import torch

    options: dict[str, Any] = {"stride": (3, 2), "padding": (1, 2), "output_padding": (2, 1), "dilation": (2, 1)}
    case = conv_transpose("torch", (2, 3, 3, 4), (3, 2, 3, 4), **options)
    arrays = inputs(case)
    x, weight, bias = (torch.asarray(arrays[name]) for name in ("x", "weight", "bias"))
    theirs = torch.nn.functional.conv_transpose2d(x, weight, bias, **options)
    assert_array(library, run(case, library, arrays)["y"], theirs.numpy(), "float64")


def test_extra_terms_of_an_integer_sum_are_counted_per_cell() -> None:
    """A transposed conv of stride s sums at most ceil(k / s) taps in a cell: 65,536 products of 8 bits, 2 strides."""
    x = np.ones((1, 4, 3), np.int8)
    fn.conv_transpose_init(x, np.ones((4, 1, 16384), np.int8), stride=2)
    with pytest.raises(fn.SpecError, match="32768 terms"):
        fn.conv_transpose_init(x, np.ones((4, 1, 16385), np.int8), stride=2)
    # With a dilation of 2 as well, all taps meet in every other cell.
    fn.conv_transpose_init(x, np.ones((4, 1, 8192), np.int8), stride=2, dilation=2)
    with pytest.raises(fn.SpecError, match="32768 terms"):
        fn.conv_transpose_init(x, np.ones((4, 1, 8193), np.int8), stride=2, dilation=2)


def test_only_terms_that_exist(numpy_backend: Backend) -> None:
    """A scatter multiplies no padding: an infinite weight whose products are cropped away is not seen."""
    x, weight = np.ones((1, 1, 2)), np.asarray([[[1.0, 2.0, np.inf]]])
    case = conv_transpose("cropped", (1, 1, 2), (1, 1, 3), padding=((0, 2),))
    state = start(case, numpy_backend, {"x": x, "weight": weight})
    y, _ = fn.conv_transpose(x, weight, None, state)
    np.testing.assert_array_equal(y, [[[1, 3]]])
