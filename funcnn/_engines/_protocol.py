"""What an engine is: a class of plan for each Spec. A plan knows how one engine does what a Spec says.

An engine's module has `PLANS`, a dict from Spec class to plan class, and `VERSION`, the version of what it rests on. The
public functions check every argument before they call a plan, so a plan checks nothing. Arrays come to a plan with a
channels-first *shape* (N, C, *spatial), whatever their memory order, and leave it so.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from funcnn._spec import AvgPoolSpec, ConvSpec, DropoutSpec, MaxPoolSpec, Options, Spec

__all__ = ["AvgPoolPlan", "ConvPlan", "DropoutPlan", "MaxPoolPlan", "Plan"]

S = TypeVar("S", ConvSpec, MaxPoolSpec, AvgPoolSpec, DropoutSpec)
Array = Any


class Plan(Generic[S]):
    """How one engine does one Spec, made at init. Immutable; equal by engine, Spec, options, arrays' library, algorithm.

    A plan owns no user array and no scratch. `library` and `device` say which arrays it takes (device None: any).
    """

    engine: str

    def __init__(self, spec: S, options: Options, library: str, device: str | None, threads: int) -> None:
        self.spec: S = spec
        self.options = options
        self.library = library
        self.device = device
        self.threads = threads
        self.algorithm = self.choose_algorithm()
        self._key: tuple[Any, ...] = (self.engine, type(spec), spec, options, library, device, self.algorithm)
        self._hash = hash(self._key)

    @classmethod
    def refusal(cls, spec: Spec) -> str | None:
        """Why this engine cannot do a Spec of its kind; None if it can."""
        return None

    def choose_algorithm(self) -> str:
        """Name of the way this engine takes; engines with several ways override it."""
        return "direct"

    def prepare(self, *arrays: Any) -> None:
        """Make ready what calls with arrays (or ArraySpecs) like those of an init need; EngineError where it cannot be had."""

    def keepsake(self) -> Any:
        """What a pickle keeps beside the arguments of the plan, None for nothing."""
        return None

    def restore(self, keepsake: Any) -> None:
        """Take over the keepsake of an equal plan of another process."""

    @property
    def workspace_bytes(self) -> int:
        """Most bytes of scratch per thread that a call holds beside its results, as far as the Spec tells."""
        return 0

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Plan) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        from funcnn._engines import rebuild_plan  # the table imports the engines, which import this module

        return rebuild_plan, (self.engine, self.spec, self.options, self.library, self.device, self.keepsake())

    def __copy__(self) -> Plan[S]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan[S]:
        return self

    def __repr__(self) -> str:
        return f"<{self.engine} plan, {self.algorithm}>"


class ConvPlan(Plan[ConvSpec]):
    """A convolution as three bilinear maps, from which conv, conv_transpose and their backwards are built.

    No map conjugates: the callers do. The data gradient of a convolution *is* the transposed convolution, so one engine
    routine serves both.
    """

    def correlate(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """y[n, o, p] = bias[o] + sum over i, t of weight[o, i, t] x[n, i, p * stride + t * dilation - lo]."""
        raise NotImplementedError

    def adjoint(self, y: Array, weight: Array, bias: Array | None) -> Array:
        """The adjoint of `correlate` in x applied to y (N, O, *out): an (N, I, *size) array, plus bias[i]."""
        raise NotImplementedError

    def weight_gradient(self, x: Array, y: Array) -> Array:
        """The adjoint of `correlate` in weight: sum over n, p of y[n, o, p] x[n, i, p * stride + t * dilation - lo]."""
        raise NotImplementedError

    def bias_gradient(self, dy: Array) -> Array:
        """Sum of dy (N, C, *spatial) over all but the channels."""
        raise NotImplementedError

    def conjugate(self, a: Array) -> Array:
        """Complex conjugate of an array; real arrays as they are."""
        raise NotImplementedError

    def forward(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """y of the op."""
        return (self.adjoint if self.spec.transposed else self.correlate)(x, weight, bias)

    def backward(
        self, dy: Array, x: Array | None, weight: Array | None, wrt: tuple[str, ...]
    ) -> tuple[Array | None, Array | None, Array | None]:
        """(dx, dweight, dbias), None for what `wrt` does not name."""
        transposed = self.spec.transposed
        dx = dweight = dbias = None
        if "x" in wrt:
            dx = (self.correlate if transposed else self.adjoint)(dy, self.conjugate(weight), None)
        if "weight" in wrt:
            x = self.conjugate(x)
            dweight = self.weight_gradient(dy, x) if transposed else self.weight_gradient(x, dy)
        if "bias" in wrt:
            dbias = self.bias_gradient(dy)
        return dx, dweight, dbias


class MaxPoolPlan(Plan[MaxPoolSpec]):
    """Windows' maxima and where they are."""

    def forward(self, x: Array, train: bool) -> tuple[Array, Array | None]:
        """y and argmax (None unless train), both (N, C, *out)."""
        raise NotImplementedError

    def backward(self, dy: Array, argmax: Array) -> Array:
        """dx (N, C, *size): each dy goes to the cell that its argmax names."""
        raise NotImplementedError


class AvgPoolPlan(Plan[AvgPoolSpec]):
    """Windows' means."""

    def forward(self, x: Array) -> Array:
        """y (N, C, *out)."""
        raise NotImplementedError

    def backward(self, dy: Array) -> Array:
        """dx (N, C, *size): each dy, divided by its window's divisor, goes to every cell of the window."""
        raise NotImplementedError


class DropoutPlan(Plan[DropoutSpec]):
    """The mask by a counter-based hash, and its application."""

    def forward(self, x: Array, step: Array) -> tuple[Array, Array]:
        """y and the bool mask (True: kept) for the given step (0-d int32)."""
        raise NotImplementedError

    def backward(self, dy: Array, mask: Array) -> Array:
        """dx."""
        raise NotImplementedError


def plan_classes() -> dict[type[Spec], type[Plan[Any]]]:
    """The plan class that each Spec asks of an engine."""
    return {ConvSpec: ConvPlan, MaxPoolSpec: MaxPoolPlan, AvgPoolSpec: AvgPoolPlan, DropoutSpec: DropoutPlan}
