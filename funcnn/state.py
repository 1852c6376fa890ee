"""Op states: what an op keeps between calls, as an explicit value. Each class is a pytree in optree, JAX and torch.

A state is a *plan* (how an engine does a spec: metadata of the pytree) and *residuals* (arrays that a forward made and its
backward needs: leaves). The structure of the tree is the same from init on; residuals have zero size until a forward
fills them.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import array_api_compat

__all__ = [
    "AvgPoolState",
    "ConvState",
    "ConvTransposeState",
    "DropoutState",
    "MaxPoolState",
    "OpState",
    "clear",
    "register_pytrees",
]

T = TypeVar("T", bound=type)


class Node:
    """Base of funcnn's pytree classes: `leaves` names the children, `metadata` what stays outside the tree's leaves."""

    __slots__ = ()
    leaves: ClassVar[tuple[str, ...]] = ()
    metadata: ClassVar[tuple[str, ...]] = ()

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Children and hashable metadata."""
        return (
            tuple(getattr(self, name) for name in self.leaves),
            tuple(getattr(self, name) for name in self.metadata),
        )

    @classmethod
    def tree_unflatten(cls, metadata: tuple[Any, ...], children: Any) -> Any:
        """The inverse of `tree_flatten`; children may be any objects."""
        return cls(**dict(zip(cls.metadata, metadata, strict=True)), **dict(zip(cls.leaves, children, strict=True)))

    def cleared(self) -> Any:
        """This node with no more than an init would have put there."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        values = tuple(getattr(self, f.name) for f in dataclasses.fields(self))  # type: ignore[arg-type]
        return _unpickle, (type(self), values)


def _unpickle(cls: type, values: tuple[Any, ...]) -> Any:
    register_pytrees()
    return cls(*values)


def empty_like(array: Any) -> Any:
    """A zero-size array like `array`: the residual of a state that has not run. Other objects stay as they are.

    Never a slice of `array`: that would keep its memory.
    """
    if not array_api_compat.is_array_api_obj(array) or 0 in array.shape:
        return array
    xp = array_api_compat.array_namespace(array)
    place = {} if array_api_compat.is_jax_array(array) else {"device": array_api_compat.device(array)}
    # array_api_compat passes no device on to CuPy, which makes arrays on the current one.
    with array.device if array_api_compat.is_cupy_array(array) else nullcontext():
        return xp.zeros((0,) * array.ndim, dtype=array.dtype, **place)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class OpState(Node):
    """A plan, and the residuals that a subclass adds. Made by an init function, never by hand.

    Attributes
    ----------
    plan : Plan
        `plan.engine`, `plan.spec` and `plan.workspace_bytes` are public.
    batch : int or None
        The batch size given to init, which only `out_spec` reads. It is no part of the pytree, so that states made for
        different batches have one structure; a state rebuilt by a pytree library has None.
    """

    plan: Any
    batch: int | None = dataclasses.field(default=None, kw_only=True)
    metadata: ClassVar[tuple[str, ...]] = ("plan",)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_plan_text(self.plan)}; {self._residual_text()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_op, (type(self), self.plan, tuple(getattr(self, n) for n in self.leaves), self.batch)

    def _residual_text(self) -> str:
        parts = [f"{name} {_array_text(getattr(self, name))}" for name in self.leaves]
        total = sum(_nbytes(getattr(self, name)) for name in self.leaves)
        return ", ".join([*parts, f"residuals {total:,} B"])


def _unpickle_op(cls: type, plan: Any, leaves: tuple[Any, ...], batch: int | None) -> Any:
    register_pytrees()
    return cls(plan, *leaves, batch=batch)


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class ConvState(OpState):
    """State of `conv`: the plan alone."""


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class ConvTransposeState(OpState):
    """State of `conv_transpose`: the plan alone."""


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class MaxPoolState(OpState):
    """State of `max_pool`.

    Attributes
    ----------
    argmax : array of unsigned ints, the shape of y
        Which cell of its window won: the row-major index within the window. Zero-size until a training forward.
    """

    argmax: Any
    leaves: ClassVar[tuple[str, ...]] = ("argmax",)

    def cleared(self) -> MaxPoolState:
        return dataclasses.replace(self, argmax=empty_like(self.argmax))


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class AvgPoolState(OpState):
    """State of `avg_pool`: the plan alone."""


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class DropoutState(OpState):
    """State of `dropout`.

    Attributes
    ----------
    mask : bool array, the shape of x
        True where an element was kept. Zero-size until a training forward.
    step : 0-d int32 array
        Counts the training calls; part of what the next mask is made from.
    """

    mask: Any
    step: Any
    leaves: ClassVar[tuple[str, ...]] = ("mask", "step")

    def cleared(self) -> DropoutState:
        return dataclasses.replace(self, mask=empty_like(self.mask))


# ---- text ------------------------------------------------------------------------------------------------------------


def _plan_text(plan: Any) -> str:
    spec = getattr(plan, "spec", None)
    if spec is None:  # pytree libraries put strings, None and other stand-ins into a state
        return repr(plan)
    shapes = f"x {_shape_text(spec.x_shape, spec.layout)}"
    if hasattr(spec, "weight_shape"):
        shapes += f" * weight {spec.weight_shape}"
    text = f"{plan.engine}, {plan.library} {spec.dtype}, {shapes} -> y {_shape_text(spec.y_shape, spec.layout)}"
    axes = getattr(spec, "axes", ())
    for name in ("kernel", "stride", "dilation"):
        values = tuple(getattr(axis, name) for axis in axes)
        if values and (
            (name == "kernel" and not hasattr(spec, "weight_shape")) or (name != "kernel" and set(values) != {1})
        ):
            text += f", {name} {_same(values)}"
    pads = tuple((axis.lo, axis.hi) for axis in axes)
    if any(map(any, pads)):
        text += f", padding {_same(tuple(_same(pair) for pair in pads))}"
    for name in ("groups", "flip", "count_include_pad", "rate"):
        value = getattr(spec, name, None)
        if value is not None and not (name == "groups" and value == 1) and value is not False:
            text += f", {name} {value}"
    return text


def _same(values: tuple[Any, ...]) -> Any:
    return values[0] if len(set(values)) == 1 else values


def _shape_text(shape: tuple[int, ...], layout: str) -> str:
    shape = (*shape[1:], shape[0]) if layout == "channels_last" and shape else shape
    return f"({', '.join(['N', *map(str, shape)])})"


def _array_text(array: Any) -> str:
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    if shape is None or dtype is None:
        return repr(array)
    name = getattr(dtype, "name", None) or str(dtype).rsplit(".", 1)[-1]
    if tuple(shape) == () and type(array).__module__ == "numpy":
        return str(int(array))
    return f"{name}{tuple(shape)}"


def _nbytes(array: Any) -> int:
    shape, dtype = getattr(array, "shape", ()), getattr(array, "dtype", None)
    size = getattr(dtype, "itemsize", None)
    if size is None:  # array-api-strict
        size = getattr(getattr(dtype, "_np_dtype", None), "itemsize", 0)
    total = int(size or 0)
    for n in shape:
        total *= int(n)
    return total


# ---- clear -----------------------------------------------------------------------------------------------------------


def clear(tree: Any) -> Any:
    """The same tree with every residual of every op state zero-size again; a dropout state keeps its step.

    It frees memory, and it is what to carry through `lax.scan` or `lax.cond`. A forward reads no residual but the step, so
    clearing changes no result; a backward after it is a `StateError`.

    Parameters
    ----------
    tree : op state, layer state, or tuples, lists and dicts of them
        What is neither comes back as it is.

    Returns
    -------
    tree
        Of the same structure; the argument is unchanged.

    Examples
    --------
    >>> import numpy as np, funcnn as fn
    >>> x = np.ones((1, 1, 4, 4))
    >>> y, state = fn.max_pool(x, fn.max_pool_init(x, 2))
    >>> state.argmax.shape, fn.clear(state).argmax.shape
    ((1, 1, 2, 2), (0, 0, 0, 0))
    """
    if isinstance(tree, Node):
        return tree.cleared()
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(clear, tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map(clear, tree))
    if isinstance(tree, dict):
        cleared = copy.copy(tree)  # a defaultdict keeps its factory
        cleared.update((key, clear(value)) for key, value in tree.items())
        return cleared
    return tree


# ---- registration ----------------------------------------------------------------------------------------------------

_classes: list[type[Node]] = [ConvState, ConvTransposeState, MaxPoolState, AvgPoolState, DropoutState]
_registered: set[tuple[str, type]] = set()
_lock = threading.RLock()


def _register_optree(optree: Any, cls: type[Node]) -> None:
    def flatten(node: Node) -> tuple[Any, Any, tuple[str, ...]]:
        return (*node.tree_flatten(), cls.leaves)

    optree.register_pytree_node(
        cls, flatten, cls.tree_unflatten, path_entry_type=optree.GetAttrEntry, namespace="funcnn"
    )


def _register_jax(tree_util: Any, cls: type[Node]) -> None:
    keys = tuple(tree_util.GetAttrKey(name) for name in cls.leaves)

    def flatten_with_keys(node: Node) -> tuple[Any, Any]:
        children, metadata = node.tree_flatten()
        return tuple(zip(keys, children, strict=True)), metadata

    tree_util.register_pytree_with_keys(cls, flatten_with_keys, cls.tree_unflatten, Node.tree_flatten)


def _register_torch(pytree: Any, cls: type[Node]) -> None:
    def flatten(node: Node) -> tuple[list[Any], Any]:
        children, metadata = node.tree_flatten()
        return list(children), metadata

    def unflatten(children: Any, metadata: Any) -> Any:
        return cls.tree_unflatten(metadata, children)

    pytree.register_pytree_node(cls, flatten, unflatten)


# Module that must be there, the last name that its registration needs (a module half imported by another thread lacks
# it), and the registration.
_LIBRARIES: dict[str, tuple[str, Callable[[Any, type[Node]], None]]] = {
    "optree": ("register_pytree_node", _register_optree),
    "jax.tree_util": ("register_pytree_with_keys", _register_jax),
    "torch.utils._pytree": ("register_pytree_node", _register_torch),
}


def register_pytrees() -> None:
    """Register the state classes with optree (namespace "funcnn"), JAX and torch, each if it is imported. Idempotent.

    funcnn calls it on import, in each init and on unpickling. Call it yourself only where you import one of these libraries
    after the last init and then use its tree functions on a state.

    Examples
    --------
    >>> import funcnn as fn
    >>> fn.register_pytrees()
    """
    for module_name, (needed, register) in _LIBRARIES.items():
        module = sys.modules.get(module_name)
        if module is None or (module_name, _classes[-1]) in _registered or not hasattr(module, needed):
            continue
        with _lock:
            for cls in _classes:
                if (module_name, cls) not in _registered:
                    register(module, cls)
                    _registered.add((module_name, cls))


def pytree(cls: T) -> T:
    """Class decorator: have a Node class registered along with the op states."""
    with _lock:
        _classes.append(cls)
    register_pytrees()
    return cls
