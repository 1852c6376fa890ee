"""Packages of the extra `conformance`, which the README's test command does not install."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

_REASON = "comes with the extra `conformance` (docs/onnx.md)"
_MUST_BE_THERE = os.environ.get("FUNCNN_TEST_CONFORMANCE") == "1"


def package(name: str) -> Any:
    """The module of that name; without it, the module that asks is skipped, or fails with FUNCNN_TEST_CONFORMANCE=1."""
    if _MUST_BE_THERE:
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} {_REASON}")


def package_folder(name: str) -> Path:
    """Where a package lies that is not imported: its models are wanted, not its dependencies."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        message = f"{name} {_REASON}"
        if _MUST_BE_THERE:
            raise ModuleNotFoundError(message)
        pytest.skip(message, allow_module_level=True)
    return Path(spec.origin).parent
