"""funcnn beside torch on a GPU: `python benchmarks/run_gpu.py [--seconds 200] [--out benchmarks/results]`.

The rows of the core benchmark at batch 64. Both libraries run in one process: they then share the CUDA context, the stream, the
libcudnn that is loaded first, the clocks of the moment and the very arrays, and their turns are milliseconds apart. The most
important rows come first, and those for which the time is up are left out. Writes <gpu>.json and <gpu>.md into the folder.
Exit status: 0, or 1 if a row failed, or 3 if a target is missed (`gpu_report.py` has them).

`--double` tries the script on the CPU double of the tests, with tiny arrays; its times mean nothing. Needs
`pip install -e ".[benchmarks]"`, CuPy and cuDNN's frontend; torch columns are left out where torch has no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpu_report as report
import ml_dtypes
import worker
from gpu_device import ROOT, Device, Double, Gpu, copy_seconds, device_seconds, host_seconds, usable_torch
from gpu_report import Measured, Overhead, Setting
from rows import LAYOUTS, Row, bytes_moved, tables

import funcnn as fn

RESULTS = ROOT / "benchmarks" / "results"
START = time.monotonic()
BATCH = 64
CALLS = 20  # of one turn, fewer where they take long
TURN = 0.03  # seconds of the device that one turn may take
NEAR = {"bfloat16": 2e-2, "fast": 5e-3, "strict": 1e-4}  # |funcnn - torch| / |torch|, in the Euclidean norm

# ---- what is measured ------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """One row with its setting."""

    row: Row
    setting: Setting


def tasks(deterministic: bool) -> list[Task]:
    """Every row, the most important first: pools (they are quick), then convolutions as they come, then with autotune."""
    order = (("bfloat16", "fast"), ("float32", "fast"), ("float32", "strict"))
    found = []
    for dtype, numerics in (order[0], order[2]):  # neither TF32 nor autotune is anything to a pool
        setting = Setting(dtype, numerics, False, deterministic)
        found += [Task(row, setting) for layout in reversed(LAYOUTS) for row in _rows("pool", layout, dtype)]
    for autotune in (False, True):
        for layout in reversed(LAYOUTS):
            for dtype, numerics in order:
                setting = Setting(dtype, numerics, autotune, deterministic)
                found += [Task(row, setting) for row in _rows("conv", layout, dtype)]
    return found


def _rows(kind: str, layout: str, dtype: str) -> list[Row]:
    named = tables()
    ops = {
        "conv": ("conv", "conv_backward"),
        "pool": ("max_pool", "max_pool_backward", "avg_pool", "avg_pool_backward"),
    }
    found = []
    for op in ops[kind]:
        rows = named[f"{op.replace('avg_pool_backward', 'avg_pool')}, {layout}"]
        found += [row._replace(op=op, sizes=(BATCH, *row.sizes[1:]), dtype=dtype) for row in rows]
    return found


def tiny(row: Row) -> Row:
    """The row with small sizes and the same window and kind of groups."""
    channels = 8 if row.groups == 4 else min(row.sizes[1], 4)
    groups = channels if row.groups == row.sizes[1] > 1 else min(row.groups, 4)
    outputs = min(row.outputs, 2 * channels if groups == channels > 1 else 8)
    return row._replace(sizes=(2, channels, *(12 for _ in row.sizes[2:])), outputs=outputs, groups=groups)


# ---- calls -----------------------------------------------------------------------------------------------------------


def drawn(device: Device, row: Row) -> worker.Arrays:
    """Random arrays of a row on the device."""
    xp = device.xp
    dtype = ml_dtypes.bfloat16 if row.dtype == "bfloat16" else row.dtype
    numbers = worker.np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> Any:
        if device.double:
            values = xp.asarray(numbers.standard_normal(shape, "float32"))
        else:
            values = xp.random.standard_normal(shape, "float32")
        return worker.in_order(values.astype(dtype), row.layout, xp)

    return worker.Arrays(
        draw(row.sizes),
        draw(worker.weight_shape(row)),
        draw((row.outputs or row.sizes[1],)),
        lambda shape: draw(tuple(shape)),
    )


def as_tensor(array: Any) -> Any:
    """A torch tensor on the memory of a CuPy array. As integers: DLPack of bfloat16 is not for every version."""
    torch = usable_torch()
    if array.dtype.name != "bfloat16":
        return torch.from_dlpack(array)
    return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)


def engine(row: Row) -> str:
    """By name: where it is missing, the row fails, and no other engine is measured in its place."""
    return "cudnn" if row.outputs else "cuda"


def calls_of(device: Device, task: Task) -> dict[str, Callable[[], Any]]:
    """The row as a call of each side that is there, on the same arrays."""
    row, setting = task
    arrays = drawn(device, row)
    shared: dict[tuple[int, ...], Any] = {}

    def like(shape: tuple[int, ...]) -> Any:
        key = tuple(shape)
        if key not in shared:
            shared[key] = arrays.like(key)
        return shared[key]

    options = fn.Options(setting.numerics, setting.deterministic, autotune=setting.autotune)
    found = {"funcnn": worker.funcnn_on(row, arrays._replace(like=like), engine(row), options=options)}
    if torch := usable_torch():
        tell_torch(torch, setting)
        tensors = worker.Arrays(*map(as_tensor, arrays[:3]), lambda shape: as_tensor(like(shape)))
        found["torch"] = worker.torch_on(row, tensors)
    return found


def tell_torch(torch: Any, setting: Setting) -> None:
    """torch's global flags for a setting."""
    cudnn, tf32 = torch.backends.cudnn, setting.numerics == "fast"
    cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    cudnn.deterministic, cudnn.benchmark = setting.deterministic, setting.autotune


