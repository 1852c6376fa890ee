"""The GPU benchmark without a GPU: what it judges, on made-up numbers, and how it times, on a made-up queue."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Backend, need

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gpu_device
import gpu_report as report
import rows
import run_gpu
import worker
from gpu_report import Measured, Overhead, Setting

ROOT = Path(__file__).parent.parent
CONV = rows.Row("conv", (64, 64, 56, 56), 64, 3, 1, 1, 1, 1, "channels_last", "bfloat16")
POOL = rows.Row("max_pool", (64, 64, 112, 112), 0, 2, 2, 0, 1, 1, "channels_first", "float32")
BF16 = Setting("bfloat16", "fast", False, True)
STRICT = Setting("float32", "strict", False, True)


def conv(funcnn_us: float, torch_us: float, **more: Any) -> Measured:
    return Measured(CONV, BF16, funcnn_us, torch_us, torch_us / funcnn_us, 5, 20, **more)


def pool(funcnn_us: float, copy_us: float, moved: float = 300e6) -> Measured:
    return Measured(POOL, STRICT, funcnn_us, 100.0, 100.0 / funcnn_us, 5, 20, copy_us=copy_us, bytes=moved)


def passed(found: list[Measured], overheads: list[Overhead] | None = None) -> dict[str, bool | None]:
    """Verdicts by the first words of their targets."""
    return {v.target.split(":")[0]: v.passed for v in report.verdicts(found, overheads or [])}


def test_a_row_is_judged_by_its_slower_side() -> None:
    assert report.is_judged(conv(30.0, 10.0))
    assert report.is_judged(conv(10.0, 30.0))
    assert not report.is_judged(conv(29.9, 29.9))


def test_what_is_not_judged() -> None:
    assert not report.is_judged(conv(100.0, 100.0, error="EngineError: no"))
    assert not report.is_judged(conv(100.0, 100.0, waits="torch"))
    assert not report.is_judged(Measured(CONV, BF16, 100.0))  # no torch to judge it by
    assert report.is_judged(pool(100.0, 90.0, 200e6))
    assert not report.is_judged(pool(100.0, 90.0, 199e6))


def test_geometric_mean_is_of_judged_rows() -> None:
    assert report.geometric_mean([conv(100, 50), conv(100, 800), conv(10, 1)]) == pytest.approx(2.0)
    assert report.geometric_mean([conv(10, 1)]) is None


def test_verdicts_on_convolutions() -> None:
    name = "conv, bfloat16"
    good = passed([conv(100, 99), conv(100, 102)])
    assert good[name] is True
    assert good["conv"] is True
    slow = passed([conv(106, 100), conv(100, 200)])
    assert slow[name] is True
    assert slow["conv"] is False  # one row of 1.06 times torch's time, whatever the mean
    assert passed([conv(102, 100)])[name] is False
    assert passed([conv(104, 100)])["conv"] is True  # 4 % slower is within the 5 %
    assert passed([conv(10, 1)])[name] is None


def test_each_setting_has_a_mean_of_its_own() -> None:
    tuned = conv(100, 50)._replace(setting=BF16._replace(autotune=True))
    found = passed([conv(100, 300), tuned])
    assert (found["conv, bfloat16"], found["conv, bfloat16, autotune"]) == (True, False)
    assert STRICT.name == "float32 TF32 off"
    assert STRICT._replace(numerics="fast").name == "float32 TF32 on"


def test_verdict_on_pools_is_that_of_the_worst() -> None:
    assert passed([pool(100, 80), pool(100, 95)])["pools"] is True
    assert passed([pool(100, 79), pool(100, 95)])["pools"] is False
    assert passed([pool(100, 10, moved=1e6)])["pools"] is None
    (text,) = (v.found for v in report.verdicts([pool(100, 79), pool(100, 95)], []) if v.target.startswith("pools"))
    assert text.startswith("0.79 (max_pool, float32 TF32 off, channels_first")


def test_verdicts_on_host_time() -> None:
    fast, unfused = Overhead("conv", 50.0, 40.0, 30.0), Overhead("max_pool", 20.0, None, None)
    assert fast.beyond_us == 10.0
    assert unfused.beyond_us is None
    targets = {v.target: v.passed for v in report.verdicts([], [fast, unfused])}
    assert targets["host: a call under 60 us"] is True
    assert targets["host: under 15 us beyond execute"] is True
    targets = {v.target: v.passed for v in report.verdicts([], [Overhead("conv", 61.0, 45.0, None)])}
    assert targets["host: a call under 60 us"] is False
    assert targets["host: under 15 us beyond execute"] is False
    assert all(v.passed is None for v in report.verdicts([], []) if v.target.startswith("host"))


def test_errors_and_waiting_calls_are_misses() -> None:
    found = passed([conv(1, 1, error="differs"), conv(100, 100, waits="funcnn")])
    assert found["every row runs and agrees with torch"] is False
    assert found["no call of funcnn waits for the device"] is False
    assert passed([conv(100, 100, waits="torch")])["no call of funcnn waits for the device"] is True


def test_exit_status() -> None:
    assert (
        report.exit_status(report.verdicts([conv(100, 101)], []), failed=False) == 0
    )  # what was not measured is no miss
    assert report.exit_status(report.verdicts([conv(100, 50)], []), failed=False) == 3
    assert report.exit_status([], failed=True) == 1


ABOUT = {"gpu": "Made-up 1", "double": False}


def test_markdown() -> None:
    found = [conv(50.0, 100.0), conv(10.0, 10.0), conv(1.0, 1.0, error="EngineError: none"), pool(100.0, 85.0)]
    page = report.markdown(ABOUT, found, [Overhead("conv", 50.0, 40.0, None)], left_out=7)
    assert page.startswith("# funcnn beside torch on Made-up 1\n")
    assert "7 rows were left out" in page
    assert "## conv, bfloat16, channels_last: geometric mean 2.00" in page
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| (64")]
    teraflops = f"{2 * 64 * 64 * 56 * 56 * 64 * 9 / 50e-6 / 1e12:.1f}"
    assert cells[0][1:] == ["2.00", "100.0", "50.0", teraflops, "yes"]
    assert cells[1][-1] == "no"
    assert cells[2][-1] == "EngineError: none"
    assert cells[3][-2:] == ["85", "yes"]


def test_a_run_on_the_double_judges_nothing() -> None:
    page = report.markdown({"gpu": "double", "double": True}, [conv(50.0, 100.0)], [], 0)
    assert "times mean nothing" in page.splitlines()[0]
    assert "## Targets" not in page


def test_bytes_of_a_pool() -> None:
    cells, windows = 64 * 64 * 112 * 112, 64 * 64 * 56 * 56
    assert rows.bytes_moved(POOL) == 4 * (cells + windows) + windows
    assert rows.bytes_moved(POOL._replace(op="avg_pool_backward", dtype="bfloat16")) == 2 * (cells + windows)
    assert rows.bytes_moved(CONV) == 0


def test_every_row_is_there_and_the_important_ones_come_first() -> None:
    tasks = run_gpu.tasks(deterministic=True)
    assert len(tasks) == len(set(tasks)) == 4 * 4 * 2 * 2 + 14 * 2 * 2 * 3 * 2  # pools by dtype; convs by setting
    assert all(task.row.sizes[0] == 64 and task.row.dtype == task.setting.dtype for task in tasks)
    autotuned = [task.setting.autotune for task in tasks]
    assert autotuned == sorted(autotuned)


def test_tiny_rows_run_and_keep_their_kind_of_groups() -> None:
    for row, _ in run_gpu.tasks(deterministic=True)[::3]:
        small = run_gpu.tiny(row._replace(dtype="float32"))
        depthwise = row.groups == row.sizes[1] > 1
        assert (small.groups == small.sizes[1] > 1) == depthwise
        assert (small.groups > 1) == (row.groups > 1)
        worker.funcnn_call(small, "blas")()


class Queue:
    """A device and a host with clocks of their own, in seconds; a call takes `host` here and `device` there."""

    def __init__(self, host: float, device: float, waits: bool = False) -> None:
        self.now = self.free = self.queued = 0.0
        self.host, self.device, self.waits = host, device, waits

    def call(self) -> None:
        self.now += self.host
        self.free = max(self.free, self.now) + self.device
        if self.waits:
            self.now = self.free

    def busy(self, seconds: float) -> None:
        self.free = max(self.free, self.now) + seconds

    def mark(self) -> float:
        return max(self.free, self.now)

    def reached(self, mark: float) -> bool:
        return self.now >= mark

    def between(self, start: float, stop: float) -> float:
        self.now = max(self.now, stop)
        return stop - start


@pytest.mark.parametrize("guess", [60e-6, 1e-6])
def test_device_time_is_not_that_of_a_slow_host(guess: float) -> None:
    """Also where the guess of the host's time is far too low."""
    queue = Queue(host=60e-6, device=5e-6)
    seconds, late = gpu_device.device_seconds(queue, queue.call, 20, guess)
    assert seconds == pytest.approx(5e-6)
    assert not late


