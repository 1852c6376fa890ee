"""funcnn on CuPy arrays, and the double of CuPy that stands for it where there is no GPU (tests/gpu).

What is asked of `cupy` here holds for CuPy itself too: with a GPU these tests run on it.
"""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import optree
import pytest
from conftest import selected_backends
from gpu import double

import funcnn as fn
from funcnn import layers as L
from funcnn._engines import _gpu

HERE = Path(__file__).parent
ROOT = HERE.parent
VIEWS = (
    "x.T",
    "x[1:]",
    "x[::-1]",
    "x.reshape(-1, 4)",
    "x[:, None]",
    "x.view(np.int32)",
    "cupy.broadcast_to(x, (5, *x.shape))",
)


@pytest.fixture
def cupy() -> Any:
    """CuPy or its double, where a backend on its arrays was selected."""
    if not any(backend.is_cupy for backend in selected_backends()):
        pytest.skip("no backend on CuPy arrays was selected")
    return importlib.import_module("cupy")


@pytest.fixture
def doubled(cupy: Any) -> Any:
    """The double alone."""
    if not cupy.__file__.startswith(str(HERE)):
        pytest.skip("about the double, and this is CuPy itself")
    return cupy


# ---- the double is like CuPy -----------------------------------------------------------------------------------------


def facts(*path: Path) -> dict[str, Any]:
    """What gpu/facts.py finds out about the `cupy` of a search path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, HERE)))}
    command = [sys.executable, "-W", "ignore", "-m", "gpu.facts"]
    result = subprocess.run(command, cwd=ROOT / "docs", env=environment, capture_output=True, text=True, check=False)
    if "No module named 'cupy'" in result.stderr:
        pytest.skip("CuPy is not installed")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def real_facts() -> dict[str, Any]:
    return facts()


@pytest.fixture(scope="module")
def double_facts() -> dict[str, Any]:
    return facts(HERE / "gpu")


@pytest.mark.parametrize("kind", ["views", "texts", "dtypes"])
def test_the_double_agrees_with_cupy(kind: str, real_facts: dict[str, Any], double_facts: dict[str, Any]) -> None:
    real, mine = real_facts[kind], double_facts[kind]
    assert str(HERE) not in real_facts["file"]
    assert str(HERE) in double_facts["file"]
    assert len(real) > {"views": 10_000, "texts": 50, "dtypes": 8}[kind]
    assert real.keys() == mine.keys()
    assert {name: (real[name], mine[name]) for name in real if real[name] != mine[name]} == {}


@pytest.mark.parametrize("kind", ["names", "cuda", "runtime", "array"])
def test_the_double_has_nothing_that_cupy_lacks(
    kind: str, real_facts: dict[str, Any], double_facts: dict[str, Any]
) -> None:
    assert len(double_facts[kind]) > 3
    assert set(double_facts[kind]) <= set(real_facts[kind])


def dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    """`cuda.Device` for `_cupy().cuda.Device`; `known` says what plain names stand for."""
    if isinstance(node, ast.Attribute):
        root = dotted(node.value, known)
        return None if root is None else f"{root}.{node.attr}".removeprefix(".")
    if ast.unparse(node) == "_cupy()":
        return ""
    module = re.fullmatch(r"importlib\.import_module\('cupy\.(.*)'\)", ast.unparse(node))
    return module[1] if module else known.get(ast.unparse(node))


def names_of_cupy(path: Path) -> set[str]:
    """Every dotted name that a source asks of CuPy, in one step or through a variable of the function."""
    found = set()
    for function in ast.parse(path.read_text()).body:
        known: dict[str, str] = {}
        assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        for node in sorted(assigned, key=lambda node: node.lineno):
            if (name := dotted(node.value, known)) is not None:
                known[ast.unparse(node.targets[0])] = name
        found |= {name for node in ast.walk(function) if (name := dotted(node, known))}
    return found


def test_cupy_has_every_name_that_the_engines_use() -> None:
    used = names_of_cupy(Path(_gpu.__file__))
    assert {"empty", "cuda.Device", "RawModule", "cuda.runtime.driverGetVersion", "cuda.Event"} <= used
    assert "_core._routines_linalg.COMPUTE_TYPE_FP32" in used
    code = (
        "import cupy, importlib, operator, sys\n"
        "importlib.import_module('cupy._core._routines_linalg')\n"
        "[operator.attrgetter(name)(cupy) for name in sys.argv[1:]]"
    )
    result = subprocess.run([sys.executable, "-c", code, *sorted(used)], capture_output=True, text=True, check=False)
    if "No module named 'cupy'" in result.stderr:
        pytest.skip("CuPy is not installed")
    assert result.returncode == 0, result.stderr


def test_the_double_of_the_narrow_module_has_its_signatures() -> None:
    spec = importlib.util.spec_from_file_location("narrow", _gpu.__file__)
    narrow = importlib.util.module_from_spec(spec)  # as it is on disk, whatever was put into the one in use
    spec.loader.exec_module(narrow)
    functions = {name: f for name, f in vars(narrow).items() if inspect.isfunction(f) and name in narrow.__all__}
    assert len(functions) > 10
    assert double.public().keys() == functions.keys()
    for name, function in functions.items():
        assert inspect.signature(double.public()[name]) == inspect.signature(function), name


# ---- what CuPy does and NumPy does not -------------------------------------------------------------------------------


def test_nothing_becomes_a_numpy_array_by_itself(cupy: Any) -> None:
    host = np.ones((2, 3), np.float32)
    x = cupy.asarray(host)
    for mix in (
        lambda: x + host,
        lambda: host * x,
        lambda: np.add(x, host),
        lambda: cupy.matmul(x, host.T),
        lambda: np.asarray(x),
        lambda: np.testing.assert_array_equal(x, host),
    ):
        with pytest.raises(TypeError):
            mix()
    with pytest.raises(ValueError, match="fill"):
        x[...] = host
    x[0] = 2
    assert host.sum() == 6
    assert type(x.get()) is np.ndarray
    assert float(x.sum()) == 9


def test_functions_of_numpy_give_arrays_of_cupy(cupy: Any) -> None:
    x = cupy.asarray(np.arange(6.0).reshape(2, 3))
    for y in (
        np.add(x, 1),
        np.float64(2) * x,
        1 - x,
        np.sum(x, axis=0),
        np.where(x > 1, x, 0),
        np.transpose(x),
        x @ x.T,
        -x,
    ):
        assert type(y) is cupy.ndarray
    assert type(x == 1) is cupy.ndarray
    x += 1
    assert x.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_there_are_no_scalars(cupy: Any) -> None:
    x = cupy.asarray(np.arange(6.0).reshape(2, 3))
    for y in (
        x.sum(),
        x[0, 1],
        x.max(),
        cupy.mean(x),
        x.argmax(),
        x[0, 1] + 1,
        cupy.asarray(3),
        cupy.all(x == x),
        next(iter(x[0])),
    ):
        assert type(y) is cupy.ndarray
        assert y.shape == ()
    assert type(x.sum().item()) is float
    assert f"{float(x.sum()):.1f}" == "15.0"


def test_results_lie_in_c_order(cupy: Any) -> None:
    x = cupy.asarray(np.ones((2, 3, 4), np.float32)).transpose(0, 2, 1)
    for y in (
        x + x,
        cupy.where(x > 0, x, 0),
        x.sum(axis=0),
        cupy.exp(x),
        cupy.take(x, cupy.asarray([1]), axis=1),
        x.copy(),
    ):
        assert y.flags.c_contiguous
    for y in (x.astype(np.float64), cupy.zeros_like(x), cupy.empty_like(x)):
        assert tuple(s // y.itemsize for s in y.strides) == tuple(s // 4 for s in x.strides)


def test_arrays_of_numpy_come_over_in_plain_orders(cupy: Any) -> None:
    host = np.arange(24.0).reshape(2, 3, 4)
    for view in (
        host,
        host.T,
        host.transpose(0, 2, 1),
        host[:, ::-1],
        host.astype(">f8"),
        np.broadcast_to(host[:1], (5, 3, 4)),
    ):
        x = cupy.asarray(view)
        np.testing.assert_array_equal(x.get(), view)
        assert x.dtype.isnative
        assert x.flags.f_contiguous == view.flags.f_contiguous
        assert x.flags.c_contiguous != view.flags.f_contiguous
    assert cupy.asarray(np.ones(2, ml_dtypes.bfloat16)).dtype.name == "bfloat16"


def test_memory_begins_at_512_bytes(cupy: Any) -> None:
    x = cupy.empty((3, 5), np.float32)
    for y in (x, x + 1, cupy.asarray(np.ones(7)), cupy.zeros(3), x.sum(axis=0), pickle.loads(pickle.dumps(x))):
        assert y.data.ptr % 512 == 0
    assert x[1, 2:].data.ptr - x.data.ptr == 28
    assert x[1].data.mem is x.data.mem


def test_copies_are_copies_and_views_are_views(cupy: Any) -> None:
    x = cupy.asarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    for text in VIEWS:
        view = eval(text, {"x": x, "cupy": cupy, "np": np})
        assert view.data.mem is x.data.mem, text
    for other in (
        x.copy(),
        copy.copy(x),
        copy.deepcopy(x),
        pickle.loads(pickle.dumps(x)),
        cupy.array(x),
        x.T.reshape(-1),
    ):
        assert other.data.mem is not x.data.mem
        assert sorted(other.ravel().tolist()) == list(range(24))
    z = cupy.asarray(np.asarray([1 + 2j, 3 - 4j]))
    z.real[...] = 7
    assert z.imag.tolist() == [2, -4]
    assert z.conj().tolist() == [7 - 2j, 7 + 4j]


def test_arithmetic_does_not_warn(cupy: Any) -> None:
    x = cupy.asarray(np.asarray([0.0, np.inf, np.nan], np.float32))
    assert np.isnan((x / x - x).get()).all()
    assert cupy.log(x).tolist()[0] == -np.inf
    (x * 1e38 * 10).astype(np.int32)


# ---- the double's own ------------------------------------------------------------------------------------------------


def test_memory_is_poisoned_before_and_after(doubled: Any) -> None:
    x = doubled.empty((2, 3), np.float32)
    assert np.isnan(x.get()).all()
    assert (doubled.empty(3, np.int8).get() == -1).all()
    x[...] = 1
    peek = x._host  # what a dangling pointer reads
    assert peek.sum() == 6
    del x
    gc.collect()
    assert np.isnan(peek).all()


def test_arrays_of_another_device_are_an_error(doubled: Any) -> None:
    here, there = doubled.cuda.Device(0), doubled.cuda.Device(1)
    with there:
        x = doubled.zeros((2, 3))
    assert x.device == there != here
    assert doubled.zeros(3).device == here
    assert x[1:].T.device == there
    with pytest.raises(ValueError, match="device"):
        x + 1
    with there:
        assert (x + 1).device == there
        with here:
            assert doubled.cuda.Device() == here
        assert doubled.cuda.Device() == there
        found = []
        thread = threading.Thread(target=lambda: found.append(doubled.cuda.Device()))
        thread.start()
        thread.join()
        assert found == [here]
    with pytest.raises(RuntimeError, match="ordinal"):
        doubled.cuda.Device(2)


def test_streams_nest(doubled: Any) -> None:
    cuda = doubled.cuda
    assert cuda.get_current_stream().ptr == 0
    with cuda.Stream() as outer:
        assert cuda.get_current_stream() is outer
        with cuda.ExternalStream(5):
            assert cuda.get_current_stream().ptr == 5
        assert cuda.get_current_stream() is outer
    assert cuda.get_current_stream().ptr == 0


def at(address: int) -> SimpleNamespace:
    """What looks like an array at an address."""
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


def test_an_address_that_is_not_in_use_is_an_error(doubled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setitem(sys.modules, "gpu.host", SimpleNamespace(launch=lambda *given: launched.append(given)))
    monkeypatch.setattr("gpu.host", sys.modules["gpu.host"], raising=False)
    x = _gpu.empty((2, 3), np.float32)
    before = double.calls.copy()
    _gpu.launch("kernel", (1,), (32,), (x, np.int32(3), x[1:], np.zeros(2)))
    assert len(launched) == 1
    assert double.calls - before == {"launch": 1}
    for address in (0, x.data.ptr - 1, x.data.ptr + x.nbytes):
        with pytest.raises(AssertionError, match="no allocation in use"):
            _gpu.launch("kernel", (1,), (32,), (at(address),))
    freed = at(x.data.ptr)
    _gpu.launch("kernel", (1,), (32,), (freed,))
    del x
    launched.clear()
    gc.collect()
    with pytest.raises(AssertionError, match="no allocation in use"):
        _gpu.launch("kernel", (1,), (32,), (freed,))
    with pytest.raises(AssertionError, match="tensor 7"):
        _gpu.execute(None, {7: freed.data.ptr}, 0)
    assert launched == []


def test_the_narrow_module_on_the_double(doubled: Any) -> None:
    x = _gpu.empty((2, 3), np.int32)
    x[...] = 2
    out = _gpu.empty((2, 2), np.int32)
    _gpu.matmul(x, x.T, out)
    assert out.tolist() == [[12, 12], [12, 12]]
    assert _gpu.device_of(x) == 0
    with _gpu.on_device(1):
        assert _gpu.device_of(_gpu.empty((1,), np.int8)) == 1
    assert _gpu.free_bytes() > 0
    assert _gpu.milliseconds(lambda: x.sum(), 3) > 0
    assert "double" in _gpu.require_cuda()


# ---- funcnn on it ----------------------------------------------------------------------------------------------------


def devices(tree: Any) -> set[int]:
    return {leaf.device.id for leaf in optree.tree_leaves(tree, namespace="funcnn")}


NET = L.serial(L.conv(4, 3), L.relu(), L.max_pool(2), L.flatten(), L.dropout(0.3), L.linear(3))


def test_what_an_init_makes_lies_on_the_device_it_is_for(doubled: Any) -> None:
    there = doubled.cuda.Device(1)
    with there:
        x = doubled.asarray(np.ones((2, 3, 8, 8), np.float32))
    for like in (x, fn.ArraySpec(x.shape, "float32", doubled, device=there)):
        assert devices(fn.dropout_init(like, 0.5, seed=1)) == {1}
        assert devices(fn.max_pool_init(like, 2)) == {1}
        params, state, _ = NET.init(0, like)
        assert devices(params) == devices(state) == {1}
    with there:
        _, state = NET.forward(params, state, x)
        _, pool = fn.max_pool(x, fn.max_pool_init(x, 2))
        _, drop = fn.dropout(x, fn.dropout_init(x, 0.5, seed=1))
    assert devices(state) == devices(fn.clear(state)) == {1}
    assert fn.max_pool_indices(pool).device == there
    assert fn.dropout(x, drop, train=False)[0].device == there
    half, _, _ = L.linear(3).init(0, fn.ArraySpec((2, 5), "float16", doubled, device=there))
    assert devices(half) == {1}


def test_the_step_of_dropout_stays_on_its_device(doubled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    there = doubled.cuda.Device(1)
    with there:
        x = doubled.zeros((2, 3))
    state = fn.dropout_init(x, 0.5, seed=1, engine="xp")
    forward = type(state.plan).forward

    def on_its_device(*given: Any) -> Any:
        with there:
            return forward(*given)

    monkeypatch.setattr(type(state.plan), "forward", on_its_device)  # as engines of their own for CuPy do it
    assert devices(fn.dropout(x, state)) == {1}


def test_array_specs_with_devices_are_values(cupy: Any) -> None:
    specs = [fn.ArraySpec((1,), "float32", cupy, device=cupy.cuda.Device(0)) for _ in range(2)]
    assert len(set(specs)) == 1
    assert specs[0] == specs[1] != fn.ArraySpec((1,), "float32", cupy)
    again = pickle.loads(pickle.dumps(specs[0]))
    assert again == specs[0]
    assert again.device == cupy.cuda.Device(0)


def test_states_of_another_device_are_refused(doubled: Any) -> None:
    x = doubled.zeros((1, 1, 4, 4))
    state = fn.max_pool_init(x, 2)
    with doubled.cuda.Device(1), pytest.raises(fn.StateError, match=r"device <CUDA Device 0>.*got <CUDA Device 1>"):
        fn.max_pool(doubled.zeros((1, 1, 4, 4)), state)


def test_numpy_arrays_do_not_mix_with_a_state_on_cupy(cupy: Any) -> None:
    x = np.ones((1, 1, 4, 4), np.float32)
    with pytest.raises(TypeError, match="must be an array of cupy"):
        fn.max_pool(x, fn.max_pool_init(cupy.asarray(x), 2))
    with pytest.raises(TypeError, match="must be an array of numpy"):
        fn.max_pool(cupy.asarray(x), fn.max_pool_init(x, 2))


def test_states_on_cupy_pickle_into_another_process(doubled: Any) -> None:
    x = doubled.asarray(np.arange(16.0).reshape(1, 1, 4, 4))
    y, pool = fn.max_pool(x, fn.max_pool_init(x, 2, engine="xp"))
    _, drop = fn.dropout(x, fn.dropout_init(x, 0.5, seed=3, engine="xp"))
    again, _ = fn.dropout(x, drop)
    code = (
        "import pickle, sys\n"
        "y, x, pool, drop = pickle.load(sys.stdin.buffer)\n"
        "import funcnn as fn\n"
        "print(fn.max_pool_backward(y, pool).sum(), fn.dropout(x, drop)[0].sum(), repr(pool))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE / "gpu", ROOT)))}
    data = pickle.dumps((y, x, pool, drop))
    out = subprocess.run([sys.executable, "-c", code], input=data, check=True, capture_output=True, env=environment)
    assert out.stdout.decode().rstrip() == f"{y.sum()} {again.sum()} {pool!r}"


def test_the_double_of_cupy_alone_is_no_gpu() -> None:
    code = (
        "import cupy, funcnn as fn\n"
        "assert fn.max_pool_init(cupy.zeros((1, 1, 4, 4)), 2).plan.engine == 'xp'\n"
        "print(fn.engines()['cudnn'])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE / "gpu", ROOT)))}
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert "available=False" in out.stdout
    assert "no NVIDIA driver" in out.stdout


def test_the_example_learns_on_cupy_as_on_numpy(cupy: Any, tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import train_digits

    run, wanted = (train_digits.train(xp, seed=0, epochs=1) for xp in (cupy, np))
    (loss, *accuracies), (wanted_loss, *wanted_accuracies) = run.history[0], wanted.history[0]
    assert loss == pytest.approx(wanted_loss, rel=0.005)
    assert accuracies == pytest.approx(wanted_accuracies, abs=0.02)
    _, test = train_digits.load(0)
    train_digits.save(tmp_path / "w.npz", run.params)
    restored = train_digits.restore(tmp_path / "w.npz", run.params, cupy)
    assert {type(leaf) for leaf in optree.tree_leaves(restored)} == {cupy.ndarray}
    again = train_digits.predict(restored, fn.clear(run.state), cupy.asarray(test.x))
    np.testing.assert_array_equal(again, run.predicted)
