"""The mutants of `mutate.py`: for each section, the backends to test on and what to break in the package."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` occurs once in `file` and becomes `new`; the test files `first` run before the others."""

    name: str
    file: str
    old: str
    new: str
    first: tuple[str, ...]


class Section(NamedTuple):
    backends: str
    mutants: list[Mutant]


def section(backends: str, *files: tuple[str, list[tuple[str, str, str, str]]]) -> Section:
    """From files with rows of (name, old, new, "conv memory" for test_conv.py and test_memory.py)."""
    return Section(
        backends,
        [
            Mutant(name, f"funcnn/{file}", old, new, tuple(f"tests/test_{part}.py" for part in first.split()))
            for file, rows in files
            for name, old, new, first in rows
        ],
    )


SPEC = [
    ("'same' has the odd cell first", "(less, more) if", "(more, less) if", "spec"),
    ("'same' crops where the stride is over the kernel", "+ reach + 1 - size, 0)", "+ reach + 1 - size, -9)", "spec"),
    ("'full' and 'same' forget dilation", "reach = dilation * (kernel - 1)", "reach = kernel - 1", "spec"),
    ("a ceil window may start in the trailing padding", "out * s < size + lo:", "out * s <= size + lo:", "spec"),
    ("the divisor counts the ceil overhang", "last = min(axis.kernel, ceil_div(high - start, axis.dilation))",
     "last = axis.kernel", "avg_pool"),
    ("the divisor forgets the leading padding", "(-axis.lo, axis.size + axis.hi)", "(0, axis.size + axis.hi)",
     "avg_pool"),
    ("the divisor forgets the trailing padding", "(-axis.lo, axis.size + axis.hi)", "(-axis.lo, axis.size)", "avg_pool"),
    ("the divisor always counts padding", "_counts(axis, self.count_include_pad)", "_counts(axis, True)", "avg_pool"),
    ("the divisor forgets dilation", "ceil_div(low - start, axis.dilation)", "low - start", "avg_pool"),
    ("a max pool's window may hold padding only", "_counts(axis, include_pad=False)", "_counts(axis, include_pad=True)",
     "errors"),
    ("an argmax of 256 cells takes two bytes", "cells <= _INDEX_LIMIT", "cells < _INDEX_LIMIT", "max_pool"),
    ("conv_transpose forgets dilation", "(out - 1) * s + span(k, d) - lo", "(out - 1) * s + span(k, 1) - lo",
     "conv_transpose"),
    ("conv_transpose forgets the trailing padding", "span(k, d) - lo - hi", "span(k, d) - lo - lo", "conv_transpose"),
    ("'same' forgets output_size", "out * s if output_size is None else output_size[i]", "out * s", "conv_transpose"),
    ("output_padding must be below the stride", "if e >= max(s, d)", "if e >= s", "conv_transpose"),
    ("output_size may reach the next input size", "0 <= extra < max(s, d)", "0 <= extra <= max(s, d)", "errors"),
    ("the int32 limit of conv_transpose forgets dilation", "a.stride // math.gcd(a.stride, a.dilation)", "a.stride",
     "conv_transpose"),
    ("one int32 term too few", "> MAX_INT32_TERMS", ">= MAX_INT32_TERMS", "conv"),
    ("groups need not divide the outputs", "channels % groups or outputs % groups", "channels % groups", "errors"),
    ("a single window forgets its dilation", "dilation if kernel > 1 else 1", "dilation if out > 1 else 1", "conv"),
    ("a seed of 2**64", "value >= 2**64", "value > 2**64", "errors"),
]  # fmt: skip

XP = [
    ("a max pool reads 0 for padding", "-math.inf if real", "0 if real", "max_pool"),
    ("an integer max pool reads 0 for padding", "int(w.xp.iinfo(wide.dtype).min)", "0", "max_pool"),
    ("a max pool's last maximum wins", "w.xp.min(w.xp.where(hit, tap, w.xp.full_like(tap, spec.taps - 1))",
     "w.xp.max(w.xp.where(hit, tap, w.xp.zeros_like(tap))", "max_pool"),
    ("a max pool loses NaN", "hit = hit | w.xp.isnan(cells)", "pass", "max_pool"),
    ("-inf in the padding wins", 'hit = hit & w.constant(_inside(spec.axes), x, "bool")', "pass", "max_pool"),
    ("half floats are summed as such", "w.cast(array, _sum_dtype(self.spec.y_dtype))",
     "w.cast(array, self.spec.y_dtype)", "conv"),
    ("a complex infinity times a real weight", "if self.spec.weight_dtype == self.spec.dtype:", "if True:", "conv"),
    ("an imaginary infinity loses its sign", "(imag < 0, -math.inf)", "(imag < 0, math.inf)", "conv"),
    ("groups swap the roles of channels and taps", "rows = c // spec.groups * (math.prod(rest) // columns)",
     "rows = c // spec.groups * (math.prod(rest) // columns); array = w.xp.flip(array, axis=1)", "conv"),
    ("windows step over a cell of the input", "(cells < 0) | (cells >= axis.size)",
     "(cells < 0) | (cells >= axis.size - (axis.lo > 0))", "conv"),
    ("windows of padding only are divided by 0", "np.maximum(counts, 1)", "np.maximum(counts, 0)", "avg_pool"),
    ("half floats are averaged as such", "w.sum_taken(w.cast(x, _sum_dtype(spec.dtype)),", "w.sum_taken(x,", "avg_pool"),
    ("all rows of dropout share a key", "np.arange(n), like", "np.arange(n) * 0, like", "dropout"),
    ("a hash equal to the rate is dropped", "_shift(v, 1) >= limit", "_shift(v, 1) > limit", "dropout"),
    ("backward ignores padding", "np.arange(axis.size)[:, None] + axis.lo -", "np.arange(axis.size)[:, None] -", "conv"),
    ("backward reaches cells between the strides", "(offset % axis.stride != 0) |", "", "conv"),
    ("backward forgets the last window", "(window >= axis.out)", "(window >= axis.out - 1)", "conv"),
    ("the data gradient swaps the strides of H and W", "return w.fold(windows, spec.axes)",
     "return w.fold(windows, tuple(a._replace(stride=b.stride) for a, b in zip(spec.axes, spec.axes[::-1])))", "conv"),
    ("the weight gradient drops dilation", "w, self._grouped(w, w.unfold(self._widen(w, x), spec.axes, 0))\n",
     "w, self._grouped(w, w.unfold(self._widen(w, x), tuple(a._replace(dilation=1) for a in spec.axes), 0))\n", "conv"),
    ("the weight gradient ignores padding", "w, self._grouped(w, w.unfold(self._widen(w, x), spec.axes, 0))\n",
     "w, self._grouped(w, w.unfold(self._widen(w, x), tuple(a._replace(lo=0) for a in spec.axes), 0))\n", "conv"),
    ("the weight gradient forgets flip", "self._flipped(w, gradient)", "gradient", "conv"),
    ("the weight gradient loses a row of the batch", "rows = self._batch_last(w, self._grouped(w, self._widen(w, y)))",
     "y = w.xp.concat([y[:-1, ...], y[-1:, ...] * (y.shape[0] == 1)]); "
     "rows = self._batch_last(w, self._grouped(w, self._widen(w, y)))", "conv"),
    ("the gradient of a real weight is the imaginary part", "w.xp.real(gradient)", "w.xp.imag(gradient)", "conv"),
    ("the bias gradient sums half floats as such", "w.xp.sum(self._widen(w, dy),", "w.xp.sum(dy,", "conv"),
    ("backward does not conjugate", "self._windows().xp.conj(a) if", "a if", "conv"),
    ("a max pool's backward spreads NaN", "w.xp.where(chosen, dy, w.xp.zeros_like(dy))",
     "dy * w.xp.astype(chosen, dy.dtype)", "max_pool"),
    ("a max pool's backward sums half floats as such", "w.cast(dy, _sum_dtype(spec.dtype)), flat)", "dy, flat)",
     "max_pool"),
    ("an average's backward divides by the whole window", "dy / self._divisor(w, dy)", "dy / spec.taps", "avg_pool"),
    ("an average's backward sums half floats as such", "dy = w.cast(dy, _sum_dtype(spec.dtype))\n", "pass\n", "avg_pool"),
    ("dropout's backward forgets the scale", "return self._select(_Windows(self.library), dy, mask)",
     "return _Windows(self.library).xp.where(mask, dy, dy * 0)", "dropout"),
]  # fmt: skip

