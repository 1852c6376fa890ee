"""The narrow module `_gpu` over stand-ins of CuPy and of cuDNN's frontend, which record what it asks of them."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import funcnn
from funcnn._engines import _gpu

SOURCE = Path(funcnn.__file__).parent / "_engines" / "_gpu.py"


class Recorder:
    """Two devices, streams, events and cuDNN handles."""

    def __init__(self) -> None:
        self.device, self.stream, self.log = 0, 7, []
        self.live: set[int] = set()
        self.handles = 0
        self.compute_type = "TF32"
        self.rounds = iter((40.0, 30.0, 50.0))
        runtime = SimpleNamespace(
            runtimeGetVersion=lambda: 13020,
            driverGetVersion=lambda: 13000,
            getDeviceCount=lambda: 2,
            getDevice=lambda: self.device,
            memGetInfo=lambda: (1000, 5000),
            getDeviceProperties=lambda device: {"name": b"GPU %d" % device},
        )
        cuda = SimpleNamespace(
            runtime=runtime,
            Device=lambda device: ("device", device),
            Event=lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None),
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
            get_elapsed_time=lambda first, last: next(self.rounds),
        )
        pool = SimpleNamespace(free_bytes=lambda: 234)
        self.cupy = SimpleNamespace(
            __version__="14.2.0",
            cuda=cuda,
            empty=self.empty,
            matmul=self.matmul,
            get_default_memory_pool=lambda: pool,
            RawModule=lambda **options: SimpleNamespace(get_function=lambda name: (name, options)),
        )
        self.cudnn = SimpleNamespace(
            __version__="1.32.0",
            backend_version=lambda: 92801,
            create_handle=self.create_handle,
            destroy_handle=self.live.remove,
            set_stream=lambda handle, stream: self.log.append(("stream", handle, stream)),
            pygraph=lambda **options: options,
        )
        self.linalg = SimpleNamespace(
            COMPUTE_TYPE_FP32="FP32",
            get_compute_type=lambda dtype: self.compute_type,
            set_compute_type=lambda dtype, kind: setattr(self, "compute_type", kind),
        )

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        array = SimpleNamespace(shape=shape, dtype=dtype, data=SimpleNamespace(ptr=4096))
        self.log.append(("empty", shape, dtype))
        return array

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        self.log.append(("matmul", self.compute_type))
        if a is None:
            raise ValueError

    def create_handle(self) -> int:
        self.handles += 1
        self.live.add(self.handles)
        return self.handles


@pytest.fixture
def machine() -> Recorder:
    return Recorder()


@pytest.fixture
def gpu(machine: Recorder, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module as it is in the package, whatever stands in its place there."""
    spec = importlib.util.spec_from_file_location("gpu_as_it_is", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = {"cupy": machine.cupy, "cudnn": machine.cudnn, "cupy._core._routines_linalg": machine.linalg}
    monkeypatch.setattr(module, "importlib", SimpleNamespace(import_module=names.__getitem__))
    monkeypatch.setattr(module, "loaded_cudnn", lambda: [Path("/a/libcudnn.so.9"), Path("/a/libcudnn_graph.so.9")])
    numbers = {"cudnnGetVersion": 92801, "cudnnGetCudartVersion": 13010}
    monkeypatch.setattr(module, "_function", lambda path, name: numbers[name])
    return module


def fails(error: Exception) -> Any:
    def call(*arguments: Any) -> Any:
        raise error

    return call


# ---- what is there ---------------------------------------------------------------------------------------------------


def test_versions(gpu: Any) -> None:
    assert gpu.require_cuda() == "CuPy 14.2.0, CUDA 13.2"
    assert gpu.require_cudnn() == "cuDNN 9.28.1, frontend 1.32.0"
    assert gpu.stack() == "cuDNN 9.28.1, frontend 1.32.0, GPU 0"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("driverGetVersion", lambda: 0, "no NVIDIA driver is installed"),
        ("getDeviceCount", lambda: 0, "no CUDA device is visible"),
        (
            "getDeviceCount",
            fails(RuntimeError("cudaErrorInsufficientDriver")),
            r"CUDA cannot be used: cudaErrorInsufficientDriver \(the driver is for CUDA 13.0, CuPy has CUDA 13.2\)",
        ),
    ],
)
def test_reasons_why_there_is_no_cuda(gpu: Any, machine: Recorder, name: str, value: Any, reason: str) -> None:
    setattr(machine.cupy.cuda.runtime, name, value)
    for require in (gpu.require_cuda, gpu.require_cudnn):
        with pytest.raises(ImportError, match=reason):
            require()