def difference(results: dict[str, Any]) -> float:
    """Largest relative distance of an array of funcnn from torch's."""
    ours, theirs = ([a for a in _tuple(results[side]) if hasattr(a, "dtype")] for side in ("funcnn", "torch"))
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=False):  # torch's max_pool gives indices, too
        mine, other = as_tensor(mine).float(), other.float()
        worst = max(worst, float((mine - other).norm() / other.norm().clamp_min(1e-30)))
    return worst


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


# ---- times -----------------------------------------------------------------------------------------------------------


def measure(device: Device, task: Task, turns: int) -> Measured:
    """One row: check it, then time it in turns."""
    calls = calls_of(device, task)
    results = {side: call() for side, call in calls.items()}
    near = NEAR.get(task.row.dtype) or NEAR[task.setting.numerics]
    if "torch" in results and not (far := difference(results)) <= near:
        return Measured(*task, error=f"differs from torch by {far:.1e}, allowed {near:.0e}")
    del results
    host = {side: host_seconds(device, call, 3, 2) for side, call in calls.items()}
    longest = max(device_seconds(device, call, 3, host[side])[0] for side, call in calls.items())
    count = max(3, min(CALLS, int(TURN / longest)))
    times: dict[str, list[float]] = {side: [] for side in calls}
    waits = set()
    for turn in range(turns):
        for side in sorted(calls, reverse=turn % 2 == 1):
            seconds, late = device_seconds(device, calls[side], count, host[side])
            times[side].append(seconds * 1e6)
            waits |= {side} if late else set()
    middle = {side: statistics.median(t) for side, t in times.items()}
    ratio = None
    if "torch" in times:
        ratio = statistics.median(t / f for t, f in zip(times["torch"], times["funcnn"], strict=True))
    copy, moved = None, bytes_moved(task.row)
    if moved:
        copy = copy_seconds(device, moved, turns) * 1e6
    names = " and ".join(sorted(waits))
    return Measured(*task, middle["funcnn"], middle.get("torch"), ratio, turns, count, names, copy, moved)


# ---- host time -------------------------------------------------------------------------------------------------------


class Timed:
    """A cuDNN graph that gathers the seconds of its own execute."""

    def __init__(self, graph: Any, spent: list[float]) -> None:
        self._graph, self._spent = graph, spent

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._graph, name)
        return partial(self._timed, found) if name.startswith("execute") else found

    def _timed(self, execute: Callable[..., Any], *args: Any, **named: Any) -> None:
        start = time.perf_counter()
        execute(*args, **named)
        self._spent.append(time.perf_counter() - start)


@contextlib.contextmanager
def timed_execute() -> Iterator[list[float]]:
    """Gather the seconds of each execute of the frontend; where it is not entered by that name, of `_gpu.execute`."""
    module = importlib.import_module("funcnn._engines._gpu")
    execute, spent = module.execute, []

    def timed(graph: Any, *args: Any) -> None:
        before, start = len(spent), time.perf_counter()
        execute(Timed(graph, spent), *args)
        if len(spent) == before:
            spent.append(time.perf_counter() - start)

    module.execute = timed
    try:
        yield spent
    finally:
        module.execute = execute


def execute_seconds(device: Device, call: Callable[[], Any]) -> float | None:
    """Median seconds of a call that are spent in execute; None where it is not used."""
    with timed_execute() as spent:
        sums = []
        for _ in range(5):
            device.wait()
            for _ in range(10):
                spent.clear()
                call()
                sums.append(sum(spent))
        device.wait()
    return statistics.median(sums) or None


def overheads(device: Device) -> tuple[list[Overhead], list[str]]:
    """Small arrays, so that the device is never waited for; and what went wrong."""
    found, errors = [], []
    for dtype, numerics in (("float32", "strict"), ("bfloat16", "fast")):
        setting = Setting(dtype, numerics, False, True)
        for op in ("conv", "max_pool", "max_pool_backward", "avg_pool", "avg_pool_backward"):
            window = (32, 3, 1, 1) if op == "conv" else (0, 2, 2, 0)  # outputs, kernel, stride, padding
            row = Row(op, (8, 32, 16, 16), *window, 1, 1, "channels_last", dtype)
            row = tiny(row) if device.double else row
            try:
                found.append(overhead(device, f"{op}, {dtype}", **calls_of(device, Task(row, setting))))
                if op == "conv":
                    found += [overhead(device, *pair) for pair in gradients(device, row, setting)]
            except Exception as error:
                errors.append(f"{op}, {dtype}: {said(error)}")
    return found, errors