PROTOCOL = [
    ("dx of a complex convolution does not conjugate", "self.conjugate(weight), None", "weight, None", "conv"),
    ("dweight of a complex convolution does not conjugate", "x = self.conjugate(x)", "pass", "conv"),
    ("plans of other options are equal", "spec, options, library, device, self.algorithm)",
     "spec, library, device, self.algorithm)", "state"),
]  # fmt: skip

HASH = [
    ("the high word of a seed is lost", " ^ seed >> 32", "", "dropout"),
    ("the rate is cut, not rounded", "return round(rate", "return int(rate", "dropout"),
]

DOOR = [
    ("H and W may be swapped", "got[1:] != shape", "sorted(got[1:]) != sorted(shape)", "errors"),
    ("any dtype will do", "if name_of(array.dtype) != dtype:", "if False:", "errors"),
    ("dy may be of another batch", "if batch != expected:", "if batch > expected:", "errors"),
    ("a state of any op will do", "if type(state) is kind:", "if isinstance(state, OpState):", "errors"),
]

POOL = [
    ("an evaluation keeps an old argmax", "clear(state) if argmax is None", "state if argmax is None", "max_pool"),
    ("flat indices forget dilation", "tap * axis.dilation - axis.lo\n", "tap - axis.lo\n", "max_pool"),
    ("an argmax may name one cell of the trailing padding", "highest * axis.dilation >= axis.size",
     "highest * axis.dilation > axis.size", "errors"),
    ("an argmax may name a cell of the leading padding", "start + lowest * axis.dilation < 0 or ", "", "errors"),
    ("taps of inner axes forget those of outer ones", "if inner * kernel < taps:", "if False:", "max_pool errors"),
    ("an argmax may be one too large", "highest >= spec.taps", "highest > spec.taps", "errors"),
]  # fmt: skip

DROPOUT = [
    ("the step stands still", "state.step + 1", "state.step + 0", "dropout"),
    ("an evaluation keeps an old mask", "copy=True), clear(state)", "copy=True), state", "dropout"),
    ("an evaluation returns its argument", "copy=True)", "copy=False)", "dropout"),
]

STATE = [
    ("clear keeps the memory", "return xp.zeros((0,) * array.ndim, dtype=array.dtype, **place)",
     "return array[(slice(0, 0),) * array.ndim]", "state"),
    ("clear resets the step of dropout", "replace(self, mask=empty_like(self.mask))",
     "replace(self, mask=empty_like(self.mask), step=self.step * 0)", "state"),
    ("a pickled state forgets its batch", "return cls(plan, *leaves, batch=batch)", "return cls(plan, *leaves)", "state"),
]  # fmt: skip

LAYERS = {
    "ops": [
        ("a linear layer's dx does not conjugate", "_conj(xp, _as(xp, weight, d))", "_as(xp, weight, d)", "layers"),
        ("a linear layer's dweight does not conjugate", "_conj(xp, _as(xp, x, d))", "_as(xp, x, d)", "layers"),
    ],
    "activations": [
        ("relu passes a gradient at 0", "xp.where(x <= 0,", "xp.where(x < 0,", "layers"),
        ("softmax's backward forgets its sum", "y * (dy - xp.sum(dy * y, axis=axis, keepdims=True))", "y * dy", "layers"),
    ],
    "combinators": [
        ("residual's backward forgets the short cut", "return dy + dx, grads", "return dx, grads", "layers"),
        ("parallel splits at equal widths", "start += size", "start += sizes[0]", "layers"),
        ("parallel sums half floats as such", "array in arrays] if half else", "array in arrays] if False else",
         "layers"),
    ],
    "losses": [
        ("half the gradient of the squared error", "difference * (2 / count)", "difference * (1 / count)", "layers"),
        ("cross entropy's gradient is of the sum", "xp.astype(hit, a.dtype)) / count", "xp.astype(hit, a.dtype))",
         "layers"),
    ],
}  # fmt: skip

