"""What is measured: the rows of each table. One row: op, sizes, layout."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One measurement. `sizes` are (N, C, *spatial); O 0: a pool. `padding` is that of both ends, or (lo, hi)."""

    op: str
    sizes: tuple[int, ...]
    outputs: int
    kernel: int
    stride: int
    padding: int | tuple[int, int]
    groups: int
    dilation: int
    layout: str
    dtype: str

    @property
    def label(self) -> str:
        text = f"{self.sizes}"
        if self.outputs:
            text += f" -> {self.outputs}"
        text += f" k{self.kernel} s{self.stride} p{self.padding}"
        text += f" g{self.groups}" if self.groups > 1 else ""
        text += f" d{self.dilation}" if self.dilation > 1 else ""
        return text + ("" if self.dtype == "float32" else f" {self.dtype}")


LAYOUTS = ("channels_first", "channels_last")

# N, C, H, W, O, k, stride, padding, groups
CONVS = (
    (8, 3, 224, 224, 64, 7, 2, 3, 1),
    (8, 64, 56, 56, 64, 3, 1, 1, 1),
    (8, 128, 28, 28, 128, 3, 1, 1, 1),
    (8, 256, 14, 14, 256, 3, 1, 1, 1),
    (8, 512, 7, 7, 512, 3, 1, 1, 1),
    (8, 256, 56, 56, 64, 1, 1, 0, 1),
    (8, 64, 56, 56, 256, 1, 1, 0, 1),
    (8, 128, 56, 56, 128, 3, 2, 1, 1),
    (8, 64, 112, 112, 64, 3, 1, 1, 64),
    (8, 128, 56, 56, 128, 5, 2, 2, 128),
    (1, 3, 224, 224, 64, 3, 1, 1, 1),
    (1, 64, 224, 224, 64, 3, 1, 1, 1),
    (32, 1, 28, 28, 32, 5, 1, 2, 1),
    (8, 128, 28, 28, 128, 3, 1, 1, 4),
)

# N, C, H (= W), k, stride, padding
POOLS = ((8, 64, 112, 3, 2, 1), (8, 64, 112, 2, 2, 0), (8, 128, 56, 3, 1, 1), (8, 512, 14, 2, 2, 0))

EXTRA = (
    Row("conv_transpose", (8, 128, 28, 28), 64, 4, 2, 1, 1, 1, "channels_first", "float32"),
    Row("conv", (4, 64, 16000), 64, 9, 1, 4, 1, 1, "channels_first", "float32"),
    Row("conv", (2, 16, 32, 64, 64), 32, 3, 1, 1, 1, 1, "channels_first", "float32"),
    Row("conv", (8, 64, 56, 56), 64, 3, 1, 2, 1, 2, "channels_first", "float32"),
    Row("conv", (4, 16, 128, 128), 16, 3, 1, 1, 1, 1, "channels_first", "complex64"),
)


class Report(NamedTuple):
    """What a public report asks for: the time of `row` at most `most` times that of `beside`."""

    id: str
    asks: str
    row: Row
    beside: Row
    most: float


def _row(op: str, sizes: tuple[int, ...], outputs: int = 0, kernel: int = 3, **options: Any) -> Row:
    usual = {"stride": 1, "padding": 0, "groups": 1, "dilation": 1, "layout": "channels_first", "dtype": "float32"}
    return Row(op, sizes, outputs, kernel, **{**usual, **options})


_DEPTHWISE = _row("conv_backward", (32, 512, 1024), 512, 5, padding=2, groups=512)
_LARGE = _row("max_pool", (8, 64, 4096), kernel=64, padding=(32, 31))
_PAIRS = _row("max_pool_backward", (64, 32, 64, 64), kernel=2, stride=2)
_1X1 = _row("conv", (8, 256, 56, 56), 64, 1)
_HALF = _row("conv", (1, 16, 176, 320), 16, 1, dtype="float16")

# Reported, not gated.
REPORTS = (
    Report("B80", "asymmetric padding beside an input that is padded", _row("conv", (32, 16, 32, 32), 32, 5, padding=(2, 1)),
           _row("conv", (32, 16, 35, 35), 32, 5), 1.3),
    Report("B154", "depthwise beside dense", _row("conv", (1, 64, 200, 200), 64, groups=64),
           _row("conv", (1, 64, 200, 200), 64), 1.0),
    Report("B155", "depthwise backward beside forward", _DEPTHWISE, _DEPTHWISE._replace(op="conv"), 4.0),
    Report("B155", "dilation 4 beside 1", _DEPTHWISE._replace(dilation=4, padding=8), _DEPTHWISE, 1.5),
    Report("B157", "a window of 64 beside one of 8", _LARGE, _LARGE._replace(kernel=8, padding=(4, 3)), 8.0),
    Report("B158", "max_pool backward beside forward", _PAIRS, _PAIRS._replace(op="max_pool"), 3.0),
    Report("B160", "1x1 beside the matrix product", _1X1, _1X1._replace(op="matmul"), 1.5),
    Report("B161", "float16 beside float32", _HALF, _HALF._replace(dtype="float32"), 4.0),
)  # fmt: skip
OVERHEAD = "B129"  # asks for less than 100 us beside the work itself: the first line of the output


def tables() -> dict[str, list[Row]]:
    """Every table: its name and rows."""
    found: dict[str, list[Row]] = {}
    for op in ("conv", "conv_backward"):
        for layout in LAYOUTS:
            found[f"{op}, {layout}"] = [
                Row(op, (n, c, h, w), o, k, s, p, g, 1, layout, "float32") for n, c, h, w, o, k, s, p, g in CONVS
            ]
    for op in ("max_pool", "avg_pool", "max_pool_backward"):
        for layout in LAYOUTS:
            found[f"{op}, {layout}"] = [
                Row(op, (n, c, h, h), 0, k, s, p, 1, 1, layout, "float32") for n, c, h, k, s, p in POOLS
            ]
    found["extra"] = list(EXTRA)
    return found


def flops(row: Row) -> float:
    """Floating-point operations of a convolution row (backward: twice the forward)."""
    if not row.outputs:
        return 0.0
    sizes = row.sizes[2:]
    if row.op == "conv_transpose":
        pixels = math.prod(sizes)
    else:
        pixels = math.prod((n + 2 * row.padding - row.dilation * (row.kernel - 1) - 1) // row.stride + 1 for n in sizes)
    terms = row.sizes[1] // row.groups * row.kernel ** len(sizes)
    factor = 4 if row.dtype.startswith("complex") else 1
    return 2.0 * factor * row.sizes[0] * row.outputs * pixels * terms * (2 if row.op == "conv_backward" else 1)


def bytes_moved(row: Row) -> float:
    """Bytes that a pool cannot do without: of x, y and, for a max pool, one of argmax (0 for a convolution)."""
    if row.outputs:
        return 0.0
    sizes = [(n + 2 * row.padding - row.kernel) // row.stride + 1 for n in row.sizes[2:]]
    y = row.sizes[0] * row.sizes[1] * math.prod(sizes)
    cell = {"float16": 2.0, "bfloat16": 2.0, "float32": 4.0}[row.dtype]
    return cell * (math.prod(row.sizes) + y) + (y if row.op.startswith("max") else 0.0)
