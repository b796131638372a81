"""Print the performance goals beside the measured figures, as a Markdown table.

    python -m benchmarks.goals

Reads benchmarks/results/*.json.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from benchmarks.kept import RESULTS
from torpor.shared.values import GIB, MIB

RESTIC: Final = "restic"
TAR: Final = "tar+lz4+s5cmd"


class Goal(NamedTuple):
    """One figure and its bound."""

    what: str
    sign: str
    bound: float
    measured: Callable[[], float]
    unit: str = ""

    def row(self) -> str:
        """The figure's line of the table."""
        limit = f"{self.sign} {self.bound:g}{self.unit}"
        figure = self.measured()
        met = {"≤": operator.le, "≥": operator.ge}[self.sign](figure, self.bound)
        shown = f"{figure:.3f}" if self.unit == "x" else f"{figure:.2f}"
        return f"| {self.what} | {limit} | {shown}{self.unit} | {'met' if met else 'missed'} |"


def table() -> list[str]:
    """The lines of the table."""
    return [
        "| | goal | measured | |",
        "|---|---|---|---|",
        *(goal.row() for goal in GOALS),
    ]


def _result(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def _figure(result: dict[str, Any], tool: str, step: str, what: str) -> float:
    return float(result["tools"][tool][step][what]["median"])


def _against(
    peer: str, step: str, what: str = "wall_s", result: str = "peers"
) -> Callable[[], float]:
    """torpor's figure as a share of the peer's."""

    def ratio() -> float:
        found = _result(result)
        return _figure(found, "torpor", step, what) / _figure(found, peer, step, what)

    return ratio


def _stored_against_restic() -> float:
    tools = _result("peers")["tools"]
    ours = tools["torpor"]["stored_fixed"]["median"]  # the adaptive choice follows the line
    return float(ours / tools[RESTIC]["stored_full"]["median"])


def _cpu_s_per_gib() -> float:
    result = _result("peers")
    return _figure(result, "torpor", "full", "cpu_s") / (float(result["bytes"]) / GIB)


def _line_share(bytes_of: Callable[[dict[str, Any]], float]) -> Callable[[], float]:
    """Bytes a second of the full snapshot over the shaped line, as a share of the line."""

    def share() -> float:
        result = _result("peers-line-50")
        rate = bytes_of(result) / _figure(result, "torpor", "full", "wall_s")
        return rate / (float(result["line_mib_s"]) * MIB)

    return share


def _bf16_ratio() -> float:
    rows = _result("codecs")["rows"]
    return next(
        float(row["ratio"])
        for row in rows
        if (row["data"], row["codec"]) == ("weights BF16", "planes")
    )


def _many_over_one() -> float:
    return float(_result("replicate-links")["many_over_one"])


def _agent_peak_gib() -> float:
    return float(_result("bigfile-8gib")["agent_peak_mib"]) * MIB / GIB


def _wake_to_ssh_s() -> float:
    """The slower case's."""
    result = _result("renting")
    cases = ("address first", "address last")
    return max(float(result[case]["added_s"]["median"]) for case in cases)


def _deploys(name: str, mbit_s: float) -> dict[str, Any]:
    """What was measured over that line."""
    lines: list[dict[str, Any]] = _result(name)["lines"]
    return next(line for line in lines if line["mbit_s"] == mbit_s)


def _warm(what: str) -> Callable[[], float]:
    return lambda: float(_deploys("deploy", 1000)["warm"][what]["median"])


def _learned_over_bound(mbit_s: float) -> Callable[[], float]:
    """From the rental to the first completion, over the model's plain bytes at the line's rate."""

    def ratio() -> float:
        line = _deploys("first-token", mbit_s)
        return float(line["learned"]["from rental"]["median"] / line["bound_s"])

    return ratio


def _usual_over_learned(mbit_s: float) -> Callable[[], float]:
    return lambda: 1 / float(_deploys("first-token", mbit_s)["learned ratio"])


def _files(peer: str, step: str, what: str = "wall_s") -> Callable[[], float]:
    return _against(peer, step, what, "files-100000")


def _million(peer: str, step: str, what: str = "wall_s") -> Callable[[], float]:
    return _against(peer, step, what, _MILLION)


def _own(result: str, what: str) -> Callable[[], float]:
    """torpor's own figure where nothing has changed."""
    return lambda: _figure(_result(result), "torpor", "unchanged", what)


def _million_peak_gib(of: str) -> Callable[[], float]:
    return lambda: float(_result(_MILLION)[of]) * MIB / GIB


def _lost_s() -> float:
    (size,) = _result("vanished-large")["sizes"]
    return float(size["lost_s"]["p95"])


def _command_s(name: str) -> Callable[[], float]:
    return lambda: float(_result("commands")["commands"][name]["wall_s"]["p95"])


def _overhead_s() -> float:
    """The slower flow's."""
    flows: dict[str, Any] = _result("overhead")["flows"]
    return max(float(flow["overhead_s"]["p95"]) for flow in flows.values())


_LINE: Final = "peers-line-50"
_MILLION: Final = "files-1000000"

GOALS: Final = (
    Goal("full snapshot, time / restic's", "≤", 0.50, _against(RESTIC, "full")),
    Goal("full snapshot, time / tar's", "≤", 0.70, _against(TAR, "full")),
    Goal("full snapshot, CPU / restic's", "≤", 0.35, _against(RESTIC, "full", "cpu_s")),
    Goal("full snapshot, CPU / tar's", "≤", 0.75, _against(TAR, "full", "cpu_s")),
    Goal("full snapshot, CPU per GiB", "≤", 4.0, _cpu_s_per_gib, " s"),
    Goal(
        "50 MiB/s line, share used",
        "≥",
        0.95,
        _line_share(lambda result: float(result["tools"]["torpor"]["stored_full"]["median"])),
    ),
    Goal("50 MiB/s line, goodput / line", "≥", 1.6, _line_share(lambda r: float(r["bytes"]))),
    Goal("50 MiB/s line, time / restic's", "≤", 0.58, _against(RESTIC, "full", result=_LINE)),
    Goal("stored bytes / restic's", "≤", 0.70, _stored_against_restic),
    Goal("BF16 weights, ratio", "≥", 1.50, _bf16_ratio, "x"),
    Goal("1 % changed, time / restic's", "≤", 0.10, _against(RESTIC, "incremental")),
    Goal("100,000 files unchanged, CPU", "≤", 0.6, _own("files-100000", "cpu_s"), " s"),
    Goal("100,000 files, full, time / restic's", "≤", 0.5, _files(RESTIC, "full")),
    Goal(
        "100,000 files, unchanged, CPU / restic's", "≤", 0.2, _files(RESTIC, "unchanged", "cpu_s")
    ),
    Goal("100,000 files, restore, time / restic's", "≤", 0.5, _files(RESTIC, "restore")),
    Goal("100,000 files, restore, time / tar's", "≤", 1.5, _files("tar", "restore")),
    Goal(
        "1,000,000 files, unchanged, time",
        "≤",
        5.0,
        _own(_MILLION, "wall_s"),
        " s",
    ),
    Goal(
        "1,000,000 files, unchanged, CPU",
        "≤",
        5.0,
        _own(_MILLION, "cpu_s"),
        " s",
    ),
    Goal(
        "1,000,000 files, unchanged, CPU / restic's",
        "≤",
        0.2,
        _million(RESTIC, "unchanged", "cpu_s"),
    ),
    Goal("1,000,000 files, full, time / restic's", "≤", 0.5, _million(RESTIC, "full")),
    Goal("1,000,000 files, restore, time / restic's", "≤", 0.5, _million(RESTIC, "restore")),
    Goal("1,000,000 files, restore, time / tar's", "≤", 1.5, _million("tar", "restore")),
    Goal("1,000,000 files, agent's memory", "≤", 0.6, _million_peak_gib("agent_peak_mib"), " GiB"),
    Goal(
        "1,000,000 files, control side's memory",
        "≤",
        0.5,
        _million_peak_gib("control_peak_mib"),
        " GiB",
    ),
    Goal("restore, time / restic's", "≤", 0.25, _against(RESTIC, "restore")),
    Goal("restore, time / tar's", "≤", 0.45, _against(TAR, "restore")),
    Goal("agent's memory, 8 GiB file", "≤", 1.0, _agent_peak_gib, " GiB"),
    Goal("replicate to 8 / to 1, own links", "≤", 1.2, _many_over_one),
    Goal("wake to SSH, beyond the market's", "≤", 3.0, _wake_to_ssh_s, " s"),
    Goal("deploy 4 GiB, warm, 1 Gbit/s", "≤", 30.0, _warm("from rental"), " s"),
    Goal("deploy 4 GiB, warm, share of the line", "≥", 0.95, _warm("line share")),
    Goal("first token, learned / bound, 640 Mbit/s", "≤", 1.15, _learned_over_bound(640)),
    Goal("first token, learned / bound, 1 Gbit/s", "≤", 1.15, _learned_over_bound(1000)),
    Goal("first token, all first / learned, 640 Mbit/s", "≥", 2.0, _usual_over_learned(640)),
    Goal("first token, all first / learned, 1 Gbit/s", "≥", 2.0, _usual_over_learned(1000)),
    Goal("work lost with a machine, 95th percentile", "≤", 75.0, _lost_s, " s"),
    Goal("a flow, beside its work, 95th percentile", "≤", 2.0, _overhead_s, " s"),
    Goal("up of a stopped installation, 95th percentile", "≤", 15.0, _command_s("up"), " s"),
    Goal("status of 20 workspaces, 95th percentile", "≤", 2.0, _command_s("status"), " s"),
)


if __name__ == "__main__":
    print("\n".join(table()))
