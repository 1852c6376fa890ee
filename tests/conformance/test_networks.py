"""Whole networks beside onnxruntime: trained ones on real input, and the classic ones with random weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

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
    counting,
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


def assert_agrees(network: Network, engine: str, wanted: list[Array]) -> None:
    terms: list[int] = []
    got = network.outputs(by_funcnn(network.model, engine, counting(terms)))
    assert error(got, wanted) <= bound(terms)


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
def wanted(name: str) -> list[Array]:
    network = trained_network(name)
    return network.outputs(by_onnxruntime(network.model))


@pytest.mark.parametrize("name", TRAINED)
def test_trained_network_exercises(name: str) -> None:
    assert_exercises(trained_network(name))


@pytest.mark.parametrize("name", TRAINED)
@each_engine
def test_trained_network(name: str, engine: str) -> None:
    assert_agrees(trained_network(name), engine, wanted(name))


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
def light(request: pytest.FixtureRequest) -> tuple[Network, list[Array]]:
    """A network with random weights and what onnxruntime makes of it; weights are large: one at a time."""
    network = light_network(request.param)
    return network, network.outputs(by_onnxruntime(network.model))


@each_engine
def test_light_network(light: tuple[Network, list[Array]], engine: str) -> None:
    assert_agrees(light[0], engine, light[1])


def test_average_pools_in_place_of_max_pools_are_noticed(light: tuple[Network, list[Array]]) -> None:
    network, wanted = light
    wrong = by_funcnn(network.model, "auto", OPERATORS | {"MaxPool": average_pool})
    assert error(network.outputs(wrong), wanted) > 0.01


def test_light_network_exercises(light: tuple[Network, list[Array]]) -> None:
    assert_exercises(light[0])


def test_every_light_model_is_there() -> None:
    assert {path.stem.removeprefix("light_") for path in FOLDER.glob("*.onnx")} == LIGHT.keys()