def test_a_call_that_waits_for_the_device_is_found() -> None:
    queue = Queue(host=60e-6, device=5e-6, waits=True)
    assert gpu_device.device_seconds(queue, queue.call, 20, 60e-6)[1]


def test_written_files(tmp_path: Path) -> None:
    page = run_gpu.write(tmp_path, ABOUT, [conv(50.0, 100.0)], [Overhead("conv", 50.0, 40.0, None)], 0)
    assert page == tmp_path / "made-up-1.md"
    content = json.loads((tmp_path / "made-up-1.json").read_text())
    assert content["about"] == ABOUT
    assert content["rows"][0]["funcnn_us"] == 50.0
    assert content["rows"][0]["row"]["sizes"] == [64, 64, 56, 56]
    assert [v["passed"] for v in content["verdicts"]].count(True) == 6


def test_benchmark_calls_of_funcnn_are_what_their_rows_say() -> None:
    """A row's call on given arrays is the public function's, for every op."""
    drawn = worker._arrays(rows.Row("conv", (2, 4, 9, 9), 6, 3, 2, 1, 2, 1, "channels_last", "float32"))
    assert drawn.x.strides[1] == drawn.weight.strides[1] == 4
    for op in ("conv", "conv_backward", "max_pool", "max_pool_backward", "avg_pool", "avg_pool_backward"):
        is_conv = op.startswith("conv")
        row = rows.Row(op, (2, 4, 9, 9), 6 * is_conv, 3, 2, 1, 2 if is_conv else 1, 1, "channels_last", "float32")
        result = worker.funcnn_on(row, drawn, "blas")()
        arrays = [a for a in (result if isinstance(result, tuple) else (result,)) if isinstance(a, np.ndarray)]
        shape = (2, 4, 9, 9) if op.endswith("backward") else (2, 6 if is_conv else 4, 5, 5)
        assert arrays[0].shape == shape
        assert len(arrays) == (3 if op == "conv_backward" else 1)