@pytest.mark.parametrize("function", ["require_cuda", "require_cudnn"])
def test_no_cupy(gpu: Any, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    monkeypatch.setattr(gpu, "_cupy", fails(ModuleNotFoundError("cupy")))
    with pytest.raises(ImportError, match=r"^CuPy is not installed: pip install cupy-cuda13x \(or cupy-cuda12x\)$"):
        getattr(gpu, function)()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("cudnn"), "nvidia-cudnn-frontend is not installed: pip install nvidia-cudnn-cu13 and"),
        (OSError("libcudnn.so.9"), r"nvidia-cudnn-frontend cannot be loaded: libcudnn\.so\.9; pip install"),
    ],
)
def test_no_frontend(gpu: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    monkeypatch.setattr(gpu, "frontend", fails(error))
    with pytest.raises(ImportError, match=reason):
        gpu.require_cudnn()


def test_an_old_frontend_and_a_missing_library(gpu: Any, machine: Recorder) -> None:
    machine.cudnn.__version__ = "1.9.3"
    with pytest.raises(ImportError, match=r"nvidia-cudnn-frontend 1\.9\.3 is too old, 1\.32 is needed"):
        gpu.require_cudnn()
    machine.cudnn.__version__ = "2.0.1"
    machine.cudnn.backend_version = fails(RuntimeError("not found"))
    with pytest.raises(ImportError, match="libcudnn cannot be loaded: not found"):
        gpu.require_cudnn()


def test_libraries_of_two_versions_are_named(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    main = [Path("/a/libcudnn.so.9"), Path("/b/libcudnn.so.9")]
    monkeypatch.setattr(gpu, "loaded_cudnn", lambda: main)
    monkeypatch.setattr(gpu, "_function", lambda path, name: 92801 if path.parent == Path("/a") else 90100)
    reason = r"two versions are loaded: /a/libcudnn\.so\.9 \(9\.28\.1\), /b/libcudnn\.so\.9 \(9\.1\.0\); keep one"
    with pytest.raises(ImportError, match=reason):
        gpu.require_cudnn()
    monkeypatch.setattr(gpu, "loaded_cudnn", lambda: [main[0], Path("/b/libcudnn_graph.so.9")])
    with pytest.raises(ImportError, match=r"/a/libcudnn\.so\.9 \(9\.28\.1\), /b/libcudnn_graph\.so\.9; keep one"):
        gpu.require_cudnn()


def test_a_library_that_is_loaded_later_does_not_keep_plans_from_pickles(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "loaded_cudnn", lambda: [Path("/a/libcudnn.so.9"), Path("/b/libcudnn_graph.so.9")])
    assert gpu.stack() == "cuDNN 9.28.1, frontend 1.32.0, GPU 0"


def test_two_copies_of_one_version_are_no_error(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "loaded_cudnn", lambda: [Path("/a/libcudnn.so.9"), Path("/b/libcudnn.so.9")])
    assert gpu.require_cudnn()


def test_cudnn_for_another_cuda(gpu: Any, machine: Recorder) -> None:
    machine.cupy.cuda.runtime.runtimeGetVersion = lambda: 12090
    with pytest.raises(ImportError, match=r"/a/libcudnn\.so\.9 is made for CUDA 13, CuPy for CUDA 12"):
        gpu.require_cudnn()


# ---- handles and streams ---------------------------------------------------------------------------------------------


def test_a_handle_for_each_thread_and_device_bound_to_the_current_stream(gpu: Any, machine: Recorder) -> None:
    first = gpu.new_graph(a=1)
    assert first == {"a": 1, "handle": 1}
    machine.stream = 2  # the per-thread default stream
    assert gpu.new_graph()["handle"] == 1
    machine.device, machine.stream = 1, 0
    assert gpu.new_graph()["handle"] == 2
    machine.device = 0
    assert gpu.new_graph()["handle"] == 1
    assert machine.log == [("stream", 1, 7), ("stream", 1, 2), ("stream", 2, 0), ("stream", 1, 0)]

    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(gpu.new_graph()["handle"]))
    thread.start()
    thread.join()
    gc.collect()
    assert others == [3]
    assert machine.live == {1, 2}  # that of the thread went with it


def test_a_plan_runs_with_its_workspace_and_this_threads_handle(gpu: Any, machine: Recorder) -> None:
    runs: list[Any] = []
    graph = SimpleNamespace(execute=lambda *a, **k: runs.append((a, k)))
    gpu.execute(graph, {1: 16, 3: 32}, 100)
    gpu.execute(graph, {1: 16}, 0)
    assert runs == [(({1: 16, 3: 32}, 4096), {"handle": 1}), (({1: 16}, 0), {"handle": 1})]
    assert [entry for entry in machine.log if entry[0] == "empty"] == [("empty", (100,), "uint8")]


def test_what_the_frontend_raises(gpu: Any, machine: Recorder) -> None:
    machine.cudnn.cudnnGraphNotSupportedError = KeyError
    assert gpu.graph_errors() == (KeyError, RuntimeError, ValueError, ImportError)


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_devices_and_memory(gpu: Any, machine: Recorder) -> None:
    machine.device = 1
    assert gpu.device_of(SimpleNamespace(device=SimpleNamespace(id=0))) == 0
    assert gpu.device_of(SimpleNamespace(device=None)) == 1
    assert gpu.on_device(1) == ("device", 1)
    assert gpu.free_bytes() == 1234


def test_kernels(gpu: Any) -> None:
    name, options = gpu.compile_kernels("source", ("f",))["f"]
    assert name == "f"
    assert options == {"code": "source", "options": ("-std=c++17",)}
    calls: list[Any] = []
    gpu.launch(lambda *arguments: calls.append(arguments), (2,), (3,), (4,))
    assert calls == [((2,), (3,), (4,))]


@pytest.mark.parametrize(
    ("dtype", "during"), [("float32", "FP32"), ("complex64", "FP32"), ("float64", "TF32"), ("int32", "TF32")]
)
def test_float32_products_are_float32_whatever_the_environment_says(
    gpu: Any, machine: Recorder, dtype: str, during: str
) -> None:
    out = SimpleNamespace(dtype=dtype)
    gpu.matmul(1, 2, out)
    with pytest.raises(ValueError):  # noqa: PT011
        gpu.matmul(None, 2, out)
    assert machine.log == [("matmul", during)] * 2
    assert machine.compute_type == "TF32"


def test_products_in_two_threads_leave_the_compute_type_as_it_was(gpu: Any, machine: Recorder) -> None:
    """CuPy has one for the process: a thread that begins while another is at it must not take that one's for the user's."""
    out = SimpleNamespace(dtype="float32")
    both = threading.Barrier(2)

    def matmul(a: Any, b: Any, out: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(a)  # would meet the other here
        time.sleep(a)  # and the first would be done first
        machine.log.append(machine.compute_type)

    machine.cupy.matmul = matmul
    threads = [threading.Thread(target=gpu.matmul, args=(wait, 2, out)) for wait in (0.1, 0.2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert machine.log == ["FP32", "FP32"]
    assert machine.compute_type == "TF32"


def test_libraries_that_were_removed_since_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "libcudnn.so.9"
    there.touch()
    gone = f"{tmp_path}/a/libcudnn.so.9 (deleted)"
    maps = "".join(f"7f-80 r-xp 0 103:02 5   {name}\n" for name in (there, gone, there, "/usr/lib/libc.so.6"))
    monkeypatch.setattr(Path, "read_text", lambda self: maps + "7f-80 rw-p 0 00:00 0\n")
    assert _gpu.loaded_cudnn() == [there]


def test_time_of_one_run(gpu: Any) -> None:
    runs: list[int] = []
    assert gpu.milliseconds(lambda: runs.append(1), 10) == 3.0
    assert len(runs) == 31  # one to warm up
