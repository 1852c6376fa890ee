"""funcnn beside torch: `python benchmarks/run.py [--pairs 30] [--only TEXT] [--engine blas]`.

Two processes take turns of 50 ms (or one call), 2 threads each, the idle one asleep. The ratio is torch time over funcnn
time: above 1 funcnn is the faster. A row's ratio is the median of paired ratios, with its quartiles; absolute times on a
shared machine mean little. The last table (`--only reports`) is funcnn beside itself. Needs
`pip install -e ".[benchmarks]"` and torch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
import timeit

# Before NumPy and its BLAS are loaded, here and in the workers.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "2")
# OpenBLAS threads wait for work by spinning, in NumPy's build for so long that they took a core from the other process's
# turn. 2**22 cycles (1.6 ms) is longer than any gap between two products of one call.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "22")

import numpy as np
import worker
from rows import OVERHEAD, REPORTS, Row, bytes_moved, flops, tables
from tabulate import tabulate

import funcnn as fn

REST = 0.02  # seconds between turns, for the other thread pool to fall asleep


class Pair:
    """The two workers."""

    def __init__(self, engine: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes = {}
        for side in ("torch", "funcnn"):
            self.pipes[side], theirs = context.Pipe()
            context.Process(target=worker.serve, args=(side, theirs, engine), daemon=True).start()

    def ask(self, side: str, *request: object) -> object:
        self.pipes[side].send(request)
        return self.pipes[side].recv()

    def beside(self, *rows: Row, pairs: int) -> list[float]:
        """Ratios of paired turns of two rows of funcnn."""
        self.ask("funcnn", "rows", *rows)
        turns = ([self.ask("funcnn", "turn", i) for i in range(2)] for _ in range(pairs))
        return [first / second for first, second in turns]

    def measure(self, row: Row, pairs: int) -> tuple[list[float], float, float]:
        """Ratios of paired turns, and the median seconds of torch and of funcnn."""
        for side in self.pipes:
            self.ask(side, "rows", row)
        times = {side: [] for side in self.pipes}
        for _ in range(pairs):
            for side in self.pipes:
                time.sleep(REST)
                times[side].append(self.ask(side, "turn", 0))
        ratios = [t / f for t, f in zip(times["torch"], times["funcnn"], strict=True)]
        return ratios, statistics.median(times["torch"]), statistics.median(times["funcnn"])


def peak_gflops() -> float:
    """GFLOP/s of a 1024 x 1024 x 1024 matrix product of NumPy's BLAS: near the multiply-add peak of the cores."""
    a = np.ones((1024, 1024), np.float32)
    return 2 * 1024**3 / min(timeit.repeat(lambda: a @ a, number=1, repeat=20)) / 1e9


def copy_gbytes() -> float:
    """GB/s (read plus written) of a NumPy copy of 64 MB."""
    a = np.ones(16 << 20, np.float32)
    b = np.empty_like(a)
    return 2 * a.nbytes / min(timeit.repeat(lambda: np.copyto(b, a), number=1, repeat=20)) / 1e9


def report(pair: Pair, title: str, rows: list[Row], pairs: int, limits: tuple[float, float]) -> None:
    """limits: GFLOP/s and GB/s of the machine."""
    lines, medians = [], []
    for row in rows:
        ratios, torch_s, funcnn_s = pair.measure(row, pairs)
        low, mid, high = statistics.quantiles(ratios, n=4)
        medians.append(mid)
        memory = float(pair.ask("funcnn", "memory")) / 2**20
        work = flops(row) / funcnn_s / 1e9
        share = 100 * (work / limits[0] or bytes_moved(row) / funcnn_s / 1e9 / limits[1])
        spread = f"{low:.2f} .. {high:.2f}"
        lines.append((row.label, mid, spread, torch_s * 1e3, funcnn_s * 1e3, work or None, share, memory))
    print(f"\n### {title}: geometric mean {statistics.geometric_mean(medians):.2f}, least {min(medians):.2f}\n")
    headers = ("row", "torch / funcnn", "quartiles", "torch ms", "funcnn ms", "GFLOP/s", "% of limit", "extra MB")
    formats = ("", ".2f", "", ".2f", ".2f", ".0f", ".0f", ".1f")
    print(tabulate(lines, headers, tablefmt="github", floatfmt=formats), flush=True)


def reports(pair: Pair, pairs: int) -> None:
    """Performance reports about other libraries: funcnn beside itself. Nothing fails by them."""
    lines = []
    for one in REPORTS:
        low, mid, high = statistics.quantiles(pair.beside(one.row, one.beside, pairs=pairs), n=4)
        lines.append((one.id, one.asks, one.row.label, mid, f"{low:.2f} .. {high:.2f}", one.most))
    print("\n### public reports, not gated: funcnn time over funcnn time\n")
    headers = ("report", "what", "row", "ratio", "quartiles", "asked: at most")
    print(tabulate(lines, headers, tablefmt="github", floatfmt=("", "", "", ".2f", "", ".1f")), flush=True)


def overhead() -> None:
    """Microseconds of a small call, of its checks at the door, of an init with known arguments."""
    x, weight, bias = np.ones((1, 4, 8, 8), np.float32), np.ones((4, 4, 3, 3), np.float32), np.ones(4, np.float32)
    state = fn.conv_init(x, weight)
    plan = state.plan

    def microseconds(call: object) -> float:
        return statistics.median(timeit.repeat(call, number=500, repeat=21)) / 500 * 1e6

    whole = microseconds(lambda: fn.conv(x, weight, bias, state))
    inner = microseconds(lambda: plan.forward(x, weight, bias))
    init = microseconds(lambda: fn.conv_init(x, weight))
    print(
        f"\nconv on (1, 4, 8, 8), O=4, k=3: {whole:.1f} us in all, {whole - inner:.1f} at the door; init {init:.1f} us "
        f"({OVERHEAD} asks for less than 100)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30, help="paired turns a row (default 30)")
    parser.add_argument("--only", default="", help="tables whose name contains this text")
    parser.add_argument("--engine", default="auto", help="funcnn's engine (default auto)")
    arguments = parser.parse_args()
    pair = Pair(arguments.engine)
    print(pair.ask("torch", "about"), "|", pair.ask("funcnn", "about"))
    limits = peak_gflops(), copy_gbytes()
    print(f"matrix product {limits[0]:.0f} GFLOP/s, copy {limits[1]:.0f} GB/s (the limits, of one core for the copy)")
    overhead()
    for title, rows in tables().items():
        if arguments.only in title:
            report(pair, title, rows, arguments.pairs, limits)
    if arguments.only in "reports":
        reports(pair, arguments.pairs)


if __name__ == "__main__":
    main()
