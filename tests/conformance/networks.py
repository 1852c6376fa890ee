"""Trained networks that PyPI packages carry, real input for them, and what a user makes of their output.

`python tests/conformance/networks.py [engine]` measures the table of docs/onnx.md.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from light_models import LIGHT, light_model
from onnx_backend import FUNCNN, NUMPY, STAND_INS, Array, Node, Operator, backend_of
from packages import package, package_folder

import funcnn as fn

onnx = package("onnx")
onnxruntime = package("onnxruntime")
image = package("PIL.Image")
image_draw = package("PIL.ImageDraw")
image_font = package("PIL.ImageFont")

SILERO = package_folder("silero_vad") / "data"
RAPIDOCR = package_folder("rapidocr_onnxruntime") / "models"
FILES = {
    "silero-vad": SILERO / "silero_vad_op18_ifless.onnx",
    "rapidocr det": RAPIDOCR / "ch_PP-OCRv4_det_infer.onnx",
    "rapidocr cls": RAPIDOCR / "ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "rapidocr rec": RAPIDOCR / "ch_PP-OCRv4_rec_infer.onnx",
}

OPERATORS = FUNCNN | NUMPY | STAND_INS
Feeds = dict[str, Array]
Run = Callable[[Feeds], list[Array]]  # a prepared model: outputs for named inputs


def by_funcnn(model: Any, engine: str, operators: Mapping[str, Operator] = OPERATORS) -> Run:
    graph = backend_of(engine, operators).prepare(model).graph
    return lambda feeds: list(graph.run(feeds))


def by_onnxruntime(model: Any) -> Run:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def logits(model: Any) -> Any:
    """The model without a softmax or sigmoid at its end, after which nearly everything is 0 or 1."""
    graph = model.graph
    while graph.node[-1].op_type in ("Softmax", "Sigmoid", "Identity"):
        graph.output[0].name = graph.node.pop().input[0]
    return model


@cache
def trained(name: str) -> Any:
    """A trained model up to its logits."""
    return logits(onnx.load(FILES[name]))


# ---- how far two right answers may lie apart -------------------------------------------------------------------------

TERMS: dict[str, Callable[..., int]] = {
    "Conv": lambda x, weight, *bias: math.prod(weight.shape[1:]),
    "ConvTranspose": lambda x, weight, *bias: weight.shape[0] * math.prod(weight.shape[2:]),
    "Gemm": lambda a, b, *c: a.shape[1],
    "MatMul": lambda a, b: a.shape[-1],
}


def disturbed(seed: int) -> dict[str, Operator]:
    """The operators, with the rounding of one more right answer added to every sum of products."""
    rng = np.random.default_rng(seed)

    def rounding(op: str) -> Operator:
        def operator(node: Node, *inputs: Any) -> Any:
            y = OPERATORS[op](node, *inputs)
            size = (
                np.finfo(np.float32).eps / 2 * math.sqrt(TERMS[op](*inputs)) * np.sqrt(np.square(y, dtype=float).mean())
            )
            return (y + size * rng.standard_normal(y.shape)).astype(y.dtype)

        return operator

    return OPERATORS | {op: rounding(op) for op in TERMS}


def bound(network: Network, wanted: list[Array]) -> float:
    """Of the error relative to the largest value, for float32.

    A sum of n terms errs like a random walk, by sqrt(n) roundings of half an eps, and the next layers may enlarge that. How
    much is measured: it is four times the largest error of four answers disturbed in this way (each side has its roundings,
    and another draw may be larger than the largest of four).
    """
    runs = [network.outputs(by_funcnn(network.model, "blas", disturbed(seed))) for seed in range(4)]
    return 4 * max(error(got, wanted) for got in runs)


def error(got: list[Array], wanted: list[Array]) -> float:
    """The largest one over all outputs, each relative to the largest value of its tensor."""
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in wanted]
    errors = [np.abs(mine - its).max() / np.abs(its).max() for mine, its in zip(got, wanted, strict=True)]
    return float(np.max(errors))  # NaN if one is


# ---- silero-vad: is somebody speaking? -------------------------------------------------------------------------------

RATE = 16_000
CHUNK, CONTEXT = 512, 64  # samples of one step, and of the step before it, which come first


def clock(seconds: float) -> Array:
    return np.arange(int(seconds * RATE)) / RATE


def speech(seconds: float) -> Array:
    """Five syllables a second: a burst of hiss, then a vowel, which is the harmonics of a gliding voice under formants."""
    t = clock(seconds)
    pitch = 110 + 30 * np.sin(2 * np.pi * 0.7 * t)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    vowels = np.asarray([(730, 1090, 2440), (270, 2290, 3010), (570, 840, 2410), (530, 1840, 2480)])  # a, i, o, e
    harmonic = np.arange(1, 33)[:, None]
    formants = zip((1.0, 0.6, 0.3), vowels[(5 * t).astype(int) % 4].T, strict=True)
    gain = sum(level / (1 + ((harmonic * pitch - formant) / 80) ** 2) for level, formant in formants)
    within = 5 * t % 1
    vowel = (gain / np.sqrt(harmonic) * np.sin(harmonic * phase)).sum(0) * np.sqrt(np.sin(np.pi * within))
    hiss = np.diff(noise(seconds), prepend=0) * np.exp(-((within / 0.12) ** 2))
    return (0.3 * vowel / np.abs(vowel).max() + hiss).astype(np.float32)


def noise(seconds: float) -> Array:
    return (0.05 * np.random.default_rng(0).standard_normal(clock(seconds).size)).astype(np.float32)


def tones(seconds: float) -> Array:
    t = clock(seconds)
    return (0.2 * np.sin(2 * np.pi * 1000 * t) + 0.1 * np.sin(2 * np.pi * 1500 * t)).astype(np.float32)


def speech_probability(run: Run, sound: Array) -> list[Array]:
    """Of every chunk; and the last state of the network."""
    state, context = np.zeros((2, 1, 128), np.float32), np.zeros((1, CONTEXT), np.float32)
    probabilities = []
    for chunk in sound[: len(sound) // CHUNK * CHUNK].reshape(-1, 1, CHUNK):
        x = np.concatenate([context, chunk], axis=1)
        probability, state = run({"input": x, "sr": np.asarray(RATE), "state": state})
        probabilities.append(probability.ravel())
        context = x[:, -CONTEXT:]
    return [np.concatenate(probabilities), state]


# ---- rapidocr: where is text, which way up, and what does it say? ----------------------------------------------------

TEXT = "Convolution 2026, pure functions"


def page(upside_down: bool = False) -> Array:
    """A line of text on white paper, (height, width, 3)."""
    paper = image.new("RGB", (640, 96), "white")
    image_draw.Draw(paper).text((40, 24), TEXT, "black", image_font.load_default(36))
    pixels = np.asarray(paper)
    return pixels[::-1, ::-1] if upside_down else pixels


def line() -> Array:
    """The part of the page that the text is on."""
    pixels = page()
    rows, columns = np.nonzero(pixels[..., 0] < 128)
    return pixels[rows.min() - 8 : rows.max() + 8, columns.min() - 8 : columns.max() + 8]


def image_input(pixels: Array, height: int | None = None) -> Array:
    """(1, 3, height, width), -1 .. 1, of another height if asked for."""
    if height is not None:
        width = round(pixels.shape[1] * height / pixels.shape[0])
        pixels = np.asarray(image.fromarray(pixels).resize((width, height)))
    return np.ascontiguousarray(np.moveaxis(pixels, -1, 0)[None] / np.float32(127.5) - 1)


def cls_input(pixels: Array) -> Array:
    """Of the one size that the network was trained on."""
    return image_input(pixels, 48)[..., :192]


def find(run: Run, pixels: Array, margin: int = 12) -> Array:
    """The rectangle around all that scores as text; the network marks the core of a line only."""
    rows, columns = np.nonzero(run({"x": image_input(pixels)})[0][0, 0] > 0)
    top, left = max(rows.min() - margin, 0), max(columns.min() - margin, 0)
    return pixels[top : rows.max() + margin, left : columns.max() + margin]


def is_upside_down(run: Run, pixels: Array) -> bool:
    upright, turned = run({"x": cls_input(pixels)})[0][0]
    return bool(turned > upright)


def read(run: Run, pixels: Array) -> str:
    """Greedy decoding of CTC: the best character of every step, without repetitions and blanks."""
    best = run({"x": image_input(pixels, 48)})[0][0].argmax(-1)
    characters = alphabet()
    return "".join(characters[now] for now, before in zip(best, [0, *best[:-1]], strict=True) if now != before)


@cache
def alphabet() -> list[str]:
    """Blank, the characters, and a space."""
    (characters,) = [entry.value for entry in trained("rapidocr rec").metadata_props if entry.key == "character"]
    return ["", *characters.splitlines(), " "]


# ---- the networks and their table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A model, what it exercises, and what is compared: the outputs of a prepared model for the input."""

    exercises: str
    model: Any
    outputs: Callable[[Run], list[Array]]


