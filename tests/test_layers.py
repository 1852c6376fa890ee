"""Layers: gradients against finite differences and jax.grad, the same numbers on every library, states, losses."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
from conftest import Backend

import funcnn as fn
from funcnn import layers as L

IMAGE = (2, 4, 7, 5)
FLAT = (3, 6)

# name: (layer, shape of x). Every layer and combinator, with different numbers on each axis.
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "conv": (L.conv(6, (3, 2), stride=(2, 1), padding=((1, 0), (0, 2)), dilation=(1, 2), groups=2), IMAGE),
    "conv without bias": (L.conv(3, 2, bias=False), IMAGE),
    "conv channels last": (L.conv(3, (3, 2), layout="channels_last"), (2, 7, 5, 4)),
    "conv_transpose": (L.conv_transpose(6, (3, 2), stride=(2, 3), padding=1, output_padding=(1, 2), groups=2), IMAGE),
    "conv_transpose same": (L.conv_transpose(3, 3, stride=2, padding="same", output_size=(13, 10)), IMAGE),
    "max_pool": (L.max_pool((3, 2), stride=(2, 1), padding=1, ceil_mode=True), IMAGE),
    "avg_pool": (L.avg_pool((3, 2), stride=(2, 1), padding=1, count_include_pad=False), IMAGE),
    "global_avg_pool": (L.global_avg_pool(), IMAGE),
    "global_avg_pool channels last": (L.global_avg_pool(layout="channels_last"), (2, 7, 5, 4)),
    "linear": (L.linear(4), FLAT),
    "linear without bias": (L.linear(4, bias=False), FLAT),
    "relu": (L.relu(), IMAGE),
    "leaky_relu": (L.leaky_relu(0.2), IMAGE),
    "tanh": (L.tanh(), FLAT),
    "sigmoid": (L.sigmoid(), FLAT),
    "gelu": (L.gelu(), FLAT),
    "softmax": (L.softmax(), FLAT),
    "softmax over channels": (L.softmax(1), IMAGE),
    "dropout": (L.dropout(0.4), IMAGE),
    "flatten": (L.flatten(), IMAGE),
    "serial": (L.serial(L.conv(3, 2), L.tanh(), L.flatten(), L.linear(5)), IMAGE),
    "serial of nothing": (L.serial(), FLAT),
    "parallel sum": (L.parallel(L.conv(3, 1), L.serial(L.conv(3, 3, padding="same"), L.tanh())), IMAGE),
    "parallel concat": (L.parallel(L.conv(3, 1), L.conv(2, 3, padding="same"), L.relu(), combine="concat"), IMAGE),
    "parallel concat last": (
        L.parallel(L.conv(3, 1, layout="channels_last"), L.relu(), combine="concat", layout="channels_last"),
        (2, 7, 5, 4),
    ),
    "residual": (L.residual(L.conv(4, 3, padding="same"), L.gelu()), IMAGE),
}


def draw(shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray:
    """Distinct numbers, none within 0.01 of 0 or of another: finite differences cross no kink of relu and no tie."""
    rng = np.random.default_rng(0)
    values = (np.arange(np.prod(shape)) - np.prod(shape) / 2 + 0.5) * 0.03
    return rng.permutation(values).reshape(shape).astype(dtype)


def started(name: str, dtype: str = "float64") -> tuple[Any, Any, Any, np.ndarray]:
    layer, shape = LAYERS[name]
    x = draw(shape, dtype)
    params, state, _ = layer.init(5, x)
    return layer, params, state, x


@pytest.mark.parametrize("name", LAYERS)
def test_backward_is_the_derivative(name: str) -> None:
    layer, params, state, x = started(name)
    y, after = layer.forward(params, state, x)
    dy = np.random.default_rng(1).standard_normal(y.shape)
    dx, grads = layer.backward(params, after, dy)
    assert optree.tree_structure(grads) == optree.tree_structure(params)

    def value(params: Any, x: np.ndarray) -> float:
        return float((layer.forward(params, state, x)[0] * dy).sum())

    rng = np.random.default_rng(2)
    step = 1e-6
    leaves, structure = optree.tree_flatten((params, x))
    for number, (leaf, gradient) in enumerate(zip(leaves, optree.tree_leaves((grads, dx)), strict=True)):
        assert gradient.shape == leaf.shape
        direction = rng.standard_normal(leaf.shape)
        moved = [[*leaves[:number], leaf + sign * step * direction, *leaves[number + 1 :]] for sign in (1, -1)]
        high, low = (value(*structure.unflatten(m)) for m in moved)
        assert (high - low) / (2 * step) == pytest.approx(float((gradient * direction).sum()), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", LAYERS)
def test_backward_agrees_with_jax_grad(name: str) -> None:
    layer, shape = LAYERS[name]
    x = jnp.asarray(draw(shape, "float32"))
    params, state, _ = layer.init(5, x)

    def value(params: Any, x: Any) -> Any:
        y, _ = layer.forward(params, state, x)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    wanted = jax.jit(jax.grad(value, argnums=(1, 0)))(params, x)
    y, after = layer.forward(params, state, x)
    dy = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    for a, b in zip(jax.tree.leaves(layer.backward(params, after, dy)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_every_library_gives_numpys_numbers(name: str, backend: Backend) -> None:
    layer, params, state, x = started(name, "float32")
    mine = backend.asarray(x)
    my_params, my_state, y_spec = layer.init(5, mine)
    for a, b in zip(optree.tree_leaves(params), optree.tree_leaves(my_params), strict=True):
        np.testing.assert_array_equal(a, backend.numpy(b), strict=True)
    y, state = layer.forward(params, state, x)
    my_y, my_state = layer.forward(my_params, my_state, mine)
    assert y_spec.shape == tuple(my_y.shape)
    assert y_spec.dtype == my_y.dtype
    np.testing.assert_allclose(backend.numpy(my_y), y, rtol=1e-4, atol=1e-5)
    dx, grads = layer.backward(params, state, y)
    my_dx, my_grads = layer.backward(my_params, my_state, my_y)
    pairs = zip(optree.tree_leaves((dx, grads)), optree.tree_leaves((my_dx, my_grads)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(backend.numpy(b), a, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_structure_of_the_state_is_constant(name: str) -> None:
    layer, params, state, x = started(name)
    y, trained = layer.forward(params, state, x)
    same, untrained = layer.forward(params, trained, x, train=False)
    structure = optree.tree_structure(state, namespace="funcnn")
    for other in (trained, untrained, fn.clear(trained)):
        assert optree.tree_structure(other, namespace="funcnn") == structure
    if name != "dropout":
        np.testing.assert_array_equal(y, same)
    for leaf in optree.tree_leaves(fn.clear(trained), namespace="funcnn"):
        assert leaf.size == 0 or leaf.shape == ()


def test_train_saves_the_callers_own_array() -> None:
    layer, params, state, x = started("conv")
    assert layer.forward(params, state, x)[1].saved[0] is x
    assert layer.forward(params, state, x, train=False)[1].saved[0].size == 0


def test_states_pickle_and_stay_as_they_were() -> None:
    layer, params, state, x = started("serial")
    before = copy.deepcopy(state)
    y, after = layer.forward(params, state, x)
    again = pickle.loads(pickle.dumps(after))
    for a, b in zip(
        optree.tree_leaves(layer.backward(params, after, y)),
        optree.tree_leaves(layer.backward(params, again, y)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*(optree.tree_leaves(s, namespace="funcnn") for s in (before, state)), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_seed_and_place_decide_the_parameters() -> None:
    net = L.serial(L.conv(4, 3, padding="same"), L.conv(4, 3, padding="same"), L.dropout(0.5), L.dropout(0.5))
    x = draw((1, 4, 5, 5))
    params, state, _ = net.init(1, x)
    same, _, _ = net.init(1, fn.ArraySpec(x.shape, "float64"))
    other, _, _ = net.init(2, x)
    np.testing.assert_array_equal(params[0]["weight"], same[0]["weight"])
    assert (params[0]["weight"] != params[1]["weight"]).all()
    assert (params[0]["weight"] != other[0]["weight"]).all()
    seeds = [s.op.plan.spec.seed for s in state.op[2:]]
    assert seeds[0] != seeds[1]


def test_he_and_glorot_scales() -> None:
    x = np.zeros((1, 64, 9, 9))
    weight = L.conv(256, 3).init(0, x)[0]["weight"]
    assert weight.std() == pytest.approx(np.sqrt(2 / (64 * 9)), rel=0.02)
    assert abs(weight.mean()) < 5 * weight.std() / np.sqrt(weight.size)
    transposed = L.conv_transpose(256, 4, stride=2).init(0, x)[0]["weight"]
    assert transposed.std() == pytest.approx(np.sqrt(2 / (64 * 16 / 4)), rel=0.02)
    linear = L.linear(300).init(0, np.zeros((1, 500)))[0]["weight"]
    limit = np.sqrt(6 / 800)
    assert 0.99 * limit < abs(linear).max() <= limit
    assert linear.std() == pytest.approx(limit / np.sqrt(3), rel=0.02)


def test_bfloat16_and_complex_parameters() -> None:
    import ml_dtypes

    net = L.serial(L.conv(3, 2), L.relu(), L.flatten(), L.linear(2))
    x = draw((2, 1, 4, 4)).astype(ml_dtypes.bfloat16)
    params, state, y_spec = net.init(0, x)
    y, state = net.forward(params, state, x)
    dx, grads = net.backward(params, state, y)
    assert {a.dtype.name for a in optree.tree_leaves((params, y, dx, grads))} == {"bfloat16"}
    assert y_spec.dtype == y.dtype
    z = draw((2, 1, 4, 4)).astype(np.complex64)
    params, state, _ = L.conv(3, 2).init(0, z)
    assert params["weight"].dtype == np.complex64
    assert params["weight"].imag.std() > 0


def test_gradients_of_a_complex_linear_layer_are_adjoints() -> None:
    x, dy = (draw((3, n)) + 1j * draw((3, n))[::-1] for n in (5, 4))
    layer = L.linear(4, bias=False)
    params, state, _ = layer.init(0, x)
    y, state = layer.forward(params, state, x)
    dx, grads = layer.backward(params, state, dy)
    wanted = np.vdot(y, dy)
    np.testing.assert_allclose(np.vdot(x, dx), wanted, rtol=1e-12)
    np.testing.assert_allclose(np.vdot(params["weight"], grads["weight"]), wanted, rtol=1e-12)


# ---- activations and losses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "tanh", "sigmoid", "gelu", "softmax"])
def test_large_numbers_and_nan(name: str) -> None:
    layer = LAYERS[name][0]
    x = np.asarray([[-1e30, -1.0, 0.0, 1.0, 1e30]], np.float32)
    _, state, _ = layer.init(0, x)
    y, after = layer.forward((), state, x)
    dx, _ = layer.backward((), after, np.ones_like(x))
    assert np.isfinite(y).all()
    assert np.isfinite(dx).all()
    y, _ = layer.forward((), state, np.full_like(x, np.nan))
    assert np.isnan(y).all()


def test_relu_at_zero_and_infinity() -> None:
    x = np.asarray([[-np.inf, -0.0, 0.0, np.inf]])
    layer = L.relu()
    _, state, _ = layer.init(0, x)
    y, state = layer.forward((), state, x)
    np.testing.assert_array_equal(y, [[0, 0, 0, np.inf]])
    np.testing.assert_array_equal(layer.backward((), state, np.ones_like(x))[0], [[0, 0, 0, 1]])


def test_softmax_cross_entropy_by_hand(backend: Backend) -> None:
    logits, labels = np.asarray([[0, np.log(3)], [1000, -1000], [-1000, 1000]]), np.asarray([1, 0, 0])
    loss, dy = L.softmax_cross_entropy(backend.asarray(logits, "float32"), backend.asarray(labels, "int32"))
    assert float(loss) == pytest.approx((-np.log(0.75) + 0 + 2000) / 3, rel=1e-6)
    wanted = np.asarray([[0.25, -0.25], [0, 0], [-1, 1]]) / 3
    np.testing.assert_allclose(backend.numpy(dy), wanted, rtol=1e-6, atol=1e-7)
    assert dy.dtype == backend.asarray(logits, "float32").dtype


def test_mean_squared_error_by_hand(backend: Backend) -> None:
    y, target = np.asarray([[1, 2], [3, 4]]), np.asarray([[1, 0], [0, 4]])
    loss, dy = L.mean_squared_error(backend.asarray(y, "float32"), backend.asarray(target, "float32"))
    assert float(loss) == 13 / 4
    np.testing.assert_array_equal(backend.numpy(dy), (y - target) / 2)


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "mean_squared_error"])
def test_losses_agree_with_jax_grad(loss: str) -> None:
    logits = jnp.asarray(draw((4, 5), "float32"))
    target = jnp.asarray([0, 4, 2, 2]) if loss == "softmax_cross_entropy" else logits[::-1]
    function = getattr(L, loss)
    wanted = jax.grad(lambda y: function(y, target)[0])(logits)
    np.testing.assert_allclose(function(logits, target)[1], wanted, rtol=1e-5, atol=1e-7)


def test_losses_of_an_empty_batch() -> None:
    loss, dy = L.softmax_cross_entropy(np.zeros((0, 3), np.float32), np.zeros(0, int))
    assert float(loss) == 0
    assert dy.shape == (0, 3)
    loss, dy = L.mean_squared_error(np.zeros((0, 3)), np.zeros((0, 3)))
    assert float(loss) == 0


def test_an_empty_batch_goes_through_a_net() -> None:
    net = L.serial(L.conv(3, 3, padding="same"), L.relu(), L.max_pool(2), L.flatten(), L.dropout(0.5), L.linear(2))
    params, state, _ = net.init(0, draw((2, 1, 6, 6)))
    y, state = net.forward(params, state, np.zeros((0, 1, 6, 6)))
    dx, grads = net.backward(params, state, y)
    assert dx.shape == (0, 1, 6, 6)
    assert all((g == 0).all() for g in optree.tree_leaves(grads))


# ---- a whole net under jit ---------------------------------------------------------------------------------------------


def test_a_training_step_under_jit_is_traced_once() -> None:
    net = L.serial(
        L.conv(4, 3, padding="same"), L.relu(), L.max_pool(2),
        L.residual(L.conv(4, 3, padding="same"), L.relu()),
        L.global_avg_pool(), L.dropout(0.2), L.linear(3),
    )  # fmt: skip
    x, labels = jnp.asarray(draw((6, 1, 6, 6), "float32")), jnp.asarray([0, 1, 2, 0, 1, 2])
    params, state, _ = net.init(0, x)
    traces = 0

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        nonlocal traces
        traces += 1
        logits, state = net.forward(params, state, x)
        loss, dy = L.softmax_cross_entropy(logits, labels)
        _, grads = net.backward(params, state, dy)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), fn.clear(state), loss

    losses = []
    for _ in range(20):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert traces == 1
    assert losses[-1] < losses[0]


# ---- what comes in at the door -----------------------------------------------------------------------------------------

F32 = draw(IMAGE, "float32")


def trained(layer: Any, x: Any) -> tuple[Any, Any, Any]:
    params, state, _ = layer.init(0, x)
    y, state = layer.forward(params, state, x)
    return params, state, y


# A dy that broadcasts, has another dtype or comes from another library gave a wrong gradient without a word.
# (A serial of nothing has no layer that could know the shape of y.)
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "serial of nothing"])
def test_dy_must_be_like_y(name: str) -> None:
    layer, shape = LAYERS[name]
    params, state, y = trained(layer, draw(shape, "float32"))
    wrong = "channels" if "concat" in name else "shape"
    with pytest.raises(fn.StateError, match=rf"^\w+_backward: dy must have .*{wrong} .*, got "):
        layer.backward(params, state, y[:, :1, ...] if "last" not in name else y[..., :1])
    with pytest.raises(fn.StateError, match=r"^\w+_backward: dy must have .*dtype float32.*, got float64"):
        layer.backward(params, state, y.astype(np.float64))
    with pytest.raises(TypeError, match=r"^\w+_backward: dy must be an array of numpy .*, got jax"):
        layer.backward(params, state, jnp.asarray(y))
    with pytest.raises(TypeError, match=r"^\w+: state must be a LayerState .*, got tuple"):
        layer.forward(params, (), F32)


@pytest.mark.parametrize("name", ["relu", "softmax", "flatten", "linear", "conv", "global_avg_pool", "dropout"])
def test_x_must_be_what_init_was_given(name: str) -> None:
    layer, params, state, x = started(name, "float32")
    with pytest.raises(
        fn.StateError, match=rf"^{name.removeprefix('global_')}: x must have .*dtype float32.*, got float64"
    ):
        layer.forward(params, state, x.astype(np.float64))
    with pytest.raises(TypeError, match=r"x must be an array of numpy .*, got jax"):
        layer.forward(params, state, jnp.asarray(x))
    with pytest.raises(fn.StateError, match="x must have"):
        layer.forward(params, state, x[0])
    with pytest.raises(TypeError, match="train must be True or False, got 1"):
        layer.forward(params, state, x, train=1)


LINEAR_PARAMS = L.linear(4).init(0, draw(FLAT, "float32"))[0]

BAD_CALLS = {
    "complex activation": (
        lambda: L.gelu().init(0, F32.astype(np.complex64)), TypeError, "gelu: x must have a float dtype, got complex64",
    ),
    "complex loss": (
        lambda: L.mean_squared_error(F32.astype(np.complex64), F32.astype(np.complex64)), TypeError,
        "mean_squared_error: y must have a float dtype, got complex64",
    ),
    "logits of integers": (
        lambda: L.softmax_cross_entropy(np.ones((2, 3), int), np.ones(2, int)), TypeError,
        "softmax_cross_entropy: logits must have a float dtype, got int64",
    ),
    "conv of integers": (
        lambda: L.conv(2, 1).init(0, F32.astype(int)), TypeError, "conv: x must have a float or complex dtype, got int64",
    ),
    "negative seed": (lambda: L.conv(2, 1).init(-1, F32), fn.SpecError, "init: seed must be at least 0, got -1"),
    "slope": (lambda: L.leaky_relu("steep"), TypeError, "leaky_relu: slope must be a float, got 'steep'"),
    "no such axis": (lambda: L.softmax(4).init(0, F32), fn.SpecError, r"softmax: axis must lie in -4 \.\. 3 .*, got 4"),
    "empty axis": (lambda: L.softmax().init(0, F32[..., :0]), fn.SpecError, "softmax: x must have at least one element"),
    "axis of text": (lambda: L.softmax("channels"), TypeError, "softmax: axis must be an int, got 'channels'"),
    "flatten one axis": (lambda: L.flatten().init(0, np.ones(3)), fn.SpecError, "flatten: x must have a batch axis"),
    "params of another net": (
        lambda: L.serial(L.relu(), L.relu()).forward(((),), L.serial(L.relu(), L.relu()).init(0, F32)[1], F32),
        fn.StateError, "serial: params must have 2 items, one for each layer, got 1",
    ),
    "params that are no tuple": (
        lambda: L.serial().forward({}, L.serial().init(0, F32)[1], F32), TypeError, "serial: params must be a tuple",
    ),
    "no bias": (
        lambda: L.linear(4).forward({"weight": LINEAR_PARAMS["weight"]}, L.linear(4).init(0, draw(FLAT, "float32"))[1], F32),
        fn.StateError, r"linear: params must be a dict with weight and bias, got \['weight'\]",
    ),
    "bias that would broadcast": (
        lambda: L.linear(4).forward(
            {**LINEAR_PARAMS, "bias": np.zeros(1, np.float32)}, L.linear(4).init(0, draw(FLAT, "float32"))[1],
            draw(FLAT, "float32"),
        ),
        fn.StateError, r"linear: bias must have shape \(4,\), got \(1,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name: str) -> None:
    call, error, pattern = BAD_CALLS[name]
    with pytest.raises(error, match=f"^{pattern}") as caught:
        call()
    assert len(caught.value.args) == 1
    assert re.fullmatch(r"\w+: [\w.]+ must [^\n]*, got [^\n]+", str(caught.value))


@pytest.mark.parametrize("name", LAYERS)
def test_results_share_no_memory_with_inputs_and_are_native(name: str) -> None:
    layer, params, state, x = started(name, "float32")
    x = x.astype(">f4")
    x.flags.writeable = False
    y, state = layer.forward(params, state, x)
    dy = np.array(y)
    dx, grads = layer.backward(params, state, dy)
    assert not np.shares_memory(y, x)
    assert not np.shares_memory(dx, dy)
    for result in optree.tree_leaves((y, dx, grads)):
        assert result.dtype == np.float32
        assert result.dtype.isnative


def test_branches_of_half_floats_are_rounded_once() -> None:
    x = np.full((1, 1), 1, np.float16)
    scale = {"weight": np.full((1, 1), 2.0**-11, np.float16)}  # half of the last bit of 1
    net = L.parallel(L.serial(), L.linear(1, bias=False), L.linear(1, bias=False))
    _, state, _ = net.init(0, x)
    y, _ = net.forward(((), scale, scale), state, x)
    assert float(y[0, 0]) == 1 + 2.0**-10
