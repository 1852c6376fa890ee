"""Kernels of depthwise convolution: every lane of a vector has an input of its own, nothing but the weight is broadcast.

A *place* is one vector of outputs. Neighbouring places are computed together, in *groups*: they share the weight, and where
taps come in *runs*, whose cells lie as far apart as those of neighbouring places, they share vectors of x.

Channels-last a place is `lanes` channels of one pixel, its neighbours are those in the row, the weight is a vector. x is read
where it is. Places that read padding go by pointers, one for each tap: to a pixel of x or to a pixel of zeros.

Channels-first a place is `lanes` neighbouring pixels in a row of one channel, its neighbours are those above and below, the
weight is one number. A block of one channel (with a multiplier, of one group) is copied to padded rows that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from funcnn._engines.jit._ir import (
    I64,
    constant,
    element,
    entry_of,
    first_lanes,
    masked_load,
    masked_store,
    multiply_add,
    plain_load,
    plain_store,
    splatted,
)
from funcnn._engines.jit._kernels import njit, part
from funcnn._engines.jit._simd import (
    address,
    even,
    item_in,
    lanes_in,
    load,
    load_like,
    load_strided,
    store,
    store_alternate,
    store_first,
    store_strided,
    table,
    zeros,
)

__all__ = [
    "PLACES",
    "ROOM",
    "RUN",
    "STRIP",
    "TAPS",
    "depthwise_first",
    "depthwise_gradient_first",
    "depthwise_gradient_last",
    "depthwise_last",
]

# Places of a group: as many sums as hide the latency of a multiply-add.
PLACES = 8
# Taps of a run. With 3 a vector of x is read 10 times for 24 multiply-adds, not 24 times.
RUN = 3
# Of the weight gradient: taps that are summed together, and places of a group, whose dy is held in registers beside the sums.
TAPS, FEW = 9, 4
# Groups whose part of the weight gradient is summed before that of the next channels: their cells stay in an L1 cache.
GROUPS = 4
# Channels-last: windows of a row that are located together, and places whose pointers are kept until they are computed.
STRIP, ROOM = 64, 128


# ---- sums ------------------------------------------------------------------------------------------------------------


def _repeated(builder: Any, count: Any, sums: list[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """What `count` times sums = step(index, sums) gives; sums stay in registers."""
    entry, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.cbranch(builder.icmp_signed("<", constant(0), count), loop, end)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    olds = [builder.phi(value.type) for value in sums]
    news = step(index, list(olds))
    following = builder.add(index, constant(1))
    last = builder.block
    for old, first, new in zip([index, *olds], [constant(0), *sums], [following, *news], strict=True):
        old.add_incoming(first, entry)
        old.add_incoming(new, last)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, end)
    builder.position_at_end(end)
    results = [builder.phi(value.type) for value in sums]
    for result, first, new in zip(results, sums, news, strict=True):
        result.add_incoming(first, entry)
        result.add_incoming(new, last)
    return results


@intrinsic(prefer_literal=True)
def _sum_taps(
    typingctx: Any,
    x: Any, x_step: Any, taps: Any, runs: Any, count: Any, w: Any, w_step: Any, bias: Any, y: Any, y_step: Any,
    n: Any, run: Any, spread: Any, code: Any, lanes: Any,
) -> Any:  # fmt: skip
    """y[i * y_step] = bias + sum over t < count of w[t] * x[i * x_step + taps[t]] for n places, vectors.

    The taps begin with `runs` times `run` ones, x_step bytes apart. `spread`: weight and bias are one number for all lanes.
    """
    n_, run_, spread_, code_, lanes_ = (v.literal_value for v in (n, run, spread, code, lanes))
    vector = ir.VectorType(element(code_), lanes_)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_step, taps, runs, count, w, w_step, bias, y, y_step = args[:10]
        steps = [builder.mul(x_step, constant(i)) for i in range(n_ + run_ - 1)]

        def weight(at: Any) -> Any:
            if spread_:
                return splatted(builder, plain_load(builder, at, element(code_)), lanes_)
            return plain_load(builder, at, vector)

        def together(size: int, first: Any) -> Callable[[Any, list[Any]], list[Any]]:
            """Adds `size` neighbouring taps."""

            def step(index: Any, sums: list[Any]) -> list[Any]:
                t = builder.add(first, builder.mul(index, constant(size)))
                row = builder.add(x, entry_of(builder, taps, t))
                at = builder.add(w, builder.mul(t, w_step))
                factors = [weight(builder.add(at, builder.mul(w_step, constant(k)))) for k in range(size)]
                for i in range(n_ + size - 1):
                    cell = plain_load(builder, builder.add(row, steps[i]), vector)
                    for k in range(max(0, i - n_ + 1), min(size, i + 1)):
                        sums[i - k] = multiply_add(builder, cell, factors[k], sums[i - k])
                return sums

            return step

        sums = _repeated(builder, runs, [weight(bias)] * n_, together(run_, constant(0)))
        first = builder.mul(runs, constant(run_))
        sums = _repeated(builder, builder.sub(count, first), sums, together(1, first))
        for i, value in enumerate(sums):
            plain_store(builder, builder.add(y, builder.mul(y_step, constant(i))), value)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 10, n, run, spread, code, lanes), codegen


@intrinsic(prefer_literal=True)
def _sum_taps_at(
    typingctx: Any,
    pointers: Any, shift: Any, count: Any, w: Any, w_step: Any, bias: Any, targets: Any, rest: Any,
    n: Any, room: Any, masked: Any, code: Any, lanes: Any,
) -> Any:  # fmt: skip
    """`_sum_taps` of n places by pointers: pointers[t, i] to the cells and targets[i], all of them and w and bias + shift.

    `masked`: the first `rest` lanes alone are read and written.
    """
    n_, room_, masked_, code_, lanes_ = (v.literal_value for v in (n, room, masked, code, lanes))
    vector = ir.VectorType(element(code_), lanes_)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers, shift, count, w, w_step, bias, targets, rest = args[:8]
        mask = first_lanes(builder, rest, lanes_) if masked_ else None

        def get(at: Any) -> Any:
            at = builder.add(at, shift)
            return masked_load(builder, at, vector, mask) if masked_ else plain_load(builder, at, vector)

        def step(t: Any, sums: list[Any]) -> list[Any]:
            factor = get(builder.add(w, builder.mul(t, w_step)))
            row = builder.add(pointers, builder.mul(t, constant(8 * room_)))
            return [
                multiply_add(builder, get(entry_of(builder, row, constant(i))), factor, s) for i, s in enumerate(sums)
            ]

        for i, value in enumerate(_repeated(builder, count, [get(bias)] * n_, step)):
            to = builder.add(entry_of(builder, targets, constant(i)), shift)
            if masked_:
                masked_store(builder, to, value, mask)
            else:
                plain_store(builder, to, value)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 8, n, room, masked, code, lanes), codegen


def _bytes(number: Any) -> int:
    return 4 if number == ir.FloatType() else 8


def _add_sums(
    builder: Any, vector: Any, n: int, count: Any, step: Callable[[Any, list[Any]], list[Any]], out: Any
) -> None:
    """Add n sums, made as by `_repeated` from zeros, to the vectors at `out`."""
    add = builder.add if isinstance(vector.element, ir.IntType) else builder.fadd
    for k, value in enumerate(_repeated(builder, count, [ir.Constant(vector, None)] * n, step)):
        slot = builder.add(out, constant(k * vector.count * _bytes(vector.element)))
        plain_store(builder, slot, add(plain_load(builder, slot, vector), value))


@intrinsic(prefer_literal=True)
def _sum_groups(
    typingctx: Any,
    starts: Any, x_step: Any, taps: Any, targets: Any, y_step: Any, shift: Any, count: Any, out: Any,
    n: Any, size: Any, run: Any, code: Any, lanes: Any,
) -> Any:  # fmt: skip
    """out[k] += sum of x * y over `count` groups of `size` places, vectors, for n taps.

    x at starts[g] + i * x_step + taps[k] + shift, y at targets[g] + i * y_step + shift. The taps are runs of `run`, x_step
    bytes apart.
    """
    n_, size_, run_, code_, lanes_ = (v.literal_value for v in (n, size, run, code, lanes))
    vector = ir.VectorType(element(code_), lanes_)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts, x_step, taps, targets, y_step, shift, count, out = args[:8]
        rows = [builder.add(shift, entry_of(builder, taps, constant(k))) for k in range(0, n_, run_)]
        x_steps = [builder.mul(x_step, constant(i)) for i in range(size_ + run_ - 1)]
        y_steps = [builder.add(shift, builder.mul(y_step, constant(i))) for i in range(size_)]

        def step(g: Any, sums: list[Any]) -> list[Any]:
            start, target = entry_of(builder, starts, g), entry_of(builder, targets, g)
            factors = [plain_load(builder, builder.add(target, step), vector) for step in y_steps]
            for i, x_step in enumerate(x_steps):
                here = builder.add(start, x_step)
                for r, row in enumerate(rows):
                    cell = plain_load(builder, builder.add(here, row), vector)
                    for k in range(max(0, i - size_ + 1), min(run_, i + 1)):
                        sums[r * run_ + k] = multiply_add(builder, cell, factors[i - k], sums[r * run_ + k])
            return sums

        _add_sums(builder, vector, n_, count, step, out)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 8, n, size, run, code, lanes), codegen


@intrinsic(prefer_literal=True)
def _sum_places_at(
    typingctx: Any,
    pointers: Any, shift: Any, targets: Any, count: Any, rest: Any, out: Any,
    n: Any, room: Any, masked: Any, code: Any, lanes: Any,
) -> Any:  # fmt: skip
    """out[k] += sum over i < count of (vector at pointers[k, i] + shift) * (that at targets[i] + shift) for n taps.

    `masked`: the first `rest` lanes alone are read.
    """
    n_, room_, masked_, code_, lanes_ = (v.literal_value for v in (n, room, masked, code, lanes))
    vector = ir.VectorType(element(code_), lanes_)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers, shift, targets, count, rest, out = args[:6]
        mask = first_lanes(builder, rest, lanes_) if masked_ else None

        def get(at: Any) -> Any:
            at = builder.add(at, shift)
            return masked_load(builder, at, vector, mask) if masked_ else plain_load(builder, at, vector)

        def step(i: Any, sums: list[Any]) -> list[Any]:
            column, factor = builder.add(pointers, builder.mul(i, constant(8))), get(entry_of(builder, targets, i))
            cells = [get(entry_of(builder, column, constant(k * room_))) for k in range(n_)]
            return [multiply_add(builder, cell, factor, s) for cell, s in zip(cells, sums, strict=True)]

        _add_sums(builder, vector, n_, count, step, out)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6, n, room, masked, code, lanes), codegen


@intrinsic(prefer_literal=True)
def _sum_places(
    typingctx: Any,
    x: Any, places: Any, taps: Any, y: Any, targets: Any, lengths: Any, count: Any, out: Any,
    n: Any, masked: Any, code: Any, lanes: Any,
) -> Any:  # fmt: skip
    """out[k] += sum over i < count of x[places[i] + taps[k]] * y[targets[i]], vectors, for n taps.

    `masked`: of place i the first lengths[i] lanes are read.
    """
    n_, masked_, code_, lanes_ = (v.literal_value for v in (n, masked, code, lanes))
    vector = ir.VectorType(element(code_), lanes_)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, places, taps, y, targets, lengths, count, out = args[:8]
        rows = [builder.add(x, entry_of(builder, taps, constant(k))) for k in range(n_)]

        def step(i: Any, sums: list[Any]) -> list[Any]:
            mask = first_lanes(builder, entry_of(builder, lengths, i), lanes_) if masked_ else None

            def get(at: Any) -> Any:
                return masked_load(builder, at, vector, mask) if masked_ else plain_load(builder, at, vector)

            here, factor = entry_of(builder, places, i), get(builder.add(y, entry_of(builder, targets, i)))
            cells = [get(builder.add(row, here)) for row in rows]
            return [multiply_add(builder, cell, factor, s) for cell, s in zip(cells, sums, strict=True)]

        _add_sums(builder, vector, n_, count, step, out)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 8, n, masked, code, lanes), codegen


# ---- channels-last ---------------------------------------------------------------------------------------------------


@part
def _locate(
    x: int, nothing: int, y: int, axes: Any, taps: Any, strip: int, size: int, overlap: bool,
    starts: Any, targets: Any, edges: int, pointers: Any, edge_targets: Any,
) -> tuple[int, int]:  # fmt: skip
    """Find the cells of a strip of windows: groups of `size` neighbours that lie inside, and the others, at the edges.

    Of a group: addresses of its first tap and output. The last group of a row may overlap the one before, if that may be.
    Of an edge, which is added to the `edges` there are: pointers (taps, ROOM) to the cells, which are `nothing` for padding,
    and of the output. The new numbers of groups and edges.

    Rows of axes: windows, bytes from window to window in x and in y, windows (from, to) inside, of n, d, h, w. Rows of taps:
    offset in x from the first tap, and the windows (from, to) of d, h, w for which the tap is no padding.
    """
    columns, x_step, y_step = axes[3, 0], axes[3, 1], axes[3, 2]
    strips = -(-columns // STRIP)
    row, first = strip // strips, strip % strips * STRIP
    last = min(columns, first + STRIP)
    plane, h = row // axes[2, 0], row % axes[2, 0]
    n, d = plane // axes[1, 0], plane % axes[1, 0]
    start = x + n * axes[0, 1] + d * axes[1, 1] + h * axes[2, 1]
    to = y + n * axes[0, 2] + d * axes[1, 2] + h * axes[2, 2]
    lo, hi = last, last
    if axes[1, 3] <= d < axes[1, 4] and axes[2, 3] <= h < axes[2, 4]:
        lo = min(last, max(first, axes[3, 3]))
        hi = max(lo, min(last, axes[3, 4]))
    if not overlap or hi - lo < size:
        hi = lo + (hi - lo) // size * size
    groups = -(-(hi - lo) // size)
    for g in range(groups):
        k = min(lo + g * size, hi - size)
        starts[g], targets[g] = start + k * x_step, to + k * y_step
    for k in range(first, last):
        if k < lo or k >= hi:
            edge_targets[edges] = to + k * y_step
            for t in range(len(taps)):
                there = taps[t, 1] <= d < taps[t, 2] and taps[t, 3] <= h < taps[t, 4] and taps[t, 5] <= k < taps[t, 6]
                pointers[t * ROOM + edges] = start + k * x_step + taps[t, 0] if there else nothing
            edges += 1
    return groups, edges


def depthwise_last(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: y of a range of strips, of all channels."""

    @njit(
        "void(int64, int64, int64, int64[:, ::1], int64[:, ::1], int64[::1], int64, int64, int64, int64[::1],"
        " int64, int64, int64, int64)",
        nogil=True,
        cache=True,
        error_model="numpy",
    )
    def convolve(
        x: int, nothing: int, y: int, axes: Any, taps: Any, offsets: Any, runs: int, first: int, last: int, pointers: Any,
        w: int, w_step: int, bias: int, channels: int,
    ) -> None:  # fmt: skip
        """The arguments of `_locate` and of `_sum_taps`; w (taps, channels) and bias are as long as a vector at least."""
        stamp  # noqa: B018
        starts, targets, edge_targets = table(STRIP), table(STRIP), table(ROOM)
        edges = 0
        for strip in range(first, last):
            groups, edges = _locate(
                x, nothing, y, axes, taps, strip, PLACES, True, starts, targets, edges, pointers, edge_targets
            )
            for g in range(groups):
                for c in range(0, channels, lanes):
                    shift = min(c, channels - lanes) * item  # the last vector overlaps the one before
                    _sum_taps(
                        starts[g] + shift, axes[3, 1], address(offsets), runs, len(taps), w + shift, w_step, bias + shift,
                        targets[g] + shift, axes[3, 2], PLACES, RUN, 0, code, lanes,
                    )  # fmt: skip
            if strip < last - 1 and edges <= ROOM - STRIP:
                continue
            while edges % PLACES:  # the last place once more
                for t in range(len(taps)):
                    pointers[t * ROOM + edges] = pointers[t * ROOM + edges - 1]
                edge_targets[edges] = edge_targets[edges - 1]
                edges += 1
            for i in range(0, edges, PLACES):
                for c in range(0, channels, lanes):
                    shift = max(0, min(c, channels - lanes)) * item
                    if channels < lanes:
                        _sum_taps_at(
                            address(pointers) + 8 * i, shift, len(taps), w, w_step, bias, address(edge_targets) + 8 * i,
                            channels, PLACES, ROOM, 1, code, lanes,
                        )  # fmt: skip
                    else:
                        _sum_taps_at(
                            address(pointers) + 8 * i, shift, len(taps), w, w_step, bias, address(edge_targets) + 8 * i,
                            channels, PLACES, ROOM, 0, code, lanes,
                        )  # fmt: skip
            edges = 0

    return convolve


