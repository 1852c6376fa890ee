"""The register tile, and the kernels that walk it over a block of a convolution.

All three maps of a convolution are sums C[m, n] = D[m, n] + sum over t, k of A[m, t, k] * B[t, k, n], where n is what lies
contiguous in memory. A tile holds MR x NV vectors of C in registers, broadcasts numbers of A, and reads vectors of B:

    channels-first     m: output channels   n: pixels            A: packed weights   B: a panel of windows (im2col of NR pixels)
    channels-last      m: pixels            n: output channels   A: input rows       B: packed weights
    weight gradient    m: (input channel, tap)   n: output channels   A: input rows   B: dy, pixels by channels

Rows of A and C are given by offset tables, so that any stride, dilation and memory order is the same tile.
"""

from __future__ import annotations

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
    pointer,
    prefetch,
    splatted,
)
from funcnn._engines.jit._kernels import njit
from funcnn._engines.jit._simd import (
    address,
    copy,
    fill_zero,
    gather,
    load,
    load_between,
    load_even,
    load_first,
    number,
    read,
    splat,
    store,
    store_alternate,
    store_first,
    table,
    take,
    transpose,
    write,
)

# Taps of a kernel whose padding is given by the bits of a number.
MOST_TAPS = 63
# Panels of windows that one pass over the weights serves.
MOST_PANELS = 4


