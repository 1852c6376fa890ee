"""What public bug reports state as a property: tests of the whole kind. `test_bug_reports` says which report is where."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import reference as ref
from bug_reports import REPORTS, array
from cases import (
    AVG_POOL,
    CONV,
    CONV_TRANSPOSE,
    MAX_POOL,
    MIXED_AVG,
    MIXED_CONV,
    MIXED_MAX,
    MIXED_TRANSPOSE,
    Arrays,
    Case,
    avg_pool,
    bounds,
    conv,
    conv_transpose,
    digits,
    divisible,
    exact,
    expected,
    inputs,
    max_pool,
    normal,
)
from conftest import Backend, eps
from numpy.testing import assert_array_equal
from running import LAYOUTS, assert_array, assert_results, run, spare_jax, start, steps

import funcnn as fn

MIXED = [*MIXED_CONV, *MIXED_TRANSPOSE, *MIXED_MAX, *MIXED_AVG]
every_case = pytest.mark.parametrize("case", MIXED, ids=lambda case: f"{case.op}-{case}")
OPS = {
    "conv": lambda x, **options: fn.conv_init(x, np.ones((1, x.shape[1], *[2] * (x.ndim - 2))), **options),
    "conv_transpose": lambda x, **options: fn.conv_transpose_init(
        x, np.ones((x.shape[1], 1, *[2] * (x.ndim - 2))), **options
    ),
    "max_pool": lambda x, **options: fn.max_pool_init(x, (2,) * (x.ndim - 2), **options),
    "avg_pool": lambda x, **options: fn.avg_pool_init(x, (2,) * (x.ndim - 2), **options),
}
every_op = pytest.mark.parametrize("op", OPS)


def same_bits(results: Arrays, wanted: Arrays) -> None:
    for name, value in wanted.items():
        assert results[name].dtype == value.dtype, name
        assert results[name].tobytes() == value.tobytes(), name


# ---- windows and padding ---------------------------------------------------------------------------------------------


def axes() -> Iterator[tuple[int, int, int, int, tuple[int, int]]]:
    """(size, kernel, stride, dilation, padding) of one axis, most of them with windows that hold padding only."""
    for size, kernel, stride, dilation, lo, hi in itertools.product(
        (1, 3), (1, 2, 3), (1, 2, 5), (1, 2), (0, 2, 5), (0, 1, 4)
    ):
        if size + lo + hi >= dilation * (kernel - 1) + 1:
            yield size, kernel, stride, dilation, (lo, hi)


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_windows_wholly_in_padding(numpy_backend: Backend, ceil_mode: bool) -> None:
    """max_pool refuses them and names padding and kernel; in an average they are 0, and so is their gradient: never NaN."""
    grid = list(axes())
    refused = 0
    for first, second in zip(grid, grid[7:] + grid[:7], strict=True):
        sizes, kernel, stride, dilation, padding = zip(first, second, strict=True)
        options = {"stride": stride, "dilation": dilation, "padding": padding, "ceil_mode": ceil_mode}
        case = avg_pool("empty", (1, 1, *sizes), kernel, **options, count_include_pad=False)
        arrays = inputs(case)
        arrays["x"] = np.abs(arrays["x"]) + divisible(case)
        wanted = expected(case, arrays)
        assert_results(numpy_backend, run(case, numpy_backend, arrays, poison=False), wanted)
        largest = max_pool("empty", case.x, kernel, **options)
        if wanted["y"].all():
            assert_results(numpy_backend, run(largest, numpy_backend, arrays, poison=False), expected(largest, arrays))
            continue
        refused += 1
        with pytest.raises(
            fn.SpecError, match=r"padding must .* of kernel \d.*, got padding \(\d, \d\) with an empty window"
        ):
            start(largest, numpy_backend, arrays)
    assert 100 < refused < len(grid) - 10


# ---- memory ----------------------------------------------------------------------------------------------------------


ARRAYS = {"conv": "x weight dy", "conv_transpose": "x weight dy", "max_pool": "x dy argmax", "avg_pool": "x dy"}


@pytest.mark.parametrize(
    ("case", "name"), [pytest.param(c, name, id=f"{c.op}-{c}-{name}") for c in MIXED for name in ARRAYS[c.op].split()]
)
def test_every_order_of_axes_in_memory(numpy_backend: Backend, case: Case, name: str) -> None:
    """Each array transposed in memory in every way, alone among contiguous ones; also the residual."""
    arrays, wanted = exact(case)
    for order in itertools.permutations(range(4)):

        def transposed(a: Any, order: tuple[int, ...] = order) -> Any:
            return np.ascontiguousarray(a.transpose(order)).transpose(np.argsort(order))

        mine = {key: transposed(a) if key == name else a for key, a in arrays.items()}
        results, state = steps(case.op, mine, start(case, numpy_backend, mine))
        if name == "argmax":
            state = dataclasses.replace(state, argmax=transposed(state.argmax))
            results["dx"] = fn.max_pool_backward(mine["dy"], state)
            results["plane"] = fn.max_pool_indices(state)
        for key, value in wanted.items():
            assert_array_equal(results[key], value, err_msg=f"{key} {order}")


@pytest.mark.parametrize("case", [*CONV, *CONV_TRANSPOSE, *MAX_POOL, *AVG_POOL], ids=lambda case: f"{case.op}-{case}")
def test_no_result_reads_what_was_never_written(
    numpy_backend: Backend, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every array that NumPy gives without writing to it is full of NaN or of the largest integer."""
    for name in ("empty", "empty_like"):
        make = getattr(np, name)

        def spoilt(*args: Any, make: Callable[..., Any] = make, **kwargs: Any) -> Any:
            a = make(*args, **kwargs)
            a[...] = np.nan if a.dtype.kind in "fc" else np.iinfo(a.dtype).max if a.dtype.kind in "iu" else True
            return a

        monkeypatch.setattr(np, name, spoilt)
    arrays, wanted = exact(case)
    results, _ = steps(case.op, arrays, start(case, numpy_backend, arrays))
    monkeypatch.undo()
    for name, value in wanted.items():
        assert_array_equal(results[name], value, err_msg=name)


