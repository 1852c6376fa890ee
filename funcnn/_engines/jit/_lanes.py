"""Kernels of depthwise convolution: every lane of a vector has an input of its own, nothing but the weight is broadcast.

A *place* is one vector of outputs. Channels-first it is up to `lanes` neighbouring pixels of a row of one channel, the weight
is one number; channels-last it is `lanes` channels of one pixel, the weight is a vector. Tables of offsets give the places.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from funcnn._engines.jit._simd import (
    I64,
    address,
    constant,
    element,
    entry_of,
    first_lanes,
    masked_load,
    masked_store,
    multiply_add,
    plain_load,
    plain_store,
    read,
    splatted,
    table,
    write,
)

__all__ = ["depthwise", "depthwise_gradient"]


@intrinsic(prefer_literal=True)
def _sum_taps(
    typingctx: Any,
    x: Any, places: Any, taps: Any, count: Any, w: Any, w_step: Any, bias: Any, y: Any, targets: Any, lengths: Any,
    n: Any, spread: Any, masked: Any, code: Any, lanes: Any,
) -> Any:  # fmt: skip
    """y[targets[i]] = bias + sum over t < count of w[t] * x[places[i] + taps[t]] for n places; count is at least 1.

    `spread`: weight and bias are one number for all lanes. `masked`: of place i only the first lengths[i] lanes are written.
    """
    n_, spread_, masked_, code_, lanes_ = (v.literal_value for v in (n, spread, masked, code, lanes))
    vector = ir.VectorType(element(code_), lanes_)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, places, taps, count, w, w_step, bias, y, targets, lengths = args[:10]

        def weight(at: Any) -> Any:
            if spread_:
                return splatted(builder, plain_load(builder, at, element(code_)), lanes_)
            return plain_load(builder, at, vector)

        start = weight(bias)
        entry, tap, end = builder.block, builder.append_basic_block("tap"), builder.append_basic_block("end")
        rows = [builder.add(x, entry_of(builder, places, constant(i))) for i in range(n_)]
        builder.branch(tap)
        builder.position_at_end(tap)
        t, at = builder.phi(I64), builder.phi(I64)
        t.add_incoming(constant(0), entry)
        at.add_incoming(w, entry)
        sums = [builder.phi(vector) for _ in range(n_)]
        offset, factor = entry_of(builder, taps, t), weight(at)
        new = [
            multiply_add(builder, plain_load(builder, builder.add(row, offset), vector), factor, value)
            for row, value in zip(rows, sums, strict=True)
        ]
        t_next = builder.add(t, constant(1))
        t.add_incoming(t_next, tap)
        at.add_incoming(builder.add(at, w_step), tap)
        for old, value in zip(sums, new, strict=True):
            old.add_incoming(start, entry)
            old.add_incoming(value, tap)
        builder.cbranch(builder.icmp_signed("<", t_next, count), tap, end)
        builder.position_at_end(end)
        for i, value in enumerate(new):
            to = builder.add(y, entry_of(builder, targets, constant(i)))
            if masked_:
                masked_store(builder, to, value, first_lanes(builder, entry_of(builder, lengths, constant(i)), lanes_))
            else:
                plain_store(builder, to, value)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 10, n, spread, masked, code, lanes), codegen


@intrinsic(prefer_literal=True)
def _sum_places(
    typingctx: Any,
    x: Any, places: Any, y: Any, targets: Any, lengths: Any, count: Any, rest: Any, taps: Any, out: Any,
    n: Any, code: Any, lanes: Any,
) -> Any:  # fmt: skip
    """out[k] += sum over i < count of x[places[i] + taps[k]] * y[targets[i]], vectors, for n taps; count is at least 1.

    Of place i the first min(lengths[i], rest) lanes are read.
    """
    n_, code_, lanes_ = (v.literal_value for v in (n, code, lanes))
    vector = ir.VectorType(element(code_), lanes_)
    width = lanes_ * (4 if element(code_) == ir.FloatType() else 8)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, places, y, targets, lengths, count, rest, taps, out = args[:9]
        entry, place, end = builder.block, builder.append_basic_block("place"), builder.append_basic_block("end")
        offsets = [builder.add(x, entry_of(builder, taps, constant(k))) for k in range(n_)]
        builder.branch(place)
        builder.position_at_end(place)
        i = builder.phi(I64)
        i.add_incoming(constant(0), entry)
        sums = [builder.phi(vector) for _ in range(n_)]
        length = entry_of(builder, lengths, i)
        length = builder.select(builder.icmp_signed("<", length, rest), length, rest)
        mask = first_lanes(builder, length, lanes_)
        factor = masked_load(builder, builder.add(y, entry_of(builder, targets, i)), vector, mask)
        here = entry_of(builder, places, i)
        new = [
            multiply_add(builder, masked_load(builder, builder.add(offset, here), vector, mask), factor, value)
            for offset, value in zip(offsets, sums, strict=True)
        ]
        i_next = builder.add(i, constant(1))
        i.add_incoming(i_next, place)
        for old, value in zip(sums, new, strict=True):
            old.add_incoming(ir.Constant(vector, None), entry)
            old.add_incoming(value, place)
        builder.cbranch(builder.icmp_signed("<", i_next, count), place, end)
        builder.position_at_end(end)
        add = builder.add if isinstance(element(code_), ir.IntType) else builder.fadd
        for k, value in enumerate(new):
            to = builder.add(out, constant(k * width))
            plain_store(builder, to, add(plain_load(builder, to, vector), value))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 9, n, code, lanes), codegen


def depthwise(code: int, item: int, lanes: int, n: int, spread: int, stamp: int) -> Any:
    """Kernel: a block's places of some slices (channels, or vectors of channels); n places at a time."""
    register = lanes * item

    @njit(
        "void(int64, int64, int64[::1], int64[::1], int64, int64, int64, int64, int64, int64,"
        " int64, int64, int64[::1], int64[::1], int64, int64, int64, int64)",
        nogil=True,
        cache=True,
    )
    def convolve(
        x: int, x_slice: int, taps: Any, places: Any, w: int, w_slice: int, w_step: int, bias: int, b_slice: int, rest: int,
        y: int, y_slice: int, targets: Any, lengths: Any, full: int, pixel: int, slices: int, buffer: int,
    ) -> None:  # fmt: skip
        """Slice s starts at x + s * x_slice etc. The first `full` places have all lanes; pixel: bytes from lane to lane.

        rest: lanes of all slices together, where a slice is a vector of channels. buffer: scratch for n vectors.
        """
        stamp  # noqa: B018
        at, to, length = table(n), table(n), table(n)
        for s in range(slices):
            x_at, w_at, b_at, y_at = x + s * x_slice, w + s * w_slice, bias + s * b_slice, y + s * y_slice
            whole = 0  # places that need no mask
            if pixel == item and rest - s * lanes >= lanes:
                whole = full // n * n
            for p in range(0, whole, n):
                _sum_taps(
                    x_at, address(places) + 8 * p, address(taps), len(taps), w_at, w_step, b_at, y_at,
                    address(targets) + 8 * p, address(lengths), n, spread, 0, code, lanes,
                )  # fmt: skip
            for p in range(whole, len(places), n):
                for i in range(n):
                    there = p + i < len(places)
                    at[i] = places[min(p + i, len(places) - 1)]
                    to[i] = targets[p + i] if there and pixel == item else i * register
                    length[i] = min(lengths[p + i], rest - s * lanes) if there else 0
                _sum_taps(
                    x_at, address(at), address(taps), len(taps), w_at, w_step, b_at, y_at if pixel == item else buffer,
                    address(to), address(length), n, spread, 1, code, lanes,
                )  # fmt: skip
                if pixel != item:
                    for i in range(n):
                        for j in range(length[i]):
                            number = read(buffer + i * register + j * item, code)
                            write(y_at + targets[min(p + i, len(places) - 1)] + j * pixel, number, code)

    return convolve


def depthwise_gradient(code: int, item: int, lanes: int, n: int, stamp: int) -> Any:
    """Kernel: adds a block's part to the weight gradient (slice, taps, lanes); n taps at a time."""
    register = lanes * item

    @njit(
        "void(int64, int64, int64[::1], int64[::1], int64, int64, int64[::1], int64[::1], int64, int64, int64)",
        nogil=True,
        cache=True,
    )
    def gradient(
        x: int, x_slice: int, taps: Any, places: Any, y: int, y_slice: int, targets: Any, lengths: Any, rest: int,
        slices: int, out: int,
    ) -> None:  # fmt: skip
        """As `depthwise`; the number of taps is a multiple of n."""
        stamp  # noqa: B018
        for s in range(slices):
            for t in range(0, len(taps), n):
                _sum_places(
                    x + s * x_slice, address(places), y + s * y_slice, address(targets), address(lengths), len(places),
                    rest - s * lanes, address(taps) + 8 * t, out + (s * len(taps) + t) * register, n, code, lanes,
                )  # fmt: skip

    return gradient
