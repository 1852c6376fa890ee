"""Engine `blas`: NumPy arrays, by NumPy's own passes and the BLAS library that NumPy was built with. Always there."""

from __future__ import annotations

from typing import Any

import numpy as np

from funcnn._engines._protocol import Plan
from funcnn._engines.blas._conv import BlasConv
from funcnn._engines.blas._dropout import BlasDropout
from funcnn._engines.blas._pool import BlasAvgPool, BlasMaxPool
from funcnn._spec import AvgPoolSpec, ConvSpec, DropoutSpec, MaxPoolSpec, Spec

__all__ = ["PLANS", "VERSION"]

VERSION = f"NumPy {np.__version__}"

PLANS: dict[type[Spec], type[Plan[Any]]] = {
    ConvSpec: BlasConv,
    MaxPoolSpec: BlasMaxPool,
    AvgPoolSpec: BlasAvgPool,
    DropoutSpec: BlasDropout,
}
