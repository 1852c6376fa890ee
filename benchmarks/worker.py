"""One side of the comparison, in a process of its own: makes the call of a row and times it in turns.

Reads requests from a pipe and is asleep in between: two thread pools that spin in one process falsify both.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from rows import Row

THREADS = 2
TURN = 0.05  # seconds of one turn, or one call


def serve(side: str, pipe: Connection, engine: str) -> None:
    """Answer ("rows", row, ...), ("turn", which), ("memory",), ("about",) until ("stop",)."""
    make = partial(funcnn_call, engine=engine) if side == "funcnn" else torch_call
    calls: list[Callable[[], Any]] = []
    while True:
        request = pipe.recv()
        if request[0] == "stop":
            return
        if request[0] == "rows":
            calls = [make(row) for row in request[1:]]
            for call in calls:
                call()
            pipe.send(None)
        elif request[0] == "turn":
            pipe.send(turn(calls[request[1]]))
        elif request[0] == "memory":
            pipe.send(peak_beside_results(calls[0]))
        elif request[0] == "about":
            pipe.send(about(side))


def turn(call: Callable[[], Any]) -> float:
    """Seconds of one call: the mean over a turn."""
    call()  # wakes the thread pool, warms the caches
    start = time.perf_counter()
    count = 0
    while True:
        call()
        count += 1
        spent = time.perf_counter() - start
        if spent >= TURN:
            return spent / count


def peak_beside_results(call: Callable[[], Any]) -> int:
    """Bytes of the allocation peak of a call less those of its results; the scratch arena is emptied first."""
    import funcnn as fn

    fn.release_scratch()
    tracemalloc.start()
    results = call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    arrays = results if isinstance(results, tuple) else (results,)
    leaves = [a for a in arrays if isinstance(a, np.ndarray)]
    leaves += [a.argmax for a in arrays if hasattr(a, "argmax") and not isinstance(a, np.ndarray)]
    return peak - sum(a.nbytes for a in leaves)


def about(side: str) -> str:
    """Library, version and BLAS kernel."""
    if side == "torch":
        import torch

        return f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    from threadpoolctl import threadpool_info

    import funcnn as fn

    blas = [
        f"{b['internal_api']} {b['version']} {b.get('architecture')} {b['num_threads']} threads"
        for b in threadpool_info()
    ]
    return f"funcnn {fn.__version__}, numpy {np.__version__}, {'; '.join(blas)}"


def _arrays(row: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, weight, bias in the memory order of the row."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        a = rng.standard_normal(shape)
        return (a + 1j * rng.standard_normal(shape) if row.dtype.startswith("complex") else a).astype(row.dtype)

    x = in_order(draw(*row.sizes), row.layout)
    c, rank = row.sizes[1], len(row.sizes) - 2
    o = row.outputs or c
    shape = (c, o, *(row.kernel,) * rank) if row.op == "conv_transpose" else (o, c // row.groups, *(row.kernel,) * rank)
    return x, in_order(draw(*shape), row.layout), draw(o)


def in_order(a: np.ndarray, layout: str) -> np.ndarray:
    """The array with its channels innermost in memory, or as it is."""
    return a if layout == "channels_first" else np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1)


def funcnn_call(row: Row, engine: str = "auto") -> Callable[[], Any]:
    """The row as a funcnn call."""
    import funcnn as fn

    x, weight, bias = _arrays(row)
    padding = row.padding if isinstance(row.padding, int) else (row.padding,) * (x.ndim - 2)
    window = {"stride": row.stride, "padding": padding, "dilation": row.dilation}
    if row.op == "matmul":
        matrix, pixels = weight.reshape(row.outputs, -1), x.reshape(*x.shape[:2], -1)
        return lambda: matrix @ pixels
    if row.op.startswith("conv_transpose"):
        state = fn.conv_transpose_init(x, weight, **window)
        return lambda: fn.conv_transpose(x, weight, bias, state)
    if row.op.startswith("conv"):
        state = fn.conv_init(x, weight, groups=row.groups, **window)
        if row.op == "conv":
            return lambda: fn.conv(x, weight, bias, state)
        y, _ = fn.conv(x, weight, bias, state)
        dy = in_order(np.random.default_rng(1).standard_normal(y.shape, np.float32), row.layout)
        return lambda: fn.conv_backward(dy, x, weight, state)
    if row.op == "avg_pool":
        pool = fn.avg_pool_init(x, row.kernel, **window)
        return lambda: fn.avg_pool(x, pool)
    state = fn.max_pool_init(x, row.kernel, **window)
    if row.op == "max_pool":
        return lambda: fn.max_pool(x, state)
    y, used = fn.max_pool(x, state)
    dy = in_order(np.random.default_rng(1).standard_normal(y.shape, np.float32), row.layout)
    return lambda: fn.max_pool_backward(dy, used)


def torch_call(row: Row) -> Callable[[], Any]:
    """The row as a torch call without autograd."""
    import torch

    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    x, weight, bias = map(torch.from_numpy, _arrays(row))
    if row.layout == "channels_last" and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
        weight = weight.contiguous(memory_format=torch.channels_last)
    rank = x.ndim - 2
    functional = torch.nn.functional
    s, p, d, k = ([v] * rank for v in (row.stride, row.padding, row.dilation, row.kernel))
    if row.op == "conv_transpose":
        op = getattr(functional, f"conv_transpose{rank}d")
        return lambda: op(x, weight, bias, s, p)
    if row.op.startswith("conv"):
        op = getattr(functional, f"conv{rank}d")
        if row.op == "conv":
            return lambda: op(x, weight, bias, s, p, d, row.groups)
        dy = torch.randn_like(op(x, weight, bias, s, p, d, row.groups))
        backward = torch.ops.aten.convolution_backward
        return lambda: backward(dy, x, weight, [len(bias)], s, p, d, False, [0] * rank, row.groups, [True] * 3)
    if row.op == "avg_pool":
        return lambda: functional.avg_pool2d(x, row.kernel, row.stride, row.padding)
    forward = torch.ops.aten.max_pool2d_with_indices
    if row.op == "max_pool":
        return lambda: forward(x, k, s, p, d)
    y, indices = forward(x, k, s, p, d)
    dy = torch.randn_like(y)
    back = torch.ops.aten.max_pool2d_with_indices_backward
    return lambda: back(dy, x, k, s, p, d, False, indices)
