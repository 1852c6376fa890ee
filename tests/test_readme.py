"""The README's code blocks run, the one for CuPy with NumPy in its place; its two commands are the ones that hold."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import funcnn as fn

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number: int) -> None:
    code = BLOCKS[number].replace("import cupy as xp  # or: import numpy as xp", "import numpy as xp")
    assert "cupy" not in code
    exec(compile(code, f"README block {number}", "exec"), {})


def test_first_block_is_short_and_swaps_by_one_line() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line]
    assert len(lines) <= 15
    assert sum("cupy" in line for line in lines) == 1


def test_the_two_commands_stand_there() -> None:
    assert 'pip install -e ".[examples]" && python examples/train_digits.py' in README
    assert 'pip install -e ".[test]" && python -m pytest' in README


def test_it_names_every_function_and_engine() -> None:
    for name, value in vars(fn).items():
        if name in fn.__all__ and (inspect.isfunction(value) or name.endswith("Error")):
            assert re.search(rf"\b{name}\b", README), name
    for name, info in fn.engines().items():
        (row,) = [line for line in README.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1]]
        assert ("planned" in row) != info.available
