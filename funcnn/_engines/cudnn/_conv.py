"""conv and conv_transpose of the cudnn engine: every dtype as a real convolution that cuDNN has.

Complex arrays become real ones with the real and the imaginary part of each channel side by side, as 2 C channels:

    [re y]   [re w  -im w] [re x]
    [im y] = [im w   re w] [im x]

which channels-last arrays already are, seen as real ones. With a real weight the parts are two real images instead.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import cached_property
from typing import Any

from funcnn._engines import _gpu
from funcnn._engines._order import FIRST, LAST, allocate, memory_order, strides_of, to_first, to_last
from funcnn._engines._protocol import ConvPlan
from funcnn._engines.cudnn._graph import Problem
from funcnn._engines.cudnn._runner import Operands, Runner, by_channel
from funcnn._spec import COMPLEX_DTYPES, FLOAT_DTYPES, HALF_DTYPES, REAL_OF_COMPLEX, ConvSpec, Spec
from funcnn.errors import EngineError

__all__ = ["CudnnConv"]

MOST_WORKSPACE = 1 << 30  # bytes, where Options.workspace_limit leaves it open: what frameworks allow cuDNN

Array = _gpu.Array


class CudnnConv(ConvPlan):
    """conv and conv_transpose for CuPy arrays of 1 to 3 spatial axes."""

    engine = "cudnn"

    @classmethod
    def refusal(cls, spec: Spec) -> str | None:
        assert isinstance(spec, ConvSpec)
        if spec.dtype not in FLOAT_DTYPES and spec.dtype not in COMPLEX_DTYPES:
            return f"it has no convolution of {spec.dtype}, only of floats and complex numbers"
        rank = len(spec.axes)
        return f"it has no convolution of rank {rank}, only of 1 to 3" if rank > 3 else None

    def choose_algorithm(self) -> str:
        self._runners: dict[int, Runner] = {}
        self._choices: dict[Any, str] = {}  # from pickles
        return "graphs"

    @property
    def workspace_bytes(self) -> int:
        """Most bytes of workspace of the graphs that are ready."""
        return max((runner.workspace_bytes for runner in tuple(self._runners.values())), default=0)

    # ---- graphs ------------------------------------------------------------------------------------------------------

    def prepare(self, x: Any, weight: Any) -> None:
        """Build the graphs of the three maps for arrays like these, with and without a bias; EngineError if cuDNN has none."""
        spec = self.spec
        n = x.shape[0]
        if not n or not spec.inputs or not spec.outputs:
            return
        order = self._order_hint(x)
        strides = strides_of(weight) if self._parts == 1 and hasattr(weight, "strides") else None
        device = _gpu.device_of(x)
        forward, backward = ("dgrad", "fprop") if spec.transposed else ("fprop", "dgrad")
        calls = ((forward, True), (forward, False), (backward, False), ("wgrad", False))
        with _gpu.on_device(device):
            self._runner(device).prepare(calls, self._images * n, order, strides)

    def _order_hint(self, x: Any) -> str:
        """The memory order of an array, or the one that an ArraySpec promises."""
        if hasattr(x, "order"):
            return LAST if LAST in (self.spec.layout, x.order) else FIRST
        return memory_order(x if self.spec.layout == FIRST else to_first(x), self.spec.layout)

    def _runner(self, device: int) -> Runner:
        runner = self._runners.get(device)
        if runner is None:
            limit = self.options.workspace_limit
            if limit is None:
                limit = min(MOST_WORKSPACE, _gpu.free_bytes() // 4)
            runner = self._runners.setdefault(device, Runner(self._real_spec, self.options, limit))
            runner.choices.update(self._choices)
        return runner

    def keepsake(self) -> Any:
        """The ways chosen so far, and the libraries and device that they were chosen for.

        Problems are plain tuples there, equal to themselves: a class of this package could not be unpickled without cuDNN.
        """
        choices = dict(self._choices)
        for runner in tuple(self._runners.values()):
            choices |= runner.choices
        return _gpu.stack(), tuple((_plain(problem), name) for problem, name in choices.items())

    def restore(self, keepsake: Any) -> None:
        stack, choices = keepsake
        if not choices:
            return
        if stack != _gpu.stack():
            message = f"unpickling: the cuDNN plans were made for {stack}; they are made anew for {_gpu.stack()}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return
        self._choices = dict(choices) | self._choices
        for runner in tuple(self._runners.values()):
            for problem, name in choices:
                runner.choices.setdefault(problem, name)

    # ---- the three maps ----------------------------------------------------------------------------------------------

    def correlate(self, x: Array, weight: Array, bias: Array | None) -> Array:
        return self._map("fprop", x, weight, bias, self.spec.far)

    def adjoint(self, y: Array, weight: Array, bias: Array | None) -> Array:
        # The transpose of the real matrix above belongs to the conjugate weight.
        weight = self.conjugate(weight)
        return self._map("dgrad", y, weight, bias, self.spec.near)

    def _map(self, kind: str, source: Array, weight: Array, bias: Array | None, shape: tuple[int, ...]) -> Array:
        """The response of an image, or the image of a response; `shape` (C, *sizes) is that of the result."""
        device = _gpu.device_of(source)
        with _gpu.on_device(device):
            order = memory_order(source, self.spec.layout)
            if not source.size or not shape[0]:
                y = allocate(_gpu.empty, (len(source), *shape), self.spec.y_dtype, order)
                y[...] = 0 if bias is None else by_channel(bias, y)
                return y
            n = len(source)
            if self.spec.dtype in FLOAT_DTYPES:
                y = allocate(_gpu.empty, (n, *shape), self.spec.y_dtype, order)
                self._run(device, kind, _operands(kind, source, self._flipped(weight), y, bias), n)
                return y
            channels, *sizes = shape
            real_shape = (self._images * n, self._parts * channels, *sizes)
            y = allocate(_gpu.empty, real_shape, REAL_OF_COMPLEX[self.spec.dtype], order)
            shift = None if bias is None or self._parts == 1 else _parts_of(bias)
            weight = self._flipped(self._real_weight(weight))
            self._run(device, kind, _operands(kind, self._real(source, order), weight, y, shift), n)
            y = self._complex(y, order)
            if bias is not None and shift is None:
                y += by_channel(bias, y)
            return y

    def weight_gradient(self, x: Array, y: Array) -> Array:
        spec = self.spec
        device = _gpu.device_of(x)
        with _gpu.on_device(device):
            if not x.size or not y.size:
                dweight = _gpu.empty(spec.weight_shape, spec.weight_dtype)
                dweight[...] = 0
                return dweight
            n, order = len(x), memory_order(x, spec.layout)
            if spec.dtype in COMPLEX_DTYPES:
                if self._parts == 1:  # the real part of x * y: re x re y - im x im y
                    y = y.conj()
                x, y = self._real(x, order), self._real(y, memory_order(y, spec.layout))
            real = self._real_spec
            dweight = allocate(_gpu.empty, real.weight_shape, real.dtype, order)
            self._run(device, "wgrad", Operands(x, dweight, y), n)
            if self._parts == 2:
                dweight = self._complex_weight(dweight)
            return self._flipped(dweight).copy() if spec.flip else dweight

    def _run(self, device: int, kind: str, operands: Operands, n: int) -> None:
        """Queue a map of real arrays; an error names the op and the batch of the call."""
        try:
            self._runner(device).run(kind, operands)
        except EngineError as error:
            op, forward = ("conv_transpose", "dgrad") if self.spec.transposed else ("conv", "fprop")
            function = op if kind == forward else f"{op}_backward"
            raise EngineError(f"{function}: x must have a batch size that cuDNN can serve, got {n} ({error})") from None

    def bias_gradient(self, dy: Array) -> Array:
        dtype = "float32" if self.spec.y_dtype in HALF_DTYPES else self.spec.y_dtype
        with _gpu.on_device(_gpu.device_of(dy)):
            return dy.sum(axis=(0, *range(2, dy.ndim)), dtype=dtype).astype(self.spec.y_dtype, copy=False)

    def conjugate(self, a: Array) -> Array:
        if a.dtype.kind != "c":
            return a
        with _gpu.on_device(_gpu.device_of(a)):
            return a.conj()

    def _flipped(self, weight: Array) -> Array:
        """A view of a weight with its taps in the order in which cuDNN has them, which never flips."""
        return weight[(..., *(slice(None, None, -1),) * len(self.spec.axes))] if self.spec.flip else weight

    # ---- complex numbers ---------------------------------------------------------------------------------------------

    @cached_property
    def _parts(self) -> int:
        """Real channels of one channel: 2 where a complex weight mixes real and imaginary parts."""
        return 2 if self.spec.weight_dtype in COMPLEX_DTYPES else 1

    @cached_property
    def _images(self) -> int:
        """Real images of one image: 2 where a real weight meets complex numbers."""
        return 2 if self.spec.dtype in COMPLEX_DTYPES and self._parts == 1 else 1

    @cached_property
    def _real_spec(self) -> ConvSpec:
        spec, dtype = self.spec, REAL_OF_COMPLEX.get(self.spec.dtype, self.spec.dtype)
        inputs, outputs = self._parts * spec.inputs, self._parts * spec.outputs
        return dataclasses.replace(spec, inputs=inputs, outputs=outputs, dtype=dtype, weight_dtype=dtype, y_dtype=dtype)

    def _real(self, a: Array, order: str) -> Array:
        """A complex (N, C, *sizes) as real (N, 2 C, *sizes), or (2 N, C, *sizes) under a real weight."""
        real = REAL_OF_COMPLEX[self.spec.dtype]
        n, c, *sizes = a.shape
        if self._parts == 1:
            images = allocate(_gpu.empty, (2 * n, c, *sizes), real, order)
            images[:n], images[n:] = a.real, a.imag
            return images
        if order == LAST:
            last = to_last(a)
            if last.strides[-1] == last.itemsize:
                return to_first(last.view(real))
        channels = allocate(_gpu.empty, (n, 2 * c, *sizes), real, order)
        channels[:, ::2], channels[:, 1::2] = a.real, a.imag
        return channels

    def _complex(self, a: Array, order: str) -> Array:
        """The inverse of `_real`."""
        if self._parts == 2 and order == LAST:
            return to_first(to_last(a).view(self.spec.dtype))
        half = len(a) // 2
        real, imag = (a[:, ::2], a[:, 1::2]) if self._parts == 2 else (a[:half], a[half:])
        y = allocate(_gpu.empty, real.shape, self.spec.dtype, order)
        y.real[...], y.imag[...] = real, imag
        return y

    def _real_weight(self, weight: Array) -> Array:
        """A complex weight (O, C, *k) as the real matrix above for each pair of channels, (2 O, 2 C, *k)."""
        if self._parts == 1:
            return weight
        o, c, *kernel = weight.shape
        matrix = _gpu.empty((o, 2, c, 2, *kernel), REAL_OF_COMPLEX[self.spec.dtype])
        matrix[:, 0, :, 0] = matrix[:, 1, :, 1] = weight.real
        matrix[:, 1, :, 0], matrix[:, 0, :, 1] = weight.imag, -weight.imag
        return matrix.reshape(2 * o, 2 * c, *kernel)

    def _complex_weight(self, matrix: Array) -> Array:
        """The complex weight gradient of the gradient of that matrix without its signs: sum of y x."""
        o, c, *kernel = self.spec.weight_shape
        parts = matrix.reshape(o, 2, c, 2, *kernel)
        weight = _gpu.empty((o, c, *kernel), self.spec.weight_dtype)
        weight.real[...] = parts[:, 0, :, 0] - parts[:, 1, :, 1]
        weight.imag[...] = parts[:, 0, :, 1] + parts[:, 1, :, 0]
        return weight


def _plain(problem: Problem) -> tuple[Any, ...]:
    kind, dtype, axes, *tensors, biased = problem
    return kind, dtype, axes, *map(tuple, tensors), biased


def _operands(kind: str, source: Array, weight: Array, result: Array, bias: Array | None) -> Operands:
    image, response = (source, result) if kind == "fprop" else (result, source)
    return Operands(image, weight, response, bias)


def _parts_of(bias: Array) -> Array:
    """A complex bias (C,) as real (2 C,)."""
    return bias.ravel().view(bias.real.dtype)
