"""One side of the comparison, in a process of its own: makes the call of a row and times it in turns.

Reads requests from a pipe and is asleep in between: two thread pools that spin in one process falsify both.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

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


class Arrays(NamedTuple):
    """What a row is called with; `like(shape)` draws one more array, in the row's dtype and memory order."""

    x: Any
    weight: Any
    bias: Any
    like: Callable[[tuple[int, ...]], Any]


def _arrays(row: Row) -> Arrays:
    """x, weight, bias in the memory order of the row, as NumPy arrays."""
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        a = rng.standard_normal(shape)
        a = (a + 1j * rng.standard_normal(shape) if row.dtype.startswith("complex") else a).astype(row.dtype)
        return in_order(a, row.layout, np)

    return Arrays(draw(row.sizes), draw(weight_shape(row)), draw((row.outputs or row.sizes[1],)), draw)


def weight_shape(row: Row) -> tuple[int, ...]:
    """Shape of the weight (of a pool: of one that is not used)."""
    c, o = row.sizes[1], row.outputs or row.sizes[1]
    kernel = (row.kernel,) * (len(row.sizes) - 2)
    return (c, o, *kernel) if row.op == "conv_transpose" else (o, c // row.groups, *kernel)


def in_order(a: Any, layout: str, xp: Any) -> Any:
    """The array with its channels innermost in memory, or as it is."""
    if layout == "channels_first" or a.ndim < 3:
        return a
    return xp.moveaxis(xp.ascontiguousarray(xp.moveaxis(a, 1, -1)), -1, 1)


def funcnn_call(row: Row, engine: str = "auto") -> Callable[[], Any]:
    """The row as a funcnn call on NumPy arrays."""
    return funcnn_on(row, _arrays(row), engine)


def funcnn_on(row: Row, arrays: Arrays, engine: str, **more: Any) -> Callable[[], Any]:
    """The row as a funcnn call on given arrays; `more` goes to the init."""
    import funcnn as fn

    x, weight, bias, like = arrays
    padding = row.padding if isinstance(row.padding, int) else (row.padding,) * (x.ndim - 2)
    options = {"stride": row.stride, "padding": padding, "dilation": row.dilation, "engine": engine, **more}
    if row.op == "matmul":
        matrix, pixels = weight.reshape(row.outputs, -1), x.reshape(*x.shape[:2], -1)
        return lambda: matrix @ pixels
    if row.op == "conv_transpose":
        state = fn.conv_transpose_init(x, weight, **options)
        return lambda: fn.conv_transpose(x, weight, bias, state)
    if row.op.startswith("conv"):
        state = fn.conv_init(x, weight, groups=row.groups, **options)
        if row.op == "conv":
            return lambda: fn.conv(x, weight, bias, state)
        dy = like(fn.out_spec(state).shape)
        return lambda: fn.conv_backward(dy, x, weight, state)
    kind = row.op.removesuffix("_backward")
    init, pool, backward = getattr(fn, f"{kind}_init"), getattr(fn, kind), getattr(fn, f"{kind}_backward")
    state = init(x, row.kernel, **options)
    if row.op == kind:
        return lambda: pool(x, state)
    y, used = pool(x, state)
    dy = like(y.shape)
    return lambda: backward(dy, used)


def torch_call(row: Row) -> Callable[[], Any]:
    """The row as a torch call on the CPU."""
    import torch

    torch.set_num_threads(THREADS)
    arrays = _arrays(row)
    return torch_on(row, Arrays(*map(torch.from_numpy, arrays[:3]), lambda shape: torch.from_numpy(arrays.like(shape))))


def torch_on(row: Row, arrays: Arrays) -> Callable[[], Any]:
    """The row as a torch call on given tensors, without autograd."""
    import torch

    torch.set_grad_enabled(False)

    def ordered(tensor: Any) -> Any:  # where an axis of one cell leaves the order open, torch is told
        last = row.layout == "channels_last" and tensor.ndim == 4
        return tensor.contiguous(memory_format=torch.channels_last) if last else tensor

    x, weight, bias = ordered(arrays.x), ordered(arrays.weight), arrays.bias
    rank = x.ndim - 2
    functional, aten = torch.nn.functional, torch.ops.aten
    s, p, d, k = ([v] * rank for v in (row.stride, row.padding, row.dilation, row.kernel))
    if row.op == "conv_transpose":
        op = getattr(functional, f"conv_transpose{rank}d")
        return lambda: op(x, weight, bias, s, p)
    if row.op.startswith("conv"):
        op = getattr(functional, f"conv{rank}d")
        if row.op == "conv":
            return lambda: op(x, weight, bias, s, p, d, row.groups)
        dy = ordered(arrays.like(op(x, weight, bias, s, p, d, row.groups).shape))
        backward = aten.convolution_backward
        return lambda: backward(dy, x, weight, [len(bias)], s, p, d, False, [0] * rank, row.groups, [True] * 3)
    if row.op.startswith("avg"):
        if row.op == "avg_pool":
            return lambda: functional.avg_pool2d(x, row.kernel, row.stride, row.padding)
        dy = ordered(arrays.like(functional.avg_pool2d(x, row.kernel, row.stride, row.padding).shape))
        return lambda: aten.avg_pool2d_backward(dy, x, k, s, p, False, True, None)
    forward = aten.max_pool2d_with_indices
    if row.op == "max_pool":
        return lambda: forward(x, k, s, p, d)
    y, indices = forward(x, k, s, p, d)
    dy = ordered(arrays.like(y.shape))
    return lambda: aten.max_pool2d_with_indices_backward(dy, x, k, s, p, d, False, indices)