AXES = [
    ("the last window inside is forgotten", "(self.size - 1 - start) // self.stride + 1",
     "(self.size - 1 - start) // self.stride", "conv"),
]  # fmt: skip

THREADS = [
    (
        "a block loses its last pixel",
        "size * (i + 1) // count)",
        "size * (i + 1) // count - (i + 1 < count))",
        "memory",
    ),
]
MEMORY = [
    ("a strided block passes for a matrix", "if step is not None and stride != step:", "if False:", "conv"),
    ("padding is what was in scratch", "target[border] = 0", "pass", "conv"),
]  # fmt: skip

CONV = [
    ("1x1 forgets its stride", "a.stride == 1 and a.lo == 0 and", "a.lo == 0 and", "conv"),
    ("1x1 forgets its leading padding", "a.stride == 1 and a.lo == 0 and", "a.stride == 1 and", "conv_transpose"),
    ("1x1 forgets its trailing padding", "and a.lo == 0 and a.out == a.size for", "and a.lo == 0 for", "conv"),
    ("16-bit sums beyond float64", '"uint16": 2**21', '"uint16": 2**30', "conv"),
    ("a channels-last weight lies channels-first", "weight = np.moveaxis(weight, 1, -1)", "pass", "conv"),
    ("an infinite depthwise weight reaches cells between rows", " and np.isfinite(weight).all():", ":",
     "conv conv_transpose laws"),
    ("the weight gradient keeps the last block only", "np.add(total, np.matmul(gradient, columns, out=part), out=total)",
     "np.matmul(gradient, columns, out=total)", "memory"),
    ("a channels-last weight gradient lies channels-first", "return np.moveaxis(rows.reshape(o, *kernel, i), -1, 1)",
     "return rows.reshape(o, i, *kernel)", "conv"),
    ("the gradient of a real weight does not conjugate", "real(x.real, y.real) - real(", "real(x.real, y.real) + real(",
     "conv"),
    ("the bias gradient sums half floats as such", "self.spec.layout), self.sum_dtype)\n        return sums",
     "self.spec.layout), dy.dtype)\n        return sums", "conv"),
    ("backward does not conjugate", "a.conj() if a.dtype.kind", "a if a.dtype.kind", "conv"),
    ("the data gradient sums half floats as such", "np.zeros, shape, dtype, order", "np.zeros, shape, spec.y_dtype, order",
     "conv"),
    ("the data gradient forgets flip", "axis.kernel - 1 - tap if flip else tap", "tap", "conv"),
    ("the data gradient forgets the last window of a block", "min(last, hi)", "min(last, hi - 1)", "conv"),
]  # fmt: skip

DEPTHWISE = [
    ("taps of one phase lie too near", "step * axis.dilation // axis.stride", "axis.dilation // axis.stride", "conv"),
    ("a task forgets its last channel", "slice(c, min(c + together, channels))",
     "slice(c, min(c + together, channels - (c > 0)))", "memory"),
    ("a task forgets its last row", "(r, min(r + height, rows))", "(r, min(r + height, rows - (r > 0)))", "memory"),
    ("every task reads the first rows", "lo = row if i == 0 else 0", "lo = 0", "memory"),
    ("the kernel is never flipped", "if spec.flip else weight", "if False else weight", "conv"),
    ("the last row of a phase is forgotten", "(axis.size - 1 + axis.lo - phase) // axis.stride + 1",
     "(axis.size - 1 + axis.lo - phase) // axis.stride", "conv"),
    ("the data gradient's tasks do not overlap", "halo = _most_shift(axes[0])", "halo = 0", "memory"),
    ("the data gradient overwrites the bias of a transposed conv", "np.add(part, plane[tuple(source)], out=part)",
     "np.copyto(part, plane[tuple(source)])", "conv_transpose"),
    ("the data gradient adds two outputs of a channel at most", "if m:", "if m == 1:", "conv"),
    ("the weight gradient forgets flip", "kernel = np.flip(kernel, axis=tuple(range(2, kernel.ndim)))", "pass", "conv"),
    ("the weight gradient keeps the last task only", "parts.sum(axis=0)", "parts[-1]", "memory"),
    ("the weight gradient drops dilation", "*(p.shift_step * s for p, s", "*(s for p, s", "conv"),
    ("the weight gradient forgets a phase's shift", "start = work.slack + sum(p.shift * q",
     "start = work.slack + 0 * sum(p.shift * q", "conv"),
]  # fmt: skip

POOLS = [
    ("a max pool's last maximum wins", "np.greater(value, old, out=better)", "np.greater_equal(value, old, out=better)",
     "max_pool"),
    ("a max pool's last NaN wins", "np.isnan(value) & ~np.isnan(old)", "np.isnan(value)", "max_pool"),
    ("an argmax loses NaN", "np.isnan(best.max())", "False", "max_pool"),
    ("a task reads a row too few", "- axis.lo + axis.span))", "- axis.lo + axis.span - 1))", "memory"),
    ("a task forgets its last channel or row", "slice(lo, min(lo + most, size))",
     "slice(lo, min(lo + most, size - (lo > 0)))", "memory"),
    ("the argmax mixes up the sizes of the kernel", "stride *= axes[i].kernel", "stride *= axes[0].kernel", "max_pool"),
    ("windows that tap 0 misses start anew", "known = min(known, first)", "pass", "max_pool"),
    ("windows of padding only are what was in scratch", "if not _all_covered(axis):", "if False:", "avg_pool"),
    ("all tasks divide as the first rows", "self._divisor[job.rows]", "self._divisor[: job.rows.stop - job.rows.start]",
     "memory"),
    ("one divisor where the corners agree", "counts.min() == counts.max()", "counts.flat[0] == counts.flat[-1]",
     "avg_pool"),
    ("a max pool's backward forgets that dilated windows overlap", "axis.stride >= axis.span for",
     "axis.stride >= axis.kernel for", "max_pool"),
    ("a large window's backward drops dilation", "np.arange(axis.kernel) * axis.dilation", "np.arange(axis.kernel)",
     "max_pool"),
    ("a large window's backward ignores padding", "np.arange(axis.out) * axis.stride - axis.lo",
     "np.arange(axis.out) * axis.stride", "max_pool"),
    ("a max pool's backward spreads NaN", "np.bitwise_and(mask, here.view(bits), out=mask)",
     "np.multiply(here, mask != 0, out=mask.view(dy.dtype))", "max_pool"),
    ("a max pool's backward overwrites", "np.add(target, mask.view(dy.dtype), out=target)",
     "np.copyto(target, mask.view(dy.dtype))", "max_pool"),
    ("an average's backward divides by the whole window", "np.divide(source, self._divisor,",
     "np.divide(source, self.spec.taps,", "avg_pool"),
    ("an average's backward overwrites", "np.add(part, y[_at(i, pair[0])], out=part)",
     "np.copyto(part, y[_at(i, pair[0])])", "avg_pool"),
    ("an average's backward rounds half floats twice", 'casting="unsafe", dtype=dtype)', 'casting="unsafe")', "avg_pool"),
]  # fmt: skip

