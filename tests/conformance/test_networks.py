"""Whole networks beside onnxruntime: trained ones on real input, and the classic ones with random weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
from engines import each_engine
from light_models import FOLDER, LIGHT
from networks import (
    OPERATORS,
    TEXT,
    TRAINED,
    Array,
    Network,
    bound,
    by_funcnn,
    by_onnxruntime,
    error,
    find,
    is_upside_down,
    light_network,
    noise,
    page,
    read,
    speech,
    speech_probability,
    tones,
    trained_network,
)
from onnx_backend import average_pool


class Wanted(NamedTuple):
    """A network, what onnxruntime makes of it, and how far another right answer may lie from that."""

    network: Network
    outputs: list[Array]
    bound: float


def wanted_of(network: Network) -> Wanted:
    outputs = network.outputs(by_onnxruntime(network.model))
    return Wanted(network, outputs, bound(network, outputs))


def assert_agrees(engine: str, wanted: Wanted) -> None:
    got = wanted.network.outputs(by_funcnn(wanted.network.model, engine))
    assert error(got, wanted.outputs) <= wanted.bound


def nodes(graph: Any) -> Iterator[Any]:
    """Those that run: of two branches the first."""
    for node in graph.node:
        if node.op_type == "If":
            yield from nodes(node.attribute[0].g)
        else:
            yield node


def assert_exercises(network: Network) -> None:
    """It has as many of each op as the table says."""
    ops = [node.op_type for node in nodes(network.model.graph)]
    for op, number in re.findall(r"\b(Conv|ConvTranspose|\w+Pool)\b(?: (\d+))?", network.exercises):
        assert ops.count(op) == int(number or 1), op


# ---- trained ---------------------------------------------------------------------------------------------------------


@cache
def trained_answer(name: str) -> Wanted:
    return wanted_of(trained_network(name))


@pytest.mark.parametrize("name", TRAINED)
def test_trained_network_exercises(name: str) -> None:
    assert_exercises(trained_network(name))


@pytest.mark.parametrize("name", TRAINED)
@each_engine
def test_trained_network(name: str, engine: str) -> None:
    assert_agrees(engine, trained_answer(name))


@each_engine
def test_speech_is_told_from_noise_and_tones(engine: str) -> None:
    run = by_funcnn(trained_network("silero-vad").model, engine)
    talks = {sound: speech_probability(run, sound(2.0))[0] > 0.5 for sound in (speech, noise, tones)}
    assert talks[speech].mean() > 0.9
    assert not talks[noise].any()
    assert not talks[tones].any()


@pytest.mark.parametrize("upside_down", [False, True])
@each_engine
def test_a_rendered_line_is_read(upside_down: bool, engine: str) -> None:
    detect, classify, recognize = (
        by_funcnn(trained_network(f"rapidocr {part}").model, engine) for part in ("det", "cls", "rec")
    )
    line = find(detect, page(upside_down))
    assert line.shape[0] < 60
    assert is_upside_down(classify, line) == upside_down
    assert read(recognize, line[::-1, ::-1] if upside_down else line) == TEXT


# ---- the classic ones ------------------------------------------------------------------------------------------------


@pytest.fixture(params=LIGHT, scope="module")
def light(request: pytest.FixtureRequest) -> Wanted:
    """A network with random weights; weights are large: one at a time."""
    return wanted_of(light_network(request.param))


@each_engine
def test_light_network(light: Wanted, engine: str) -> None:
    assert_agrees(engine, light)


def test_average_pools_in_place_of_max_pools_are_noticed(light: Wanted) -> None:
    wrong = by_funcnn(light.network.model, "auto", OPERATORS | {"MaxPool": average_pool})
    assert error(light.network.outputs(wrong), light.outputs) > max(0.01, light.bound)


def test_light_network_exercises(light: Wanted) -> None:
    assert_exercises(light.network)


def test_every_light_model_is_there() -> None:
    assert {path.stem.removeprefix("light_") for path in FOLDER.glob("*.onnx")} == LIGHT.keys()
