"""Traces of spot machines, as GitHub's skypilot-org/spot-traces has them (NSDI 2024).

They have no licence, so they are fetched for a run and never kept here.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

URL: Final = "https://github.com/skypilot-org/spot-traces"


class Zone:
    """When one spot machine can be had in a zone, and until when. The trace repeats at its end."""

    def __init__(self, name: str, gap_s: float, up: Sequence[bool]) -> None:
        self.name = name
        self.gap_s = gap_s
        self._up = list(up)
        self._down = [tick for tick, is_up in enumerate(up) if not is_up]

    @classmethod
    def read(cls, path: Path) -> Zone:
        """A trace of one node."""
        trace = json.loads(path.read_bytes())
        up = [count > 0 for count in trace["data"]]
        return cls(path.name.partition("_")[0], float(trace["metadata"]["gap_seconds"]), up)

    @property
    def seconds(self) -> float:
        """The length of the trace."""
        return len(self._up) * self.gap_s

    @property
    def share_up(self) -> float:
        return 1 - len(self._down) / len(self._up)

    def is_up(self, at_s: float) -> bool:
        return self._up[int(at_s // self.gap_s) % len(self._up)]

    def lost_at_s(self, at_s: float) -> float:
        """When a machine that is up at ``at_s`` is lost; infinity if it never is."""
        if not self._down:
            return math.inf
        whole, tick = divmod(int(at_s // self.gap_s), len(self._up))
        index = bisect_left(self._down, tick)
        if index == len(self._down):
            whole, index = whole + 1, 0
        return (whole * len(self._up) + self._down[index]) * self.gap_s


@contextmanager
def traces(folder: Path | None) -> Iterator[tuple[Path, str]]:
    """The traces in ``folder``, or fetched from GitHub for as long as this lasts; and their
    commit."""
    if folder is not None:
        yield folder, _commit(folder)
        return
    with tempfile.TemporaryDirectory(prefix="torpor-spot-") as scratch:
        fetched = Path(scratch) / "traces"
        argv = ["git", "clone", "--quiet", "--depth", "1", URL, str(fetched)]
        try:
            done = subprocess.run(argv, capture_output=True, check=False)
        except OSError as error:
            raise SystemExit(f"{_without(error)}") from None
        if done.returncode:
            raise SystemExit(_without(done.stderr.decode(errors="replace").strip()))
        yield fetched, _commit(fetched)


def _without(why: object) -> str:
    return (
        f"the traces cannot be fetched from {URL} ({why}): fetch them where that is possible, and "
        "name their folder with --traces"
    )


def _commit(folder: Path) -> str:
    argv = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(argv, capture_output=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.decode().strip() if done.returncode == 0 else "unknown"
