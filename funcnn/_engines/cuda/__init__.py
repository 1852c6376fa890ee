"""Engine `cuda`: CuPy arrays, by kernels of its own and, for convolution, im2col and cuBLAS."""

from __future__ import annotations

from typing import Any

from funcnn._engines import _gpu
from funcnn._engines._protocol import Plan
from funcnn._engines.cuda._conv import CudaConv
from funcnn._engines.cuda._dropout import CudaDropout
from funcnn._engines.cuda._pool import CudaAvgPool, CudaMaxPool
from funcnn._spec import AvgPoolSpec, ConvSpec, DropoutSpec, MaxPoolSpec, Spec

__all__ = ["PLANS", "VERSION"]

VERSION = _gpu.require_cuda()

PLANS: dict[type[Spec], type[Plan[Any]]] = {
    ConvSpec: CudaConv,
    MaxPoolSpec: CudaMaxPool,
    AvgPoolSpec: CudaAvgPool,
    DropoutSpec: CudaDropout,
}
