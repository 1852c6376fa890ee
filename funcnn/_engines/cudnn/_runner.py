"""Running a real convolution: which graph serves the arrays of a call, and what has to be copied or split for it.

Graphs are prepared once for each batch size and memory layout of the operands, and kept. They own no array and no workspace.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from funcnn._engines import _gpu
from funcnn._engines._order import FIRST, LAST, allocate, memory_order, strides_of
from funcnn._engines.cudnn._graph import RESULT, UIDS, Built, Problem, Refusal, Tensor, candidates, rebuilt, refusal
from funcnn._spec import HALF_DTYPES, Axis, ConvSpec, Options
from funcnn.errors import EngineError

__all__ = ["Operands", "Runner", "by_channel"]

MOST_GRAPHS = 64  # kept by a plan: up to four for each batch size and memory layout of the arrays
MOST_ELEMENTS = 2**31 - 1  # from the first of an operand to its last: cuDNN's kernels index in 32 bits
ALIGNMENT = 16  # bytes, of every operand of a graph
REPEATS = 10  # runs of a candidate that are timed at once

T = TypeVar("T")
Array = _gpu.Array


class Operands(NamedTuple):
    """The arrays of one map, one of them its result: (N, C, *size), (O, C/groups, *kernel), (N, O, *out); bias (C,) or (O,)."""

    image: Array
    filter: Array
    response: Array
    bias: Array | None = None

    def pointers(self) -> dict[int, int]:
        """Addresses by uid."""
        return {UIDS[name]: a.data.ptr for name, a in zip(self._fields, self, strict=True) if a is not None}


class _Way(NamedTuple):
    """How a call is served: by copies of some operands, by fewer images at a time, by a graph, or (None) in float32."""

    step: int
    packed: tuple[str, ...] = ()
    built: Built | None = None
    add_bias: bool = False  # after the graph


class _Bounded(OrderedDict[Hashable, T]):
    """A dict of the entries that were used last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def find(self, key: Hashable) -> T | None:
        found = self.get(key)
        if found is not None:
            self.move_to_end(key)
        return found

    def keep(self, key: Hashable, value: T) -> T:
        self[key] = value
        while len(self) > self._most:
            self.popitem(last=False)
        return value


