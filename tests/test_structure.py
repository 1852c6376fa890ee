"""What imports what, what is public, what is documented, what an engine must have."""

from __future__ import annotations

import ast
import inspect
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEFAULT_BACKENDS, Backend, selected_backends

import funcnn as fn
from funcnn import _engines
from funcnn._engines import _protocol, blas, xp

PACKAGE = Path(fn.__file__).parent

# What engines share.
ENGINE_PARTS = ("_engines._protocol", "_engines._hash", "_engines._order", "_engines._threads")
# Each group of modules, and the groups it may import.
MAY_IMPORT = {
    "errors": set(),
    "_scratch": set(),
    "_spec": {"errors"},
    "_arrays": {"_spec", "errors"},
    "state": set(),
    "_engines._hash": set(),
    "_engines._order": set(),
    "_engines._threads": set(),
    "_engines._protocol": {"_spec", "_engines"},
    "_engines.xp": {"_spec", "errors", "_arrays", "_engines._protocol", "_engines._hash"},
    "_engines.blas": {"_spec", "errors", "_scratch", *ENGINE_PARTS, "_engines.blas"},
    "_engines.jit": {"_spec", "errors", "_scratch", *ENGINE_PARTS, "_engines.jit"},
    "_engines._gpu": set(),
    "_engines.cudnn": {"_spec", "errors", *ENGINE_PARTS, "_engines._gpu", "_engines.cudnn"},
    "_engines.cuda": {"_spec", "errors", *ENGINE_PARTS, "_engines._gpu", "_engines.cuda"},
    "_engines": {"_spec", "errors", "_engines._protocol"},
    "_ops": {"_spec", "errors", "_arrays", "_engines", "state", "_ops"},
    "ops": {"_spec", "errors", "_arrays", "state", "_ops"},
    "_layers": {"_spec", "errors", "_arrays", "state", "ops", "_layers", ""},
    "layers": {"_layers"},
    "__main__": {""},
    "": {"layers", "ops", "state", "errors", "_spec", "_arrays", "_engines", "_scratch"},
}


def group(module: str) -> str:
    """The longest name of MAY_IMPORT that the module, without 'funcnn.', starts with."""
    return max((g for g in MAY_IMPORT if module == g or module.startswith(g + ".") or not g), key=len)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.ImportFrom) or node.level == 0, f"{path}: imports are absolute"
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "funcnn":
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            is_module = [(PACKAGE.parent / name.replace(".", "/")).with_suffix(".py").exists() for name in whole]
            found |= {name if m else node.module for name, m in zip(whole, is_module, strict=True)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "funcnn"}
    return {name.removeprefix("funcnn").removeprefix(".") for name in found}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path: Path) -> None:
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
    mine = group(module)
    for imported in imports(path):
        assert group(imported) in MAY_IMPORT[mine] | {mine}, f"{module} imports {imported}"


def test_import_brings_no_optional_library() -> None:
    code = (
        "import sys, numpy as np, funcnn as fn\n"
        "x = np.ones((1, 1, 4, 4)); w = np.ones((1, 1, 2, 2)); own = {'engine': 'blas'}\n"
        "fn.conv(x, w, None, fn.conv_init(x, w, **own)); fn.max_pool(x, fn.max_pool_init(x, 2, **own))\n"
        "fn.layers.serial(fn.layers.conv(2, 1, **own)).init(0, x)\n"
        "bad = {'optree', 'jax', 'torch', 'cupy', 'numba', 'cudnn', 'ml_dtypes', 'array_api_strict'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-Werror", "-c", code], check=True)


def test_command_line_lists_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("funcnn", run_name="__main__")
    out = capsys.readouterr().out
    assert out.startswith(f"funcnn {fn.__version__}\n")
    for name, info in fn.engines().items():
        (line,) = [line for line in out.splitlines() if line.split()[0] == name]
        assert ("available" in line) == info.available
        assert (info.version or info.reason) in line


@pytest.mark.parametrize("module", [fn, fn.ops, fn.state, fn.errors, fn.layers], ids=lambda m: m.__name__)
def test_all_is_sorted_and_complete(module: object) -> None:
    names = list(module.__all__)
    assert names == sorted(names)
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith("funcnn")
        and (inspect.isfunction(value) or inspect.isclass(value))
    }
    if module in (fn, fn.layers):
        assert public <= set(names)
    assert all(hasattr(module, name) for name in names)


FUNCTIONS = {
    **{name: getattr(fn, name) for name in fn.__all__ if inspect.isfunction(getattr(fn, name))},
    **{
        f"layers.{name}": getattr(fn.layers, name)
        for name in fn.layers.__all__
        if inspect.isfunction(getattr(fn.layers, name))
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_are_documented(name: str) -> None:
    function = FUNCTIONS[name]
    text = inspect.getdoc(function) or ""
    assert "Examples\n--------\n>>> " in text
    parameters = inspect.signature(function).parameters
    signature_returns = inspect.signature(function).return_annotation
    if signature_returns not in ("None", None):
        assert "Returns\n-------\n" in text
    if parameters and not name.startswith("layers."):
        assert "Parameters\n----------\n" in text
        for parameter in parameters:
            assert parameter in text, parameter


CANNOT_FAIL = {"clear", "engines", "register_pytrees", "release_scratch"}


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith("layers.")])
def test_public_functions_name_their_errors(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    assert ("Raises\n------\n" in text) == (name not in CANNOT_FAIL)


def test_warnings_are_errors_and_markers_strict(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("filterwarnings") == ["error"]
    assert pytestconfig.getini("xfail_strict")
    assert pytestconfig.option.doctestmodules


def test_every_engine_has_the_signatures_of_the_protocol() -> None:
    for module in (xp, blas):
        for spec, base in _protocol.plan_classes().items():
            plan = module.PLANS[spec]
            assert issubclass(plan, base)
            for name, method in inspect.getmembers(base, inspect.isfunction):
                if not name.startswith("_"):
                    mine = inspect.signature(getattr(plan, name))
                    assert mine == inspect.signature(method), (module.__name__, name)


def test_the_table_has_the_engines_of_the_tests() -> None:
    available = {name for name, info in fn.engines().items() if info.available}
    wanted = {backend.engine for backend in (*DEFAULT_BACKENDS, *selected_backends())}
    assert wanted <= available <= {backend.engine for backend in Backend}
    assert set(_engines._TABLE) == {"jit", "blas", "cudnn", "cuda", "xp"}


def test_names_and_defaults_of_the_trios_agree() -> None:
    for op in ("conv", "conv_transpose", "max_pool", "avg_pool", "dropout"):
        init = inspect.signature(getattr(fn, f"{op}_init")).parameters
        assert init["layout"].default == "channels_first"
        assert init["engine"].default == "auto"
        assert init["options"].default == fn.Options()
        assert all(
            p.kind is p.KEYWORD_ONLY for name, p in init.items() if name not in ("x", "weight", "kernel_size", "rate")
        )
