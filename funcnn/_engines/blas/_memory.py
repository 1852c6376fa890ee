"""Views and blocks that the blas engine's ops share. Arrays have a channels-first *shape* here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from funcnn._engines._order import Array, allocate
from funcnn._engines._threads import ranges
from funcnn._scratch import scratch

__all__ = [
    "Block",
    "blocks",
    "matrix",
    "put",
    "scratch_in_order",
    "strided",
]

Index = tuple[Any, ...]
Block = tuple[tuple[int, int], ...]
"""Ranges of the batch and of every spatial axis."""


def scratch_in_order(name: str, shape: tuple[int, ...], dtype: Any, order: str) -> Array:
    """Scratch (N, C, *spatial) in a memory order."""
    return allocate(lambda memory, kind: scratch(name, memory, kind), shape, dtype, order)


def put(target: Array, region: list[slice], values: Array) -> None:
    """Write values into a region of the spatial axes of target (..., *spatial) and zeros around it."""
    for i, part in enumerate(region):
        rest = (slice(None),) * (len(region) - 1 - i)
        for outside in (slice(0, part.start), slice(part.stop, None)):
            if outside.start != target.shape[i - len(region)] and outside.stop != 0:
                border: Index = (..., *region[:i], outside, *rest)
                target[border] = 0
    inside: Index = (..., *region)
    np.copyto(target[inside], values, casting="unsafe")


def strided(base: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """base's memory seen with another shape and strides. (numpy's as_strided takes 4 microseconds, ndarray() 1.)"""
    if base.flags.c_contiguous and min(strides, default=0) >= 0:
        return np.ndarray(shape, base.dtype, base, 0, strides)
    return as_strided(base, shape, strides)


def matrix(block: Array, groups: int) -> Array | None:
    """(n, C, *b) as (G, C/G, n * b) without a copy, None where strides do not allow it."""
    pixels = (block.shape[0], *block.shape[2:])
    strides = (block.strides[0], *block.strides[2:])
    # Each axis must step over exactly what the axes inside it cover; axes of size 1 never step.
    step = None
    for size, stride in zip(reversed(pixels), reversed(strides), strict=True):
        if size == 1:
            continue
        if step is not None and stride != step:
            return None
        step = stride * size
    c = block.shape[1]
    axes = (1, 0, *range(2, block.ndim))
    return block.transpose(axes).reshape(groups, c // groups, math.prod(pixels))


@lru_cache(64)
def blocks(n: int, sizes: tuple[int, ...], pixels: int, merge_images: bool) -> tuple[Block, ...]:
    """Cut n images of the given sizes into blocks of at most `pixels` pixels, in memory order and of even size.

    A block is a run of pixels: whole images, or rows of one image (of the first axis that has to be cut).
    """
    return tuple(_blocks(n, sizes, pixels, merge_images))


def _blocks(n: int, sizes: tuple[int, ...], pixels: int, merge_images: bool) -> Iterator[Block]:
    image = math.prod(sizes)
    whole = tuple((0, size) for size in sizes)
    if image <= pixels:
        together = max(1, pixels // max(image, 1)) if merge_images else 1
        for lo, hi in ranges(n, together):
            yield ((lo, hi), *whole)
        return
    cut, inner = len(sizes) - 1, 1
    while inner * sizes[cut] <= pixels:
        inner *= sizes[cut]
        cut -= 1
    rows = max(1, pixels // inner)
    for i in range(n):
        for outer in np.ndindex(*sizes[:cut]):
            for part in ranges(sizes[cut], rows):
                yield ((i, i + 1), *((o, o + 1) for o in outer), part, *whole[cut + 1 :])