BLAS_DROPOUT = [
    ("a hash equal to the rate is dropped", "np.greater_equal(v, np.uint32", "np.greater(v, np.uint32", "dropout"),
    ("blocks of a long row share a mask", "(int(first[row]) + lo)", "(int(first[row]))", "dropout"),
    ("the scale is rounded to half floats", "x.astype(np.float32) * np.float32(scale)", "x * scale", "dropout"),
    ("backward loses the imaginary part", "((x.real, y.real), (x.imag, y.imag))", "((x.real, y.real),)", "dropout"),
    ("backward forgets the scale", "return self._select(dy, mask)", "return np.where(mask, dy, dy * 0)", "dropout"),
]  # fmt: skip

WALK = [
    ("the data gradient drops dilation", "- t * axis.dilation) % axis.stride", "- t) % axis.stride", "conv"),
    ("the data gradient forgets the leading padding", "(phase + axis.lo - t * axis.dilation) // axis.stride",
     "(phase - t * axis.dilation) // axis.stride", "conv"),
    ("every phase begins at cell 0", "offsets, taps, phase, axis.stride", "offsets, taps, 0, axis.stride", "conv"),
    ("the kernel is never flipped", "tuple(reversed(range(axis.kernel))) if flip", "tuple(range(axis.kernel)) if flip",
     "conv"),
    ("the first cell counts as padding", "(cells < 0)", "(cells <= 0)", "jit"),
    ("the last cell counts as padding", "(cells >= self.size)", "(cells >= self.size - 1)", "jit"),
    ("later blocks meet the padding a window early", "self.start + lo * self.step", "self.start + (lo + (lo > 0)) * self.step",
     "jit"),
]  # fmt: skip
MAPS = [
    ("infinite weights multiply the zeros around dy", "if not np.isfinite(weight).all():", "if False:",
     "conv conv_transpose"),
    ("cells that no window reads get no bias", "if covered < math.prod(", "if covered < 0 * math.prod(", "conv_transpose"),
]  # fmt: skip
VIEW = [
    ("later blocks begin at their row, not at its cell", "block.h[0] * h.step + h.start", "block.h[0] + h.start", "jit"),
    ("later blocks are written as if the stride were 1", "(h.first + block.h[0] * h.stride) * to.h",
     "(h.first + block.h[0]) * to.h", "jit"),
    ("blocks hold parts of several images", "if images > 1:\n            images = -(-images // 2)",
     "if False:\n            pass",
     "jit"),
    ("bits of padding: planes have none", "bits = (d | h | w)", "bits = (h | w)", "jit"),
    ("bits of padding: the last axis has none", "self.walks[2] if self.direct else None", "None", "jit"),
    ("bits of padding: taps in reverse order", "bits @ (1 << np.arange(bits.shape[1]))",
     "bits @ (1 << np.arange(bits.shape[1])[::-1])", "jit"),
    ("rows of a block have no padding of their own", "None if h.inside else h", "None", "jit"),
    ("1x1: long rows lose the last", "single(cells // width), single(width)",
     "single(max(1, cells // width - 1)), single(width)", "jit"),
]  # fmt: skip
DENSE = [
    ("the weight gradient forgets its last rows", "min(t1 * tile.mr, k_count)", "min(t1 * tile.mr, k_count - 1)", "conv"),
    ("the weight gradient keeps the first slice only", "total.sum(0) if len(cuts) > 1 else total[0]", "total[0]", "jit"),
    ("each block starts the weight gradient anew", "if block is all_blocks[part[0]] else 0", "", "jit"),
    ("a slice of the weight gradient loses its last block", "all_blocks[slice(*part)]",
     "all_blocks[part[0] : max(part[0] + 1, part[1] - 1)]", "jit"),
    ("all shares of the weight gradient go to its first rows", "address_of(total[s, 0, k0:])", "address_of(total[s, 0])",
     "jit"),
    ("dy is read in place where its pixels lie unevenly", "self.item and evenly(y[:, 0])", "self.item", "jit"),
    ("strided 1x1 layers swap the sides of the weight gradient", "all(walk == single(walk.size) for walk in walks)",
     "all(len(walk.taps) == 1 for walk in walks)", "conv jit"),
    ("swapped sides forget the padding of the sums", "total[:, :outputs, :channels]", "total[:, :outputs, -channels:]", "jit"),
    ("channels-last groups share the bias of the first", "bias.reshape(groups, outputs)", "bias.reshape(groups, outputs)[:1]",
     "conv"),
    ("a weight of any order is read in place", "if order == FIRST and together:",
     "if order == FIRST:", "conv"),
    ("chunks of channels depend on the block", "PANEL_BYTES // (_gemm.MOST_PANELS *", "PANEL_BYTES // (parts *", "jit"),
    ("taps in runs though they are dilated", "and w.offsets == tuple(range(len(w.taps)))", "", "conv jit"),
    ("channels-last columns forget the stride", "columns * (w.step * source.w)", "columns * source.w", "conv"),
    ("few inputs: the data gradient forgets flip", "if spec.flip:\n            weight = np.flip",
     "if False:\n            weight = np.flip",
     "jit"),
]  # fmt: skip
GEMM = [
    ("a panel forgets its last lane", "b_at, lanes_here = panels + q * panel_bytes, min(nr,",
     "b_at, lanes_here = panels + q * panel_bytes, min(nr - 1,", "conv jit"),
    ("a panel's vector loses the first lane of a patch", "load_between(at, patch_lane[patch],",
     "load_between(at, patch_lane[patch] + 1,", "jit"),
    ("a panel's vector is patched from one run at most", "while patch < patch_end[q * nv + i]:",
     "if patch < patch_end[q * nv + i]:",
     "jit"),
    ("panels are read a register beyond x", "+ farthest + register <= limit", "+ farthest <= limit", "jit"),
    ("lanes of a panel are read beyond x", "load_first(at, (limit - at) // item, code, lanes)", "load(at, code, lanes)", "jit"),
    ("channels-first groups share the bias of the first", "bias + outputs * item", "bias", "conv"),
    ("channels-first groups share the input of the first", "x, w, y, bias = x + x_group,", "x, w, y, bias = x,", "conv"),
    ("channels-last groups share the input of the first", "x_block + g * x_group, w +", "x_block, w +", "conv"),
    ("channels-last groups share the bias of the tile", "bias + s * nr * item", "bias + s % tiles * nr * item", "conv jit"),
    ("groups of the weight gradient share dy", "x + x_group, dy + dy_group, to", "x + x_group, dy, to", "conv"),
    ("a channels-last tile forgets its last pixel", "number(targets, p + i) if p + i < total else",
     "number(targets, p + i) if p + i < total - 1 else",
     "conv"),
    ("the last tile reads its first pixel only", "number(places, min(p + i, total - 1))", "number(places, p)", "conv"),
    ("a tile looks for padding at its last pixel only", "padded |= number(padding, i)", "padded = number(padding, i)", "jit"),
    ("the table of turns is that of other pixels", "if padded and (s == 0 or together > mr):", "if padded and s == 0:", "jit"),
    ("the table of turns has the padding of the next tap", "(outside >> t) & 1", "(outside >> (t + 1)) & 1", "jit"),
    ("pack reads rows that do not exist", "gather(row + offsets[k], step, here, code, lanes)",
     "gather(row + offsets[k], step, block, code, lanes)", "jit"),
    ("pack reads lanes that do not exist", "rows - row0 - r0, code, lanes)", "width, code, lanes)", "jit"),
    ("the copy of dy loses its last pixel", "for j in range(count):", "for j in range(count - 1):", "conv jit"),
    ("each lot of pixels starts the weight gradient anew", "start != 0 and p == 0", "start != 0", "jit"),
    ("cells of the weight gradient lag a pixel behind", "8 * (total + 1 + p)", "8 * (total + p)", "conv"),
    ("dy is never copied together", "if dy_step != wide:", "if False:", "conv jit"),
    ("the leading padding of a channels-last row is one short", "lo = min(size, max(0, -w0))",
     "lo = min(size, max(0, -w0 - 1))", "conv"),
]  # fmt: skip
COLUMNS = [
    ("few inputs: a part forgets the windows whose last tap alone is its own", "a.start(a.kernel - 1) - part[0]",
     "a.start(0) - part[0]", "jit"),
    ("few inputs: a part forgets the last window that writes to it", "(part[1] - 1 - a.start(0)) // a.stride",
     "(part[1] - 2 - a.start(0)) // a.stride", "jit"),
    ("few inputs: the first row of a part gets nothing", "(lo <= at) & (at < hi)", "(lo < at) & (at < hi)", "jit"),
    ("few inputs: all images add to the first", "* (planes * height * pitch)", "* 0", "jit"),
    ("few inputs: planes follow as rows do", "cells[0][0][:, None] * height", "cells[0][0][:, None]", "jit"),
    ("few inputs: products of some rows lose the last", "hs[hi - 1] + 1)", "max(hs[lo], hs[hi - 1] - 1) + 1)", "jit"),
    ("few inputs: runs of dilated taps lie together", "w.kernel if w.dilation == 1 else 1", "w.kernel", "jit"),
    ("few inputs: all phases are the first", "sums[..., phase, self.left", "sums[..., 0, self.left", "jit"),
    ("few inputs: cells begin at the padding", "sums[..., phase, self.left : self.left + to.shape[-1]]",
     "sums[..., phase, : to.shape[-1]]", "jit"),
    ("few inputs: no bias", "if bias.any():", "if False:", "jit"),
    ("few inputs: the last number of a run is not added", "load_first(start, rest, code, lanes)",
     "load_first(start, rest - 1, code, lanes)", "jit"),
]  # fmt: skip
SUMS = [
    ("channels-first sums forget the last number of a row", "length - i, code", "length - i - 1, code", "jit"),
    ("channels-last sums take a register of the next pixel", "here - 3 * lanes", "here", "jit"),
    ("channels-last sums lose a pixel of each lot", "min(p0 + most, last)", "min(p0 + most - 1, last)", "jit"),
    ("channels-last sums take unevenly lying pixels in one go", "self.item and evenly(spread[..., 0])", "self.item", "jit"),
]  # fmt: skip
WINOGRAD = [
    ("squares reach cells beyond the last row", "0 <= h < axes[0, 0]", "0 <= h <= axes[0, 0]", "winograd jit"),
    ("the last square of a row loses a pixel", "h < axes[0, 0] and w < axes[1, 0]", "h < axes[0, 0] and w < axes[1, 0] - 1",
     "winograd"),
    ("squares have no bias", "start = masked_load(builder, bias, vector, mask)", "start = ir.Constant(vector, None)",
     "winograd"),
    ("squares of a task begin at its image's first", "2 * r + axes[0, 1]", "2 * (r - r0) + axes[0, 1]", "winograd"),
]  # fmt: skip
LANES = [
    ("depthwise: the weight gradient forgets the last place of a row", "len(places) - full, to", "len(places) - full - 1, to",
     "conv"),
    ("depthwise: a window beside the padding counts as inside", "min(last, axes[3, 4])", "min(last, axes[3, 4] + 1)", "jit"),
    ("depthwise: the last group of a row is forgotten", "groups = -(-(hi - lo) // size)", "groups = (hi - lo) // size", "jit"),
]  # fmt: skip
JIT_CONV = [
    ("complex: the adjoint's matrix is not that of the conjugate", "weight = self.conjugate(weight)", "weight = weight + 0",
     "conv"),
    ("complex: the weight gradient adds where it should subtract", "blocks[:, 0, :, 0] - blocks[:, 1, :, 1]",
     "blocks[:, 0, :, 0] + blocks[:, 1, :, 1]", "conv"),
]  # fmt: skip
JIT_POOL_TABLES = [
    ("pools drop dilation", "np.arange(axis.kernel) * axis.dilation - axis.lo", "np.arange(axis.kernel) - axis.lo",
     "max_pool avg_pool"),
    ("the backward of a part misses the windows that reach into it", "targets.start + axis.lo - axis.span + 1",
     "targets.start + axis.lo", "max_pool avg_pool memory"),
]  # fmt: skip
JIT_POOL = [
    ("an average's backward divides by one row's counts", "geometry.divisor[windows]", "geometry.divisor[:1]", "avg_pool"),
]  # fmt: skip
JIT_DROPOUT = [
    ("the threshold is one too low", "least = 2 * threshold(self.spec.rate)", "least = 2 * threshold(self.spec.rate) - 2",
     "dropout"),
]  # fmt: skip

