"""Geometry of a pass over windows. A convolution is one pass, its adjoint one for each phase of the strides.

A `Walk` is one axis: window j reads the cells j * step + start + offset of the source for each of its taps, and belongs to cell
first + j * stride of the target. Passes have three axes (D, H, W); missing ones are walks of one window.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from funcnn._spec import Axis

__all__ = ["POINT", "Walk", "backwards", "forwards", "single", "three"]


class Walk(NamedTuple):
    """One axis of a pass; `offsets` ascend from 0, `taps` are the cells of the kernel that they belong to."""

    size: int  # cells of the source
    windows: int
    step: int
    start: int
    offsets: tuple[int, ...]
    taps: tuple[int, ...]
    first: int = 0
    stride: int = 1

    @property
    def extent(self) -> int:
        """Cells from the first tap of a window to its last, both counted."""
        return self.offsets[-1] + 1

    def span(self, windows: int) -> int:
        """Cells that so many neighbouring windows read, with the cells between."""
        return (windows - 1) * self.step + self.extent

    @property
    def inside(self) -> bool:
        """Whether no window reads padding."""
        return self.start >= 0 and self.start + self.span(self.windows) <= self.size

    def part(self, lo: int, hi: int) -> Walk:
        """Windows lo .. hi alone (where they write is as before)."""
        return self._replace(windows=hi - lo, start=self.start + lo * self.step)

    def outside(self) -> np.ndarray[Any, Any]:
        """Which taps lie in padding: (windows, taps) of bool."""
        cells = np.add.outer(np.arange(self.windows) * self.step + self.start, self.offsets)
        return (cells < 0) | (cells >= self.size)


POINT = Walk(1, 1, 1, 0, (0,), (0,))
Pass = tuple[Walk, Walk, Walk]


def single(cells: int) -> Walk:
    """Windows of one tap over an axis."""
    return Walk(cells, cells, 1, 0, (0,), (0,))


def three(walks: tuple[Walk, ...]) -> Pass:
    """Walks of 1 to 3 axes as a pass."""
    missing = (POINT,) * (3 - len(walks))
    d, h, w = missing + walks
    return d, h, w


def _order(axis: Axis, flip: bool) -> tuple[int, ...]:
    return tuple(reversed(range(axis.kernel))) if flip else tuple(range(axis.kernel))


@lru_cache(1024)
def forwards(axes: tuple[Axis, ...], flip: bool) -> Pass:
    """The pass of a convolution."""
    return three(
        tuple(
            Walk(a.size, a.out, a.stride, -a.lo, tuple(t * a.dilation for t in range(a.kernel)), _order(a, flip))
            for a in axes
        )
    )


@lru_cache(1024)
def backwards(axes: tuple[Axis, ...], flip: bool) -> tuple[Pass, ...]:
    """The passes of the adjoint: one for each phase of the strides that has taps; cells without a pass get no sum."""
    phases = [[walk for phase in range(a.stride) if (walk := _phase(a, phase, flip)) is not None] for a in axes]
    return tuple(three(walks) for walks in itertools.product(*phases))


def _phase(axis: Axis, phase: int, flip: bool) -> Walk | None:
    """Cells phase, phase + stride, ... of x: cell q takes y[(q + lo - t * dilation) / stride] for the taps that divide."""
    count = -(-(axis.size - phase) // axis.stride)
    order = _order(axis, flip)
    reads = sorted(
        ((phase + axis.lo - t * axis.dilation) // axis.stride, order[t])
        for t in range(axis.kernel)
        if (phase + axis.lo - t * axis.dilation) % axis.stride == 0
    )
    if not reads or count <= 0:
        return None
    start = reads[0][0]
    offsets, taps = tuple(cell - start for cell, _ in reads), tuple(tap for _, tap in reads)
    return Walk(axis.out, count, 1, start, offsets, taps, phase, axis.stride)
