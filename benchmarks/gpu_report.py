"""What the measurements of `run_gpu.py` say: which rows are judged, the targets, the Markdown page. Needs no GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from rows import Row, flops
from tabulate import tabulate

LEAST_US = 30.0  # device time below which a row is reported, not judged: launches and clocks weigh too much
LEAST_BYTES = 200e6  # and a pool that moves less may lie in the L2 cache
MEAN = 1.0  # torch over funcnn, geometric mean of the judged convolutions
SLOWEST = 1.05  # funcnn over torch, of each judged convolution
SHARE = 0.8  # of the copy bandwidth, of each judged pool
HOST_US = 60.0  # of a whole call
BEYOND_US = 15.0  # of a whole call, without the frontend's execute


class Setting(NamedTuple):
    """What both sides are told. `numerics` is funcnn's: "fast" stands for TF32 allowed in torch, "strict" for not."""

    dtype: str
    numerics: str
    autotune: bool
    deterministic: bool

    @property
    def name(self) -> str:
        precision = {"fast": " TF32 on", "strict": " TF32 off"}[self.numerics] if self.dtype == "float32" else ""
        return self.dtype + precision + (", autotune" if self.autotune else "")


class Measured(NamedTuple):
    """Medians of one row, in microseconds a call. torch_us, ratio: None without torch; copy_us: of pools only."""

    row: Row
    setting: Setting
    funcnn_us: float = math.nan
    torch_us: float | None = None
    ratio: float | None = None  # torch over funcnn, median of paired turns
    turns: int = 0
    calls: int = 0  # of one turn
    waits: str = ""  # the sides whose queue ran empty: what they took is no device time
    copy_us: float | None = None  # of a copy that moves as many bytes as the row must
    bytes: float = 0.0
    error: str = ""  # what went wrong; there are no times then

    @property
    def table(self) -> str:
        return f"{self.row.op}, {self.setting.name}, {self.row.layout}"

    @property
    def share(self) -> float | None:
        """Of the copy bandwidth."""
        return None if self.copy_us is None else self.copy_us / self.funcnn_us


class Overhead(NamedTuple):
    """Host time of one call whose queue is not full, in microseconds; execute_us: within the frontend's, None: unused."""

    call: str
    whole_us: float
    execute_us: float | None
    torch_us: float | None

    @property
    def beyond_us(self) -> float | None:
        return None if self.execute_us is None else self.whole_us - self.execute_us


class Verdict(NamedTuple):
    """One target. passed None: nothing was measured that it could be judged by."""

    target: str
    found: str
    passed: bool | None


def is_conv(measured: Measured) -> bool:
    return measured.row.op.startswith("conv")


def is_judged(measured: Measured) -> bool:
    """Whether the slower side takes long enough and, for a pool, enough memory is moved."""
    if measured.error or measured.waits or max(measured.funcnn_us, measured.torch_us or 0.0) < LEAST_US:
        return False
    return measured.ratio is not None if is_conv(measured) else measured.bytes >= LEAST_BYTES


def geometric_mean(found: Iterable[Measured]) -> float | None:
    """Of torch time over funcnn time, over the judged rows; None: there are none."""
    ratios = [m.ratio for m in found if is_judged(m) and m.ratio is not None]
    return statistics.geometric_mean(ratios) if ratios else None


def by_setting(found: Iterable[Measured]) -> dict[str, list[Measured]]:
    groups: dict[str, list[Measured]] = {}
    for measured in found:
        groups.setdefault(measured.setting.name, []).append(measured)
    return groups


def _number(value: float | None, form: str = ".2f") -> str:
    return "not measured" if value is None else f"{value:{form}}"


def _worst(found: list[tuple[float, str]], most: float, form: str) -> tuple[str, bool | None]:
    """The largest value with its name, and whether it is at most `most`."""
    if not found:
        return "not measured", None
    value, name = max(found)
    return f"{value:{form}} ({name}); {sum(v > most for v, _ in found)} of {len(found)} over", value <= most


