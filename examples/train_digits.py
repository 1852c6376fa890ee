"""Train a small convolutional net on scikit-learn's 1,797 scanned digits (8 x 8 pixels), with funcnn and no framework.

    pip install -e ".[examples]" && python examples/train_digits.py

Parameters, op states and the optimizer are plain values that this file holds; the library keeps nothing.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import funcnn as fn
from funcnn import layers as L

NAMESPACES = {"numpy": "numpy", "jax": "jax.numpy", "torch": "torch", "cupy": "cupy"}
BATCH, RATE, MOMENTUM, DECAY = 64, 0.05, 0.9, 5e-4

net = L.serial(
    L.conv(32, 3, padding="same"), L.relu(),
    L.conv(32, 3, padding="same"), L.relu(), L.max_pool(2),
    L.conv(64, 3, padding="same"), L.relu(), L.max_pool(2),
    L.flatten(), L.dropout(0.3), L.linear(10),
)  # fmt: skip


class Data(NamedTuple):
    """Images (N, 1, 8, 8) in 0 .. 1 and labels, as NumPy arrays."""

    x: np.ndarray
    labels: np.ndarray


def load(seed: int) -> tuple[Data, Data]:
    """Training data and a stratified quarter held out."""
    digits = load_digits()
    x = (digits.images[:, None] / 16).astype(np.float32)
    x, x_test, labels, labels_test = train_test_split(
        x, digits.target, test_size=0.25, stratify=digits.target, random_state=seed
    )
    return Data(x, labels), Data(x_test, labels_test)


def to_numpy(array: Any) -> np.ndarray:
    """The array in main memory; CuPy copies from the GPU only where it is told to."""
    return np.asarray(array.get() if hasattr(array, "get") else array)


def step(params: Any, velocity: Any, state: Any, x: Any, labels: Any, rate: float) -> tuple[Any, ...]:
    """One step of gradient descent with momentum and weight decay: new params, velocity and state, loss, logits."""
    logits, state = net.forward(params, state, x)
    loss, dy = L.softmax_cross_entropy(logits, labels)
    _, grads = net.backward(params, state, dy)
    velocity = optree.tree_map(lambda v, g, p: MOMENTUM * v - rate * (g + DECAY * p), velocity, grads, params)
    params = optree.tree_map(lambda p, v: p + v, params, velocity)
    return params, velocity, state, loss, logits


def predict(params: Any, state: Any, x: Any) -> np.ndarray:
    """The likeliest digit of each image."""
    logits, _ = net.forward(params, state, x, train=False)
    return to_numpy(logits).argmax(axis=1)


class Run(NamedTuple):
    """What a training gives: parameters, op states, (loss, training accuracy, test accuracy) of each epoch, predictions."""

    params: Any
    state: Any
    history: list[tuple[float, float, float]]
    predicted: np.ndarray


def train(xp: Any, seed: int, epochs: int) -> Run:
    """Train one net; seed chooses the parameters, the held-out images and the order of the batches."""
    data, test = load(seed)
    rng = np.random.default_rng(seed)
    params, state, _ = net.init(seed, xp.asarray(data.x[:BATCH]))
    print(f"seed {seed}: engine {state.op[0].op.plan.engine!r}, {state.op[0].op}")
    velocity = optree.tree_map(lambda p: p * 0, params)
    history = []
    progress = tqdm(range(epochs), unit="epoch", desc=f"seed {seed}")
    for epoch in progress:
        rate = RATE * (1 + np.cos(np.pi * epoch / epochs)) / 2  # cosine decay to 0
        losses, hits = [], 0
        for rows in np.split(rng.permutation(len(data.x)), range(BATCH, len(data.x), BATCH)):
            x, labels = xp.asarray(shifted(rng, data.x[rows])), xp.asarray(data.labels[rows])
            params, velocity, state, loss, logits = step(params, velocity, state, x, labels, float(rate))
            losses.append(float(loss))
            hits += int((logits.argmax(1) == labels).sum())
        predicted = predict(params, state, xp.asarray(test.x))
        history.append((float(np.mean(losses)), hits / len(data.x), float((predicted == test.labels).mean())))
        progress.set_postfix(loss=f"{history[-1][0]:.3f}", test=f"{history[-1][2]:.3f}")
    return Run(params, state, history, predicted)


def shifted(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Each image moved by up to one pixel: the digits of other hands sit elsewhere in their 8 x 8 box."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    moved = np.empty_like(x)
    for image, (i, j) in enumerate(rng.integers(0, 3, (len(x), 2))):
        moved[image] = padded[image, :, i : i + 8, j : j + 8]
    return moved


def save(path: Path, params: Any) -> None:
    """Write the parameters to an npz file, named by their place in the tree."""
    paths, leaves, _ = optree.tree_flatten_with_path(params)
    names = ("/".join(map(str, place)) for place in paths)
    np.savez(path, **dict(zip(names, map(to_numpy, leaves), strict=True)))


def restore(path: Path, params: Any, xp: Any) -> Any:
    """Parameters of the structure of `params` with the values of a file."""
    paths, _, structure = optree.tree_flatten_with_path(params)
    with np.load(path) as file:
        return structure.unflatten(xp.asarray(file["/".join(map(str, place))]) for place in paths)


def draw(path: Path, run: Run, test: Data, seed: int) -> None:
    """One picture: learning curves, confusion matrix, first-layer kernels, the mistakes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    losses, train_accuracy, test_accuracy = np.asarray(run.history).T
    epochs = np.arange(1, len(losses) + 1)
    figure = plt.figure(figsize=(14, 9), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    curves, accuracy, confusion = top.subplots(1, 3)
    curves.plot(epochs, losses, color="tab:red")
    curves.set(title="training loss", xlabel="epoch", ylabel="cross entropy", yscale="log")
    accuracy.plot(epochs, train_accuracy, label="training (shifted, with dropout)", color="tab:gray")
    accuracy.plot(epochs, test_accuracy, label="held-out quarter", color="tab:blue")
    lowest = min(0.85, test_accuracy[-1] - 0.1)  # the first epochs would flatten the rest
    accuracy.set(
        title=f"accuracy of seed {seed}: {test_accuracy[-1]:.3f} held out", xlabel="epoch", ylim=(lowest, 1.003)
    )
    accuracy.legend(loc="lower right")
    for axes in (curves, accuracy):
        axes.xaxis.get_major_locator().set_params(integer=True)
    matrix = confusion_matrix(test.labels, run.predicted, labels=range(10))
    confusion.imshow(np.sqrt(matrix), cmap="Blues")  # the square root lets single mistakes show beside the diagonal
    for (i, j), count in np.ndenumerate(matrix):
        if count:
            confusion.text(j, i, count, ha="center", va="center", color="white" if i == j else "black", fontsize=9)
    confusion.set(title="confusion matrix", xlabel="predicted", ylabel="true", xticks=range(10), yticks=range(10))
    kernels, mistakes = bottom.subfigures(1, 2)
    images(kernels, "first-layer kernels (blue +, red -)", to_numpy(run.params[0]["weight"])[:, 0], 8, "RdBu")
    wrong = np.flatnonzero(run.predicted != test.labels)
    title = f"the mistakes: {len(wrong)} of {len(test.labels)}" + (", the first 21" if len(wrong) > 21 else "")
    labels = [f"{test.labels[i]} read as {run.predicted[i]}" for i in wrong[:21]]
    images(mistakes, title, test.x[wrong[:21], 0], 7, "gray_r", labels)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def images(figure: Any, title: str, pictures: np.ndarray, columns: int, colours: str, labels: Any = None) -> None:
    """A grid of small pictures, under one title."""
    figure.suptitle(title)
    rows = max(1, -(-len(pictures) // columns))
    for i, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.axis("off")
        if i < len(pictures):
            limit = np.abs(pictures).max()
            axes.imshow(pictures[i], cmap=colours, vmin=-limit if colours == "RdBu" else 0, vmax=limit)
            axes.set_title(labels[i] if labels else "", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--xp", choices=NAMESPACES, default="numpy", help="array library (default numpy)")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training data (default 30)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one training for each (default 0 1 2)")
    parser.add_argument("--quick", action="store_true", help="one seed and 3 epochs, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of digits.npz and digits.png")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.epochs = arguments.seeds[:1], 3

    xp = importlib.import_module(NAMESPACES[arguments.xp])  # the one line that chooses the array library
    arguments.out.mkdir(parents=True, exist_ok=True)
    accuracies = []
    for seed in arguments.seeds:
        run = train(xp, seed, arguments.epochs)
        _, test = load(seed)
        weights = arguments.out / "digits.npz"
        save(weights, run.params)
        again = predict(restore(weights, run.params, xp), fn.clear(run.state), xp.asarray(test.x))
        accuracies.append((again == test.labels).mean())
        assert accuracies[-1] == run.history[-1][2], "the saved weights must give the same accuracy"
        print(f"seed {seed}: test accuracy {accuracies[-1]:.4f}, the same from the saved weights")
    draw(arguments.out / "digits.png", run, test, seed)
    print(f"wrote {weights} and {arguments.out / 'digits.png'}")
    print(f"test accuracy: {np.mean(accuracies):.3f}")


if __name__ == "__main__":
    main()
