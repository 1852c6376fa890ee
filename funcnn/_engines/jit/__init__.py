"""Engine `jit`: NumPy arrays, by kernels that LLVM compiles from Python through Numba. The default where Numba is installed."""

from __future__ import annotations

from typing import Any

import numba

from funcnn._engines._protocol import Plan
from funcnn._engines.jit._conv import JitConv
from funcnn._engines.jit._dropout import JitDropout
from funcnn._engines.jit._pool import JitAvgPool, JitMaxPool
from funcnn._spec import AvgPoolSpec, ConvSpec, DropoutSpec, MaxPoolSpec, Spec

__all__ = ["PLANS", "VERSION"]

VERSION = f"Numba {numba.__version__}"

PLANS: dict[type[Spec], type[Plan[Any]]] = {
    ConvSpec: JitConv,
    MaxPoolSpec: JitMaxPool,
    AvgPoolSpec: JitAvgPool,
    DropoutSpec: JitDropout,
}
