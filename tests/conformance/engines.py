"""The engines that the conformance suites run on: all that take NumPy arrays, among the selected backends."""

from __future__ import annotations

import pytest
from conftest import selected_backends

each_engine = pytest.mark.parametrize(
    "engine", list(dict.fromkeys(backend.engine for backend in selected_backends() if backend.is_numpy))
)