@intrinsic(prefer_literal=True)
def tile(
    typingctx: Any,
    a: Any, arow: Any, aturn: Any, atap: Any, astep: Any,
    b: Any, bstep: Any,
    c: Any, crow: Any, d: Any, drow: Any,
    count: Any, taps: Any, steps: Any, ahead: Any,
    listed: Any, reads: Any, writes: Any, mr: Any, nv: Any, code: Any, lanes: Any,
) -> Any:  # fmt: skip
    """C[i, :count] = D[i, :count] + sum over t < taps, k < steps of A[i, t, k] * B[t, k, :].

    A[i, t, k] is at a + arow[i] + atap[t] + k * astep, with a row of arow `aturn` bytes further for each tap; B[t, k] at
    b + (t * steps + k) * bstep, C[i] at c + crow[i], D[i] at d + drow[i]; all in bytes, the tables are addresses of int64.
    taps and steps are at least 1. The sum starts from 0.
    `listed`: there is one tap, and astep is a table: from step k - 1 to step k it is number k of it (of 0 .. steps).
    `ahead`: table (reads + writes, 2) of memory to fetch for the next tiles: an address, and the bytes to go on in each step.
    """
    literals = listed, reads, writes, mr, nv, code, lanes
    listed_, reads_, writes_, mr_, nv_, code_, lanes_ = (v.literal_value for v in literals)
    streams_ = reads_ + writes_
    number = element(code_)
    vector = ir.VectorType(number, lanes_)
    width = lanes_ * (4 if number == ir.FloatType() else 8)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, arow, aturn, atap, astep, b, bstep, c, crow, d, drow, count, taps, steps, ahead = args[:15]
        zero = ir.Constant(vector, None)

        heads = [entry_of(builder, ahead, constant(2 * stream)) for stream in range(streams_)]
        strides = [entry_of(builder, ahead, constant(2 * stream + 1)) for stream in range(streams_)]
        entry = builder.block
        tap, step, tap_end, end = (builder.append_basic_block(n) for n in ("tap", "step", "tap_end", "end"))
        builder.branch(tap)

        builder.position_at_end(tap)
        t, b_tap = builder.phi(I64), builder.phi(I64)
        t.add_incoming(constant(0), entry)
        b_tap.add_incoming(b, entry)
        fetched = [builder.phi(I64) for _ in range(streams_)]
        for stream, value in enumerate(fetched):
            value.add_incoming(heads[stream], entry)
        outer = [[builder.phi(vector) for _ in range(nv_)] for _ in range(mr_)]
        for row in outer:
            for value in row:
                value.add_incoming(zero, entry)
        a_tap = builder.add(a, entry_of(builder, atap, t))
        a_rows = builder.add(arow, builder.mul(t, aturn))
        rows = [builder.add(a_tap, entry_of(builder, a_rows, constant(i))) for i in range(mr_)]
        builder.branch(step)

        builder.position_at_end(step)
        k, b_at = builder.phi(I64), builder.phi(I64)
        k.add_incoming(constant(0), tap)
        b_at.add_incoming(b_tap, tap)
        a_off = builder.phi(I64)
        a_off.add_incoming(constant(0), tap)
        sums = [[builder.phi(vector) for _ in range(nv_)] for _ in range(mr_)]
        nexts = [builder.phi(I64) for _ in range(streams_)]
        new_nexts = []
        for stream, value in enumerate(nexts):
            value.add_incoming(fetched[stream], tap)
            prefetch(builder, value, write=stream >= reads_)
            new_nexts.append(builder.add(value, strides[stream]))
            value.add_incoming(new_nexts[-1], step)
            fetched[stream].add_incoming(new_nexts[-1], tap_end)
        columns = [plain_load(builder, builder.add(b_at, constant(v * width)), vector) for v in range(nv_)]
        new = []
        for i in range(mr_):
            address = builder.gep(pointer(builder, rows[i], ir.IntType(8)), [a_off], source_etype=ir.IntType(8))
            value = builder.load(builder.bitcast(address, number.as_pointer()), typ=number, align=1)
            factor = splatted(builder, value, lanes_)
            new.append([multiply_add(builder, factor, columns[v], sums[i][v]) for v in range(nv_)])
        k_next = builder.add(k, constant(1))
        k.add_incoming(k_next, step)
        a_off.add_incoming(builder.add(a_off, entry_of(builder, astep, k_next) if listed_ else astep), step)
        b_next = builder.add(b_at, bstep)
        b_at.add_incoming(b_next, step)
        b_tap.add_incoming(b_next, tap_end)
        for i in range(mr_):
            for v in range(nv_):
                sums[i][v].add_incoming(outer[i][v], tap)
                sums[i][v].add_incoming(new[i][v], step)
        builder.cbranch(builder.icmp_signed("<", k_next, steps), step, tap_end)

        builder.position_at_end(tap_end)
        t_next = builder.add(t, constant(1))
        t.add_incoming(t_next, tap_end)
        for i in range(mr_):
            for v in range(nv_):
                outer[i][v].add_incoming(new[i][v], tap_end)
        builder.cbranch(builder.icmp_signed("<", t_next, taps), tap, end)

        builder.position_at_end(end)
        masks = [first_lanes(builder, builder.sub(count, constant(v * lanes_)), lanes_) for v in range(nv_)]
        for i in range(mr_):
            to = builder.add(c, entry_of(builder, crow, constant(i)))
            start = builder.add(d, entry_of(builder, drow, constant(i)))
            for v in range(nv_):
                old = masked_load(builder, builder.add(start, constant(v * width)), vector, masks[v])
                add = builder.add if isinstance(number, ir.IntType) else builder.fadd
                masked_store(builder, builder.add(to, constant(v * width)), add(old, new[i][v]), masks[v])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 15, *literals), codegen


# ---- kernels. Each is made for one dtype (code, item bytes) and register width; all sizes and strides are arguments, in bytes
# where they are distances. `stamp` stands in each closure for Numba's cache, see `_host.stamp`.


