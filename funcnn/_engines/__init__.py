"""The table of engines, the choice among them at init, and the interned plans."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

from funcnn._engines._protocol import Plan
from funcnn._spec import Options, Spec, choice, integer
from funcnn.errors import EngineError

__all__ = ["EngineInfo", "engines", "plan_for", "set_num_threads"]


class EngineInfo(NamedTuple):
    """Whether an engine can run here, the version of what it rests on, and the reason why it cannot ("" if it can)."""

    available: bool
    version: str
    reason: str


class _Engine(NamedTuple):
    libraries: tuple[str, ...]  # of arrays it takes; (): any
    module: str


# In order of preference: the first that takes the arrays' library and is available is the one for engine="auto".
_TABLE: dict[str, _Engine] = {
    "jit": _Engine(("numpy",), "funcnn._engines.jit"),
    "blas": _Engine(("numpy",), "funcnn._engines.blas"),
    "cudnn": _Engine(("cupy",), "funcnn._engines.cudnn"),
    "cuda": _Engine(("cupy",), "funcnn._engines.cuda"),
    "xp": _Engine((), "funcnn._engines.xp"),
}


def engines() -> dict[str, EngineInfo]:
    """Every engine by name, in order of preference, with its availability, version and the reason if unavailable.

    Returns
    -------
    dict of str to EngineInfo

    Examples
    --------
    >>> import funcnn as fn
    >>> fn.engines()["blas"].available
    True
    """
    return {name: _info(name) for name in _TABLE}


def _info(name: str) -> EngineInfo:
    try:
        return EngineInfo(True, importlib.import_module(_TABLE[name].module).VERSION, "")
    except ImportError as error:
        return EngineInfo(False, "", str(error))


def _refusal(name: str, spec: Spec, library: str) -> str | None:
    """Why an engine cannot do a Spec on arrays of a library; None if it can."""
    engine = _TABLE[name]
    if engine.libraries and library not in engine.libraries:
        return f"it takes arrays of {' and '.join(engine.libraries)}, not of {library}"
    info = _info(name)
    if not info.available:
        return info.reason
    plan = importlib.import_module(engine.module).PLANS.get(type(spec))
    if plan is None:
        return f"it has no {type(spec).__name__.removesuffix('Spec')}"
    return plan.refusal(spec)


# ---- plans -----------------------------------------------------------------------------------------------------------

_MAX_PLANS = 1024
_plans: OrderedDict[tuple[Any, ...], Plan[Any]] = OrderedDict()
_lock = threading.Lock()
_num_threads: int | None = None


def plan_for(
    function: str, engine: str, spec: Spec, options: Options, library: str, device: str | None, *arrays: Any
) -> Plan[Any]:
    """The plan for a Spec, the same object for equal arguments (among the last 1,024 plans), ready for such arrays."""
    if not isinstance(engine, str):
        raise TypeError(f"{function}: engine must be a string, got {engine!r}")
    if not isinstance(options, Options):
        raise TypeError(f"{function}: options must be a funcnn.Options, got {options!r}")
    threads = options.threads or _num_threads or available_cpus()
    # Spec classes may be equal as tuples of fields; dataclass equality asks for the class, the hash need not.
    key = (spec, options, library, device, threads)
    # "auto" first: the plan that it led to before.
    names = ("auto", *_TABLE) if engine == "auto" else (choice(function, "engine", engine, ("auto", *_TABLE)),)
    reason: str | None = None
    for name in names:
        plan = _interned((name, *key))
        if plan is None:
            reason = None if name == "auto" else _refusal(name, spec, library)
            if name == "auto" or reason is not None:
                continue
            plan = importlib.import_module(_TABLE[name].module).PLANS[type(spec)](*key)
        try:
            if arrays:
                plan.prepare(*arrays)
        except EngineError as error:
            reason = str(error)
            continue
        return _intern(plan, key, engine)
    raise EngineError(f"{function}: engine must be able to do the job, got {engine!r}: {reason}")


def _interned(key: tuple[Any, ...]) -> Plan[Any] | None:
    with _lock:
        plan = _plans.get(key)
        if plan is not None:
            _plans.move_to_end(key)
        return plan


def _intern(plan: Plan[Any], key: tuple[Any, ...], asked: str) -> Plan[Any]:
    """Keep a plan under its engine's name and the name asked for ("auto"): both give one object."""
    with _lock:
        plan = _plans.setdefault((plan.engine, *key), plan)
        _plans[(asked, *key)] = plan
        while len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)
        return plan


def rebuild_plan(
    engine: str, spec: Spec, options: Options, library: str, device: str | None, keepsake: Any = None
) -> Plan[Any]:
    """The plan of a pickle: by its own engine, or by the best one there is, with a warning."""
    try:
        plan = plan_for("unpickling", engine, spec, options, library, device)
    except EngineError as error:
        plan = plan_for("unpickling", "auto", spec, options, library, device)
        warnings.warn(f"{error}; using engine {plan.engine!r}", RuntimeWarning, stacklevel=2)
        return plan
    if keepsake is not None:
        plan.restore(keepsake)
    return plan


def available_cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_num_threads(n: int | None) -> None:
    """Set the CPU threads of plans made from now on, where `Options.threads` is None.

    Parameters
    ----------
    n : int or None
        At least 1; None goes back to the CPU affinity of the process.

    Raises
    ------
    TypeError, SpecError
        For what is not an int of at least 1.

    Examples
    --------
    >>> import funcnn as fn
    >>> fn.set_num_threads(2)
    >>> fn.set_num_threads(None)
    """
    global _num_threads
    _num_threads = None if n is None else integer("set_num_threads", "n", n, 1)