def widths(channels: int, rank: int) -> list[Case]:
    """Depthwise with 1 and 2 outputs a channel, dense, and pools."""
    x = (2, channels, *(5, 4)[:rank])
    kernel = (3, 2)[:rank]
    options: dict[str, Any] = {"stride": (2, 1)[:rank], "padding": ((1, 0), (0, 1))[:rank]}
    name = f"{channels} channels, rank {rank}"
    return [
        conv(name, x, (channels, 1, *kernel), groups=channels, **options),
        conv(f"{name}, multiplier", x, (2 * channels, 1, *kernel), groups=channels, **options),
        conv(f"{name}, dense", x, (3, channels, *kernel), **options),
        conv_transpose(name, x, (channels, 2, *kernel), groups=channels, **options),
        max_pool(name, x, kernel, **options),
        avg_pool(name, x, kernel, **options),
    ]


# Around the widths of vectors.
WIDTHS = [case for c in (1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33) for rank in (1, 2) for case in widths(c, rank)]


@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_channels(numpy_backend: Backend, op: str, layout: str) -> None:
    for case in WIDTHS:
        if case.op == op:
            arrays, wanted = exact(case)
            assert_results(numpy_backend, run(case, numpy_backend, arrays, layout, poison=False), wanted, layout)


@pytest.mark.parametrize("channels", [1, 47, 1025, 70000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_of_many_channels(backend: Backend, channels: int, layout: str) -> None:
    """By NumPy alone: windows that do not overlap are axes of a reshaped array."""
    spare_jax(backend, layout == "channels_last")
    arrays = {
        "x": digits(np.random.default_rng(0), (2, channels, 4, 3), scale=6),
        "dy": digits(np.random.default_rng(1), (2, channels, 2, 1), scale=6),
    }
    windows = arrays["x"].reshape(2, channels, 2, 2, 1, 3).swapaxes(3, 4).reshape(2, channels, 2, 1, 6)
    case = max_pool("channels", arrays["x"].shape, (2, 3))
    got = run(case, backend, arrays, layout)
    first = dict(zip(("y", "argmax"), (windows.max(-1), windows.argmax(-1)), strict=True))
    spread = np.arange(6) == first["argmax"][..., None]
    for name, wanted in {**first, "dx": _cells(spread * arrays["dy"][..., None])}.items():
        _same(backend, got[name], wanted, layout)
    got = run(dataclasses.replace(case, op="avg_pool"), backend, arrays, layout)
    _same(backend, got["y"], windows.mean(-1), layout)
    _same(backend, got["dx"], _cells(np.repeat(arrays["dy"][..., None] / 6, 6, -1)), layout)


def _cells(windows: Any) -> Any:
    """Windows of 2 by 3 cells, laid out as the planes that they come from."""
    n, c, rows, columns, _ = windows.shape
    return windows.reshape(n, c, rows, columns, 2, 3).swapaxes(3, 4).reshape(n, c, 2 * rows, 3 * columns)


def _same(backend: Backend, got: Any, wanted: Any, layout: str) -> None:
    got = backend.numpy(got)
    assert_array_equal(np.moveaxis(got, -1, 1) if layout == "channels_last" else got, wanted)


# ---- large numbers ---------------------------------------------------------------------------------------------------

FAR = 2**31 + 10


@pytest.mark.parametrize("shape", [(1, 1, FAR), (2, 1, FAR // 2), (1, 3, FAR // 3 + 5)], ids=str)
def test_indices_beyond_31_bits(numpy_backend: Backend, shape: tuple[int, ...]) -> None:
    """Offsets in the plane and in the tensor; few windows far apart, so that little of the zeros is ever touched."""
    x = np.zeros(shape, np.int8)
    x[..., -1] = 1
    kernel, stride = 10, shape[-1] - 10
    mine = numpy_backend.asarray(x)
    y, state = fn.max_pool(mine, fn.max_pool_init(mine, kernel, stride=stride, engine=numpy_backend.engine))
    assert_array(numpy_backend, y, np.broadcast_to([0, 1], (*shape[:2], 2)), "int8")
    assert_array(numpy_backend, state.argmax, np.broadcast_to([0, 9], (*shape[:2], 2)), "uint8")
    plane = np.broadcast_to([0, shape[-1] - 1], (*shape[:2], 2))
    planes = np.arange(math.prod(shape[:2]), dtype="int64").reshape(*shape[:2], 1) * shape[-1]
    assert_array(numpy_backend, fn.max_pool_indices(state), plane, "int64")
    assert_array(numpy_backend, fn.max_pool_indices(state, base="tensor"), plane + planes, "int64")


@pytest.fixture
def at_once() -> Iterator[None]:
    """A test that would count up to a huge number is stopped."""

    def stop(*_: Any) -> None:
        raise TimeoutError("the cost grows with an option")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**64 + 1])
@pytest.mark.parametrize("op", ["conv", "max_pool", "avg_pool"])
def test_huge_options(numpy_backend: Backend, op: str, far: int) -> None:
    """Whole numbers do not wrap: a huge step changes nothing where it is not taken, and is refused where it is."""
    window = {k: (2, 1, k, k) if op == "conv" else (k, k) for k in (1, 2)}
    for option, k, usual in (("dilation", 1, 1), ("stride", 1, 5), ("stride", 2, 5)):
        case = Case("usual", op, (2, 1, 3, 4), window[k], {"stride": 1, option: usual})
        huge = Case("huge", op, case.x, case.weight, {"stride": 1, option: far})
        arrays, wanted = exact(case)
        assert_results(numpy_backend, run(huge, numpy_backend, arrays, poison=False), wanted)
    case = Case("refused", op, (1, 1, 3, 4), window[2], {"stride": 1, "dilation": (1, far)})
    with pytest.raises(fn.SpecError, match=rf"kernel must fit .*{far + 1}.*\(3, 4\)"):
        start(case, numpy_backend, inputs(dataclasses.replace(case, options={})))


# ---- nothing in it ---------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_empty_batches(numpy_backend: Backend, case: Case, threads: int) -> None:
    """Whatever the number of threads: empty results, gradients of the parameters of exactly 0."""
    case = Case(case.name, case.op, (0, *case.x[1:]), case.weight, case.options)
    arrays = inputs(case)
    state = start(case, numpy_backend, arrays, options=fn.Options(threads=threads))
    results, _ = steps(case.op, arrays, state)
    assert_results(numpy_backend, results, expected(case, arrays))
    assert not any(np.any(results.get(name, 0)) for name in ("dweight", "dbias"))
    assert fn.out_spec(state).shape == results["y"].shape


@every_op
def test_a_spatial_axis_of_size_0_is_named(numpy_backend: Backend, op: str) -> None:
    for rank, axis in ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)):
        sizes = [5, 4, 3][:rank]
        sizes[axis] = 0
        for padding in (0, 3):
            with pytest.raises(fn.SpecError, match=rf"x must have no spatial axis of size 0, got .*\(axis {axis}\)"):
                OPS[op](np.ones((2, 1, *sizes)), padding=padding, engine=numpy_backend.engine)


# ---- bad arguments ---------------------------------------------------------------------------------------------------


def test_one_rank_for_one_kernel(numpy_backend: Backend) -> None:
    """x has two axes more than the kernel, or the message says how many it should have."""
    for rank, axes_of_x in itertools.product((1, 2, 3, 4), range(8)):
        engine = {"engine": numpy_backend.engine if rank < 4 else "auto"}  # jit has convolutions of rank 1 to 3
        x = np.ones((3, 3, 4, 5, 3, 4, 3)[:axes_of_x])
        weight, kernel = np.ones((3, 3, *[2] * rank)), (2,) * rank
        for init, second in (
            (fn.conv_init, weight),
            (fn.conv_transpose_init, weight),
            (fn.max_pool_init, kernel),
            (fn.avg_pool_init, kernel),
        ):
            if axes_of_x == rank + 2:
                assert len(fn.out_spec(init(x, second, **engine)).shape) == axes_of_x
                continue
            with pytest.raises(fn.SpecError) as caught:
                init(x, second, **engine)
            if init in (fn.max_pool_init, fn.avg_pool_init):
                pattern = rf"x must have {rank + 2} axes .*, got {axes_of_x}\b"
            elif axes_of_x > 2:
                pattern = rf"weight must have {axes_of_x} axes as x has, got "
            else:
                pattern = rf"x must have .*, got {axes_of_x} axes"
            assert re.search(pattern, str(caught.value))


def test_output_padding_is_bounded() -> None:
    """By stride or dilation, whichever is larger, of its own axis; the message names both."""
    x, weight = np.ones((1, 1, 3, 4)), np.ones((1, 1, 2, 3))
    for stride, dilation, axis in itertools.product((1, 2, 3), (1, 2, 4), (0, 1)):
        most = max(stride, dilation) - 1
        options = {"stride": [5, 5], "dilation": [5, 5]}
        options["stride"][axis], options["dilation"][axis] = stride, dilation
        options = {name: tuple(value) for name, value in options.items()}
        for extra in range(6):
            padding = (extra, 0) if axis == 0 else (0, extra)
            if extra <= most:
                small = fn.conv_transpose_init(x, weight, **options)
                state = fn.conv_transpose_init(x, weight, output_padding=padding, **options)
                grown = np.subtract(fn.out_spec(state).shape, fn.out_spec(small).shape)
                assert tuple(grown[2:]) == padding
            else:
                text = rf"output_padding must .*stride {stride}, dilation {dilation}.*got {extra}"
                with pytest.raises(fn.SpecError, match=text):
                    fn.conv_transpose_init(x, weight, output_padding=padding, **options)


def _conv(x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None = None, other: Any = None) -> Any:
    """A convolution of ones, of another x than its state was made for if given."""
    x_, w = np.ones(x), np.ones(weight)
    return fn.conv(x_ if other is None else np.ones(other), w, bias and np.ones(bias), fn.conv_init(x_, w))


def _conv_transpose(bias: tuple[int, ...]) -> Any:
    x, w = np.ones((1, 1, 2, 2)), np.ones((1, 3, 1, 1))
    return fn.conv_transpose(x, w, np.ones(bias), fn.conv_transpose_init(x, w))


def _backward(op: str) -> Any:
    x, dy = array(REPORTS["B119"].params["x"]), array(REPORTS["B119"].params["gy"])
    if op == "max_pool":
        return fn.max_pool_backward(dy, fn.max_pool(x, fn.max_pool_init(x, 2))[1])
    w = np.ones((1, 1, 2))
    return fn.conv_backward(dy, x, w, fn.conv_init(x, w, stride=2))


ONE, THREE = (1, 1, 2, 2), (3, 1, 1, 1)
# (call, its error, what the message says in this order)
MESSAGES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "B39": (lambda: _conv((2, 0, 5, 5), (3, 3, 3, 3)), fn.SpecError, ("weight", "I/groups = 0", "got (3, 3, 3, 3)")),
    "B115": (lambda: _conv(ONE, (1, 1, 3, 3)), fn.SpecError, ("kernel", "effective kernel (3, 3)", "size (2, 2)")),
    "B118 one": (lambda: _conv(ONE, THREE, (1,)), fn.StateError, ("bias", "(3,)", "got (1,)")),
    "B118 column": (lambda: _conv(ONE, THREE, (3, 1)), fn.StateError, ("bias", "(3,)", "got (3, 1)")),
    "B118 two": (lambda: _conv(ONE, THREE, (2,)), fn.StateError, ("bias", "(3,)", "got (2,)")),
    "B118 transposed": (lambda: _conv_transpose((1,)), fn.StateError, ("bias", "(3,)", "got (1,)")),
    "B118 transposed column": (lambda: _conv_transpose((3, 1)), fn.StateError, ("bias", "(3,)", "got (3, 1)")),
    "B119 max_pool": (lambda: _backward("max_pool"), fn.StateError, ("dy", "batch size 2 of state.argmax", "got 1")),
    "B119 conv": (lambda: _backward("conv"), fn.StateError, ("dy", "batch size 2 of x", "got 1")),
    "B127": (
        lambda: _conv((1, 3, 32, 32), (64, 3, 3, 3), other=(64, 3, 33, 31)),
        fn.StateError,
        ("x", "(N, 3, 32, 32)", "got (64, 3, 33, 31)", "conv_init"),
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_message_names_what_was_expected(name: str) -> None:
    call, error, says = MESSAGES[name]
    with pytest.raises(error, match=": " + ".*".join(map(re.escape, says))):
        call()


@pytest.mark.parametrize("init", ["conv_init", "conv_transpose_init", "max_pool_init", "avg_pool_init", "dropout_init"])
def test_an_unknown_option_is_not_ignored(init: str) -> None:
    x = np.ones((1, 1, 4))
    second = {"conv_init": x, "conv_transpose_init": x, "dropout_init": 0.5}.get(init, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        getattr(fn, init)(x, second, divisor_override=1)


# ---- sums ------------------------------------------------------------------------------------------------------------


def test_mean_over_a_large_window_keeps_its_gradient(backend: Backend) -> None:
    """A divisor beyond the largest float16: the gradients are subnormal numbers, not zeros."""
    if not backend.has_dtype("float16"):
        pytest.skip(f"{backend.module} has no float16")
    report = REPORTS["B57"]
    x, dy = (backend.asarray(array(report.params[name])) for name in ("x", "gy"))
    state = fn.avg_pool_init(x, tuple(report.params["kernel"]), stride=1, engine=backend.engine)
    got = backend.numpy(fn.avg_pool_backward(dy, state))
    rows, columns = (np.convolve(np.ones(2), np.ones(k)) for k in report.params["kernel"])  # windows that hold a cell
    wanted = np.outer(rows, columns) / math.prod(report.params["kernel"])
    step = float(np.spacing(np.float16(0)))
    assert got.dtype == np.float16
    assert (np.abs(got - wanted) <= step / 2 + 4 * eps("float32") * wanted).all()


def extremes(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: int) -> Any:
    """Numbers near the largest float16, and some small ones."""
    sizes = rng.choice([1.0, 300.0, 65504.0], shape)
    return (rng.choice([-1, 1], shape) * sizes).astype(dtype)


@pytest.mark.parametrize("case", [*MIXED_CONV, *MIXED_TRANSPOSE, *MIXED_AVG], ids=lambda case: f"{case.op}-{case}")
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_half_floats_overflow_in_the_result_only(backend: Backend, case: Case) -> None:
    """Every result is the rounded sum, infinite where that is too large for a float16; no finite number gives NaN."""
    if not backend.has_dtype("float16"):
        pytest.skip(f"{backend.module} has no float16")
    spare_jax(backend, case not in (MIXED_CONV[0], MIXED_TRANSPOSE[0], MIXED_AVG[0]))
    arrays = inputs(case, seed=3, dtype="float16", make=extremes)
    results = run(case, backend, arrays)
    overflows = 0
    for name, (bound, wanted) in bounds(case, arrays, "float16").items():
        got = backend.numpy(results[name])
        finite = np.isfinite(got)
        assert (np.abs(got - wanted) <= bound)[finite].all(), name
        # 65,520 is the first number that rounds to infinity.
        assert (got == np.copysign(np.inf, wanted))[~finite].all(), name
        assert (np.abs(wanted) + bound >= 65520)[~finite].all(), name
        overflows += (~finite).sum()
    assert overflows or case.op == "avg_pool"


@every_case
def test_an_image_does_not_depend_on_its_batch(numpy_backend: Backend, case: Case) -> None:
    """Within the rounding of its sum: alone, among others, among ten thousand. And no sum of positive numbers is negative."""
    many = 10007
    case = Case(case.name, case.op, (7, *case.x[1:]), case.weight, case.options)
    arrays = inputs(case, dtype="float32", make=normal)
    bound = bounds(case, arrays, "float32")
    whole = run(case, numpy_backend, arrays, poison=False)
    for images in ([3], [6, 0], [2] * (many if case.name == "mixed" or "plain" in case.name else 20)):
        mine = {name: a[images] if name in ("x", "dy") else a for name, a in arrays.items()}
        part = run(
            Case(case.name, case.op, mine["x"].shape, case.weight, case.options), numpy_backend, mine, poison=False
        )
        for name in ("y", "dx"):
            apart = np.abs(part[name] - whole[name][images])
            assert (apart <= 2 * bound[name][0][images]).all(), (name, len(images))
    positive = {name: np.abs(a) for name, a in arrays.items()}
    assert all((result >= 0).all() for result in run(case, numpy_backend, positive, poison=False).values())


REPEATED = ["B87", "B131", "B132"]


@pytest.mark.parametrize("case", [*MIXED, *(REPORTS[id].case for id in REPEATED)], ids=lambda case: f"{case.op}-{case}")
def test_calls_repeat_bit_for_bit(numpy_backend: Backend, case: Case) -> None:
    """With one state, with a new one, and with calls on other data and another batch between them."""
    arrays = REPORTS[case.name].arrays if case.name in REPEATED else inputs(case, dtype="float32", make=normal)
    larger = Case(case.name, case.op, (case.x[0] + 3, *case.x[1:]), case.weight, case.options)
    others = inputs(larger, seed=9, dtype=arrays["x"].dtype.name, make=normal)
    state = start(case, numpy_backend, arrays)
    wanted, used = steps(case.op, arrays, state)
    for i in range(20):
        if i % 8 == 4:
            steps(case.op, others, state)
        if i % 5 == 4:
            state = start(case, numpy_backend, arrays)
        results, used = steps(case.op, arrays, used if i % 2 else state)
        same_bits(results, wanted)


# ---- meaning ---------------------------------------------------------------------------------------------------------


def test_true_convolution(backend: Backend) -> None:
    """flip=True is NumPy's convolve, and in the plane the product of two of them; the docs begin with the difference."""
    rng = np.random.default_rng(0)
    rows, columns, a, b = (rng.integers(-4, 5, n).astype(float) for n in (9, 7, 4, 3))
    dtype = backend.widest_float

    def convolved(x: Any, weight: Any, **options: Any) -> Any:
        x, weight = (backend.asarray(v[None, None], dtype) for v in (x, weight))
        return fn.conv(x, weight, None, fn.conv_init(x, weight, engine=backend.engine, **options))[0]

    for padding in ("full",) if backend is Backend.JAX else ("full", "same_lower", "valid"):
        mode = padding.removesuffix("_lower")
        one, two = np.convolve(rows, a, mode), np.convolve(columns, b, mode)
        assert_array(backend, convolved(rows, a, padding=padding, flip=True), one[None, None], dtype)
        plane = convolved(np.outer(rows, columns), np.outer(a, b), padding=padding, flip=True)
        assert_array(backend, plane, np.outer(one, two)[None, None], dtype)
        correlated = np.convolve(rows, a[::-1], mode)
        assert_array(backend, convolved(rows, a, padding=padding), correlated[None, None], dtype)
    first, _, rest = str(fn.conv.__doc__).partition("\n")
    assert "cross-correlation" in first
    assert "flip=True" in rest


@pytest.mark.parametrize(
    "case",
    [case for case in (*CONV, *CONV_TRANSPOSE, *MAX_POOL, *AVG_POOL) if len(case.kernel) > 1],
    ids=lambda case: f"{case.op}-{case}",
)
def test_swapped_axes_of_everything_swap_the_result(numpy_backend: Backend, case: Case) -> None:
    """Height is treated as width is: no axis takes a number of another one."""
    rank = len(case.kernel)
    order = (*range(1, rank), 0)

    def moved(a: Any) -> Any:
        return a.transpose(*range(a.ndim - rank), *(a.ndim - rank + i for i in order)) if a.ndim > rank else a

    def reordered(value: Any) -> Any:
        return tuple(value[i] for i in order) if isinstance(value, tuple) else value

    options = {name: reordered(value) for name, value in case.options.items()}
    lead = len(case.weight) - rank
    weight = (*case.weight[:lead], *reordered(case.kernel))
    swapped = Case(case.name, case.op, (*case.x[:2], *reordered(case.x[2:])), weight, options)
    arrays = inputs(case)
    cells = np.random.default_rng(0).permutation(math.prod(case.x)).reshape(case.x) * divisible(case)
    arrays["x"] = cells.astype(float)  # without ties, whose winner depends on the order of the axes
    wanted = run(case, numpy_backend, arrays, poison=False)
    results = run(swapped, numpy_backend, {name: moved(a) for name, a in arrays.items()}, poison=False)
    for name in ("y", "dx", "dweight", "dbias"):
        if name in wanted:
            assert_array_equal(results[name], moved(wanted[name]), err_msg=name)


def test_backward_scatters_by_the_argmax_alone(backend: Backend) -> None:
    """Whatever x was: windows that chose one cell add up there."""
    values = np.zeros((1, 1, 3))
    x = backend.asarray(values, backend.widest_float)
    _, state = fn.max_pool(x, fn.max_pool_init(x, 2, stride=1, engine=backend.engine))
    state = dataclasses.replace(state, argmax=backend.asarray([[[1, 0]]], "uint8"))
    assert_array(backend, fn.max_pool_indices(state), REPORTS["B30"].params["argmax"], backend.widest_int)
    dy = backend.asarray(array(REPORTS["B30"].params["gy"]), backend.widest_float)
    assert_array(
        backend, fn.max_pool_backward(dy, state), [[REPORTS["B30"].expected["gx"][0][0][:3]]], backend.widest_float
    )
    for case in MIXED_MAX[:1] if backend is Backend.JAX else MIXED_MAX:
        argmax = expected(case, inputs(case, seed=7))["argmax"]
        dy = exact(case)[0]["dy"]
        state = start(case, backend, {"x": backend.asarray(np.zeros(case.x), backend.widest_float)})
        state = dataclasses.replace(state, argmax=backend.asarray(argmax, "uint8"))
        wanted = ref.max_pool_backward(dy, argmax, case.x[2:], case.kernel, **case.options)
        got = fn.max_pool_backward(backend.asarray(dy, backend.widest_float), state)
        assert_array(backend, got, wanted, backend.widest_float)


# ---- plans -----------------------------------------------------------------------------------------------------------

CHANGES: dict[str, list[dict[str, Any]]] = {
    "conv": [{"stride": (2, 1)}, {"padding": ((0, 1), (2, 0))}, {"padding": "full"}, {"dilation": (1, 2)}, {"flip": True}],
    "conv_transpose": [{"stride": (2, 1)}, {"padding": ((0, 1), (1, 0))}, {"dilation": (1, 2)}, {"flip": True},
                       {"stride": (2, 1), "output_padding": (1, 0)}],
    "max_pool": [{"stride": (1, 2)}, {"padding": ((0, 1), (1, 0))}, {"dilation": (1, 2)}, {"ceil_mode": True}],
    "avg_pool": [{"stride": (1, 2)}, {"padding": ((0, 1), (1, 0))}, {"dilation": (1, 2)}, {"ceil_mode": True},
                 {"padding": 1, "count_include_pad": False}, {"padding": 1, "count_include_pad": True}],
}  # fmt: skip


@pytest.mark.parametrize("op", CHANGES)
def test_plans_do_not_mix(numpy_backend: Backend, op: str) -> None:
    """Calls that differ in one thing each, by turns, with old and new states: options, dtype, sizes, memory order."""
    weight = {"conv": (2, 3, 3, 2), "conv_transpose": (3, 2, 3, 2)}.get(op, (3, 2))
    case = Case("plain", op, (2, 3, 6, 7), weight)
    cases = [Case(str(change), op, case.x, weight, change) for change in CHANGES[op]]
    cases += [dataclasses.replace(case, x=x) for x in ((2, 3, 7, 6), (1, 3, 6, 7))]
    jobs = [(one, dtype, {}) for one in (case, *cases) for dtype in ("float64", "float32", "float16")]
    jobs.append((case, "float64", {"options": fn.Options(deterministic=False)}))
    calls = []
    for one, dtype, more in jobs:
        arrays = {name: a.astype(dtype) for name, a in inputs(dataclasses.replace(one, op=op)).items()}
        for order in "CF":
            mine = {name: np.asarray(a, order=order) for name, a in arrays.items()}
            calls.append((one, mine, more, start(one, numpy_backend, mine, **more), expected(one, arrays)))
    rng = np.random.default_rng(0)
    for _ in range(2):
        for i in rng.permutation(len(calls)):
            one, mine, more, state, wanted = calls[i]
            for used in (state, start(one, numpy_backend, mine, **more)):
                results, _ = steps(op, mine, used)
                for name, value in wanted.items():
                    assert_array_equal(results[name], value, err_msg=f"{one} {name}")
                assert results["y"].dtype == mine["x"].dtype


# ---- chunked arrays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 5, 11])
@pytest.mark.parametrize("id", ["B149", "B150"])
def test_chunks_of_dask(id: str, chunk: int) -> None:
    """Chunks smaller than a window or not: values of the whole array, in the shape that was declared."""
    dask = pytest.importorskip("dask.array")
    report = REPORTS[id]
    arrays = {name: dask.from_array(a, chunks=chunk) for name, a in report.arrays.items()}
    results, _ = steps(report.case.op, arrays, start(report.case, Backend.NUMPY_XP, arrays), differentiable=False)
    for name, wanted in expected(report.case, report.arrays).items():
        if name in results:
            got = results[name].compute()
            assert got.shape == results[name].shape
            assert_array_equal(got, wanted)
