"""`cupy.linalg`: the one name that array_api_compat asks for by name."""

from __future__ import annotations

from typing import Any

__all__ = ["lstsq"]


def lstsq(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the double of CuPy has no linear algebra")