CUDNN_GPU = [
    ("a handle stays on the default stream",
     "    frontend().set_stream(handle=found.handle, stream=cuda.get_current_stream().ptr)\n", "", "gpu"),
    ("a product of float32 goes without the lock", "with _compute_type:", "if True:", "gpu"),
    ("threads share a handle", "class _Handles(threading.local):", "class _Handles:", "gpu"),
    ("devices share a handle", "found = _handles.by_device.get(device)",
     "found = next(iter(_handles.by_device.values()), None)", "gpu"),
    ("handles outlive their thread", "self._destroy(self.handle)", "pass", "gpu"),
    ("a workspace of no bytes is allocated", 'if workspace else None', 'if workspace >= 0 else None', "gpu"),
    ("two versions of cuDNN are no reason", "if len(set(versions.values())) > 1 or (main and strangers):",
     "if main and strangers:", "gpu"),
    ("sublibraries of another cuDNN are no reason", "> 1 or (main and strangers):", "> 1:", "gpu"),
    ("free memory leaves out the pool's", " + cupy.get_default_memory_pool().free_bytes()", "", "gpu"),
    ("a product of float32 leaves its compute type behind", "linalg.set_compute_type(out.dtype, before)", "pass",
     "gpu"),
    ("the slowest round is reported", "return float(min(times))", "return float(max(times))", "gpu"),
]  # fmt: skip
CUDNN_GRAPH = [
    ("strict float32 may be TF32", 'if dtype == "float32":', 'if dtype == "float64":', "cudnn"),
    ("strict sums may be transformed", "names += _NOT_SUMS", "names += ()", "cudnn"),
    ("deterministic is not asked for", "if options.deterministic:", "if not options.deterministic:", "cudnn"),
    ("sums of half floats may be half floats", 'names = ["REDUCED_PRECISION_REDUCTION"]', "names = []", "cudnn"),
    ("float64 is summed in float32", 'types.DOUBLE if problem.dtype == "float64" else types.FLOAT', "types.FLOAT",
     "cudnn"),
    ("the workspace limit is one byte too low", "if built.workspace > limit:", "if built.workspace >= limit:", "cudnn"),
    ("a workspace over the limit is no reason to split", "refusals.append(Refusal(reason, over_limit=True))",
     "refusals.append(Refusal(reason))", "cudnn"),
    ("a restored choice may be over the limit", "built if built is not None and built.workspace <= limit else None",
     "built", "cudnn"),
    ("fallbacks are never asked for", "for mode in (modes.A, modes.FALLBACK):", "for mode in (modes.A,):", "cudnn"),
    ("fallbacks pass for the heuristics' own", "yield graph, mode == modes.FALLBACK", "yield graph, False", "cudnn"),
    ("padding is symmetric", '"pre_padding": [axis.lo for axis in axes]', '"pre_padding": [axis.hi for axis in axes]',
     "cudnn conv"),
    ("all of the trailing padding", "max(0, axis.end - axis.size)",
     "axis.hi", "cudnn conv"),
    ("dilation is dropped", '"dilation": [axis.dilation for axis in axes]', '"dilation": [1 for axis in axes]',
     "cudnn conv"),
    ("a reason is all that cuDNN says", """.strip().split("\\n")[0]""", ".strip()", "cudnn"),
]  # fmt: skip
CUDNN_RUNNER = [
    ("graphs are not bounded", "while len(self) > self._most:", "while len(self) > 9 * self._most:", "cudnn"),
    ("the graph used last goes first", "self.move_to_end(key)", "self.move_to_end(key, last=False)", "cudnn"),
    ("an init prepares nothing", "self._find_way(kind, images, tensors, biased).step", "images", "cudnn"),
    ("an init prepares a packed weight whatever its strides", "if filter_strides is not None:",
     "if filter_strides == ():", "cudnn"),
    ("views off 16 bytes go to cuDNN", "ALIGNMENT = 16", "ALIGNMENT = 1", "cudnn"),
    ("a copied result is not written back", "getattr(operands, RESULT[kind])[...] = copies[RESULT[kind]]", "pass",
     "cudnn conv"),
    ("copies of operands stay empty", "copy[...] = getattr(operands, name)", "pass", "cudnn"),
    ("cells that no window reads keep what was there",
     "result[...] = 0 if operands.bias is None else by_channel(operands.bias, result)", "pass",
     "cudnn conv conv_transpose"),
    ("parts of a weight gradient overwrite each other", "total = total + (weight.astype", "total = (weight.astype",
     "cudnn"),
    ("a bias after the graph is left out", "result += by_channel(operands.bias, result)", "pass", "cudnn conv"),
    ("a graph that cannot add the bias adds none", "return _Way(n, built=built, add_bias=add_bias)",
     "return _Way(n, built=built)", "cudnn conv"),
    ("half floats are rounded before the bias", "if built is not None and add_bias and self.spec.dtype in HALF_DTYPES:",
     "if False:", "conv cudnn conv_transpose"),
    ("ways do not depend on the bias", "key = (kind, bias is not None, n, *strides)", "key = (kind, n, *strides)",
     "cudnn conv"),
    ("ways do not depend on the batch", "key = (kind, bias is not None, n, *strides)",
     "key = (kind, bias is not None, *strides)", "cudnn"),
    ("strides of a bias are not looked at", "if bias is not None and bias.strides != (bias.itemsize,):", "if False:",
     "cudnn"),
    ("over 2**31 elements go to cuDNN at once", "if n > 1 and max(map(_extent, operands.values())) > MOST_ELEMENTS:",
     "if False:", "cudnn"),
    ("strides that cuDNN refuses are an error", "if spread:", "if False:", "cudnn"),
    ("a choice of a pickle is ignored", "if found is None and problem in self.choices:", "if False:", "cudnn"),
    ("autotune keeps the slowest", "return min(times, key", "return max(times, key", "cudnn"),
    ("a plan may run in two threads", "        with self._queueing:\n", "        if True:\n", "cudnn"),
    ("elements may overlap", "        if step < room:\n", "        if False:\n", "cudnn"),
    ("windows may reach past what is read", "return axis.size if axis.size - end < axis.stride else end",
     "return axis.size", "cudnn conv conv_transpose"),
]  # fmt: skip
CUDNN_CONV = [
    ("a fixed workspace limit is not kept", "limit = self.options.workspace_limit\n", "limit = None\n", "cudnn"),
    ("a workspace may take all free memory", "min(MOST_WORKSPACE, _gpu.free_bytes() // 4)", "1 << 62", "cudnn"),
    ("a pickle of other libraries keeps its choices",
     "            warnings.warn(message, RuntimeWarning, stacklevel=2)\n            return\n",
     "            warnings.warn(message, RuntimeWarning, stacklevel=2)\n", "cudnn"),
    ("restored choices do not reach graphs yet to come", "self._choices = dict(choices) | self._choices", "pass",
     "cudnn"),
    ("restored choices do not reach plans in use", "runner.choices.setdefault(problem, name)", "pass", "cudnn"),
    ("complex gradients on the current device",
     "        with _gpu.on_device(_gpu.device_of(a)):\n            return a.conj()", "        return a.conj()",
     "cudnn"),
    ("maps on the current device", "        device = _gpu.device_of(source)\n", "        device = 0\n", "cudnn"),
    ("a flipped weight gradient is not flipped back", "self._flipped(dweight).copy() if spec.flip else dweight",
     "dweight", "conv"),
    ("a complex adjoint takes the weight as it is", "weight = self.conjugate(weight)", "weight = weight + 0", "conv"),
    ("the real part of a complex weight gradient adds", "parts[:, 0, :, 0] - parts[:, 1, :, 1]",
     "parts[:, 0, :, 0] + parts[:, 1, :, 1]", "conv"),
    ("the imaginary part of a weight has one sign", "weight.imag, -weight.imag", "weight.imag, weight.imag", "conv"),
    ("x is not conjugated under a real weight", "y = y.conj()", "y = y.copy()", "conv"),
    ("complex bias of a real weight is dropped", "if bias is not None and shift is None:", "if False:", "conv"),
    ("half floats' bias gradient is summed as such",
     '"float32" if self.spec.y_dtype in HALF_DTYPES else self.spec.y_dtype', "self.spec.y_dtype", "conv"),
    ("zero channels give no bias", "y[...] = 0 if bias is None else by_channel(bias, y)", "y[...] = 0", "conv"),
    ("y is always channels-first in memory", "order = memory_order(source, self.spec.layout)\n", "order = FIRST\n",
     "cudnn conv"),
    ("an ArraySpec's order is ignored", "return LAST if LAST in (self.spec.layout, x.order) else FIRST", "return FIRST",
     "cudnn"),
]  # fmt: skip