def stage_first(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: rows of x, channels-first, into padded rows; one part of a row for each phase of the last axis' stride."""

    @njit("void(int64, int64[:, ::1], int64[::1], int64, int64)", nogil=True, cache=True)
    def stage(x: int, axes: Any, phases: Any, to: int, size: int) -> None:
        """axes: rows (count, stride) of c, n and (count, stride, first cell, cells) of d, h, and of w with its step.

        `size`: cells of one part of a row; part i starts at cell phases[i] of x.
        """
        stamp  # noqa: B018
        channels, c_stride = axes[0, 0], axes[0, 1]
        images, n_stride = axes[1, 0], axes[1, 1]
        planes, d_stride, d0, d_size = axes[2, 0], axes[2, 1], axes[2, 2], axes[2, 3]
        rows, h_stride, h0, h_size = axes[3, 0], axes[3, 1], axes[3, 2], axes[3, 3]
        step, w_stride, w_size = axes[4, 0], axes[4, 1], axes[4, 3]
        jump = step * w_stride
        for c in range(channels):
            for n in range(images):
                for d in range(d0, d0 + planes):
                    for h in range(h0, h0 + rows):
                        row = x + c * c_stride + n * n_stride + d * d_stride + h * h_stride
                        inside = 0 <= d < d_size and 0 <= h < h_size
                        for first in phases:
                            lo = min(size, max(0, (step - 1 - first) // step))
                            hi = max(lo, min(size, (w_size - 1 - first) // step + 1)) if inside else lo
                            fill_zero(to, lo * item)
                            start, put = row + (first + lo * step) * w_stride, to + lo * item
                            i = lo
                            if jump == item:
                                copy(put, start, (hi - lo) * item)
                                i = hi
                            elif jump == 2 * item and hi - lo >= lanes:
                                while i < hi:
                                    if i + lanes > hi:  # the last register begins earlier, so as not to read beyond
                                        back = i + lanes - hi
                                        i, start, put = i - back, start - back * jump, put - back * item
                                    store(put, load_even(start, code, lanes))
                                    start += lanes * jump
                                    put += lanes * item
                                    i += lanes
                            while i < hi:
                                write(put, read(start, code), code)
                                start += jump
                                put += item
                                i += 1
                            fill_zero(to + hi * item, (size - hi) * item)
                            to += size * item

    return stage


def stage_last(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: rows of x, channels-last, into padded rows of `size` pixels."""

    @njit("void(int64, int64[:, ::1], int64, int64, int64)", nogil=True, cache=True)
    def stage(x: int, axes: Any, to: int, size: int, pixel: int) -> None:
        """axes: as in `stage_first`; the first cell of w is in axes[4, 2]. pixel: bytes from pixel to pixel of a row."""
        stamp  # noqa: B018
        channels, c_stride = axes[0, 0], axes[0, 1]
        images, n_stride = axes[1, 0], axes[1, 1]
        planes, d_stride, d0, d_size = axes[2, 0], axes[2, 1], axes[2, 2], axes[2, 3]
        rows, h_stride, h0, h_size = axes[3, 0], axes[3, 1], axes[3, 2], axes[3, 3]
        w_stride, w0, w_size = axes[4, 1], axes[4, 2], axes[4, 3]
        own = channels * item
        lo = min(size, max(0, -w0))
        for n in range(images):
            for d in range(d0, d0 + planes):
                for h in range(h0, h0 + rows):
                    inside = 0 <= d < d_size and 0 <= h < h_size
                    hi = max(lo, min(size, w_size - w0)) if inside else lo
                    start = x + n * n_stride + d * d_stride + h * h_stride + (w0 + lo) * w_stride
                    fill_zero(to, lo * pixel)
                    if c_stride == item and w_stride == own == pixel:
                        copy(to + lo * pixel, start, (hi - lo) * pixel)
                    elif c_stride == item:
                        for i in range(lo, hi):
                            copy(to + i * pixel, start + (i - lo) * w_stride, own)
                    else:
                        for i in range(lo, hi):
                            for c in range(channels):
                                value = read(start + (i - lo) * w_stride + c * c_stride, code)
                                write(to + i * pixel + c * item, value, code)
                    fill_zero(to + hi * pixel, (size - hi) * pixel)
                    to += size * pixel

    return stage


def pack(code: int, item: int, lanes: int, stamp: int) -> Any:
    """Kernel: tiles of `width` rows side by side: to[tile, k, r] = start[tile * width + r, k], 0 beyond the last row."""

    @njit("void(int64, int64, int64, int64, int64[::1], int64, int64, int64, int64)", nogil=True, cache=True)
    def pack(
        start: int, group: int, step: int, rows: int, offsets: Any, width: int, to: int, first: int, last: int
    ) -> None:
        """Tiles first .. last, counted over all groups, which lie `group` bytes apart and have `rows` rows each.

        Row r lies r * step bytes from the start of its group, number k of a row offsets[k] bytes from its head.
        """
        stamp  # noqa: B018
        count, tiles = len(offsets), (rows + width - 1) // width
        for tile in range(first, last):
            row0 = tile % tiles * width
            base, head = to + tile * count * width * item, start + tile // tiles * group + row0 * step
            if step == item and width % lanes == 0:
                for k in range(count):
                    for r0 in range(0, width, lanes):
                        vector = load_first(head + offsets[k] + r0 * item, rows - row0 - r0, code, lanes)
                        store(base + (k * width + r0) * item, vector)
                continue
            for r0 in range(0, width, lanes):
                row = head + r0 * step
                block = min(lanes, width - r0)
                here = min(rows - row0 - r0, block)  # rows that exist
                k = 0
                while k < count:
                    to_k = base + (k * width + r0) * item
                    run = 1  # numbers that lie together
                    while (
                        here == lanes
                        and run < lanes
                        and k + run < count
                        and offsets[k + run] == offsets[k] + run * item
                    ):
                        run += 1
                    if run == lanes:
                        transpose(to_k, width * item, row + offsets[k], step, code, lanes)
                        k += lanes
                        continue
                    store_first(to_k, gather(row + offsets[k], step, here, code, lanes), block)
                    k += 1

    return pack


def convolve_first(code: int, item: int, lanes: int, mr: int, nv: int, stamp: int) -> Any:
    """Kernel: pixels of a block, channels-first. Windows are copied to panels (k, NR), k = (channel, tap); see `tile`."""
    nr = nv * lanes
    register, wide = lanes * item, nv * lanes * item
    most, entries = MOST_PANELS, MOST_PANELS * nr

    @njit(
        "void(int64, int64, int64, int64, int64, int64, int64[::1], int64[:, ::1], int64, int64,"
        " int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)",
        nogil=True,
        cache=True,
    )
    def convolve(
        groups: int, x: int, x_group: int, limit: int, c_step: int, channels: int,
        taps: Any, rows: Any, width: int, together: int,
        w: int, w_group: int, w_row: int, w_step: int, w_tile: int, outputs: int,
        y: int, y_group: int, y_step: int, pixel: int, bias: int, panels: int, sums: int, chunk: int,
    ) -> None:  # fmt: skip
        """All pixels of `rows`: (offset in x, offset in y) of rows of `width` pixels.

        x: first tap of pixel 0, channel 0; nothing is read at `limit` and beyond. bias: `outputs` numbers. `together` panels
        (at most MOST_PANELS) share a pass over the weights, `chunk` channels at a time. panels: scratch for together
        * chunk * taps * NR numbers; sums: for together * (outputs + MR) * NR.
        """
        stamp  # noqa: B018
        total = len(rows) * width
        put, length, lane, parts, whole = table(entries), table(entries), table(entries), table(most), table(most)
        read_at, patch_at, patch_lane, patch_end = table(entries), table(entries), table(entries), table(entries)
        arow, crow, drow, zero = table(mr), table(mr), table(mr), table(1)
        zero[0] = 0
        own_bytes = (outputs + mr) * wide  # of the sums of one panel
        panel_bytes = chunk * len(taps) * wide
        last_tap = taps[0]
        for tap in taps:
            last_tap = max(last_tap, tap)
        for _ in range(groups):
            for p0 in range(0, total, together * nr):
                count = min(together, (total - p0 + nr - 1) // nr)
                vectors = (min(nr, total - p0 - (count - 1) * nr) + lanes - 1) // lanes  # of the last panel
                patches, farthest = 0, 0
                for q in range(count):
                    # Runs of pixels that lie together: lane, length, offset in y. A vector of the panel is read where its
                    # first run lies; lanes from patch_lane on are then patched from where the next run lies.
                    p, s, done, one_run = p0 + q * nr, q * nr, 0, pixel == item
                    while done < min(nr, total - p):
                        row, col = (p + done) // width, (p + done) % width
                        put[s], lane[s] = rows[row, 1] + col * pixel, done
                        length[s] = min(width - col, min(nr, total - p) - done)
                        one_run = one_run and put[s] == put[q * nr] + done * item
                        end = done + length[s]
                        while done < end:
                            v, first = q * nv + done // lanes, done % lanes
                            here = rows[row, 0] + (col - first) * item
                            farthest = max(farthest, here)
                            if first:
                                patch_at[patches], patch_lane[patches] = here, first
                                patches += 1
                            else:
                                read_at[v] = here
                            patch_end[v] = patches
                            col += lanes - first
                            done += lanes - first
                        done = end
                        s += 1
                    parts[q], whole[q] = s, one_run
                for c0 in range(0, channels, chunk):
                    c1 = min(channels, c0 + chunk)
                    steps = (c1 - c0) * len(taps)
                    to = panels
                    inside = x + max(c0 * c_step, (c1 - 1) * c_step) + last_tap + farthest + register <= limit
                    for c in range(c0, c1):
                        for tap in taps:
                            start = x + c * c_step + tap
                            patch = 0
                            for q in range(count):
                                for i in range(vectors if q == count - 1 else nv):
                                    at = start + read_at[q * nv + i]
                                    if inside:
                                        vector = load(at, code, lanes)
                                    else:
                                        vector = load_first(at, (limit - at) // item, code, lanes)
                                    while patch < patch_end[q * nv + i]:
                                        at = start + patch_at[patch]
                                        vector = load_between(at, patch_lane[patch], (limit - at) // item, vector)
                                        patch += 1
                                    store(to + q * panel_bytes + i * register, vector)
                            to += wide
                    for m in range(0, outputs, mr):
                        a_at = w + m // mr * w_tile + c0 * len(taps) * w_step
                        for i in range(mr):
                            arow[i] = min(i, outputs - 1 - m) * w_row
                        for q in range(count):
                            own = sums + q * own_bytes + m * wide
                            c_at = y + m * y_step + put[q * nr] if whole[q] else own
                            d_at = own if c0 == 0 else c_at
                            for i in range(mr):
                                crow[i] = i * y_step if whole[q] and m + i < outputs else own + i * wide - c_at
                                drow[i] = i * wide if c0 == 0 else crow[i]
                                if c0 == 0:
                                    start_ = splat(read(bias + min(m + i, outputs - 1) * item, code), code, lanes)
                                    for v in range(nv):
                                        store(own + i * wide + v * register, start_)
                            b_at, lanes_here = panels + q * panel_bytes, min(nr, total - p0 - q * nr)
                            if lanes_here > 2 * lanes and nv > 2:
                                tile(
                                    a_at, address(arow), 0, address(zero), w_step, b_at, wide, c_at,
                                    address(crow), d_at, address(drow), lanes_here, 1, steps, 0, 0, 0, 0, mr, nv, code, lanes,
                                )  # fmt: skip
                            elif lanes_here > lanes:
                                tile(
                                    a_at, address(arow), 0, address(zero), w_step, b_at, wide, c_at,
                                    address(crow), d_at, address(drow), lanes_here, 1, steps, 0, 0, 0, 0, mr, 2, code, lanes,
                                )  # fmt: skip
                            else:
                                tile(
                                    a_at, address(arow), 0, address(zero), w_step, b_at, wide, c_at,
                                    address(crow), d_at, address(drow), lanes_here, 1, steps, 0, 0, 0, 0, mr, 1, code, lanes,
                                )  # fmt: skip
                for q in range(count):
                    if whole[q]:
                        continue
                    for m in range(outputs):
                        for s in range(q * nr, parts[q]):
                            source, target = sums + q * own_bytes + m * wide + lane[s] * item, y + m * y_step + put[s]
                            if pixel == item:
                                copy(target, source, length[s] * item)
                            elif pixel == 2 * item:
                                for i in range(0, length[s], lanes):
                                    vector = load(source + i * item, code, lanes)
                                    store_alternate(target + i * pixel, vector, min(lanes, length[s] - i))
                            else:
                                for _ in range(length[s]):
                                    write(target, read(source, code), code)
                                    source += item
                                    target += pixel
            x, w, y, bias = x + x_group, w + w_group, y + y_group, bias + outputs * item

    return convolve


def convolve_last(code: int, item: int, lanes: int, mr: int, nv: int, stamp: int) -> Any:
    """Kernel: pixels of a block, channels-last, by all output channels; weights are packed (tile, tap, channel, NR)."""
    nr, most, entries = nv * lanes, MOST_TAPS, MOST_TAPS * mr

    @njit(
        "void(int64, int64[:, ::1], int64, int64, int64, int64[::1], int64[::1], int64, int64, int64,"
        " int64, int64, int64, int64, int64, int64, int64, int64)",
        nogil=True,
        cache=True,
    )
    def convolve(
        groups: int, jobs: Any, counter: int, x: int, x_group: int, runs: Any, taps: Any, channels: int, resident: int,
        x_ahead: int, w: int, outputs: int, y: int, y_group: int, y_ahead: int, bias: int, zeros: int, dump: int,
    ) -> None:  # fmt: skip
        """Takes blocks of pixels, rows of `jobs`, as long as the counter, which threads share, finds any.

        A job: offset of a block in x, in y; address of a table (3, pixels) of int64, their number. A pixel reads from x plus
        its first number and goes to y plus its second; bit t of the third: its tap t lies in padding.

        taps: offsets of taps of `channels` numbers; runs: of neighbouring taps that lie together as one. `resident`: weights
        stay in the L2 cache, so that MR pixels at a time pass by; else all pixels of a block do. x_ahead, y_ahead: bytes of x
        and y that each step of a tile fetches for the next. bias: numbers for all tiles, 0 beyond the outputs; zeros: a tap of
        padding, of all groups; dump: scratch for NR numbers.
        """
        stamp  # noqa: B018
        own_a, own_c, turns, drow = table(mr), table(mr), table(entries), table(mr)
        nothing, ahead = table(most), table(4)
        for i in range(mr):
            drow[i] = 0
        for t in range(min(len(taps), most)):
            nothing[t] = 0
        steps = len(taps) * channels
        tiles = (outputs + nr - 1) // nr  # of a group
        while True:
            job = take(counter)
            if job >= len(jobs):
                break
            x_block, y_block, places, total = x + jobs[job, 0], y + jobs[job, 1], jobs[job, 2], jobs[job, 3]
            together = mr if resident else (total + mr - 1) // mr * mr
            targets, padding = places + 8 * total, places + 16 * total
            for p0 in range(0, total, together):
                for s in range(groups * tiles):
                    g, o = s // tiles, s % tiles * nr
                    x_at, w_at = x_block + g * x_group, w + s * steps * nr * item
                    y_at = y_block + g * y_group + o * item
                    for p in range(p0, min(p0 + together, total), mr):
                        arow, crow, padded = places + 8 * p, targets + 8 * p, 0
                        if p + mr > total:  # rows beyond the last pixel repeat it
                            for i in range(mr):
                                own_a[i] = number(places, min(p + i, total - 1))
                                own_c[i] = number(targets, p + i) if p + i < total else dump - y_at
                            arow, crow = address(own_a), address(own_c)
                        for i in range(p, min(p + mr, total)):
                            padded |= number(padding, i)
                        if padded and (s == 0 or together > mr):
                            for i in range(mr):
                                pixel = min(p + i, total - 1)
                                at, outside = number(places, pixel), number(padding, pixel)
                                for t in range(len(taps)):
                                    turns[t * mr + i] = zeros - x_block if (outside >> t) & 1 else at + taps[t]
                        following = min(p + mr, total - 1)
                        ahead[0] = x_block + number(places, following) + taps[-1] + s * steps * x_ahead
                        ahead[2] = y_block + number(targets, following) + s * steps * y_ahead
                        ahead[1], ahead[3] = x_ahead, y_ahead
                        parts = taps if padded else runs
                        tile(
                            x_at, address(turns) if padded else arow, 8 * mr if padded else 0,
                            address(nothing) if padded else address(runs), item, w_at, nr * item,
                            y_at, crow, bias + s * nr * item, address(drow),
                            outputs - o, len(parts), steps // len(parts), address(ahead), 0, 1, 1, mr, nv, code, lanes,
                        )  # fmt: skip

    return convolve


def weight_gradient(code: int, item: int, lanes: int, mr: int, nv: int, stamp: int) -> Any:
    """Kernel: adds a block's part to the weight gradient (k, padded output channels)."""
    nr, register = nv * lanes, lanes * item

    @njit(
        "void(int64, int64, int64, int64[::1], int64[:, ::1], int64,"
        " int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)",
        nogil=True,
        cache=True,
    )
    def gradient(
        groups: int, x: int, x_group: int, places: Any, pixels: Any, together: int,
        dy: int, dy_group: int, dy_tile: int, dy_step: int, outputs: int, buffer: int,
        to: int, to_group: int, last: int, start: int,
    ) -> None:  # fmt: skip
        """Row k < last of the gradient sums x + places[k] + pixels[0, p] times pixel p of dy; pixels[1, p] is the distance from
        pixel p - 1; the last pixel stands for none.

        Tiles of dy have NR numbers for each pixel and lie dy_tile bytes apart, their pixels dy_step. `together` pixels are
        summed at a time: their cells stay in the L1 cache for all tiles, and so does their dy, which is copied to the buffer
        unless its pixels lie together. The sums are added to the result, which has room for a multiple of MR rows; if `start`,
        NR zeros, is not 0, nothing is in the result yet.
        """
        stamp  # noqa: B018
        arow, crow, nothing, ahead = table(mr), table(mr), table(mr), table(4)
        wide, tiles, total = nr * item, (outputs + nr - 1) // nr, pixels.shape[1] - 1
        pitch = tiles * wide  # of a row of the result
        for i in range(mr):
            crow[i], nothing[i] = i * pitch, 0
        for _ in range(groups):
            for p in range(0, total, together):
                count, following = min(together, total - p), min(p + together, total - 1)
                for o in range(tiles):
                    b_at = dy + o * dy_tile + p * dy_step
                    dy_next = b_at + dy_tile if o + 1 < tiles else dy + following * dy_step
                    if dy_step != wide:
                        for j in range(count):
                            for v in range(nv):
                                vector = load(b_at + j * dy_step + v * register, code, lanes)
                                store(buffer + j * wide + v * register, vector)
                        b_at = buffer
                    for k in range(0, last, mr):
                        c_at = to + k * pitch + o * wide
                        for i in range(mr):
                            arow[i] = places[min(k + i, last - 1)]
                        fresh = start != 0 and p == 0
                        line = k // mr * register
                        ahead[0], ahead[1] = dy_next + line % wide, dy_step
                        ahead[2], ahead[3] = x + pixels[0, following] + places[0] + line, pixels[1, following]
                        tile(
                            x + pixels[0, p], address(arow), 0, address(nothing), address(pixels) + 8 * (total + 1 + p),
                            b_at, wide, c_at, address(crow),
                            start if fresh else c_at, address(nothing) if fresh else address(crow),
                            nr, 1, count, address(ahead), 1, 2, 0, mr, nv, code, lanes,
                        )  # fmt: skip
            x, dy, to = x + x_group, dy + dy_group, to + to_group

    return gradient