def test_rows_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides' calls, on the CPU: the same op on the same memory, in every dtype, layout and setting."""
    need(Backend.TORCH)
    import torch

    monkeypatch.setattr(run_gpu, "usable_torch", lambda: torch)
    monkeypatch.setattr(run_gpu, "engine", lambda row: "blas")
    device = SimpleNamespace(double=True, xp=np)
    with torch.enable_grad():  # what a row switches off is on again afterwards
        for row, setting in run_gpu.tasks(deterministic=True)[::5]:
            calls = run_gpu.calls_of(device, run_gpu.Task(run_gpu.tiny(row), setting))
            assert list(calls) == ["funcnn", "torch"]
            far = run_gpu.difference({side: call() for side, call in calls.items()})
            assert far < (1e-2 if row.dtype == "bfloat16" else 1e-6), (row, setting)
            assert torch.backends.cudnn.benchmark == setting.autotune
            assert torch.backends.cudnn.allow_tf32 == (setting.numerics == "fast")


class Graph:
    """A cuDNN graph as `_gpu.execute` sees it."""

    name = "graph"

    def execute(self, *args: Any, handle: int) -> None:
        assert args == ({1: 2}, 0)
        assert handle == 7


@pytest.mark.parametrize("entry", ["execute", "another"])
def test_execute_is_timed_apart(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """The frontend's own, or the whole of `_gpu.execute` where that enters the frontend by another name."""
    from funcnn._engines import _gpu

    def execute(graph: Any, pointers: dict[int, int], workspace: int) -> None:
        assert graph.name == "graph"
        if entry == "execute":
            graph.execute(pointers, workspace, handle=7)

    monkeypatch.setattr(_gpu, "execute", execute)
    with run_gpu.timed_execute() as spent:
        _gpu.execute(Graph(), {1: 2}, 0)
    assert len(spent) == 1
    assert spent[0] > 0
    assert _gpu.execute is execute


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def test_the_check_says_how_it_is_used() -> None:
    usage = gpu_check("--help")
    assert usage.returncode == 0
    assert "[--double] [--install] [--python PROGRAM] [OUT]" in usage.stdout
    wrong = gpu_check("--dobule")
    assert wrong.returncode == 2
    assert "unknown option: --dobule" in wrong.stderr
