"""What dense and depthwise convolutions share: the maps of a Spec as passes over windows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np

from funcnn._engines._order import Array, allocate
from funcnn._engines.jit import _host
from funcnn._engines.jit._gemm import stage_first, stage_last
from funcnn._engines.jit._kernels import kernel
from funcnn._engines.jit._walk import Pass, Walk, backwards, forwards, three
from funcnn._spec import ConvSpec

__all__ = ["Maps"]

# Multiply-adds that one thread does in the time of a hand-over to another (about 60 us).
SHARED_WORK = 4 << 20


class Maps(ABC):
    """The three maps for one Spec on arrays of the dtype of the sums (float32, float64 or int64)."""

    def __init__(self, spec: ConvSpec, dtype: str, threads: int) -> None:
        self.spec, self.dtype, self.threads = spec, dtype, threads
        self.item = np.dtype(dtype).itemsize
        self.lanes = _host.lanes_of(dtype)
        for make in (stage_first, stage_last):  # a call compiles nothing
            kernel(make, dtype)

    @abstractmethod
    def _convolve(self, walks: Pass, x: Array, weight: Array, bias: Array, y: Array, order: str) -> None:
        """Write the cells of y of one pass; weight (G, M, C, *k), bias (G * M)."""

    @abstractmethod
    def weight_gradient(self, x: Array, y: Array, order: str) -> Array:
        """The gradient (O, I / groups, *k)."""

    def correlate(self, x: Array, weight: Array, bias: Array, y: Array, order: str) -> None:
        """Write y; weight (O, I / groups, *k)."""
        spec = self.spec
        weight = weight.reshape(spec.groups, spec.outputs // spec.groups, *weight.shape[1:])
        self._convolve(forwards(spec.axes, spec.flip), x, weight, bias, y, order)

    def adjoint(self, y: Array, weight: Array, bias: Array, x: Array, order: str) -> None:
        """Write x, the adjoint of y plus bias."""
        spec = self.spec
        if not np.isfinite(weight).all():
            return self._adjoint_by_taps(y, weight, bias, x, order)
        passes = backwards(spec.axes, spec.flip)
        covered = sum(math.prod(walk.windows for walk in walks) for walks in passes)
        if covered < math.prod(a.size for a in spec.axes):  # strides leave cells that no window reads
            x[...] = bias.reshape(-1, *(1,) * len(spec.axes))
        weight = weight.reshape(spec.groups, spec.outputs // spec.groups, *weight.shape[1:]).swapaxes(1, 2)
        for walks in passes:
            self._convolve(walks, y, weight, bias, x, order)
        return None

    def _adjoint_by_taps(self, y: Array, weight: Array, bias: Array, x: Array, order: str) -> None:
        """`adjoint` tap by tap, of cells of y alone: a pass would multiply the zeros around y by an infinite weight."""
        spec = self.spec
        x[...] = bias.reshape(-1, *(1,) * len(spec.axes))
        weight = weight.reshape(spec.groups, spec.outputs // spec.groups, *weight.shape[1:]).swapaxes(1, 2)
        for taps in np.ndindex(*spec.kernel):
            inside = [axis.windows_inside(tap) for axis, tap in zip(spec.axes, taps, strict=True)]
            counts = [hi - lo for lo, hi in inside]
            if 0 in counts:
                continue
            own = [axis.kernel - 1 - t if spec.flip else t for axis, t in zip(spec.axes, taps, strict=True)]
            walks = three(tuple(Walk(n, n, 1, 0, (0,), (0,)) for n in counts))
            product = allocate(np.empty, (len(x), spec.inputs, *counts), self.dtype, order)
            source = y[_spatial(slice(*part) for part in inside)]
            alone = weight[_spatial(slice(t, t + 1) for t in own)]
            self._convolve(walks, source, alone, np.zeros_like(bias), product, order)
            starts = [a.start(t) + lo * a.stride for a, t, (lo, _) in zip(spec.axes, taps, inside, strict=True)]
            cells = [
                slice(s, s + (n - 1) * a.stride + 1, a.stride)
                for a, s, n in zip(spec.axes, starts, counts, strict=True)
            ]
            x[_spatial(cells)] += product

    def _parts(self, work: int) -> int:
        """Threads for so many multiply-adds."""
        return self.threads if work > SHARED_WORK else 1


def _spatial(parts: Iterable[slice]) -> Any:
    """An index of the spatial axes."""
    return (..., *parts)