CUDA = {
    "common.cuh": [
        ("a tile begins early", "place.cell[RANK - 1] *= TILE;",
         "place.cell[RANK - 1] *= TILE;\n    if (TILE > 1 && place.cell[RANK - 1]) --place.cell[RANK - 1];", "cuda_kernels"),
        ("the quotient of 64 bits is a product", "sizeof number > 4",
         "sizeof number > 8", "cuda_kernels"),
        ("the quotient forgets its shift", "by.multiplier >> 32) >> by.shift",
         "by.multiplier >> 32)", "cuda_kernels"),
        ("the last axis is counted in tiles", "(axis < RANK - 1 ? 1 : TILE)",
         "1", "cuda_kernels"),
    ],
    "avg_pool.cu": [
        ("a thread beyond the last works", "item >= args.items",
         "item > args.items", "cuda_kernels"),
    ],
    "windows.cuh": [
        ("a cell between the taps is covered", " && reach % window.dilation == 0;",
         ";", "cuda_kernels"),
    ],
    "cells.cuh": [
        ("rows of padding are read", "row_inside &= inside;",
         "", "cuda_kernels"),
    ],
    "max_pool.cu": [
        ("the last NaN wins", "return !(value <= best) && best == best;",
         "return !(value <= best);", "cuda_kernels"),
        ("the last of equal floats wins", "return !(value <= best) && best == best;",
         "return !(value < best) && best == best;", "cuda_kernels"),
        ("the last of equal integers wins", "return value > best;",
         "return value >= best;", "cuda_kernels"),
    ],
    "max_pool_backward.cu": [
        ("a winner of another row counts", "const bool chosen = there && tap < unsigned(last.kernel);",
         "const bool chosen = there;", "cuda_kernels"),
        ("a window that is not there counts", "const bool chosen = there && tap",
         "const bool chosen = tap", "cuda_kernels"),
    ],
    "avg_pool_backward.cu": [
        ("a cell between the taps has a share", " && reach % last.dilation == 0",
         "", "cuda_kernels"),
    ],
    "mean.cuh": [
        ("windows at the end count all of the input", "axis.end - start",
         "axis.size - start", "cuda_kernels"),
    ],
    "dropout.cu": [
        ("lanes hash one index", " + unsigned(lane) * cells",
         "", "cuda_kernels"),
        ("the image is not in the key", " + unsigned(place.image)), second",
         "), second", "cuda_kernels"),
        ("what is dropped is kept", ">= args.least;",
         "< args.least;", "cuda_kernels"),
        ("nothing is scaled", "Real(args.scale)",
         "Real(1)", "cuda_kernels"),
    ],
    "columns.cuh": [
        ("the kernel is never flipped", "FLIP ? TAPS - 1 - tap : tap",
         "tap", "cuda_kernels"),
        ("group and channel are exchanged", "Index(group) * columns.group + in_group * columns.channel",
         "Index(group) * columns.channel + in_group * columns.group", "cuda_kernels"),
    ],
    "columns.cu": [
        ("padding is not zero", "values[lane] = inside ? WIDEN(cell[lane]) : Wide{};",
         "values[lane] = WIDEN(cell[lane]);", "cuda_kernels"),
        ("a block of pixels begins at 0", "Count(pixel + args.first)",
         "Count(pixel)", "cuda_kernels"),
        ("pixels count on over the images", "pixel - image * args.tiles.cells",
         "pixel", "cuda_kernels"),
    ],
    "fold.cu": [
        ("sums of earlier blocks are lost", "if (args.accumulate)",
         "if (false)", "cuda_kernels"),
        ("pixels of other blocks count", "covers &= pixel >= 0 && pixel < args.pixels;",
         "", "cuda_kernels"),
        ("windows lie as far apart as cells", "pixels *= args.axes[a].out",
         "pixels *= args.axes[a].size", "cuda_kernels"),
    ],
    "_kernels.py": [
        ("words need not be aligned", " and view.phase % word == 0",
         "", "cuda_kernels"),
        ("words may start anywhere in a row", "all(s * view.itemsize % word == 0 for s in others)",
         "True", "cuda_kernels"),
        ("the reach is one too short", "return sum((n - 1) * abs(s)",
         "return sum((n - 2) * abs(s)", "cuda_kernels"),
        ("a divisor is rounded down", "ceil_div(1 << 31 + s, n)",
         "(1 << 31 + s) // n", "cuda_kernels"),
        ("a divisor shifts too far", "(number - 1).bit_length()",
         "number.bit_length()", "cuda_kernels"),
        ("padding before is not guarded", "a.lo > 0 or a.end",
         "a.end", "cuda_kernels"),
        ("padding behind is not guarded", "a.end > a.size",
         "a.end > a.size + 9", "cuda_kernels"),
        ("the other padding counts", "if count_padding else",
         "if not count_padding else", "cuda_kernels"),
        ("sizes are compiled in", '"LANES": self.lanes,',
         '"LANES": self.lanes, "CHANNELS": self.channels,', "cuda_kernels"),
    ],
    "_dropout.py": [
        ("the mask is taken for packed", '"MASK_PACKED": packed[-1]',
         '"MASK_PACKED": packed[0]', "cuda_kernels"),
        ("key and threshold are exchanged", "[base_key(spec.seed), 2 * least % 2**32]",
         "[2 * least % 2**32, base_key(spec.seed)]", "cuda_kernels"),
    ],
    "_conv.py": [
        ("columns are never far apart", "reach(shape, x.strides)) >= INDEX_LIMIT",
         "reach(shape, x.strides)) < 0", "cuda_kernels"),
        ("a small fold is taken for a large one", "max(items * lanes, outs, images",
         "max(0, outs, 0 * images", "cuda_kernels"),
    ],
    "_pool.py": [
        ("windows beside padding lie side by side", " and last.lo == 0",
         "", "max_pool"),
        ("one window over a tile is missed", "ceil_div(cell - axis.span + 1, axis.stride) + 1 for",
         "ceil_div(cell - axis.span + 1, axis.stride) for", "cuda_kernels"),
        ("padding moves no window", "range(axis.lo, axis.lo + tile * axis.stride, tile)",
         "range(0, tile * axis.stride, tile)", "cuda_kernels"),
    ],
}  # fmt: skip

