"""What is measured: the rows of each table. One row: op, sizes, layout."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One measurement. `sizes` are (N, C, *spatial); O 0: a pool."""

    op: str
    sizes: tuple[int, ...]
    outputs: int
    kernel: int
    stride: int
    padding: int
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
