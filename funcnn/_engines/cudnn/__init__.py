"""Engine `cudnn`: convolution of CuPy arrays by cuDNN graphs, which the plan prepares at init and keeps."""

from __future__ import annotations

from typing import Any

from funcnn._engines import _gpu
from funcnn._engines._protocol import Plan
from funcnn._engines.cudnn._conv import CudnnConv
from funcnn._spec import ConvSpec, Spec

__all__ = ["PLANS", "VERSION"]

VERSION = _gpu.require_cudnn()

PLANS: dict[type[Spec], type[Plan[Any]]] = {ConvSpec: CudnnConv}
