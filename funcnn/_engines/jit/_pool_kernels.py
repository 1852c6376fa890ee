"""The kernels of pooling: for every target (a window; backward, a cell of x) a walk over its sources (cells; windows).

An array is seen as (units, rows, lane): a row is what one loop of vectors runs over, the last spatial axis or, where channels
lie innermost, the channels. Which sources a target has is a sum over three parts: the axes before the last two ("outer"), the
middle axis, and the axis of the lanes, each a table of links (distance to the source, number of the tap), with one row of
(first link, last link, divisor) for every target, so that any rank, stride, dilation and padding is the same kernel.

The axis of the lanes has phases: targets q * phases + p for all q have the same links. Forward there is one phase, backward as
many as the stride. `words` says for every link and 64 targets which of them have that source, a bit each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from funcnn._engines.jit._simd import (
    CODES,
    add,
    beats,
    bytes_of,
    divide,
    equal,
    even,
    every_lane,
    fill_zero,
    item_in,
    lanes_in,
    load,
    load_like,
    load_strided,
    load_where,
    lowest_like,
    mask_like,
    multiply,
    pairs_high,
    pairs_low,
    read,
    resized,
    select,
    splat,
    splat_like,
    store,
    store_strided,
    store_where,
    write,
    zeros,
    zeros_like,
)

__all__ = ["lanes_in_block", "pool", "scatter", "spread"]

INT32, INT64 = CODES["int32"], CODES["int64"]


part = njit(nogil=True, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # of a kernel


def lanes_in_block(lanes: int) -> tuple[int, int]:
    """Targets of a single vector and of a block of four, computed together where a row has more than two.

    16 at most in one, the lanes of an int32 index.
    """
    lanes = min(lanes, 16)
    return lanes, 4 * lanes


@part
def number(table: int, i: int) -> int:
    """Entry of a table of int64 by its address; an array would cost a check for negative indices."""
    return read(table + 8 * i, INT64)


@part
def head(tables: int) -> Any:
    """Addresses and sizes of the tables.

    outer rows and links, middle rows and links, middle rows' number, phases, their number, links of the lanes, words, bytes
    of the words of one link, values of the lanes, targets in a row, longest distance of a link of the lanes, whether the
    values of the lanes are reciprocals.
    """
    return (
        number(tables, 0), number(tables, 1), number(tables, 2), number(tables, 3), number(tables, 4), number(tables, 5),
        number(tables, 6), number(tables, 7), number(tables, 8), number(tables, 9), number(tables, 10), number(tables, 11),
        number(tables, 12), number(tables, 13),
    )  # fmt: skip


@part
def fetch(at: int, step: int, words: int, fill: Any) -> Any:
    """A vector of sources `step` bytes apart; `fill` where the words have no bit."""
    lanes, item, every = lanes_in(fill), item_in(fill), every_lane(fill)
    word = number(words, 0)
    full = word & every == every
    if step == item:
        return load_like(at, fill) if full else load_where(at, mask_like(word, fill), fill)
    if step != 2 * item:
        return load_strided(at, step, word, fill)
    high = at + (lanes - 1) * item
    if full:
        return even(load_like(at, fill), load_like(high, fill))
    near = number(words, 1)
    far = number(words, 2) if lanes == 64 else near >> (lanes - 1)
    return even(load_where(at, mask_like(near, fill), fill), load_where(high, mask_like(far, fill), fill))


@part
def put(at: int, vector: Any, count: int) -> None:
    """Write the first `count` lanes, up to all."""
    if count >= lanes_in(vector):
        store(at, vector)
    elif count > 0:
        store_where(at, vector, mask_like((1 << count) - 1, vector))


@part
def maxima(
    x: int, step: int, y: int, argmax: int, count: int, bits: int, spans: Any, links: Any, firsts: int,
    zero: Any, narrow: Any,
) -> None:  # fmt: skip
    """Largest sources of one vector of windows and, unless argmax is 0, their numbers, in the dtype of `narrow`."""
    e0, e1, m0, m1 = spans
    outer, middle, inner, taps, pitch = links
    fill = best = lowest_like(zero)
    # Until a larger cell comes, the first one of each window has won: all may be as low as `fill`.
    one = splat_like(1, zeros_like(zero, INT32))
    index = add(load_like(firsts, one), splat_like(number(outer, 2 * e0 + 1) + number(middle, 2 * m0 + 1), one))
    for e in range(e0, e1):
        for m in range(m0, m1):
            row = x + number(outer, 2 * e) + number(middle, 2 * m)
            own = splat_like(number(outer, 2 * e + 1) + number(middle, 2 * m + 1), index)
            for k in range(taps):
                value = fetch(row + number(inner, 2 * k), step, bits + k * pitch, fill)
                wins = beats(value, best)
                best = select(wins, value, best)
                index = select(wins, own, index)
                own = add(own, one)
    put(y, best, count)
    if argmax:
        put(argmax, resized(index, narrow), count)


@part
def means(x: int, step: int, y: int, count: int, bits: int, spans: Any, links: Any, scale: Any, exact: int) -> None:
    """Means of one vector of windows: sums over their divisors, or (`exact`) times the reciprocals."""
    e0, e1, m0, m1 = spans
    outer, middle, inner, taps, pitch = links
    zero = total = splat_like(0, scale)
    for e in range(e0, e1):
        for m in range(m0, m1):
            row = x + number(outer, 2 * e) + number(middle, 2 * m)
            for k in range(taps):
                total = add(total, fetch(row + number(inner, 2 * k), step, bits + k * pitch, zero))
    put(y, multiply(total, scale) if exact else divide(total, scale), count)


def pool(code: int, item: int, lanes: int, index_code: int, stamp: int) -> Any:
    """Kernel: maxima of windows with their argmax, or (index_code -1) means."""
    single, most = lanes_in_block(lanes)
    is_max = index_code >= 0
    narrow = max(index_code, 0)
    narrow_item = bytes_of(narrow)
    number_type = np.float64 if item == 8 else np.float32

    @njit(f"void({', '.join(['int64'] * 13)})", nogil=True, cache=True)
    def run(
        x: int, limit: int, n_step: int, c_step: int, step: int, y: int, argmax: int,
        groups: int, units: int, rows: int, r0: int, r1: int,
        tables: int,
    ) -> None:  # fmt: skip
        """Rows r0 .. r1 of all units; unit u is group u % groups of image u // groups. argmax 0: not wanted.

        x: of the first cell of unit 0; nothing is read at `limit` and beyond.
        y, argmax: of row 0 of unit 0; their units lie `rows` rows apart, packed. `lane_values`: for each lane, maxima the
        number of the first tap of its windows (int32), means their divisor; where all are powers of 2, the reciprocal.
        """
        stamp  # noqa: B018
        outer_rows, outer, middle_rows, middle, cols, phases, _, inner, words, pitch, lane_values, width, longest, exact = head(tables)
        links = (outer, middle, inner, number(phases, 1), pitch)
        regular = step == item or step == 2 * item
        for unit in range(units):
            image = x + unit // groups * n_step + unit % groups * c_step
            row = r0 % cols
            o, m = outer_rows + 32 * (r0 // cols), middle_rows + 32 * row
            for r in range(r0, r1):
                if row == cols:
                    row, o, m = 0, o + 32, middle_rows
                spans = (number(o, 0), number(o, 1), number(m, 0), number(m, 1))
                divisor, reach = number(o, 2) * number(m, 2), number(o, 3) + number(m, 3) + longest
                at = (unit * rows + r) * width
                j = 0
                while j < width:
                    start, to, left = image + j * step, y + (at + j) * item, width - j
                    several = left > 2 * single
                    inside = start + reach + (most if several else single) * step <= limit
                    bits = words + 48 * (j // single) + (0 if inside and regular else 24)
                    if is_max:
                        index = argmax + (at + j) * narrow_item if argmax else 0
                        firsts = lane_values + 4 * j
                        if several:
                            maxima(start, step, to, index, left, bits, spans, links, firsts, zeros(code, most), zeros(narrow, most))
                        else:
                            one = zeros(code, single)
                            maxima(start, step, to, index, left, bits, spans, links, firsts, one, zeros(narrow, single))
                    else:
                        divisors = lane_values + j * item
                        scale = number_type(1 / divisor if exact else divisor)
                        if several:
                            by = multiply(load(divisors, code, most), splat(scale, code, most))
                            means(start, step, to, left, bits, spans, links, by, exact)
                        else:
                            own = multiply(load(divisors, code, single), splat(scale, code, single))
                            means(start, step, to, left, bits, spans, links, own, exact)
                    j += most if several else single
                row += 1
                m += 32

    return run


@part
def collect(
    dy: int, argmax: int, dx: int, count: int, bits: int, spans: Any, links: Any, zero: Any, nought: Any
) -> None:
    """What one vector of cells in each phase gets: dy of all its windows (nought None) or of those whose argmax names it."""
    e0, e1, m0, m1 = spans
    outer, middle, inner, phases, strides, pitch = links
    lanes, item = lanes_in(zero), item_in(zero)
    before = zero
    for p in range(strides):
        total = zero
        for e in range(e0, e1):
            for m in range(m0, m1):
                row = number(outer, 2 * e) + number(middle, 2 * m)
                base = number(outer, 2 * e + 1) + number(middle, 2 * m + 1)
                for k in range(number(phases, 2 * p), number(phases, 2 * p + 1)):
                    at = row + number(inner, 2 * k)
                    value = fetch(dy + at * item, item, bits + k * pitch, zero)
                    if nought is not None:  # lanes without a source hold 0, harmless whatever their index
                        index_item = item_in(nought)
                        index = fetch(argmax + at * index_item, index_item, bits + k * pitch, nought)
                        value = select(equal(index, splat_like(base + number(inner, 2 * k + 1), nought)), value, zero)
                    total = add(total, value)
        if strides == 1:
            put(dx, total, count)
        elif strides != 2:
            store_strided(dx + p * item, strides * item, total, (count - p + strides - 1) // strides)
        elif p == 1:
            put(dx, pairs_low(before, total), count)
            put(dx + lanes * item, pairs_high(before, total), count - lanes)
        before = total


def spread(code: int, item: int, lanes: int, index_code: int, stamp: int) -> Any:
    """Kernel: dx of a max pool, or (index_code -1) of a sum over windows; dy, argmax and dx lie packed in one order."""
    single, most = lanes_in_block(lanes)
    is_max = index_code >= 0
    narrow = max(index_code, 0)
    narrow_item = bytes_of(narrow) if is_max else 0

    @njit(f"void({', '.join(['int64'] * 12)})", nogil=True, cache=True)
    def run(
        dy: int, dy_end: int, plane: int, argmax: int, argmax_end: int, index_plane: int, dx: int, units: int, rows: int, r0: int, r1: int,
        tables: int,
    ) -> None:  # fmt: skip
        """Rows r0 .. r1 of all units. A unit has `plane` windows in dy, `index_plane` in argmax, and `rows` rows in dx.

        Nothing is read at the ends and beyond.
        """
        stamp  # noqa: B018
        outer_rows, outer, middle_rows, middle, cols, phases, strides, inner, words, pitch, _, width, longest, _ = head(tables)
        links = (outer, middle, inner, phases, strides, pitch)
        for unit in range(units):
            row = r0 % cols
            o, m = outer_rows + 32 * (r0 // cols), middle_rows + 32 * row
            for r in range(r0, r1):
                if row == cols:
                    row, o, m = 0, o + 32, middle_rows
                spans = (number(o, 0), number(o, 1), number(m, 0), number(m, 1))
                reach = number(o, 3) + number(m, 3) + longest
                j = 0
                while j * strides < width:
                    left = width - j * strides
                    dy_at = dy + (unit * plane + j) * item
                    index = argmax + (unit * index_plane + j) * narrow_item
                    to = dx + ((unit * rows + r) * width + j * strides) * item
                    several = left > 2 * single * strides
                    last = reach + (most if several else single)
                    inside = dy_at + last * item <= dy_end and index + last * narrow_item <= argmax_end
                    bits = words + 48 * (j // single) + (0 if inside else 24)
                    if several:
                        zero = zeros(code, most)
                        if is_max:
                            collect(dy_at, index, to, left, bits, spans, links, zero, zeros(narrow, most))
                        else:
                            collect(dy_at, index, to, left, bits, spans, links, zero, None)
                        j += most
                    else:
                        one = zeros(code, single)
                        if is_max:
                            collect(dy_at, index, to, left, bits, spans, links, one, zeros(narrow, single))
                        else:
                            collect(dy_at, index, to, left, bits, spans, links, one, None)
                        j += single
                row += 1
                m += 32

    return run


def scatter(code: int, item: int, lanes: int, index_code: int, stamp: int) -> Any:
    """Kernel: dx of a max pool by one addition for each window; dy, argmax and dx lie packed, channels-first."""
    index_item = bytes_of(index_code)

    @njit(f"void({', '.join(['int64'] * 10)})", nogil=True, cache=True)
    def run(
        dy: int, argmax: int, dx: int, units: int, size: int, rows: int, bases: int, offsets: int, width: int, step: int
    ) -> None:
        """All windows of all units. Unit: `size` cells, `rows` rows of windows.

        `bases`: int64 table of the first tap of each row's first window, in bytes from the unit's first cell; windows of a row
        lie `step` bytes apart; `offsets`: int64 table of the bytes from the first tap to each.
        """
        stamp  # noqa: B018
        for unit in range(units):
            fill_zero(dx, size * item)
            for r in range(rows):
                at = dx + number(bases, r)
                for j in range(width):
                    cell = at + number(offsets, np.int64(read(argmax + j * index_item, index_code)))
                    write(cell, read(cell, code) + read(dy + j * item, code), code)
                    at += step
                dy += width * item
                argmax += width * index_item
            dx += size * item

    return run
