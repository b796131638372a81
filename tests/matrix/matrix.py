"""The rows of the matrix: a run that is stopped in one of its steps, and two runs at once."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

from tests.fixtures.deployed import Deployed
from tests.fixtures.world import World
from tests.matrix.bench import Bench, benched
from tests.matrix.runs import POLL_S, PlainRun, Run, UiRun, wait_for
from tests.matrix.uses import USES, Use

MEANS: Final = ("ui", "ctrl-c", "kill")
_SIGNALS: Final = {"ctrl-c": signal.SIGINT, "kill": signal.SIGKILL}
_COLUMNS: Final = (
    "flow", "stopped", "ended", "seconds", "the user reads", "machines", "then", "files",
)  # fmt: skip


@dataclass
class Row:
    """``seconds``: from the stop, or of a pair from its start, to the end of the last run."""

    what: str
    stopped: str = ""
    ended: str = ""
    seconds: float = 0.0
    read: str = ""
    machines: int = 0
    again: str = ""
    faults: list[str] = field(default_factory=list)

    @staticmethod
    def head() -> list[str]:
        return [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]

    def line(self) -> str:
        files = "; ".join(self.faults) or "identical"
        cells = (self.what, self.stopped, self.ended, f"{self.seconds:.1f}", self.read)
        cells = (*cells, str(self.machines), self.again, files)
        return f"| {' | '.join(_cell(cell) for cell in cells)} |"


class Matrix:
    """``deployed``: the installation whose worker carries out what the UI cancels."""

    def __init__(self, world: World, deployed: Deployed | None) -> None:
        self._world = world
        self._deployed = deployed
        self._numbers = itertools.count(1)

    def stops(
        self, uses: Sequence[Use], means: Sequence[str], wanted: Sequence[str] = ()
    ) -> Iterator[Row]:
        """Each flow, stopped in each of its steps, or the ``wanted`` ones."""
        for use in uses:
            steps = self._steps(use)
            for step in [step for step in steps if not wanted or step in wanted]:
                for by in means:
                    yield self.stop(use, step, by)

    def pairs(self, uses: Sequence[Use]) -> Iterator[Row]:
        """Each two flows that change something, of which one is among ``uses``. Where they begin
        from different states, from both."""
        changing = [use for use in USES if use.changes]
        for pair in itertools.combinations_with_replacement(changing, 2):
            if set(pair) & set(uses):
                for begins in sorted({use.begins for use in pair}):
                    yield self.pair(*pair, awake=begins == "awake")

    def stop(self, use: Use, step: str, by: str) -> Row:
        row = Row(use.flow, f"{step}, {by}")
        with self._benched(use.begins == "awake", by) as bench:
            run = self._start(bench, use, by)
            while not run.ended() and step not in run.steps():
                time.sleep(POLL_S)
            run.stop()
            row.ended, row.seconds = wait_for(run)
            row.stopped = f"{(run.steps() or ['start'])[-1]}, {by}"
            row.read, row.machines = run.read(), len(bench.machines())
            row.faults += bench.unnamed()
            again = self._start(bench, use, by)
            said, seconds = wait_for(again)
            row.again = f"{said} after {seconds:.1f} s: {again.read()}"
            self._judge(row, bench, row.ended, said)
        return row

    def pair(self, first: Use, second: Use, awake: bool) -> Row:
        row = Row(f"{first.flow} + {second.flow}", "awake" if awake else "asleep")
        with self._benched(awake, "kill") as bench:
            began = time.monotonic()
            runs = [self._start(bench, use, "kill") for use in (first, second)]
            ended = [wait_for(run)[0] for run in runs]
            row.seconds = time.monotonic() - began
            row.ended = " + ".join(ended)
            row.read = " + ".join(run.read() for run in runs)
            row.machines = len(bench.machines())
            self._judge(row, bench, *ended)
        return row

    def _steps(self, use: Use) -> list[str]:
        """The steps of an undisturbed run, in order."""
        with self._benched(use.begins == "awake", "kill") as bench:
            run = self._start(bench, use, "kill")
            ended, _ = wait_for(run)
            assert ended == "completed", f"{use.flow}, undisturbed, {ended}: {run.read()}"
            return [*dict.fromkeys(run.steps())]

    def _benched(self, awake: bool, by: str) -> AbstractContextManager[Bench]:
        return benched(self._world, f"row{next(self._numbers)}", awake=awake, saved=by == "ui")

    def _start(self, bench: Bench, use: Use, by: str) -> Run:
        parameters = use.parameters(bench)
        if by == "ui":
            assert self._deployed is not None
            return UiRun(self._deployed, use.deployment, workspace=bench.name, **parameters)
        return PlainRun(bench.world.opened, use.flow, _SIGNALS[by], **parameters)

    def _judge(self, row: Row, bench: Bench, *ended: str) -> None:
        row.faults += bench.unnamed()
        row.faults += ["a run never ends" for end in ended if end == "hangs"]
        row.faults += bench.lost()


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:160] or "-"
