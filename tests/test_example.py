"""The example: its first step is the same on NumPy and JAX, it learns, and weights survive the file."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import optree
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_digits

SCRIPT = Path(train_digits.__file__)


def first_step(xp: object) -> tuple[float, list[np.ndarray]]:
    data, _ = train_digits.load(0)
    x, labels = xp.asarray(data.x[:32]), xp.asarray(data.labels[:32].astype(np.int32))
    params, state, _ = train_digits.net.init(0, x)
    velocity = optree.tree_map(lambda p: p * 0, params)
    params, _, _, loss, _ = train_digits.step(params, velocity, state, x, labels, 0.05)
    return float(loss), [np.asarray(leaf) for leaf in optree.tree_leaves(params)]


def test_first_step_agrees_between_numpy_and_jax() -> None:
    import jax.numpy as jnp

    loss, params = first_step(np)
    jax_loss, jax_params = first_step(jnp)
    assert loss == pytest.approx(jax_loss, rel=1e-5)
    for a, b in zip(params, jax_params, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_saved_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    data, _ = train_digits.load(1)
    params, _, _ = train_digits.net.init(1, data.x[:4])
    train_digits.save(tmp_path / "w.npz", params)
    other, _, _ = train_digits.net.init(2, data.x[:4])
    again = train_digits.restore(tmp_path / "w.npz", other, np)
    assert optree.tree_structure(again) == optree.tree_structure(params)
    for a, b in zip(optree.tree_leaves(params), optree.tree_leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_split_is_stratified_and_whole() -> None:
    data, test = train_digits.load(0)
    assert len(data.x) + len(test.x) == 1797
    assert np.bincount(test.labels).min() >= 43


def test_it_learns_and_the_saved_weights_know_as_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_digits.train(np, seed=0, epochs=2)
    assert "engine 'jit'" in capsys.readouterr().out
    losses, _, accuracies = np.asarray(run.history).T
    assert losses[1] < losses[0]
    _, test = train_digits.load(0)
    train_digits.save(tmp_path / "w.npz", run.params)
    again = train_digits.predict(train_digits.restore(tmp_path / "w.npz", run.params, np), run.state, test.x)
    assert (again == test.labels).mean() == accuracies[-1]
    assert accuracies[-1] > 0.5


# The README's test command installs no matplotlib; .ci/run runs the script after it.
@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib comes with the extra `examples`")
def test_the_script_ends_with_its_accuracy_and_draws(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path)]
    root = str(SCRIPT.parent.parent)
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": root}
    )
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"test accuracy: 0\.\d{3}", result.stdout.splitlines()[-1])
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    assert (tmp_path / "digits.npz").exists()