SECTIONS = {
    "spec": section("numpy_xp", ("_spec.py", SPEC)),
    "xp": section("numpy_xp", ("_engines/xp.py", XP)),
    "shared": section(
        "numpy_xp",
        ("_engines/_protocol.py", PROTOCOL),
        ("_engines/_hash.py", HASH),
        ("_ops/_door.py", DOOR),
        ("_ops/pool.py", POOL),
        ("_ops/dropout.py", DROPOUT),
        ("state.py", STATE),
    ),
    "layers": section("numpy_xp", *((f"_layers/_{file}.py", rows) for file, rows in LAYERS.items())),
    "blas": section(
        "numpy_blas,numpy_blas_readonly",
        ("_spec.py", AXES),
        ("_engines/_threads.py", THREADS),
        ("_engines/blas/_memory.py", MEMORY),
        ("_engines/blas/_conv.py", CONV),
        ("_engines/blas/_depthwise.py", DEPTHWISE),
        ("_engines/blas/_pool.py", POOLS),
        ("_engines/blas/_dropout.py", BLAS_DROPOUT),
    ),
    "jit": section(
        "numpy_jit",
        ("_engines/jit/_walk.py", WALK),
        ("_engines/jit/_maps.py", MAPS),
        ("_engines/jit/_view.py", VIEW),
        ("_engines/jit/_dense.py", DENSE),
        ("_engines/jit/_gemm.py", GEMM),
        ("_engines/jit/_columns.py", COLUMNS),
        ("_engines/jit/_sums.py", SUMS),
        ("_engines/jit/_winograd.py", WINOGRAD),
        ("_engines/jit/_lanes.py", LANES),
        ("_engines/jit/_conv.py", JIT_CONV),
        ("_engines/jit/_pool_tables.py", JIT_POOL_TABLES),
        ("_engines/jit/_pool.py", JIT_POOL),
        ("_engines/jit/_dropout.py", JIT_DROPOUT),
    ),
    "cudnn": section(
        "cupy_cudnn",
        ("_engines/_gpu.py", CUDNN_GPU),
        ("_engines/cudnn/_graph.py", CUDNN_GRAPH),
        ("_engines/cudnn/_runner.py", CUDNN_RUNNER),
        ("_engines/cudnn/_conv.py", CUDNN_CONV),
    ),
    "cuda": section("cupy_cuda", *((f"_engines/cuda/{file}", rows) for file, rows in CUDA.items())),
}
