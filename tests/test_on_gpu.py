"""What only a GPU can show: streams, threads and devices at work, the same bits again. Skipped on the CPU double."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from cases import MIXED_AVG, MIXED_CONV, MIXED_MAX, MIXED_TRANSPOSE, Case, conv, inputs, normal
from conftest import Backend, selected_backends
from gpu import double
from numpy.testing import assert_array_equal
from running import FLOATS, start, steps

import funcnn as fn

pytestmark = pytest.mark.gpu
CUPY = [backend for backend in (Backend.CUPY_CUDNN, Backend.CUPY_CUDA) if backend in selected_backends()]
LAYER = conv("layer", (16, 64, 56, 56), (64, 64, 3, 3), padding=1)
MIXED = [*MIXED_CONV, *MIXED_TRANSPOSE, *MIXED_MAX, *MIXED_AVG, LAYER]


@pytest.fixture(params=CUPY, ids=lambda backend: backend.name.lower())
def gpu(request: pytest.FixtureRequest) -> Backend:
    if double.installed():
        pytest.skip("there is no GPU")
    return request.param


def results(case: Case, backend: Backend, mine: Any, state: Any = None) -> dict[str, np.ndarray]:
    found, _ = steps(case.op, mine, state or start(case, backend, mine))
    return {name: array.get() for name, array in found.items()}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", MIXED, ids=str)
def test_the_same_call_gives_the_same_bits(case: Case, dtype: str, gpu: Backend) -> None:
    mine = {name: gpu.asarray(a) for name, a in inputs(case, dtype=dtype, make=normal).items()}
    state = start(case, gpu, mine)
    first = results(case, gpu, mine, state)
    for _ in range(10):
        for name, array in results(case, gpu, mine, state).items():
            assert array.tobytes() == first[name].tobytes(), name


@pytest.mark.parametrize("stream", ["own", "non-blocking", "per thread", "null"])
def test_calls_wait_for_what_their_stream_does_before(stream: str, gpu: Backend) -> None:
    """x is written on the stream behind a long product: a call on another stream would read what was there before."""
    cupy = gpu.xp
    arrays = inputs(LAYER, dtype="float32")
    wanted = results(LAYER, gpu, {name: gpu.asarray(a) for name, a in arrays.items()})
    mine = {name: gpu.asarray(a) for name, a in arrays.items()}
    state = start(LAYER, gpu, mine)
    x, mine["x"] = mine["x"], cupy.zeros_like(mine["x"])
    busy = cupy.ones((8192, 8192), "float32")
    cupy.cuda.Device().synchronize()
    streams = {
        "own": lambda: cupy.cuda.Stream(),
        "non-blocking": lambda: cupy.cuda.Stream(non_blocking=True),
        "per thread": lambda: cupy.cuda.Stream.ptds,
        "null": lambda: cupy.cuda.Stream.null,
    }
    with streams[stream]():
        busy @ busy
        mine["x"][...] = x
        found = results(LAYER, gpu, mine, state)
    for name, array in wanted.items():
        assert_array_equal(found[name], array, err_msg=name)


def test_threads_with_streams_of_their_own(gpu: Backend) -> None:
    arrays = inputs(LAYER, dtype="float32")
    mine = {name: gpu.asarray(a) for name, a in arrays.items()}
    state = start(LAYER, gpu, mine)
    wanted = results(LAYER, gpu, mine, state)
    gpu.xp.cuda.Device().synchronize()
    found: list[Any] = []

    def work() -> None:
        with gpu.xp.cuda.Stream(non_blocking=True):
            found.extend(results(LAYER, gpu, mine, state) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for result in found:
        for name, array in wanted.items():
            assert_array_equal(result[name], array, err_msg=name)


def test_plans_outlive_the_thread_that_made_them(gpu: Backend) -> None:
    """Its cuDNN handle goes with a thread; the plans that were made with it run on, with the handles of others."""
    mine = {name: gpu.asarray(a) for name, a in inputs(LAYER, dtype="float32").items()}
    found: list[Any] = []

    def work() -> None:
        state = start(LAYER, gpu, mine)
        found.append((state, results(LAYER, gpu, mine, state)))

    fn._engines._plans.clear()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((state, wanted),) = found
    gc.collect()
    for name, array in results(LAYER, gpu, mine, state).items():
        assert_array_equal(array, wanted[name], err_msg=name)


def test_scratch_goes_back_to_the_pool(gpu: Backend) -> None:
    mine = {name: gpu.asarray(a) for name, a in inputs(LAYER, dtype="float32").items()}
    state = start(LAYER, gpu, mine)
    results(LAYER, gpu, mine, state)
    pool = gpu.xp.get_default_memory_pool()
    before = pool.used_bytes()
    results(LAYER, gpu, mine, state)
    assert pool.used_bytes() == before


def test_autotune_on_the_device(gpu: Backend) -> None:
    if gpu is not Backend.CUPY_CUDNN:
        pytest.skip("engine cuda has no candidates")
    mine = {name: gpu.asarray(a) for name, a in inputs(LAYER, dtype="bfloat16").items()}
    tuned = start(LAYER, gpu, mine, options=fn.Options(autotune=True))
    wanted = results(LAYER, gpu, mine)
    for name, array in results(LAYER, gpu, mine, tuned).items():
        assert_array_equal(array, wanted[name], err_msg=name)