class Runner:
    """The three maps of a real ConvSpec on one device. limit: most bytes of workspace."""

    def __init__(self, spec: ConvSpec, options: Options, limit: int) -> None:
        self.spec, self.options, self.limit = spec, options, limit
        # Candidates of the last graphs, by name: what a pickle keeps.
        self.choices: _Bounded[str] = _Bounded(MOST_GRAPHS)
        self._reached = tuple(_reached(axis) for axis in spec.axes)
        self._cropped = any(size != axis.size for axis, size in zip(spec.axes, self._reached, strict=True))
        axes = tuple(axis._replace(size=size) for axis, size in zip(spec.axes, self._reached, strict=True))
        self._axes = axes if len(axes) > 1 else (Axis(1, 1, 1, 1, 0, 0, 1), *axes)
        self._ways: _Bounded[_Way] = _Bounded(MOST_GRAPHS)
        self._graphs: _Bounded[Built] = _Bounded(MOST_GRAPHS)
        self._prepared: _Bounded[bool] = _Bounded(MOST_GRAPHS)
        self._lock = threading.RLock()
        self._queueing = threading.Lock()

    @property
    def workspace_bytes(self) -> int:
        """Most that a graph prepared so far needs."""
        with self._lock:
            return max((built.workspace for built in self._graphs.values()), default=0)

    def prepare(
        self, calls: tuple[tuple[str, bool], ...], n: int, order: str, filter_strides: tuple[int, ...] | None
    ) -> None:
        """Prepare graphs, given as (kind, biased), for n images in a memory order. filter_strides: None: packed."""
        key = (n, order, filter_strides)
        with self._lock:
            if 0 in self._reached or self._prepared.find(key) is not None:
                return
            spec = self.spec
            weight = packed(spec.weight_shape, FIRST)
            if filter_strides is not None:
                weight = weight._replace(strides=filter_strides)
            for kind, biased in calls:
                images, step = 0, n
                while step != images:  # smaller parts, until one graph takes a whole one
                    images = step
                    image, response = (packed((images, *shape), order) for shape in (spec.near, spec.far))
                    image = image._replace(shape=(*image.shape[:2], *self._reached))
                    tensors = {"image": image, "filter": weight, "response": response}
                    step = self._find_way(kind, images, tensors, biased).step
            self._prepared.keep(key, True)

    def run(self, kind: str, operands: Operands) -> None:
        """Queue a map that writes its result (which has elements, and so have the others)."""
        if self._cropped and operands.image.shape[2:] != self._reached:
            self._run_cropped(kind, operands)
            return
        n = operands.image.shape[0]
        pointers = operands.pointers()
        unaligned = tuple(name for name, uid in UIDS.items() if pointers.get(uid, 0) % ALIGNMENT)
        way = _Way(n, unaligned) if unaligned else self._way(kind, n, operands)
        if way.packed:
            self._run_packed(kind, operands, way.packed)
        elif way.step < n:
            self._run_parts(kind, operands, way.step)
        elif way.built is None:
            self._run_wide(kind, operands)
        elif way.add_bias:
            self._execute(way.built, operands._replace(bias=None).pointers())
            result = getattr(operands, RESULT[kind])
            result += by_channel(operands.bias, result)
        else:
            self._execute(way.built, pointers)

    def _execute(self, built: Built, pointers: dict[int, int]) -> None:
        """Queue a graph; in one thread at a time, for not every engine of cuDNN allows a plan to be used by two at once."""
        with self._queueing:
            _gpu.execute(built.graph, pointers, built.workspace)

    def _run_cropped(self, kind: str, operands: Operands) -> None:
        """On the cells of the image that windows read."""
        result = getattr(operands, RESULT[kind])
        if kind == "dgrad" or 0 in self._reached:
            result[...] = 0 if operands.bias is None else by_channel(operands.bias, result)
        if 0 not in self._reached:
            reached = (..., *(slice(size) for size in self._reached))
            self.run(kind, operands._replace(image=operands.image[reached]))

    def _run_packed(self, kind: str, operands: Operands, names: tuple[str, ...]) -> None:
        """With copies of some operands, without gaps and at whole multiples of ALIGNMENT."""
        copies = {name: _packed_like(getattr(operands, name)) for name in names}
        for name, copy in copies.items():
            if name != RESULT[kind]:
                copy[...] = getattr(operands, name)
        self.run(kind, operands._replace(**copies))
        if RESULT[kind] in copies:
            getattr(operands, RESULT[kind])[...] = copies[RESULT[kind]]

    def _run_parts(self, kind: str, operands: Operands, step: int) -> None:
        """So many images at a time."""
        total: Any = 0
        for lo in range(0, len(operands.image), step):
            part = slice(lo, lo + step)
            image, response = operands.image[part], operands.response[part]
            if kind != "wgrad":
                self.run(kind, operands._replace(image=image, response=response))
                continue
            weight = _packed_like(operands.filter)
            self.run(kind, Operands(image, weight, response))
            # Half floats: the parts are added in float32, though each has been rounded.
            total = total + (weight.astype("float32") if self.spec.dtype in HALF_DTYPES else weight)
        if kind == "wgrad":
            operands.filter[...] = total

    def _run_wide(self, kind: str, operands: Operands) -> None:
        """Half floats in float32: without a graph that adds the bias they would be rounded twice."""
        result = getattr(operands, RESULT[kind])
        wide = Operands(*(None if array is None else array.astype("float32") for array in operands))
        self._wide.run(kind, wide)
        result[...] = getattr(wide, RESULT[kind])

    @cached_property
    def _wide(self) -> Runner:
        wide = Runner(_in_dtype(self.spec, "float32"), self.options, self.limit)
        wide.choices = self.choices
        return wide

    # ---- which graph -------------------------------------------------------------------------------------------------

    def _way(self, kind: str, n: int, operands: Operands) -> _Way:
        """The way for a call; after the first of its kind one lookup."""
        strides = operands.image.strides, operands.filter.strides, operands.response.strides
        bias = operands.bias
        if bias is not None and bias.strides != (bias.itemsize,):
            return _Way(n, ("bias",))
        key = (kind, bias is not None, n, *strides)
        with self._lock:
            found = self._ways.find(key)
            if found is None:
                arrays = operands._replace(bias=None)._asdict().items()
                tensors = {name: Tensor(a.shape, strides_of(a)) for name, a in arrays if a is not None}
                found = self._ways.keep(key, self._find_way(kind, n, tensors, bias is not None))
            return found

    def _find_way(self, kind: str, n: int, tensors: dict[str, Tensor], biased: bool) -> _Way:
        order = memory_order(tensors["image"], self.spec.layout)
        canonical = {name: _canonical(tensor, order) for name, tensor in tensors.items()}
        operands = {name: tensor for name, tensor in canonical.items() if tensor is not None}
        irregular = tuple(name for name in tensors if name not in operands)
        if irregular:
            return _Way(n, irregular)
        if n > 1 and max(map(_extent, operands.values())) > MOST_ELEMENTS:
            return _Way((n + 1) // 2)
        refusals: list[Refusal] = []
        built, add_bias = self._choose(kind, {name: _lifted(t) for name, t in operands.items()}, biased, refusals)
        if built is not None and add_bias and self.spec.dtype in HALF_DTYPES:
            return _Way(n)
        if built is not None:
            return _Way(n, built=built, add_bias=add_bias)
        spread = tuple(name for name, t in operands.items() if t != packed(t.shape, memory_order(t, order)))
        if spread:
            return _Way(n, spread)
        if n > 1 and any(refusal.over_limit for refusal in refusals):
            return _Way((n + 1) // 2)
        refusals.sort(key=lambda refusal: not refusal.over_limit)
        reason = refusals[0].reason if refusals else "the options allow no engine"
        raise EngineError(f"cuDNN has no {kind} plan within {self.limit:,} bytes of workspace: {reason}")

    def _choose(
        self, kind: str, tensors: dict[str, Tensor], biased: bool, refusals: list[Refusal]
    ) -> tuple[Built | None, bool]:
        """The graph, and whether a bias is to be added after it.

        A graph with the bias in it reads and writes the result once, and rounds half floats once. But for float32 and
        float64 it may have slow engines only, those that the heuristics do not name.
        """
        problem = Problem(kind, self.spec.dtype, self._axes, **tensors, biased=biased)
        fused = self._graph(problem, refusals)
        if not biased or (fused is not None and (self.spec.dtype in HALF_DTYPES or not fused.fallback)):
            return fused, False
        plain = self._graph(problem._replace(biased=False), refusals)
        if fused is not None and (plain is None or plain.fallback):
            return fused, False
        return plain, True

    def _graph(self, problem: Problem, refusals: list[Refusal]) -> Built | None:
        """The graph of a problem: kept, the candidate that was chosen before, or the best one."""
        found = self._graphs.find(problem)
        if found is None and problem in self.choices:
            found = rebuilt(problem, self.choices[problem], self.limit)
        if found is None:
            allowed = candidates(problem, self.options, self.limit, refusals)
            if self.options.autotune:
                name = _fastest(problem, allowed, refusals)
                found = None if name is None else rebuilt(problem, name, self.limit)  # the others' plans go
            else:
                found = next(allowed, None)
        if found is not None:
            self._graphs.keep(problem, found)
            self.choices.keep(problem, found.name)
        return found


def _fastest(problem: Problem, allowed: Iterator[Built], refusals: list[Refusal]) -> str | None:
    """Name of the candidate with the least device time, on arrays of its own. One that fails when it runs is refused."""
    arrays = {
        UIDS[name]: _gpu.empty((_extent(getattr(problem, name)),), problem.dtype)
        for name in ("image", "filter", "response")
    }
    if problem.biased:
        arrays[UIDS["bias"]] = _gpu.empty((getattr(problem, RESULT[problem.kind]).shape[1],), problem.dtype)
    pointers = {uid: array.data.ptr for uid, array in arrays.items()}

    times: dict[str, float] = {}
    for built in allowed:
        run = partial(_gpu.execute, built.graph, pointers, built.workspace)
        try:
            time = _gpu.milliseconds(run, 1)
            # Most candidates are many times slower than the best: they are not worth more runs.
            times[built.name] = (
                _gpu.milliseconds(run, REPEATS) if time < 2 * min(times.values(), default=time) else time
            )
        except _gpu.graph_errors() as error:
            refusals.append(refusal(error))
    return min(times, key=times.__getitem__, default=None)


# ---- sizes and strides -----------------------------------------------------------------------------------------------


def by_channel(bias: Array, y: Array) -> Array:
    """bias (C,) to broadcast against y (N, C, *sizes)."""
    return bias.reshape(-1, *(1,) * (y.ndim - 2))


def _reached(axis: Axis) -> int:
    """Cells up to the last that a window reads, where cuDNN would fit in more windows; else all. 0: windows read padding."""
    end = max(0, axis.end)
    return axis.size if axis.size - end < axis.stride else end


def _in_dtype(spec: ConvSpec, dtype: str) -> ConvSpec:
    return dataclasses.replace(spec, dtype=dtype, weight_dtype=dtype, y_dtype=dtype)


def packed(shape: tuple[int, ...], order: str) -> Tensor:
    """A tensor without gaps in a memory order."""
    axes = [0, *range(2, len(shape)), 1] if order == LAST else list(range(len(shape)))
    strides, step = [0] * len(shape), 1
    for axis in reversed(axes):
        strides[axis] = step
        step *= shape[axis]
    return Tensor(shape, tuple(strides))


def _canonical(tensor: Tensor, order: str) -> Tensor | None:
    """The tensor with the strides of its axes of size 1 as in a packed one; None if elements overlap or lie backwards."""
    steps = packed(tensor.shape, memory_order(tensor, order)).strides
    strides = tuple(own if size > 1 else step for size, own, step in zip(*tensor, steps, strict=True))
    room = 1
    for step, size in sorted((own, size) for size, own in zip(tensor.shape, strides, strict=True) if size > 1):
        if step < room:
            return None
        room = step * size
    return Tensor(tensor.shape, strides)


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last, both counted."""
    return 1 + sum((size - 1) * step for size, step in zip(*tensor, strict=True))


def _lifted(tensor: Tensor) -> Tensor:
    """With two spatial axes at least: a row is an image of one row, which cuDNN wants."""
    if len(tensor.shape) > 3:
        return tensor
    (n, c, width), (image, channel, step) = tensor
    row = c * width if channel == 1 and c > 1 else width * step
    return Tensor((n, c, 1, width), (image, channel, row, step))


def _packed_like(a: Array) -> Array:
    """A new array without gaps in the memory order of another, which starts at a whole ALIGNMENT."""
    if a.ndim == 1:
        return _gpu.empty(a.shape, a.dtype)
    return allocate(_gpu.empty, a.shape, a.dtype, memory_order(a, FIRST))