TRAINED: dict[str, tuple[str, Callable[[Run], list[Array]]]] = {
    "silero-vad": (
        "Conv 6: one axis, 256 taps with stride 128; reflecting Pad; a state from step to step",
        lambda run: speech_probability(run, np.concatenate([speech(2), noise(1), tones(1)])),
    ),
    "rapidocr det": (
        "Conv 62: depthwise 3x3 and 5x5 with stride 2; ConvTranspose 2; GlobalAveragePool 10; Resize",
        lambda run: run({"x": image_input(page())}),
    ),
    "rapidocr cls": (
        "Conv 53: depthwise 3x3 and 5x5 with strides (2, 1); MaxPool; GlobalAveragePool 10",
        lambda run: run({"x": cls_input(line())}),
    ),
    "rapidocr rec": (
        "Conv 38: depthwise with strides (2, 1) and (1, 2), 1x3; AveragePool (3, 2); attention",
        lambda run: run({"x": image_input(line(), 48)}),
    ),
}


def trained_network(name: str) -> Network:
    exercises, outputs = TRAINED[name]
    return Network(exercises, trained(name), outputs)


def light_network(name: str) -> Network:
    model, feeds = light_model(name)
    return Network(LIGHT[name], logits(model), lambda run: run(feeds))


def milliseconds(call: Callable[[], Any], turns: int = 9) -> float:
    """The median after one turn that does not count."""
    times = []
    for _ in range(turns + 1):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def row(name: str, network: Network, engine: str) -> str:
    wanted = network.outputs(oracle := by_onnxruntime(network.model))
    mine = by_funcnn(network.model, engine)
    far, most = error(network.outputs(mine), wanted), bound(network, wanted)
    times = [milliseconds(lambda run=run: network.outputs(run)) for run in (mine, oracle)]
    return f"| {name} | {network.exercises} | {far:.1e} | {most:.1e} | {times[0]:.0f} | {times[1]:.0f} |"


def main(engine: str = "auto") -> None:
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in (fn, np, onnx, onnxruntime))
    print(f"engine {engine}; {versions}\n")
    print("| network | what it exercises | error | bound | funcnn ms | onnxruntime ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in TRAINED:
        print(row(name, trained_network(name), engine), flush=True)
    for name in LIGHT:
        print(row(name, light_network(name), engine), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
