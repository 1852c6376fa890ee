"""The kernels of pooling: every target (a window; backward, a cell of x) walks over its sources (cells; backward, windows).

An array is a number of units, of which each has rows of targets: along the last spatial axis or, where channels lie innermost,
along the channels. Vectors run along a row. Which sources a target has is a sum of three parts, the axes before the last two
("outer"), the middle axis and the axis of the row, each a table of links (distance to the source, number of the tap); so any
rank, stride, dilation and padding is the same kernel. All tables are int64 and come as addresses, in one more table:

    0, 1   outer rows, outer links: a row of (first link, last link, divisor, longest distance) for each target
    2-4    middle rows, middle links, number of middle rows
    5-7    phases, their number, links along a row: targets phase + i * number have the links first .. last of a phase
    8, 9   words of each link along a row, their bytes: for every vector of targets, which of them have that source, a bit each
    10     what each target along a row has (see `pool`)
    11-13  targets in a row, longest distance along it, whether the divisors are powers of 2

Backward there are as many phases as the stride, forward there is one. A vector has six words: the targets that have the source;
for sources that are every second number in memory, these numbers from the first on and from the last one of the first vector
on; all that with a bit for targets that no one wants but whose source it does no harm to read; then without.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from funcnn._engines.jit._host import (
    CODES,
)
from funcnn._engines.jit._kernels import njit, part
from funcnn._engines.jit._simd import (
    add,
    beats,
    bytes_of,
    divide,
    equal,
    even,
    every_lane,
    fill_zero,
    item_in,
    joined,
    lanes_in,
    load,
    load_like,
    load_strided,
    load_where,
    lowest_like,
    mask_like,
    multiply,
    number,
    pairs_high,
    pairs_low,
    quarter,
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
)

__all__ = ["WORDS", "lanes_in_block", "pool", "put", "scatter", "spread"]

INT32 = CODES["int32"]
WORDS = 6
ROW = 32  # bytes of a row of the outer and the middle table


def lanes_in_block(lanes: int) -> tuple[int, int]:
    """Targets of a single vector and of four, which are computed together where a row has more than two.

    16 at most in one: every lane has a number of 4 bytes.
    """
    lanes = min(lanes, 16)
    return lanes, 4 * lanes


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
def fetch_four(at: int, apart: int, step: int, words: int, fill: Any) -> Any:
    """The same short row of four units that lie `apart`, as one vector."""
    own = quarter(fill, 0)
    a, b = fetch(at, step, words, own), fetch(at + apart, step, words, own)
    return joined(a, b, fetch(at + 2 * apart, step, words, own), fetch(at + 3 * apart, step, words, own))


@part
def put(at: int, vector: Any, count: int) -> None:
    """Write the first `count` lanes, up to all."""
    if count >= lanes_in(vector):
        store(at, vector)
    elif count > 0:
        store_where(at, vector, mask_like((1 << count) - 1, vector))


@part
def put_four(at: int, apart: int, vector: Any, count: int) -> None:
    """Write what `fetch_four` gave: `count` targets of each unit."""
    put(at, quarter(vector, 0), count)
    put(at + apart, quarter(vector, 1), count)
    put(at + 2 * apart, quarter(vector, 2), count)
    put(at + 3 * apart, quarter(vector, 3), count)


@part
def maxima(
    x: int, step: int, y: int, argmax: int, count: int, bits: int, spans: Any, links: Any, first: Any, zero: Any, narrow: Any,
    apart: Any, size: int,
) -> None:  # fmt: skip
    """Largest sources of a vector of windows and, unless argmax is 0, their numbers, in the dtype of `narrow`."""
    e0, e1, m0, m1 = spans
    outer, middle, inner, taps, pitch = links
    fill = best = lowest_like(zero)
    # Until a larger cell comes, the first one of each window has won: all may be as low as `fill`.
    index = add(first, splat_like(number(outer, 2 * e0 + 1) + number(middle, 2 * m0 + 1), first))
    one = splat_like(1, first)
    for e in range(e0, e1):
        for m in range(m0, m1):
            row = x + number(outer, 2 * e) + number(middle, 2 * m)
            own = splat_like(number(outer, 2 * e + 1) + number(middle, 2 * m + 1), first)
            for k in range(taps):
                at, here = row + number(inner, 2 * k), bits + k * pitch
                value = fetch(at, step, here, fill) if apart is None else fetch_four(at, apart, step, here, fill)
                wins = beats(value, best)
                best = select(wins, value, best)
                index = select(wins, own, index)
                own = add(own, one)
    if apart is None:
        put(y, best, count)
        if argmax:
            put(argmax, resized(index, narrow), count)
    else:
        put_four(y, size * item_in(zero), best, count)
        if argmax:
            put_four(argmax, size * item_in(narrow), resized(index, narrow), count)


@part
def means(
    x: int,
    step: int,
    y: int,
    count: int,
    bits: int,
    spans: Any,
    links: Any,
    scale: Any,
    exact: int,
    apart: Any,
    size: int,
) -> None:
    """Means of a vector of windows: sums over their divisors, or (`exact`) times the reciprocals."""
    e0, e1, m0, m1 = spans
    outer, middle, inner, taps, pitch = links
    zero = total = splat_like(0, scale)
    for e in range(e0, e1):
        for m in range(m0, m1):
            row = x + number(outer, 2 * e) + number(middle, 2 * m)
            for k in range(taps):
                at, here = row + number(inner, 2 * k), bits + k * pitch
                value = fetch(at, step, here, zero) if apart is None else fetch_four(at, apart, step, here, zero)
                total = add(total, value)
    mean = multiply(total, scale) if exact else divide(total, scale)
    if apart is None:
        put(y, mean, count)
    else:
        put_four(y, size * item_in(scale), mean, count)


def pool(code: int, item: int, lanes: int, index_code: int, stamp: int) -> Any:
    """Kernel: maxima of windows with their argmax, or (index_code -1) means."""
    single, most = lanes_in_block(lanes)
    is_max = index_code >= 0
    narrow = max(index_code, 0)
    narrow_item = bytes_of(narrow)
    value_code = INT32 if is_max else code
    value_item = 4 if is_max else item
    number_type = np.float64 if item == 8 else np.float32

    @njit(f"void({', '.join(['int64'] * 13)})", nogil=True, cache=True, error_model="numpy")
    def run(
        x: int, limit: int, n_step: int, c_step: int, step: int, y: int, argmax: int,
        groups: int, units: int, rows: int, r0: int, r1: int, tables: int,
    ) -> None:  # fmt: skip
        """Rows r0 .. r1 of all units; unit u is group u % groups of image u // groups. argmax 0: not wanted.

        x: of the first cell of unit 0; nothing is read at `limit` and beyond. y, argmax: of row 0 of unit 0; a unit has `rows`
        rows there. Entry 10 of the tables: for each lane the number of the first tap of its window (int32), or its divisor, or
        the reciprocal, where all are powers of 2.
        """
        stamp  # noqa: B018
        links = (
            number(tables, 1),
            number(tables, 3),
            number(tables, 7),
            number(number(tables, 5), 1),
            number(tables, 9),
        )
        cols, width, longest, exact = number(tables, 4), number(tables, 11), number(tables, 12), number(tables, 13)
        regular = step == item or step == 2 * item
        size = rows * width
        unit = 0
        while unit < units:
            c = unit % groups
            beside = 4 if width <= single and min(groups - c, units - unit) >= 4 else 1
            image = x + unit // groups * n_step + c * c_step
            beyond = limit - longest - max(0, (beside - 1) * c_step)
            col = r0 % cols
            o, m = number(tables, 0) + ROW * (r0 // cols), number(tables, 2) + ROW * col
            for r in range(r0, r1):
                if col == cols:
                    col, o, m = 0, o + ROW, number(tables, 2)
                spans = (number(o, 0), number(o, 1), number(m, 0), number(m, 1))
                divisor = number(o, 2) * number(m, 2)
                scale = number_type(1 / divisor if exact else divisor)
                reach = image + number(o, 3) + number(m, 3)
                j = 0
                while j < width:
                    several = beside == 1 and width - j > 2 * single
                    at = unit * size + r * width + j
                    inside = regular and reach + (j + (most if several else single)) * step <= beyond
                    bits = number(tables, 8) + 8 * WORDS * (j // single) + (0 if inside else 4 * WORDS)
                    start, to, left = image + j * step, y + at * item, width - j
                    index = argmax + at * narrow_item if argmax else 0
                    values = number(tables, 10) + j * value_item
                    if several:
                        wide = load(values, value_code, most)
                        if is_max:
                            maxima(
                                start, step, to, index, left, bits, spans, links, wide, zeros(code, most), zeros(narrow, most),
                                None, 0,
                            )  # fmt: skip
                        else:
                            by = multiply(wide, splat(scale, code, most))
                            means(start, step, to, left, bits, spans, links, by, exact, None, 0)
                        j += most
                        continue
                    own = load(values, value_code, single)
                    if beside == 4:
                        four = joined(own, own, own, own)
                        if is_max:
                            maxima(
                                start, step, to, index, left, bits, spans, links, four, zeros(code, most), zeros(narrow, most),
                                c_step, size,
                            )  # fmt: skip
                        else:
                            by = multiply(four, splat(scale, code, most))
                            means(start, step, to, left, bits, spans, links, by, exact, c_step, size)
                    elif is_max:
                        maxima(
                            start, step, to, index, left, bits, spans, links, own, zeros(code, single), zeros(narrow, single),
                            None, 0,
                        )  # fmt: skip
                    else:
                        one = multiply(own, splat(scale, code, single))
                        means(start, step, to, left, bits, spans, links, one, exact, None, 0)
                    j += single
                col += 1
                m += ROW
            unit += beside

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
        if nought is not None or strides == 1:
            put(dx, total, count)
        elif strides > 2:
            store_strided(dx + p * item, strides * item, total, (count - p + strides - 1) // strides)
        elif p == 1:
            put(dx, pairs_low(before, total), count)
            put(dx + lanes * item, pairs_high(before, total), count - lanes)
        before = total


def spread(code: int, item: int, lanes: int, index_code: int, stamp: int) -> Any:
    """Kernel: dx of a max pool along channels (one phase), or (index_code -1) of a sum over windows.

    dy, argmax and dx lie packed in one order.
    """
    single, most = lanes_in_block(lanes)
    is_max = index_code >= 0
    narrow = max(index_code, 0)
    narrow_item = bytes_of(narrow) if is_max else 0

    @njit(f"void({', '.join(['int64'] * 12)})", nogil=True, cache=True, error_model="numpy")
    def run(
        dy: int, dy_end: int, plane: int, argmax: int, argmax_end: int, argmax_plane: int,
        dx: int, units: int, rows: int, r0: int, r1: int, tables: int,
    ) -> None:  # fmt: skip
        """Rows r0 .. r1 of all units. A unit has `plane` windows in dy, `argmax_plane` in argmax, and `rows` rows in dx.

        Nothing is read at the ends and beyond. Distances are in windows.
        """
        stamp  # noqa: B018
        strides = number(tables, 6)
        links = (number(tables, 1), number(tables, 3), number(tables, 7), number(tables, 5), strides, number(tables, 9))
        cols, width, longest = number(tables, 4), number(tables, 11), number(tables, 12)
        for unit in range(units):
            col = r0 % cols
            o, m = number(tables, 0) + ROW * (r0 // cols), number(tables, 2) + ROW * col
            for r in range(r0, r1):
                if col == cols:
                    col, o, m = 0, o + ROW, number(tables, 2)
                spans = (number(o, 0), number(o, 1), number(m, 0), number(m, 1))
                j = 0
                while j * strides < width:
                    left = width - j * strides
                    several = left > 2 * single * strides
                    dy_at, index = dy + (unit * plane + j) * item, argmax + (unit * argmax_plane + j) * narrow_item
                    to = dx + ((unit * rows + r) * width + j * strides) * item
                    last = longest + number(o, 3) + number(m, 3) + (most if several else single)
                    inside = dy_at + last * item <= dy_end and index + last * narrow_item <= argmax_end
                    bits = number(tables, 8) + 8 * WORDS * (j // single) + (0 if inside else 4 * WORDS)
                    if several:
                        kind = zeros(narrow, most) if is_max else None
                        collect(dy_at, index, to, left, bits, spans, links, zeros(code, most), kind)
                        j += most
                    else:
                        one = zeros(narrow, single) if is_max else None
                        collect(dy_at, index, to, left, bits, spans, links, zeros(code, single), one)
                        j += single
                col += 1
                m += ROW

    return run


def scatter(code: int, item: int, lanes: int, index_code: int, stamp: int) -> Any:
    """Kernel: dx of a max pool by one addition for each window; dy, argmax and dx lie packed, channels-first."""
    index_item = bytes_of(index_code)

    @njit(f"void({', '.join(['int64'] * 10)})", nogil=True, cache=True)
    def run(
        dy: int, argmax: int, dx: int, units: int, size: int, rows: int, bases: int, offsets: int, width: int, step: int
    ) -> None:
        """All windows of all units, of `size` cells and `rows` rows of `width` windows each.

        `bases`: bytes from a unit's first cell to the first tap of each row's first window; the next one is `step` bytes on.
        `offsets`: bytes from a window's first tap to each. Both are tables of int64.
        """
        stamp  # noqa: B018
        for _ in range(units):
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
