"""The code blocks of the README and of the page on CuPy run, with NumPy in CuPy's place; the README's two commands hold."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import funcnn as fn

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PLACES = {
    "import cupy as xp  # or: import numpy as xp": "import numpy as xp",
    "import cupy as xp": "import numpy as xp",
    "from cupyx.scipy import signal": "from scipy import signal",
}


def blocks(page: str) -> list[str]:
    """The Python code blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


PAGES = ("README.md", "docs/cupy.md")
BLOCKS = [pytest.param(block, id=f"{page}-{i}") for page in PAGES for i, block in enumerate(blocks(page))]


@pytest.mark.parametrize("code", BLOCKS)
def test_block_runs(code: str) -> None:
    for cupy, numpy in PLACES.items():
        code = code.replace(cupy, numpy)
    assert "cupy" not in code
    exec(compile(code, "block", "exec"), {})


def test_first_block_is_short_and_swaps_by_one_line() -> None:
    lines = [line for line in blocks("README.md")[0].splitlines() if line]
    assert len(lines) <= 15
    assert sum("cupy" in line for line in lines) == 1


def test_blocks_on_cupy_are_short() -> None:
    first = blocks("docs/cupy.md")[:3]
    assert [re.search(r"fn\.(\w+)\(x", code)[1] for code in first] == ["conv_init", "conv_init", "max_pool_init"]
    for code in first:
        assert len([line for line in code.splitlines() if line and not line.startswith("import")]) <= 10


def test_the_two_commands_stand_there() -> None:
    assert 'pip install -e ".[examples]" && python examples/train_digits.py' in README
    assert 'pip install -e ".[test]" && python -m pytest' in README


def test_it_names_every_function_and_engine() -> None:
    for name, value in vars(fn).items():
        if name in fn.__all__ and (inspect.isfunction(value) or name.endswith("Error")):
            assert re.search(rf"\b{name}\b", README), name
    for name in fn.engines():
        (row,) = [line for line in README.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1]]
        assert "| yes" in row
