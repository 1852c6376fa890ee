"""What an op computes: frozen Specs, canonical options, and every size and padding formula. Standard library only."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from funcnn.errors import SpecError

__all__ = ["AvgPoolSpec", "Axis", "ConvSpec", "DropoutSpec", "MaxPoolSpec", "Options", "Spec"]

NAMED_PADDINGS = ("valid", "full", "same", "same_lower")
LAYOUTS = ("channels_first", "channels_last")
HALF_DTYPES = ("float16", "bfloat16")
FLOAT_DTYPES = (*HALF_DTYPES, "float32", "float64")
COMPLEX_DTYPES = ("complex64", "complex128")
REAL_OF_COMPLEX = {"complex64": "float32", "complex128": "float64"}
# An 8-bit product is at most 255**2; 32,768 of them stay below 2**31.
MAX_INT32_TERMS = 32_768
INTEGER_RESULT = {
    "int8": "int32",
    "uint8": "int32",
    "int16": "int64",
    "uint16": "int64",
    "int32": "int64",
    "uint32": "int64",
    "int64": "int64",
}
INTEGER_DTYPES = (*INTEGER_RESULT, "uint64")


@dataclass(frozen=True)
class Options:
    """How an engine may compute; the meaning of a result never depends on it.

    Parameters
    ----------
    numerics : {"strict", "fast"}
        "strict": float32 means float32 and sums are direct. "fast" allows TF32, Winograd and FFT where an engine has them.
    deterministic : bool
        The same call gives the same bits. On the CPU this always holds.
    threads : int or None
        CPU threads of an engine's own loops; None: `set_num_threads` if it was called, else the CPU affinity, read at init.
        (The BLAS library of NumPy keeps its own thread count.)
    workspace_limit : int or None
        Most bytes of device workspace. None: in engine `cudnn` a quarter of the memory that is free at init, at most 1 GiB; in
        engine `cuda` 256 MiB, for the last bits of its sums depend on how they are cut.
    autotune : bool
        Time the candidates at init and keep the fastest, on engines that have candidates.

    Raises
    ------
    SpecError
        For a value outside these sets.
    TypeError
        For a value of another type.

    Examples
    --------
    >>> Options(threads=2).threads
    2
    """

    numerics: str = "strict"
    deterministic: bool = True
    threads: int | None = None
    workspace_limit: int | None = None
    autotune: bool = False

    def __post_init__(self) -> None:
        choice("Options", "numerics", self.numerics, ("strict", "fast"))
        flag("Options", "deterministic", self.deterministic)
        flag("Options", "autotune", self.autotune)
        for name, least in (("threads", 1), ("workspace_limit", 0)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, integer("Options", name, value, least))


class Axis(NamedTuple):
    """One spatial axis of a window op: window o covers the cells `o * stride - lo + t * dilation` for t < kernel.

    Cells outside 0 .. size - 1 are padding; `out` counts the windows. `hi` only matters to a divisor that counts padding.
    """

    size: int
    kernel: int
    stride: int
    dilation: int
    lo: int
    hi: int
    out: int

    @property
    def span(self) -> int:
        """Cells from the first tap of a window to its last, both counted."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def end(self) -> int:
        """Cell behind the last that a window reads: beyond `size` for one that reads trailing padding or overhang."""
        return self.start(0) + (self.out - 1) * self.stride + self.span

    def start(self, tap: int) -> int:
        """Cell that the given tap of window 0 reads; negative in the leading padding."""
        return tap * self.dilation - self.lo

    def windows_inside(self, tap: int) -> tuple[int, int]:
        """Range lo, hi of windows whose given tap reads a cell of the input (lo == hi: none)."""
        start = self.start(tap)
        first = max(0, -(start // self.stride))
        last = min(self.out, (self.size - 1 - start) // self.stride + 1)
        return (first, last) if first < last else (0, 0)


def span(kernel: int, dilation: int) -> int:
    """Cells from the first tap of a window to its last, both counted."""
    return dilation * (kernel - 1) + 1


def ceil_div(a: int, b: int) -> int:
    """Quotient rounded up."""
    return -(-a // b)


class _Windows:
    """What all Specs with windows share."""

    axes: tuple[Axis, ...]

    @cached_property
    def kernel(self) -> tuple[int, ...]:
        return tuple(axis.kernel for axis in self.axes)

    @cached_property
    def taps(self) -> int:
        return math.prod(self.kernel)


@dataclass(frozen=True)
class ConvSpec(_Windows):
    """A convolution, or (`transposed`) its adjoint; geometry and channels are those of the convolution in both cases.

    The convolution maps `inputs` channels on `axis.size` cells to `outputs` channels on `axis.out` cells with a weight
    (outputs, inputs / groups, *kernel). conv_transpose runs it backwards: its x has `outputs` channels on `axis.out` cells.
    """

    axes: tuple[Axis, ...]
    inputs: int
    outputs: int
    groups: int
    transposed: bool
    flip: bool
    layout: str
    dtype: str
    weight_dtype: str
    y_dtype: str

    @cached_property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.outputs, self.inputs // self.groups, *self.kernel)

    @cached_property
    def x_shape(self) -> tuple[int, ...]:
        """(C, *spatial) of the op's x."""
        return self.far if self.transposed else self.near

    @cached_property
    def y_shape(self) -> tuple[int, ...]:
        """(C, *spatial) of the op's y."""
        return self.near if self.transposed else self.far

    @cached_property
    def near(self) -> tuple[int, ...]:
        """(C, *spatial) that the convolution reads."""
        return (self.inputs, *(axis.size for axis in self.axes))

    @cached_property
    def far(self) -> tuple[int, ...]:
        """(C, *spatial) that the convolution makes."""
        return (self.outputs, *(axis.out for axis in self.axes))


@dataclass(frozen=True)
class _PoolSpec(_Windows):
    """Windows over every channel by itself."""

    axes: tuple[Axis, ...]
    channels: int
    layout: str
    dtype: str

    @cached_property
    def x_shape(self) -> tuple[int, ...]:
        """(C, *spatial) of x."""
        return (self.channels, *(axis.size for axis in self.axes))

    @cached_property
    def y_shape(self) -> tuple[int, ...]:
        """(C, *spatial) of y."""
        return (self.channels, *(axis.out for axis in self.axes))

    @property
    def y_dtype(self) -> str:
        return self.dtype


@dataclass(frozen=True)
class MaxPoolSpec(_PoolSpec):
    """The largest cell of each window and where it is; `argmax_dtype` holds an index into the window's cells."""

    argmax_dtype: str


@dataclass(frozen=True)
class AvgPoolSpec(_PoolSpec):
    """The mean of each window; the divisor counts the declared padding or only the input, never the ceil overhang."""

    count_include_pad: bool

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Counted cells of each window along each axis; the divisor is their product over axes, where that is not 0."""
        return tuple(tuple(_counts(axis, self.count_include_pad)) for axis in self.axes)


def _counts(axis: Axis, include_pad: bool) -> Iterator[int]:
    low, high = (-axis.lo, axis.size + axis.hi) if include_pad else (0, axis.size)
    for window in range(axis.out):
        start = window * axis.stride - axis.lo
        first = max(0, ceil_div(low - start, axis.dilation))
        last = min(axis.kernel, ceil_div(high - start, axis.dilation))
        yield max(0, last - first)


@dataclass(frozen=True)
class DropoutSpec:
    """Keep each element with probability 1 - rate and scale it; `x_shape` is channels-first, without the batch."""

    x_shape: tuple[int, ...]
    rate: float
    seed: int
    layout: str
    dtype: str

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.x_shape

    @property
    def y_dtype(self) -> str:
        return self.dtype


Spec = ConvSpec | MaxPoolSpec | AvgPoolSpec | DropoutSpec


# ---- scalars ---------------------------------------------------------------------------------------------------------


def integer(function: str, name: str, value: Any, least: int) -> int:
    """`value` as an int of at least `least`; bool and float are a TypeError."""
    if type(value) is not int:
        # By name: NumPy's bool counts too, which up to NumPy 2.2 can be an index, with a warning.
        if type(value).__name__ == "bool" or not hasattr(value, "__index__"):
            raise TypeError(f"{function}: {name} must be an int, got {value!r}")
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{function}: {name} must be an int, got {value!r}") from None
    if value < least:
        raise SpecError(f"{function}: {name} must be at least {least}, got {value}")
    return int(value)


def per_axis(function: str, name: str, value: Any, rank: int, least: int) -> tuple[int, ...]:
    """One int for every spatial axis, from an int or a sequence of `rank` ints."""
    if type(value) is int:
        return (integer(function, name, value, least),) * rank
    if isinstance(value, (tuple, list)):
        if len(value) != rank:
            raise SpecError(f"{function}: {name} must be an int or {rank} ints (one per spatial axis), got {value!r}")
        return tuple([integer(function, name, v, least) for v in value])
    return (integer(function, name, value, least),) * rank


def flag(function: str, name: str, value: Any) -> bool:
    """`value` if it is a bool."""
    if type(value) is not bool:
        raise TypeError(f"{function}: {name} must be True or False, got {value!r}")
    return value


def choice(function: str, name: str, value: Any, choices: tuple[str, ...]) -> str:
    """`value` if it is one of the choices."""
    if not isinstance(value, str):
        raise TypeError(f"{function}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    if value not in choices:
        raise SpecError(f"{function}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


# ---- paddings --------------------------------------------------------------------------------------------------------

Padding = str | tuple[tuple[int, int], ...]


def canonical_padding(function: str, value: Any, rank: int) -> Padding:
    """A named padding, or one (lo, hi) pair per axis."""
    if isinstance(value, str):
        return choice(function, "padding", value, NAMED_PADDINGS)
    if type(value) is int:
        return ((integer(function, "padding", value, 0),) * 2,) * rank
    if not isinstance(value, (tuple, list)):
        return ((integer(function, "padding", value, 0),) * 2,) * rank
    if len(value) != rank:
        raise SpecError(
            f"{function}: padding must be an int, {rank} ints or {rank} (lo, hi) pairs (one per spatial axis) "
            f"or one of {', '.join(map(repr, NAMED_PADDINGS))}, got {value!r}"
        )
    return tuple([_pair(function, value, item) for item in value])


def _pair(function: str, padding: Any, item: Any) -> tuple[int, int]:
    if isinstance(item, (tuple, list)):
        if len(item) != 2:
            raise SpecError(f"{function}: padding must have (lo, hi) pairs, got {padding!r}")
        return integer(function, "padding", item[0], 0), integer(function, "padding", item[1], 0)
    both = integer(function, "padding", item, 0)
    return both, both


def _pads(padding: Padding, index: int, size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """(lo, hi) of one axis; "same" pads least for ceil(size / stride) windows, the odd cell at the end."""
    if not isinstance(padding, str):
        return padding[index]
    if padding == "valid":
        return 0, 0
    reach = dilation * (kernel - 1)
    if padding == "full":
        return reach, reach
    total = max((ceil_div(size, stride) - 1) * stride + reach + 1 - size, 0)
    less, more = total // 2, total - total // 2
    return (less, more) if padding == "same" else (more, less)


# ---- axes ------------------------------------------------------------------------------------------------------------


def _window_axes(
    function: str,
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: Padding,
    dilation: tuple[int, ...],
    ceil_mode: bool = False,
) -> tuple[Axis, ...]:
    """The axes of windows that slide over `sizes`."""
    _no_empty_axis(function, sizes)
    pads = [_pads(padding, i, *item) for i, item in enumerate(zip(sizes, kernel, stride, dilation, strict=True))]
    padded = tuple(size + lo + hi for size, (lo, hi) in zip(sizes, pads, strict=True))
    spans = tuple(span(k, d) for k, d in zip(kernel, dilation, strict=True))
    if any(s > p for s, p in zip(spans, padded, strict=True)):
        raise SpecError(
            f"{function}: kernel must fit into the padded input, got effective kernel {spans} and padded size {padded} "
            f"(kernel {kernel}, dilation {dilation})"
        )
    axes = []
    for size, k, s, d, (lo, hi), wide in zip(sizes, kernel, stride, dilation, pads, spans, strict=True):
        room = size + lo + hi - wide
        out = room // s + 1
        # Caffe's ceiling with the rule of torch and ONNX: a window that would start in the trailing padding is dropped.
        if ceil_mode and room % s and out * s < size + lo:  # (never so with "same")
            out += 1
        axes.append(_axis(size, k, s, d, lo, hi, out))
    return tuple(axes)


def _axis(size: int, kernel: int, stride: int, dilation: int, lo: int, hi: int, out: int) -> Axis:
    """An Axis whose steps are 1 where none is taken: engines need not meet a stride or dilation beyond every array."""
    return Axis(size, kernel, stride if out > 1 else 1, dilation if kernel > 1 else 1, lo, hi, out)


def _no_empty_axis(function: str, sizes: tuple[int, ...]) -> None:
    for index, size in enumerate(sizes):
        if size == 0:
            raise SpecError(
                f"{function}: x must have no spatial axis of size 0, got spatial shape {sizes} (axis {index})"
            )


def _transposed_axes(
    function: str,
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: Padding,
    dilation: tuple[int, ...],
    output_padding: tuple[int, ...],
    output_size: tuple[int, ...] | None,
) -> tuple[Axis, ...]:
    """The axes of the convolution whose adjoint maps `sizes` (its outputs) back to its inputs."""
    _no_empty_axis(function, sizes)
    axes = []
    for i, (out, k, s, d, extra) in enumerate(zip(sizes, kernel, stride, dilation, output_padding, strict=True)):
        if isinstance(padding, str) and padding.startswith("same"):
            size = out * s if output_size is None else output_size[i]
            if ceil_div(size, s) != out:
                raise SpecError(
                    f"{function}: output_size must have ceil(output_size / stride) equal to the input size {out} "
                    f"with padding {padding!r}, got {size} with stride {s} on spatial axis {i}"
                )
            lo, hi = _pads(padding, i, size, k, s, d)
        else:
            lo, hi = _pads(padding, i, 0, k, s, d)
            least = (out - 1) * s + span(k, d) - lo - hi
            if output_size is not None:
                extra = output_size[i] - least
                if not 0 <= extra < max(s, d):
                    raise SpecError(
                        f"{function}: output_size must lie in {least} .. {least + max(s, d) - 1} on spatial axis {i} "
                        f"(input size, stride, kernel and padding fix it up to max(stride, dilation) - 1), "
                        f"got {output_size[i]}"
                    )
            size = least + extra
            if size < 1:
                raise SpecError(
                    f"{function}: padding must leave an output of at least 1 cell, "
                    f"got padding {(lo, hi)} and output size {size} on spatial axis {i}"
                )
        axes.append(_axis(size, k, s, d, lo, hi, out))
    return tuple(axes)


# ---- spec makers: the first lines of the init functions -----------------------------------------------------------------


def _spatial_rank(function: str, ndim: int) -> int:
    if ndim < 3:
        raise SpecError(
            f"{function}: x must have a batch axis, a channel axis and at least one spatial axis, got {ndim} axes; "
            f"add a batch axis by x[None]"
        )
    return ndim - 2


def split_shape(shape: Sequence[int], layout: str) -> tuple[int, int, tuple[int, ...]]:
    """N, C and the spatial sizes of a shape in the given layout."""
    n, *rest = shape
    if layout == "channels_last":
        return n, rest[-1], tuple(rest[:-1])
    return n, rest[0], tuple(rest[1:])


def conv_spec(
    function: str,
    x_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    dtype: str,
    weight_dtype: str,
    widest_int: str,
    *,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
    flip: Any,
    layout: Any,
    output_padding: Any = 0,
    output_size: Any = None,
    transposed: bool = False,
) -> ConvSpec:
    """The Spec of conv or conv_transpose from an x shape (in `layout`), a weight shape and raw options."""
    rank = _spatial_rank(function, len(x_shape))
    choice(function, "layout", layout, LAYOUTS)
    _, channels, sizes = split_shape(x_shape, layout)
    if len(weight_shape) != rank + 2:
        raise SpecError(
            f"{function}: weight must have {rank + 2} axes as x has, got shape {weight_shape} for x of shape {x_shape}"
        )
    kernel = weight_shape[2:]
    if 0 in kernel:
        raise SpecError(f"{function}: weight must have no kernel axis of size 0, got shape {weight_shape}")
    strides = per_axis(function, "stride", stride, rank, 1)
    dilations = per_axis(function, "dilation", dilation, rank, 1)
    pads = canonical_padding(function, padding, rank)
    count = integer(function, "groups", groups, 1)
    flag(function, "flip", flip)
    y_dtype = _conv_dtype(function, dtype, weight_dtype, widest_int)
    _check_channels(function, channels, weight_shape, count, transposed)
    if not transposed:
        axes = _window_axes(function, sizes, kernel, strides, pads, dilations)
        inputs, outputs = channels, weight_shape[0]
    else:
        extra, target = _output_options(function, pads, strides, dilations, output_padding, output_size)
        axes = _transposed_axes(function, sizes, kernel, strides, pads, dilations, extra, target)
        inputs, outputs = weight_shape[1] * count, channels
    spec = ConvSpec(axes, inputs, outputs, count, transposed, flip, layout, dtype, weight_dtype, y_dtype)
    if dtype in ("int8", "uint8") and (terms := _terms(spec)) > MAX_INT32_TERMS:
        raise SpecError(
            f"{function}: weight must have at most {MAX_INT32_TERMS} terms per output for {dtype} (the int32 sum could "
            f"overflow), got {terms}; cast x and weight to int16, which sums in int64"
        )
    return spec


def _terms(spec: ConvSpec) -> int:
    """Most products in one output sum."""
    if not spec.transposed:
        return spec.inputs // spec.groups * spec.taps
    # Taps t that reach one cell satisfy t * dilation = const (mod stride): every stride / gcd-th of them.
    taps = math.prod(ceil_div(a.kernel, a.stride // math.gcd(a.stride, a.dilation)) for a in spec.axes)
    return spec.outputs // spec.groups * taps


def _conv_dtype(function: str, dtype: str, weight_dtype: str, widest_int: str) -> str:
    kinds = "a float, complex or integer dtype (no bool, no uint64)"
    if dtype not in FLOAT_DTYPES + COMPLEX_DTYPES and dtype not in INTEGER_RESULT:
        raise TypeError(f"{function}: x must have {kinds}, got {dtype}")
    if weight_dtype != dtype and weight_dtype != REAL_OF_COMPLEX.get(dtype):
        allowed = f"{dtype} or {REAL_OF_COMPLEX[dtype]}" if dtype in COMPLEX_DTYPES else dtype
        raise TypeError(f"{function}: weight must have the dtype of x ({allowed}), got {weight_dtype}")
    result = INTEGER_RESULT.get(dtype, dtype)
    return widest_int if result == "int64" else result


def _check_channels(function: str, channels: int, weight_shape: tuple[int, ...], groups: int, transposed: bool) -> None:
    if transposed:
        if weight_shape[0] != channels:
            raise SpecError(
                f"{function}: weight must have shape (I, O/groups, *kernel) with I = {channels} channels of x, "
                f"got {weight_shape}"
            )
        if channels % groups:
            raise SpecError(f"{function}: groups must divide the {channels} input channels, got {groups}")
        return
    outputs, per_group = weight_shape[:2]
    if channels % groups or outputs % groups:
        raise SpecError(
            f"{function}: groups must divide the {channels} input and {outputs} output channels, got {groups}"
        )
    if per_group * groups != channels:
        raise SpecError(
            f"{function}: weight must have shape (O, I/groups, *kernel) with I/groups = {channels // groups} "
            f"({channels} channels of x, groups {groups}), got {weight_shape}"
        )


def _output_options(
    function: str,
    pads: Padding,
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    output_padding: Any,
    output_size: Any,
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    rank = len(strides)
    extra = per_axis(function, "output_padding", output_padding, rank, 0)
    target = None if output_size is None else per_axis(function, "output_size", output_size, rank, 1)
    if any(extra) and isinstance(pads, str):
        raise SpecError(
            f"{function}: output_padding must be 0 with a named padding, got {output_padding!r} with padding {pads!r}; "
            f"use output_size"
        )
    if any(extra) and target is not None:
        raise SpecError(f"{function}: output_padding must be 0 where output_size is given, got {output_padding!r}")
    for e, s, d in zip(extra, strides, dilations, strict=True):
        if e >= max(s, d):
            raise SpecError(
                f"{function}: output_padding must be smaller than stride or dilation on its axis "
                f"(stride {s}, dilation {d}), got {e}"
            )
    return extra, target


def _pool_axes(
    function: str,
    x_shape: tuple[int, ...],
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: Any,
    layout: Any,
) -> tuple[int, tuple[Axis, ...]]:
    """Channels and window axes of a pool from raw options."""
    if len(x_shape) < 3 and isinstance(kernel_size, (tuple, list)):
        raise SpecError(
            f"{function}: x must have {len(kernel_size) + 2} axes (batch, channels and {len(kernel_size)} spatial axes "
            f"of kernel_size), got {len(x_shape)}; add a batch axis by x[None]"
        )
    rank = _spatial_rank(function, len(x_shape))
    if isinstance(kernel_size, (tuple, list)) and len(kernel_size) != rank:
        raise SpecError(
            f"{function}: x must have {len(kernel_size) + 2} axes (batch, channels and one spatial axis for each number "
            f"of kernel_size {tuple(kernel_size)}), got {len(x_shape)}; add a batch axis by x[None]"
        )
    choice(function, "layout", layout, LAYOUTS)
    kernel = per_axis(function, "kernel_size", kernel_size, rank, 1)
    strides = kernel if stride is None else per_axis(function, "stride", stride, rank, 1)
    dilations = per_axis(function, "dilation", dilation, rank, 1)
    pads = canonical_padding(function, padding, rank)
    flag(function, "ceil_mode", ceil_mode)
    _, channels, sizes = split_shape(x_shape, layout)
    return channels, _window_axes(function, sizes, kernel, strides, pads, dilations, ceil_mode)


def max_pool_spec(
    function: str,
    x_shape: tuple[int, ...],
    dtype: str,
    index_dtypes: tuple[str, ...],
    *,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: Any,
    layout: Any,
) -> MaxPoolSpec:
    """The Spec of max_pool; `index_dtypes`: what the library can hold an argmax in, smallest first."""
    channels, axes = _pool_axes(function, x_shape, kernel_size, stride, padding, dilation, ceil_mode, layout)
    if dtype not in FLOAT_DTYPES + INTEGER_DTYPES + ("bool",):
        raise TypeError(f"{function}: x must have a real, integer or bool dtype, got {dtype}")
    for index, axis in enumerate(axes):
        _no_empty_window(function, index, axis)
    cells = math.prod(axis.kernel for axis in axes)
    argmax_dtype = next(name for name in index_dtypes if cells <= _INDEX_LIMIT[name])
    return MaxPoolSpec(axes, channels, layout, dtype, argmax_dtype)


_INDEX_LIMIT = {"uint8": 2**8, "uint16": 2**16, "uint32": 2**32, "int32": 2**31, "int64": 2**63}


def _no_empty_window(function: str, index: int, axis: Axis) -> None:
    """Refuse windows that hold padding only: their maximum does not exist."""
    for window, count in enumerate(_counts(axis, include_pad=False)):
        if count == 0:
            raise SpecError(
                f"{function}: padding must leave a cell of the input in every window of kernel {axis.kernel} "
                f"(dilation {axis.dilation}), got padding {(axis.lo, axis.hi)} with an empty window {window} "
                f"on spatial axis {index}"
            )


def avg_pool_spec(
    function: str,
    x_shape: tuple[int, ...],
    dtype: str,
    *,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: Any,
    count_include_pad: Any,
    layout: Any,
) -> AvgPoolSpec:
    """The Spec of avg_pool."""
    channels, axes = _pool_axes(function, x_shape, kernel_size, stride, padding, dilation, ceil_mode, layout)
    flag(function, "count_include_pad", count_include_pad)
    if dtype not in FLOAT_DTYPES + COMPLEX_DTYPES:
        raise TypeError(f"{function}: x must have a float or complex dtype, got {dtype}; cast x to float32 first")
    return AvgPoolSpec(axes, channels, layout, dtype, count_include_pad)


def dropout_spec(
    function: str, x_shape: tuple[int, ...], dtype: str, *, rate: Any, seed: Any, layout: Any
) -> DropoutSpec:
    """The Spec of dropout."""
    if not x_shape:
        raise SpecError(f"{function}: x must have at least 1 axis, got 0; add a batch axis by x[None]")
    choice(function, "layout", layout, LAYOUTS)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise TypeError(f"{function}: rate must be a float in 0 .. 1, got {rate!r}")
    if not 0 <= rate <= 1:
        raise SpecError(f"{function}: rate must lie in 0 .. 1, got {rate!r}")
    value = integer(function, "seed", seed, 0)
    if value >= 2**64:
        raise SpecError(f"{function}: seed must be below 2**64, got {value}")
    if dtype not in FLOAT_DTYPES + COMPLEX_DTYPES:
        raise TypeError(f"{function}: x must have a float or complex dtype, got {dtype}")
    rest = x_shape[1:]
    if layout == "channels_last" and len(rest) > 1:
        rest = (rest[-1], *rest[:-1])
    return DropoutSpec(rest, float(rate), value, layout, dtype)
