"""Op states: pytrees of three libraries, transformations of JAX, pickles, copies, text, plans."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from typing import Any

import array_api_strict
import jax  # before the first init, so that it registers the states
import jax.numpy as jnp
import numpy as np
import optree
import pytest
from conftest import Backend, need

import funcnn as fn
from funcnn import _engines

X = np.asarray(np.random.default_rng(0).integers(-5, 6, (2, 3, 6, 4)), np.float32)
WEIGHT = np.asarray(np.random.default_rng(1).integers(-5, 6, (4, 3, 3, 2)), np.float32)


def states(x: Any = X, weight: Any = WEIGHT, **options: Any) -> dict[str, Any]:
    """One fresh state of every op."""
    return {
        "conv": fn.conv_init(x, weight, stride=(2, 1), **options),
        "conv_transpose": fn.conv_transpose_init(x, weight[:3, ...], padding=1, **options),
        "max_pool": fn.max_pool_init(x, (3, 2), stride=1, **options),
        "avg_pool": fn.avg_pool_init(x, (3, 2), stride=1, **options),
        "dropout": fn.dropout_init(x, 0.5, seed=3, **options),
    }


def used(x: Any = X, weight: Any = WEIGHT) -> dict[str, Any]:
    """One state of every op after a training forward."""
    fresh = states(x, weight)
    return {
        "conv": fn.conv(x, weight, None, fresh["conv"])[1],
        "conv_transpose": fn.conv_transpose(x, weight[:3, ...], None, fresh["conv_transpose"])[1],
        "max_pool": fn.max_pool(x, fresh["max_pool"])[1],
        "avg_pool": fn.avg_pool(x, fresh["avg_pool"])[1],
        "dropout": fn.dropout(x, fresh["dropout"])[1],
    }


OPS = list(states())


# ---- trees -----------------------------------------------------------------------------------------------------------


def structures(tree: Any) -> list[Any]:
    """The structure of a tree in each library that is there."""

    found = [optree.tree_structure(tree, namespace="funcnn"), jax.tree.structure(tree)]
    if "torch" in sys.modules:
        import torch.utils._pytree as torch_tree

        found.append(torch_tree.tree_structure(tree))
    return found


@pytest.mark.parametrize("op", OPS)
def test_structure_depends_on_neither_batch_nor_residuals(op: str) -> None:
    fresh = structures(states()[op])
    assert fresh == structures(states(X[:1])[op]) == structures(used()[op]) == structures(fn.clear(used()[op]))


def test_different_options_have_different_structures() -> None:
    a, b = fn.max_pool_init(X, 2), fn.max_pool_init(X, 2, padding=1)
    for one, other in zip(structures(a), structures(b), strict=True):
        assert one != other


@pytest.mark.parametrize("op", OPS)
def test_trees_round_trip(op: str) -> None:

    state = used()[op]
    leaves, structure = optree.tree_flatten(state, namespace="funcnn")
    for again in (optree.tree_unflatten(structure, leaves), jax.tree.unflatten(jax.tree.structure(state), leaves)):
        assert type(again) is type(state)
        assert again.plan is state.plan
        for name in state.leaves:
            assert getattr(again, name) is getattr(state, name)


@pytest.mark.parametrize("op", OPS)
def test_torch_tree_depends_on_neither_batch_nor_residuals(op: str) -> None:
    need(Backend.TORCH)
    fresh = structures(states()[op])
    assert len(fresh) == 3
    assert fresh == structures(states(X[:1])[op]) == structures(used()[op]) == structures(fn.clear(used()[op]))


def test_torch_tree() -> None:
    need(Backend.TORCH)
    import torch.utils._pytree as torch_tree

    state = used()["max_pool"]
    leaves, structure = torch_tree.tree_flatten(state)
    assert len(leaves) == 1
    assert leaves[0] is state.argmax
    assert torch_tree.tree_unflatten(leaves, structure).plan == state.plan


def test_optree_without_the_namespace_sees_one_leaf() -> None:
    assert optree.tree_leaves(states()["conv"]) != optree.tree_leaves(states()["conv"], namespace="funcnn")


def test_paths_are_readable() -> None:

    (path, _), *_ = jax.tree_util.tree_flatten_with_path(used()["max_pool"])[0]
    assert jax.tree_util.keystr(path) == ".argmax"


FRESH = "import numpy as np, funcnn as fn; s = fn.max_pool_init(np.ones((1, 1, 4, 4)), 2)"
COUNT = {
    "optree": "import optree; assert len(optree.tree_leaves(s, namespace='funcnn')) == 1; "
    "assert optree.tree_leaves(s, namespace='funcnn')[0].size == 0",
    "jax": "import jax; assert jax.tree.leaves(s)[0].size == 0",
    "torch": "import torch.utils._pytree as p; assert p.tree_leaves(s)[0].size == 0",
}


@pytest.mark.parametrize("library", ["optree", "jax", pytest.param("torch", id="torch")])
@pytest.mark.parametrize("order", ["before", "between", "after", "next init", "unpickled", "unpickled after both"])
def test_registration_in_every_import_order(library: str, order: str) -> None:
    if library == "torch":
        need(Backend.TORCH)
    check, pickled = COUNT[library], pickle.dumps(states()["max_pool"])
    code = {
        "before": f"import {library}; {FRESH}; {check}",
        "between": f"import numpy as np, funcnn as fn, {library}; {FRESH}; {check}",
        "after": f"{FRESH}; import {library}; fn.register_pytrees(); fn.register_pytrees(); {check}",
        "next init": f"{FRESH}; import {library}; fn.avg_pool_init(np.ones((1, 1, 4)), 2); {check}",
        "unpickled": f"import {library}, pickle; s = pickle.loads({pickled!r}); {check}",
        "unpickled after both": f"import funcnn, {library}, pickle; s = pickle.loads({pickled!r}); {check}",
    }[order]
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- transformations of JAX --------------------------------------------------------------------------------------------


def test_jit_does_not_retrace_from_call_to_call() -> None:

    x, traces = jnp.asarray(X), 0

    def forward(x: Any, state: Any) -> Any:
        nonlocal traces
        traces += 1
        y, state = fn.max_pool(x, state)
        return fn.max_pool_backward(y, state), fn.clear(state)

    jitted = jax.jit(forward)
    state = fn.max_pool_init(x, 2)
    for _ in range(3):
        dx, state = jitted(x, state)
    jitted(x, fn.max_pool_init(x[:1], 2))  # another batch at init: the same structure
    assert traces == 1
    np.testing.assert_array_equal(dx, forward(x, fn.max_pool_init(x, 2))[0])


def test_dropout_step_goes_on_under_jit() -> None:

    x = jnp.asarray(X)
    jitted = jax.jit(fn.dropout)
    state, eager = fn.dropout_init(x, 0.5, seed=3), fn.dropout_init(x, 0.5, seed=3)
    state = dataclasses.replace(state, mask=jnp.zeros(x.shape, bool))
    for _ in range(3):
        y, state = jitted(x, state)
        wanted, eager = fn.dropout(x, eager)
        np.testing.assert_array_equal(y, wanted)
    assert int(state.step) == 3


def test_grad_with_a_state_as_argument() -> None:

    x, weight = jnp.asarray(X), jnp.asarray(WEIGHT)
    state = fn.conv_init(x, weight)

    def loss(weight: Any, state: Any) -> Any:
        y, _ = fn.conv(x, weight, None, state)
        return jnp.sum(y * y)

    y, _ = fn.conv(x, weight, None, state)
    _, dweight, _ = fn.conv_backward(2 * y, x, weight, state, wrt="weight")
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(weight, state), dweight, rtol=1e-6)


def test_vmap_over_x_and_over_a_used_state() -> None:

    xs = jnp.asarray(np.random.default_rng(2).standard_normal((5, *X.shape)), jnp.float32)
    state = fn.max_pool_init(xs[0], 2)
    ys, many = jax.vmap(fn.max_pool, in_axes=(0, None))(xs, state)
    dxs = jax.vmap(fn.max_pool_backward)(ys, many)
    for i, x in enumerate(xs):
        y, one = fn.max_pool(x, state)
        np.testing.assert_array_equal(ys[i], y)
        np.testing.assert_array_equal(many.argmax[i], one.argmax)
        np.testing.assert_array_equal(dxs[i], fn.max_pool_backward(y, one))


def test_scan_and_cond_carry_a_cleared_state() -> None:

    xs = jnp.asarray(np.random.default_rng(2).standard_normal((4, *X.shape)), jnp.float32)
    start = (fn.max_pool_init(xs[0][:1], 1), fn.dropout_init(xs[0], 0.5, seed=1))

    def body(carry: Any, x: Any) -> Any:
        pool, drop = carry
        y, pool = fn.max_pool(x, pool)
        y, drop = fn.dropout(y, drop)
        return fn.clear((pool, drop)), y

    (_, drop), ys = jax.lax.scan(body, start, xs)
    assert int(drop.step) == 4
    state = start
    for x, y in zip(xs, ys, strict=True):
        state, wanted = body(state, x)
        np.testing.assert_array_equal(y, wanted)
    branch = jax.lax.cond(True, lambda s: body(s, xs[0])[0], lambda s: s, start)
    assert int(branch[1].step) == 1


JX, JW = jnp.asarray(X), jnp.asarray(WEIGHT)


def there_and_back(op: str, x: Any, state: Any) -> tuple[Any, Any]:
    """(y, gradients) of a forward and the backward of y, and the state between them."""
    second = {"conv": (JW,), "conv_transpose": (JW[:3, ...],)}.get(op, ())
    none = (None,) if second else ()
    y, state = getattr(fn, op)(x, *second, *none, state)
    return (y, getattr(fn, f"{op}_backward")(y, *((x,) if second else ()), *second, state)), state


def assert_trees_close(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_jit_of_there_and_back_traces_once(op: str) -> None:
    traces = 0

    @jax.jit
    def jitted(x: Any, state: Any) -> Any:
        nonlocal traces
        traces += 1
        results, state = there_and_back(op, x, state)
        assert fn.out_spec(state, x).shape == results[0].shape
        return results, fn.clear(state)

    first = state = states(JX, JW)[op]
    for _ in range(3):
        _, state = jitted(JX, state)
    jitted(JX, states(JX[:1], JW)[op])
    jitted(JX, copy.deepcopy(state))
    jitted(JX, pickle.loads(pickle.dumps(state)))
    results, _ = jitted(JX, first)
    assert traces == 1
    assert_trees_close(results, there_and_back(op, JX, first)[0])


@pytest.mark.parametrize("op", OPS)
def test_vmap_of_there_and_back(op: str) -> None:
    xs, state = jnp.stack([JX, -JX, JX + 1]), states(JX, JW)[op]
    results, many = jax.vmap(lambda x, s: there_and_back(op, x, s), in_axes=(0, None))(xs, state)
    for i, x in enumerate(xs):
        wanted, used_state = there_and_back(op, x, state)
        assert_trees_close(jax.tree.map(lambda leaf, i=i: leaf[i], results), wanted)
        assert_trees_close(jax.tree.map(lambda leaf, i=i: leaf[i], many), used_state)


@pytest.mark.parametrize("op", OPS)
def test_grad_agrees_with_backward(op: str) -> None:
    state = states(JX, JW)[op]

    def half_square(x: Any, state: Any) -> Any:
        return jnp.sum(there_and_back(op, x, state)[0][0] ** 2) / 2

    dx = there_and_back(op, JX, state)[0][1]
    np.testing.assert_allclose(
        jax.jit(jax.grad(half_square))(JX, state), dx[0] if isinstance(dx, tuple) else dx, rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize("op", OPS)
def test_scan_and_cond_trace_once(op: str) -> None:
    traces = 0

    def body(state: Any, x: Any) -> Any:
        nonlocal traces
        traces += 1
        results, state = there_and_back(op, x, state)
        return fn.clear(state), results

    @jax.jit
    def run(go: Any, state: Any, xs: Any) -> Any:
        state, results = jax.lax.scan(body, state, xs)
        return jax.lax.cond(go, lambda s: body(s, xs[0])[0], lambda s: s, state), results

    xs = jnp.stack([JX, -JX])
    start = states(JX, JW)[op]
    state, results = run(True, start, xs)
    before = traces
    run(False, run(True, state, xs)[0], xs)
    run(True, states(JX[:1], JW)[op], xs)
    assert traces == before
    for i, x in enumerate(xs):
        wanted, start = there_and_back(op, x, start)
        assert_trees_close(jax.tree.map(lambda leaf, i=i: leaf[i], results), wanted)


# ---- values ----------------------------------------------------------------------------------------------------------


def test_clear_drops_residuals_and_keeps_the_step() -> None:
    Pair = collections.namedtuple("Pair", "a b")
    tree = {"net": [used()["max_pool"], (used()["dropout"],)], "pair": Pair(used()["conv"], 7)}
    cleared = fn.clear(tree)
    assert type(cleared["pair"]) is Pair
    assert cleared["pair"].b == 7
    assert optree.tree_structure(cleared, namespace="funcnn") == optree.tree_structure(tree, namespace="funcnn")
    assert cleared["net"][0].argmax.size == 0
    assert cleared["net"][0].argmax.base is None  # a slice would keep the memory
    drop = cleared["net"][1][0]
    assert drop.mask.size == 0
    assert int(drop.step) == 1
    assert tree["net"][0].argmax.size > 0
    np.testing.assert_array_equal(fn.dropout(X, drop)[0], fn.dropout(X, tree["net"][1][0])[0])


def test_clear_keeps_every_kind_of_container() -> None:
    state = used()["max_pool"]
    tree = collections.defaultdict(list, a=[state], b=(state, {"c": collections.OrderedDict(d=state)}))
    cleared = fn.clear(tree)
    assert type(cleared) is collections.defaultdict
    assert cleared.default_factory is list
    assert type(cleared["b"][1]["c"]) is collections.OrderedDict
    assert optree.tree_structure(cleared, namespace="funcnn") == optree.tree_structure(tree, namespace="funcnn")
    assert {leaf.size for leaf in optree.tree_leaves(cleared, namespace="funcnn")} == {0}
    assert tree["a"][0] is state
    for other in (None, 7, "text", X):
        assert fn.clear(other) is other


def test_clear_frees_memory() -> None:
    states = [used()["max_pool"], used()["dropout"]]
    kept = [weakref.ref(states[0].argmax), weakref.ref(states[1].mask)]
    assert all(ref() is not None for ref in kept)
    states = fn.clear(states)
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


@pytest.mark.parametrize("op", OPS)
def test_states_of_every_library_copy_and_print(op: str, backend: Backend) -> None:
    x, weight = backend.asarray(X), backend.asarray(WEIGHT)
    second = {"conv": (weight, None), "conv_transpose": (weight[:3, ...], None)}.get(op, ())
    _, state = getattr(fn, op)(x, *second, states(x, weight, engine=backend.engine)[op])
    size = sum(backend.numpy(getattr(state, name)).nbytes for name in state.leaves)
    assert f"residuals {size:,} B)" in repr(state)
    for again in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert again.plan is state.plan
        assert repr(again) == repr(state)
        for name in state.leaves:
            assert type(getattr(again, name)) is type(getattr(state, name))
            np.testing.assert_array_equal(backend.numpy(getattr(again, name)), backend.numpy(getattr(state, name)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_are_the_same(op: str, duplicate: Any) -> None:
    state = used()[op]
    again = duplicate(state)
    assert type(again) is type(state)
    assert again.plan is state.plan
    assert again.batch == state.batch
    for name in state.leaves:
        np.testing.assert_array_equal(getattr(again, name), getattr(state, name), strict=True)


def test_pickle_works_in_another_process() -> None:
    x = np.arange(16.0).reshape(1, 1, 4, 4)
    y, state = fn.max_pool(x, fn.max_pool_init(x, 2))
    code = (
        "import pickle, sys, numpy as np\n"
        "state, y = pickle.load(sys.stdin.buffer)\n"
        "import funcnn as fn\n"
        "assert state.plan is fn.max_pool_init(np.zeros((9, 1, 4, 4)), 2, engine=state.plan.engine).plan\n"
        "print(fn.max_pool_backward(y, state).sum())"
    )
    out = subprocess.run([sys.executable, "-c", code], input=pickle.dumps((state, y)), check=True, capture_output=True)
    assert float(out.stdout) == y.sum()


def test_pickle_of_a_missing_engine_takes_the_best_one_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(16.0).reshape(1, 1, 4, 4)
    y, state = fn.max_pool(x, fn.max_pool_init(x, 2, engine="jit"))
    data = pickle.dumps(state)
    monkeypatch.setitem(_engines._TABLE, "jit", _engines._TABLE["jit"]._replace(module="funcnn._engines.absent"))
    _engines._plans.clear()
    with pytest.warns(RuntimeWarning, match="'jit'.*using engine 'blas'"):
        again = pickle.loads(data)
    assert again.plan.engine == "blas"
    np.testing.assert_array_equal(fn.max_pool_backward(y, again), fn.max_pool_backward(y, state))
    _engines._plans.clear()


@pytest.mark.parametrize("op", OPS)
def test_text_is_one_line_with_engine_shapes_and_bytes(op: str) -> None:
    state = used()[op]
    text = repr(state)
    size = sum(getattr(state, name).nbytes for name in state.leaves)
    assert "\n" not in text
    assert text.startswith(f"{type(state).__name__}({state.plan.engine}, numpy float32, x (N, 3, 6, 4)")
    assert f"residuals {size:,} B" in text
    assert "\n" not in repr(state.plan)


def test_text_survives_what_tree_libraries_put_into_leaves() -> None:

    state = used()["dropout"]
    for filling in ("text", None, object(), 3.5):
        filled = jax.tree.map(lambda _, value=filling: value, state)
        assert repr(filled).startswith("DropoutState(")
    shapes = []
    jax.jit(lambda s: shapes.append(repr(s)))(state)
    assert "DropoutState" in shapes[0]
    assert repr(fn.MaxPoolState("plan", None)).startswith("MaxPoolState('plan'")


@pytest.mark.parametrize("op", ["max_pool", "dropout"])
def test_old_state_stays_as_it_was(op: str) -> None:
    forward, backward = getattr(fn, op), getattr(fn, f"{op}_backward")
    state = used()[op]
    before = copy.deepcopy(state)
    y, new = forward(X + 1, state)
    backward(y, state)
    backward(y, new)
    fn.clear(state)
    for name in state.leaves:
        np.testing.assert_array_equal(getattr(state, name), getattr(before, name), strict=True)


def test_states_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        states()["conv"].plan = None


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_equal_inits_share_one_plan_and_different_ones_do_not() -> None:
    assert fn.conv_init(X, WEIGHT).plan is fn.conv_init(X[:1], WEIGHT).plan
    others = [
        fn.conv_init(X, WEIGHT, stride=2),
        fn.conv_init(X, WEIGHT, flip=True),
        fn.conv_init(X, WEIGHT, engine="xp"),
        fn.conv_init(X.astype(np.float64), WEIGHT.astype(np.float64)),
        fn.conv_init(X, WEIGHT, options=fn.Options(numerics="fast")),
        fn.conv_init(X, WEIGHT, padding=((0, 1), (0, 0))),
    ]
    plans = {fn.conv_init(X, WEIGHT).plan, *(state.plan for state in others)}
    assert len(plans) == 1 + len(others)


@pytest.mark.parametrize("op", OPS)
def test_auto_and_the_engine_by_name_share_one_plan(op: str) -> None:
    auto = states()[op].plan
    assert states(engine=auto.engine)[op].plan is auto
    assert states(options=fn.Options())[op].plan is auto


def test_interned_plans_are_bounded() -> None:
    for size in range(3, 3 + _engines._MAX_PLANS + 20):
        fn.max_pool_init(fn.ArraySpec((1, 1, size), "float32"), 2)
    assert len(_engines._plans) <= _engines._MAX_PLANS


def test_plans_from_eight_threads_at_once() -> None:
    found: list[Any] = []
    barrier = threading.Barrier(8)

    def make() -> None:
        barrier.wait()
        for size in range(5, 60):
            found.append((size, fn.max_pool_init(np.ones((1, 1, size), np.float32), 3).plan))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for size in range(5, 60):
        assert len({id(plan) for s, plan in found if s == size}) == 1


def test_threads_are_read_at_init() -> None:
    state = fn.avg_pool_init(X, 2, engine="blas")
    try:
        fn.set_num_threads(1)
        assert fn.avg_pool_init(X, 2, engine="blas").plan.threads == 1
        assert fn.avg_pool_init(X, 2, engine="blas", options=fn.Options(threads=3)).plan.threads == 3
    finally:
        fn.set_num_threads(None)
    assert fn.avg_pool_init(X, 2, engine="blas").plan.threads == state.plan.threads == _engines.available_cpus()


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 64, 96, 96)).astype(np.float32)
    weight = rng.standard_normal((64, 1, 3, 3)).astype(np.float32)
    results = []
    for threads in (1, 2, 7):
        options = fn.Options(threads=threads)
        conv = fn.conv_init(x, weight, groups=64, padding=1, options=options, engine="blas")
        pool = fn.max_pool_init(x, 3, stride=2, options=options, engine="blas")
        y, pool = fn.max_pool(x, pool)
        drop = fn.dropout_init(x, 0.5, seed=1, options=options, engine="blas")
        results.append(
            [
                fn.conv(x, weight, None, conv)[0],
                *fn.conv_backward(x, x, weight, conv),
                y,
                fn.max_pool_backward(y, pool),
                fn.dropout(x, drop)[0],
            ]
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


# ---- out_spec and ArraySpec --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
@pytest.mark.parametrize("op", OPS)
def test_out_spec_is_what_comes_out(op: str, layout: str, backend: Backend) -> None:
    first = layout == "channels_first"
    x = backend.asarray(X if first else np.moveaxis(X, 1, -1).copy())
    weight = backend.asarray(WEIGHT)
    state = states(x, weight, layout=layout, engine=backend.engine)[op]
    second = {"conv": (weight, None), "conv_transpose": (weight[:3, ...], None)}.get(op, ())
    y, after = getattr(fn, op)(x, *second, state)
    for spec in (fn.out_spec(state), fn.out_spec(after), fn.out_spec(state, x)):
        assert spec.shape == tuple(y.shape)
        assert spec.dtype == y.dtype
    assert fn.out_spec(state, x[:1, ...]).shape[0] == 1
    described = fn.ArraySpec((7, *x.shape[1:]), "float32", backend.xp)
    assert fn.out_spec(state, described).shape[0] == 7


def test_out_spec_asks_for_x_where_a_tree_library_forgot_the_batch() -> None:
    state = optree.tree_map(lambda leaf: leaf, states()["max_pool"], namespace="funcnn")
    with pytest.raises(fn.StateError, match=r"out_spec: x must be given"):
        fn.out_spec(state)
    assert fn.out_spec(state, X).shape[0] == 2


def test_inits_take_specs_of_arrays(backend: Backend) -> None:
    x, weight = backend.asarray(X), backend.asarray(WEIGHT)
    spec = fn.ArraySpec(X.shape, "float32", backend.xp), fn.ArraySpec(WEIGHT.shape, "float32", backend.xp)
    made = fn.conv_init(*spec, padding="same", engine=backend.engine)
    wanted = fn.conv_init(x, weight, padding="same", engine=backend.engine)
    got = backend.numpy(fn.conv(x, weight, None, made)[0])
    np.testing.assert_array_equal(got, backend.numpy(fn.conv(x, weight, None, wanted)[0]))
    pool, _ = fn.max_pool(x, fn.max_pool_init(spec[0], 2, engine=backend.engine))
    np.testing.assert_array_equal(backend.numpy(pool), backend.numpy(fn.max_pool(x, fn.max_pool_init(x, 2))[0]))


def test_array_specs_are_values() -> None:
    a = fn.ArraySpec((2, 3), np.float32)
    assert a == fn.ArraySpec([2, 3], "float32")
    assert a == fn.ArraySpec((2, 3), np.dtype("float32"))
    assert hash(a) == hash(fn.ArraySpec((2, 3), "float32"))
    assert a != fn.ArraySpec((2, 3), "float64")
    assert a != fn.ArraySpec((2, 3), "float32", order="channels_last")
    assert a.ndim == 2
    assert a.dtype == np.float32
    assert "\n" not in repr(a)


def test_array_specs_take_dtypes_in_every_form(backend: Backend) -> None:
    wanted = fn.ArraySpec((1,), "float32", backend.xp)
    assert wanted.dtype == backend.asarray(X).dtype
    assert fn.ArraySpec((1,), backend.xp.float32, backend.xp) == wanted
    assert fn.ArraySpec((np.int64(1),), backend.asarray(X).dtype, backend.xp) == wanted
    assert wanted.xp.float32 == backend.xp.float32


def test_array_specs_copy_and_pickle(backend: Backend) -> None:
    spec = fn.ArraySpec((2, 0, 3), "float32", backend.xp, order="channels_last")
    for again in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert again == spec
        assert again.xp is spec.xp
        assert hash(again) == hash(spec)


def test_array_specs_tell_libraries_and_devices_apart() -> None:
    here, there = (array_api_strict.Device(name) for name in ("CPU_DEVICE", "device1"))
    specs = [
        fn.ArraySpec((1,), "float32"),
        fn.ArraySpec((1,), "float32", array_api_strict),
        fn.ArraySpec((1,), "float32", array_api_strict, device=here),
        fn.ArraySpec((1,), "float32", array_api_strict, device=there),
        fn.ArraySpec((1, 1), "float32"),
    ]
    assert len(set(specs)) == len(specs)
    assert specs[0] != "ArraySpec((1,), float32, numpy)"
    assert repr(specs[0]) == "ArraySpec((1,), float32, numpy)"
    assert "device1" in repr(specs[3])
    assert "device1" in repr(fn.out_spec(fn.dropout_init(specs[3], 0.5, seed=0)))