def verdicts(found: list[Measured], overheads: list[Overhead]) -> list[Verdict]:
    """Every target with what was found."""
    convs = [m for m in found if is_conv(m) and is_judged(m)]
    pools = [m for m in found if not is_conv(m) and is_judged(m)]
    result = []
    for name, group in by_setting(m for m in found if is_conv(m)).items():
        mean = geometric_mean(group)
        passed = None if mean is None else mean >= MEAN
        result.append(Verdict(f"conv, {name}: geometric mean at least {MEAN:.1f}", _number(mean), passed))
    slow = [(1 / m.ratio, f"{m.table}, {m.row.label}") for m in convs if m.ratio is not None]
    result.append(Verdict(f"conv: no judged row over {SLOWEST:.2f} of torch's time", *_worst(slow, SLOWEST, ".2f")))
    shares = [(-m.share, f"{m.table}, {m.row.label}") for m in pools if m.share is not None]
    text, passed = _worst(shares, -SHARE, ".2f")
    result.append(Verdict(f"pools: {SHARE:.0%} of the copy bandwidth", text.lstrip("-"), passed))
    whole = [(o.whole_us, o.call) for o in overheads]
    result.append(Verdict(f"host: a call under {HOST_US:.0f} us", *_worst(whole, HOST_US, ".1f")))
    beyond = [(o.beyond_us, o.call) for o in overheads if o.beyond_us is not None]
    result.append(Verdict(f"host: under {BEYOND_US:.0f} us beyond execute", *_worst(beyond, BEYOND_US, ".1f")))
    waiting = [f"{m.table}, {m.row.label}" for m in found if "funcnn" in m.waits]
    result.append(Verdict("no call of funcnn waits for the device", "; ".join(waiting) or "none does", not waiting))
    failed = sum(bool(m.error) for m in found)
    text = f"{failed} of {len(found)} do not" if failed else "they do"
    result.append(Verdict("every row runs and agrees with torch", text, not failed))
    return result


def exit_status(judged: list[Verdict], failed: bool) -> int:
    """0: no target is missed; 1: something failed; 3: a target is missed."""
    if failed:
        return 1
    return 3 if any(v.passed is False for v in judged) else 0


def markdown(about: dict[str, Any], found: list[Measured], overheads: list[Overhead], left_out: int) -> str:
    """The page: what it was measured on, the targets, a table for each op, setting and memory order."""
    title = f"# funcnn beside torch on {about['gpu']}"
    if about["double"]:
        title = "# A trial run on the CPU double: its times mean nothing, and nothing is judged"
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items() if value)
    parts = [title, HOW, facts]
    if left_out:
        parts.append(f"{left_out} rows were left out: the time was up.")
    if not about["double"]:
        parts += ["## Targets", _verdict_table(verdicts(found, overheads))]
    if overheads:
        parts += ["## Host time of a call", _overhead_table(overheads)]
    groups: dict[str, list[Measured]] = {}
    for measured in found:
        groups.setdefault(measured.table, []).append(measured)
    for name, group in groups.items():
        mean = geometric_mean(group)
        parts += [f"## {name}" + ("" if mean is None else f": geometric mean {mean:.2f}"), _table(group)]
    return "\n\n".join(parts) + "\n"


HOW = f"""\
Device time of a call: the median of several turns, in each of which up to 20 calls wait in the queue behind a long kernel, so
that the host is never the limit. torch and funcnn take turns, on the same memory. The ratio is torch time over funcnn time:
above 1 funcnn is the faster. TF32, the deterministic flags and autotune (torch: cuDNN's benchmark mode) are alike on both
sides; bfloat16 runs with numerics="fast", as torch has no stricter mode for it. conv_backward is all three gradients, without
the forward. A row is judged where the slower side takes {LEAST_US:.0f} us and, if a pool, {LEAST_BYTES / 1e6:.0f} MB move."""


def _verdict_table(judged: list[Verdict]) -> str:
    words = {True: "met", False: "missed", None: "not judged"}
    lines = [(v.target, v.found, words[v.passed]) for v in judged]
    return tabulate(lines, ("target", "found", ""), tablefmt="github", disable_numparse=True)


def _overhead_table(overheads: list[Overhead]) -> str:
    lines = [(o.call, o.whole_us, o.execute_us, o.beyond_us, o.torch_us) for o in overheads]
    headers = ("call", "funcnn us", "of these in execute", "beyond", "torch us")
    return tabulate(lines, headers, tablefmt="github", floatfmt=".1f")


def _table(group: list[Measured]) -> str:
    lines = []
    for m in group:
        if m.error:
            lines.append((m.row.label, "", "", "", "", m.error))
            continue
        word = f"{m.waits} waits" if m.waits else "yes" if is_judged(m) else "no"
        rate = _rate(m)
        torch_us, ratio = ("" if v is None else f"{v:.{n}f}" for v, n in ((m.torch_us, 1), (m.ratio, 2)))
        lines.append((m.row.label, ratio, torch_us, f"{m.funcnn_us:.1f}", rate, word))
    unit = "TFLOP/s" if is_conv(group[0]) else "% of copy"
    headers = ("row", "torch / funcnn", "torch us", "funcnn us", unit, "judged")
    align = ("left", "right", "right", "right", "right", "left")
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True, colalign=align)


def _rate(measured: Measured) -> str:
    if is_conv(measured):
        return f"{flops(measured.row) / measured.funcnn_us / 1e6:.1f}"
    return "" if measured.share is None else f"{100 * measured.share:.0f}"
