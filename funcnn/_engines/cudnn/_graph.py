"""One convolution as a cuDNN graph: what it is, and which of cuDNN's ways to compute it are allowed.

cuDNN's words: the *image* (N, C, *size), the *filter* (O, C/groups, *kernel) and the *response* (N, O, *out) of a
convolution. `fprop` computes the response, `dgrad` the image and `wgrad` the filter, each from the two others. Ways are
*engines* with *knobs*; its heuristics name the promising ones in order, and a list of fallbacks.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from funcnn._engines import _gpu
from funcnn._spec import Axis, Options

__all__ = ["RESULT", "UIDS", "Built", "Problem", "Refusal", "Tensor", "candidates", "rebuilt", "refusal"]

UIDS = {"image": 1, "filter": 2, "response": 3, "bias": 4}
RESULT = {"fprop": "response", "dgrad": "image", "wgrad": "filter"}
_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT", "float64": "DOUBLE"}
_NOT_SUMS = ("WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13", "FFT")
_DESELECTED = "Deselecting execution plan"  # the frontend's error for a way that a note bars
_NOT_FLOAT32 = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS")  # of float32 numbers: TF32


class Tensor(NamedTuple):
    """Shape and strides (in elements) of an operand, with the axes N, C, *spatial whatever its memory order."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Problem(NamedTuple):
    """All that a graph depends on. biased: a bias is added to the result."""

    kind: str
    dtype: str
    axes: tuple[Axis, ...]
    image: Tensor
    filter: Tensor
    response: Tensor
    biased: bool


class Built(NamedTuple):
    """A graph whose plan that was built last is ready to run. fallback: the heuristics did not name it.

    name: of the engine and all of its knobs ("eng32_k2=15_k6=3"). It is what a choice is stored by: the frontend gives knobs
    as a dict by their public names, and loses those that have none (seen with 1.32).
    """

    graph: _gpu.Graph
    workspace: int
    name: str
    fallback: bool


class Refusal(NamedTuple):
    """Why a way is not taken. over_limit: for its workspace."""

    reason: str
    over_limit: bool = False


def candidates(problem: Problem, options: Options, limit: int, refusals: list[Refusal]) -> Iterator[Built]:
    """The allowed ways that need at most `limit` bytes of workspace, best first, each built when it is asked for.

    Reasons of the others go to `refusals`. All that one list of the heuristics yields share a graph, which runs the last one.
    """
    for graph, fallback in _lists(problem, refusals):
        graph.deselect_numeric_notes(_barred_notes(problem.dtype, options))
        for number in range(graph.get_execution_plan_count()):
            built = _built(graph, number, fallback, refusals)
            if built is None:
                continue
            if built.workspace > limit:
                reason = f"{built.name} needs {built.workspace:,} bytes of workspace, over the limit of {limit:,}"
                refusals.append(Refusal(reason, over_limit=True))
                continue
            yield built


def rebuilt(problem: Problem, name: str, limit: int) -> Built | None:
    """The candidate of that name; None where cuDNN has it no more, or not within `limit` bytes of workspace."""
    for graph, fallback in _lists(problem, []):
        for number in range(graph.get_execution_plan_count()):
            if graph.get_plan_name_at_index(number) == name:
                built = _built(graph, number, fallback, [])
                return built if built is not None and built.workspace <= limit else None
    return None


def _lists(problem: Problem, refusals: list[Refusal]) -> Iterator[tuple[_gpu.Graph, bool]]:
    """A graph with what the heuristics name, then one with the fallbacks."""
    modes = _gpu.frontend().heur_mode
    for mode in (modes.A, modes.FALLBACK):
        try:
            graph = _described(problem)
            graph.create_execution_plans([mode])
        except _gpu.graph_errors() as error:
            refusals.append(refusal(error))
            continue
        yield graph, mode == modes.FALLBACK


def _built(graph: _gpu.Graph, number: int, fallback: bool, refusals: list[Refusal]) -> Built | None:
    try:
        graph.build_plan_at_index(number)
    except _gpu.graph_errors() as error:
        if _DESELECTED not in str(error):  # what we bar ourselves is no reason of cuDNN's
            refusals.append(refusal(error))
        return None
    workspace = int(graph.get_workspace_size_plan_at_index(number))
    return Built(graph, workspace, graph.get_plan_name_at_index(number), fallback)


def _barred_notes(dtype: str, options: Options) -> list[Any]:
    names = ["REDUCED_PRECISION_REDUCTION"]
    if options.numerics == "strict":
        names += _NOT_SUMS
        if dtype == "float32":
            names += _NOT_FLOAT32
    if options.deterministic:
        names.append("NONDETERMINISTIC")
    notes = _gpu.frontend().numerical_note
    return [getattr(notes, name) for name in names]


def refusal(error: Exception) -> Refusal:
    """The first line of what cuDNN says."""
    return Refusal(str(error).strip().split("\n")[0] or type(error).__name__)


def _described(problem: Problem) -> _gpu.Graph:
    """The graph of a problem, as far as cuDNN can check it without choosing how to compute it."""
    types = _gpu.frontend().data_type
    io = getattr(types, _TYPES[problem.dtype])
    sums = types.DOUBLE if problem.dtype == "float64" else types.FLOAT
    graph = _gpu.new_graph(io_data_type=io, intermediate_data_type=sums, compute_data_type=sums)

    def operand(name: str) -> Any:
        tensor: Tensor = getattr(problem, name)
        return graph.tensor(
            name=name, dim=list(tensor.shape), stride=list(tensor.strides), data_type=io, uid=UIDS[name]
        )

    geometry = _geometry(problem.axes)
    result: Tensor = getattr(problem, RESULT[problem.kind])
    if problem.kind == "fprop":
        y = graph.conv_fprop(image=operand("image"), weight=operand("filter"), **geometry)
    elif problem.kind == "dgrad":
        y = graph.conv_dgrad(loss=operand("response"), filter=operand("filter"), **geometry)
    else:
        y = graph.conv_wgrad(image=operand("image"), loss=operand("response"), **geometry)
    if problem.biased:
        if problem.kind != "fprop":  # only the sizes of a response follow from its operands
            y.set_dim(list(result.shape)).set_stride(list(result.strides))
        channels = result.shape[1]
        sizes = [1, channels, *(1 for _ in problem.axes)]
        strides = [channels, 1, *(channels for _ in problem.axes)]
        y = graph.add(a=y, b=graph.tensor(name="bias", dim=sizes, stride=strides, data_type=io, uid=UIDS["bias"]))
    y.set_output(True).set_dim(list(result.shape)).set_stride(list(result.strides)).set_data_type(io)
    y.set_uid(UIDS[RESULT[problem.kind]])
    graph.validate()
    graph.build_operation_graph()
    return graph


def _geometry(axes: tuple[Axis, ...]) -> dict[str, list[int]]:
    """Padding, stride and dilation. Of the trailing padding just what the last window reads."""
    return {
        "pre_padding": [axis.lo for axis in axes],
        "post_padding": [max(0, axis.end - axis.size) for axis in axes],
        "stride": [axis.stride for axis in axes],
        "dilation": [axis.dilation for axis in axes],
    }