def depthwise_gradient_last(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: the weight gradient of parts of the strips: adds to sums (parts, slices, taps, lanes)."""
    register = lanes * item

    @njit(
        "void(int64, int64, int64, int64[:, ::1], int64[:, ::1], int64[::1], int64, int64[::1], int64, int64, int64[::1],"
        " int64, int64)",
        nogil=True,
        cache=True,
        error_model="numpy",
    )
    def gradient(
        x: int, nothing: int, y: int, axes: Any, taps: Any, offsets: Any, runs: int, cuts: Any, first: int, last: int,
        pointers: Any, channels: int, out: int,
    ) -> None:  # fmt: skip
        """Parts first .. last; of part i are the strips cuts[i] .. cuts[i + 1]. A slice is a vector of channels.

        The arguments of `depthwise_last`; the number of taps is a multiple of TAPS, all are in runs or none.
        """
        stamp  # noqa: B018
        starts, targets, edge_targets = table(STRIP), table(STRIP), table(ROOM)
        sums = -(-channels // lanes) * len(taps) * register
        for number in range(first, last):
            edges = 0
            for strip in range(cuts[number], cuts[number + 1]):
                groups, edges = _locate(
                    x, nothing, y, axes, taps, strip, FEW, False, starts, targets, edges, pointers, edge_targets
                )
                for g in range(0, groups, GROUPS):
                    to = out + number * sums
                    for c in range(0, channels, lanes):
                        shift = min(c, channels - lanes) * item
                        for t in range(0, len(taps), TAPS):
                            if runs:
                                _sum_groups(
                                    address(starts) + 8 * g, axes[3, 1], address(offsets) + 8 * t, address(targets) + 8 * g,
                                    axes[3, 2], shift, min(GROUPS, groups - g), to, TAPS, FEW, RUN, code, lanes,
                                )  # fmt: skip
                            else:
                                _sum_groups(
                                    address(starts) + 8 * g, axes[3, 1], address(offsets) + 8 * t, address(targets) + 8 * g,
                                    axes[3, 2], shift, min(GROUPS, groups - g), to, TAPS, FEW, 1, code, lanes,
                                )  # fmt: skip
                            to += TAPS * register
                if strip < cuts[number + 1] - 1 and edges <= ROOM - STRIP:
                    continue
                to = out + number * sums
                for c in range(0, channels, lanes):
                    shift = max(0, min(c, channels - lanes)) * item
                    for t in range(0, len(taps), TAPS):
                        if channels < lanes:
                            _sum_places_at(
                                address(pointers) + 8 * ROOM * t, shift, address(edge_targets), edges, channels, to,
                                TAPS, ROOM, 1, code, lanes,
                            )  # fmt: skip
                        else:
                            _sum_places_at(
                                address(pointers) + 8 * ROOM * t, shift, address(edge_targets), edges, channels, to,
                                TAPS, ROOM, 0, code, lanes,
                            )  # fmt: skip
                        to += TAPS * register
                edges = 0

    return gradient


# ---- channels-first --------------------------------------------------------------------------------------------------


@part
def _gather(to: int, start: int, jump: int, count: int, like: Any) -> None:
    """Copy numbers that lie `jump` bytes apart to where they lie together; nothing else is read or written."""
    lanes, item = lanes_in(like), item_in(like)
    if count >= lanes and jump == item:
        for k in range(0, count, lanes):
            i = min(k, count - lanes)
            store(to + i * item, load_like(start + i * item, like))
    elif count >= lanes and jump == 2 * item:
        for k in range(0, count, lanes):
            i = min(k, count - lanes)
            at = start + 2 * i * item
            store(to + i * item, even(load_like(at, like), load_like(at + (lanes - 1) * item, like)))
    else:
        for k in range(0, count, lanes):
            here = min(lanes, count - k)
            store_first(to + k * item, load_strided(start + k * jump, jump, (1 << here) - 1, like), here)


@part
def _stage(x: int, to: int, extents: Any, jump: int, like: Any) -> None:
    """Copy the cells of a block into padded rows; the padding is zero already.

    Rows of extents: (count, bytes from one to the next in x and in the copy) of channels, planes and rows, then (cells,
    offset in x and in the copy) of the parts of a row; cells lie `jump` bytes apart in x.
    """
    for c in range(extents[0, 0]):
        for d in range(extents[1, 0]):
            for h in range(extents[2, 0]):
                start = x + c * extents[0, 1] + d * extents[1, 1] + h * extents[2, 1]
                put = to + c * extents[0, 2] + d * extents[1, 2] + h * extents[2, 2]
                for i in range(3, len(extents)):
                    _gather(put + extents[i, 2], start + extents[i, 1], jump, extents[i, 0], like)


@part
def _put(to: int, step: int, vector: Any, count: int) -> None:
    """Write the first `count` numbers of a vector, `step` bytes apart."""
    if step == item_in(vector):
        store_first(to, vector, count)
    elif step == 2 * item_in(vector):
        store_alternate(to, vector, count)
    else:
        store_strided(to, step, vector, count)


def depthwise_first(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: y of a block of a range of groups and images."""
    register = lanes * item

    @njit(
        "void(int64, int64, int64, int64[:, ::1], int64, int64, int64[::1], int64, int64[::1], int64, int64, int64, int64,"
        " int64, int64, int64, int64[::1], int64, int64[::1], int64, int64, int64, int64, int64)",
        nogil=True,
        cache=True,
        error_model="numpy",
    )
    def convolve(
        x: int, x_image: int, x_group: int, extents: Any, jump: int, cells: int, starts: Any, x_step: int, taps: Any,
        runs: int, w: int, bias: int, outputs: int,
        y: int, y_image: int, y_channel: int, targets: Any, y_step: int, lengths: Any, pixel: int, buffer: int,
        images: int, first: int, last: int,
    ) -> None:  # fmt: skip
        """Numbers first .. last of group * images + image; each group has `outputs` channels in y.

        cells: room for a block, zero in its padding. buffer: room for PLACES vectors, which are written by their lengths and
        `pixel` bytes from lane to lane; 0: all lanes are, together.
        """
        stamp  # noqa: B018
        like = zeros(code, lanes)
        for number in range(first, last):
            g, n = number // images, number % images
            _stage(x + n * x_image + g * x_group, cells, extents, jump, like)
            for o in range(g * outputs, (g + 1) * outputs):
                for p in range(len(starts)):
                    to = y + n * y_image + o * y_channel + targets[p]
                    _sum_taps(
                        cells + starts[p], x_step, address(taps), runs, len(taps), w + o * len(taps) * item, item,
                        bias + o * item, buffer if buffer else to, register if buffer else y_step,
                        PLACES, RUN, 1, code, lanes,
                    )  # fmt: skip
                    if buffer:
                        for i in range(PLACES):
                            vector = load(buffer + i * register, code, lanes)
                            _put(to + i * y_step, pixel, vector, lengths[p * PLACES + i])

    return convolve


def depthwise_gradient_first(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: adds the part of a block of a range of groups and images to the weight gradient (outputs, taps, lanes)."""
    register = lanes * item

    @njit(
        "void(int64, int64, int64, int64[:, ::1], int64, int64, int64[::1], int64[::1], int64,"
        " int64, int64, int64, int64[::1], int64[::1], int64, int64, int64, int64, int64)",
        nogil=True,
        cache=True,
        error_model="numpy",
    )
    def gradient(
        x: int, x_image: int, x_group: int, extents: Any, jump: int, cells: int, places: Any, taps: Any, outputs: int,
        y: int, y_image: int, y_channel: int, targets: Any, lengths: Any, full: int, images: int, first: int, last: int,
        out: int,
    ) -> None:  # fmt: skip
        """Arguments as of `depthwise_first`, place by place; the first `full` places have all lanes.

        The number of taps is a multiple of TAPS.
        """
        stamp  # noqa: B018
        like = zeros(code, lanes)
        for number in range(first, last):
            g, n = number // images, number % images
            _stage(x + n * x_image + g * x_group, cells, extents, jump, like)
            for o in range(g * outputs, (g + 1) * outputs):
                dy = y + n * y_image + o * y_channel
                for t in range(0, len(taps), TAPS):
                    to = out + (o * len(taps) + t) * register
                    if full:
                        _sum_places(
                            cells, address(places), address(taps) + 8 * t, dy, address(targets), address(lengths),
                            full, to, TAPS, 0, code, lanes,
                        )  # fmt: skip
                    if full < len(places):
                        _sum_places(
                            cells, address(places) + 8 * full, address(taps) + 8 * t, dy, address(targets) + 8 * full,
                            address(lengths) + 8 * full, len(places) - full, to, TAPS, 1, code, lanes,
                        )  # fmt: skip

    return gradient
