"""The error classes; every message reads `<function>: <argument> <what is required>, got <value>[; <what to do>]`."""

from __future__ import annotations

__all__ = ["EngineError", "SpecError", "StateError"]


class SpecError(ValueError):
    """An option or a shape given to an init function is impossible."""


class StateError(ValueError):
    """A call does not fit its op state: shape, dtype, device, another op's state, a backward without its forward."""


class EngineError(RuntimeError):
    """An engine asked for by name cannot do the job, or an engine is out of candidates."""