def overhead(device: Device, name: str, funcnn: Callable[[], Any], torch: Callable[[], Any] | None = None) -> Overhead:
    """One call."""
    funcnn()
    whole = host_seconds(device, funcnn)
    execute = execute_seconds(device, funcnn)
    other = None
    if torch is not None:
        torch()
        other = host_seconds(device, torch) * 1e6
    return Overhead(name, whole * 1e6, None if execute is None else execute * 1e6, other)


def gradients(device: Device, row: Row, setting: Setting) -> Iterator[tuple[str, Callable[[], Any]]]:
    """conv_backward of one gradient, as a call: that of all three executes two plans."""
    x, weight, _, like = drawn(device, row)
    options = fn.Options(setting.numerics, setting.deterministic)
    state = fn.conv_init(x, weight, padding=row.padding, engine=engine(row), options=options)
    dy = like(fn.out_spec(state).shape)
    for wrt in ("x", "weight"):
        yield f"conv_backward, {wrt}, {row.dtype}", lambda wrt=wrt: fn.conv_backward(dy, x, weight, state, wrt=wrt)


# ---- all of it -------------------------------------------------------------------------------------------------------


def measured(device: Device, task: Task, turns: int) -> Measured:
    """measure; what goes wrong becomes the row's error, so that the rest is measured."""
    try:
        found = measure(device, task, turns)
        device.free()
        return found
    except Exception as error:
        return Measured(*task, error=said(error))


def said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def write(out: Path, about: dict[str, Any], found: list[Measured], hosts: list[Overhead], left_out: int) -> Path:
    """The JSON file and the page; the path of the page."""
    out.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")
    content = {
        "about": about,
        "left_out": left_out,
        "overheads": [one._asdict() for one in hosts],
        "rows": [one._asdict() | {"row": one.row._asdict(), "setting": one.setting._asdict()} for one in found],
    }
    if not about["double"]:
        content["verdicts"] = [v._asdict() for v in report.verdicts(found, hosts)]
    (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    page = out / f"{name}.md"
    page.write_text(report.markdown(about, found, hosts, left_out))
    return page


def run(device: Device, arguments: argparse.Namespace) -> int:
    """Measure until the time is up; the exit status."""
    end = START + arguments.seconds
    about = device.about() | {"funcnn": fn.__version__, "double": device.double, "date": time.strftime("%Y-%m-%d")}
    hosts, about["host times failed"] = overheads(device)
    todo = [task for task in tasks(arguments.deterministic) if arguments.only in f"{task.row.op}, {task.setting.name}"]
    found: list[Measured] = []
    for number, (row, setting) in enumerate(todo):
        if time.monotonic() > end:
            break
        found.append(measured(device, Task(tiny(row) if device.double else row, setting), arguments.turns))
        if number % 20 == 0:  # so that something is left if the process is ended
            write(arguments.out, about, found, hosts, len(todo) - len(found))
    page = write(arguments.out, about, found, hosts, len(todo) - len(found))
    print(f"{len(found)} of {len(todo)} rows; wrote {page} and {page.with_suffix('.json').name}")
    return conclude(about, found, hosts)


def conclude(about: dict[str, Any], found: list[Measured], hosts: list[Overhead]) -> int:
    """Print what was found, and say it as an exit status."""
    for error in about["host times failed"]:
        print(f"failed: host time of {error}")
    errors = [f"{one.table}, {one.row.label}: {one.error}" for one in found if one.error]
    for error in errors[:10]:
        print(f"failed: {error}")
    if errors[10:]:
        print(f"and {len(errors[10:])} more rows, which the page names")
    failed = bool(about["host times failed"]) or bool(errors)
    if about["double"]:
        print("a trial run on the CPU double: the times mean nothing")
        return int(failed)
    judged = report.verdicts(found, hosts)
    for verdict in judged:
        print(f"{ {True: 'met', False: 'MISSED', None: '-'}[verdict.passed]:7}{verdict.target}: {verdict.found}")
    return report.exit_status(judged, failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200, help="no row is begun after so long (default 200)")
    parser.add_argument("--turns", type=int, default=5, help="of each side for a row (default 5)")
    parser.add_argument("--only", default="", help='rows of which "op, setting" contains this text')
    parser.add_argument("--nondeterministic", dest="deterministic", action="store_false", help="on both sides")
    parser.add_argument("--double", action="store_true", help="try the script on the CPU double")
    parser.add_argument("--out", type=Path, help=f"folder for the results (default {RESULTS.relative_to(ROOT)})")
    arguments = parser.parse_args()
    if arguments.double:
        arguments.out = arguments.out or Path(tempfile.mkdtemp())
        if arguments.out.resolve() == RESULTS:
            parser.error("--out: results of the double do not belong there")
    arguments.out = arguments.out or RESULTS
    return run(Double() if arguments.double else Gpu(), arguments)


if __name__ == "__main__":
    sys.exit(main())
