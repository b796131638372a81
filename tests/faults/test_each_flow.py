"""Each flow that acts on a workspace is stopped before some of its steps, and meets any other flow
between two of them: no byte is lost, no machine is without a rental, and the next run completes.
Over machines in memory."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pytest
from prefect.flows import Flow

import flows
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import DEMO, Lab, make_lab
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.trees import Tree, facts, fill, let_settle, mutate
from torpor.control.jobs.records import Job
from torpor.shared.errors import ProviderUnavailable, StoreUnavailable, TorporError, WorkspaceAwake
from torpor.shared.values import Machine

SOME: Final = 2
"""Steps of each flow before which it is stopped, beside the last; and other flows that it meets."""


def _oldest(lab: Lab) -> str:
    return lab.snapshots()[-1].snapshot


def _job(lab: Lab) -> str:
    """A job on record, which nobody drives."""
    jobs = lab.opened.jobs
    job = Job(
        id=secrets.token_hex(6),
        workspace=jobs.workspace,
        block=DEMO,
        command=["true"],
        created_unix=time.time(),
    )
    return msgspec.structs.replace(jobs.take(job, "a run that is gone")).id


@dataclass(frozen=True)
class Use:
    """A flow, whether its workspace is awake before, and its parameters."""

    flow: Flow[..., Any]
    awake: bool = True
    parameters: Callable[[Lab], dict[str, Any]] = lambda lab: {}

    def run(self, lab: Lab, before: Callable[[str], None] = lambda step: None) -> None:
        given = self.parameters(lab)
        with PlainRunner(lab.opened, wait_factor=0.001, before=before):
            self.flow.fn(DEMO, **given)


USES: Final = {
    use.flow.name: use
    for use in (
        Use(flows.create, awake=False),
        Use(flows.wake, awake=False),
        Use(flows.replicate, awake=False, parameters=lambda lab: {"count": 2, "peers": "always"}),
        Use(flows.hibernate),
        Use(flows.backup, parameters=lambda lab: {"keep_last": 1}),
        Use(flows.sync, parameters=lambda lab: {"snapshot": _oldest(lab)}),
        Use(flows.restore_path, parameters=lambda lab: {"path": "lib", "into": "~/recovered"}),
        Use(flows.verify, parameters=lambda lab: {"depth": "full"}),
        Use(flows.cancel_job, parameters=lambda lab: {"job": _job(lab)}),
        Use(flows.delete_snapshots, parameters=lambda lab: {"snapshots": [_oldest(lab)]}),
        Use(flows.prune, parameters=lambda lab: {"dry_run": False}),
        Use(flows.pin, parameters=lambda lab: {"snapshot": _oldest(lab), "reason": "a test"}),
        Use(flows.reconcile),
    )
}


STOPPED: Final = [name for name in USES if name != "cancel-job"]  # which has no steps
DONE: Final[dict[str, type[TorporError]]] = {
    "wake": WorkspaceAwake,
    "create": WorkspaceAwake,
}
"""What a flow says where the run before it was stopped too late."""


class Bench:
    """A workspace with two snapshots, awake or asleep, and all that it ever was."""

    def __init__(self, lab: Lab, *, awake: bool) -> None:
        self.lab = lab
        machine = lab.rent()
        place = lab.workspace(machine.id)
        fill(place, random.Random(1), big=1, big_bytes=100_000)
        self._states: list[Tree] = []
        for last in (False, True):
            let_settle()
            self._states.append(_tree(lab, machine))
            if last and not awake:
                hibernate_plainly(lab.opened)
            else:
                run_plainly(lab.opened, flows.backup)
            if not last:
                mutate(place, random.Random(2))

    def wrong(self) -> list[str]:
        """Machines that no open rental names, and what is in no machine and no snapshot. Where no
        machine has the workspace, the newest snapshot is woken."""
        lab = self.lab
        named = {rental.label for rental in lab.opened.rentals.open()}
        found = [f"{m.id} is in no open rental" for m in lab.machines() if m.label not in named]
        assert lab.verify_listed() == len(lab.snapshots())
        if not self._whole():
            lab.lose_machines()
            lab.forget_rentals()
            wake_plainly(lab.opened)
        states = [_tree(lab, machine) for machine in self._whole()]
        return found + ["other files" for tree in states if tree not in self._states]

    def _whole(self) -> list[Machine]:
        """Those that a user has and that hold the workspace."""
        handed = {r.label for r in self.lab.opened.rentals.open() if r.state == "handed over"}
        return [m for m in self.lab.machines() if m.label in handed and _tree(self.lab, m)]


def _tree(lab: Lab, machine: Machine) -> Tree:
    place = lab.workspace(machine.id)
    found = facts(place) if place.exists() else {}
    return {path: fact for path, fact in found.items() if path and not path.startswith(b".torpor-")}


@contextmanager
def _bench(use: Use) -> Iterator[Bench]:
    with make_lab() as lab:
        yield Bench(lab, awake=use.awake)


class _Stop:
    """Ends the run before its step of this ``number``. ``killed``: what it would clean up reaches
    neither the store nor the market any more, as nothing of a killed process does."""

    def __init__(self, lab: Lab, number: int, *, killed: bool) -> None:
        self._lab = lab
        self._number = number
        self._killed = killed
        self._begun = 0

    @property
    def met(self) -> bool:
        return self._begun >= self._number

    def __call__(self, step: str) -> None:
        self._begun += 1
        if not self.met:
            return
        if self._killed:
            self._lab.store.fails = StoreUnavailable("the run was killed")
            self._lab.market.away = ProviderUnavailable("the run was killed")
        raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["interrupted", "killed"])
@pytest.mark.parametrize("name", STOPPED)
def test_a_flow_that_was_stopped_before_a_step_is_completed_by_the_next(
    name: str, how: str
) -> None:
    """Before its last step and before some others. What the stopped run had done already, the next
    one refuses to do again."""
    use, seed = USES[name], secrets.randbelow(1 << 32)
    last = _steps(use)
    for number in {*random.Random(seed).sample(range(1, last), min(SOME, last - 1)), last}:
        where = f"{name}, {how} before step {number} of {last}, seed {seed}"
        with _bench(use) as bench:
            stop = _Stop(bench.lab, number, killed=how == "killed")
            with suppress(KeyboardInterrupt, TorporError):  # a replicate reports them
                use.run(bench.lab, stop)
            assert stop.met, where
            bench.lab.store.fails = bench.lab.market.away = None
            for near in bench.lab.market.near.values():
                near.restart()  # as the agent of a run whose control side is gone, after a minute
            try:
                use.run(bench.lab)
            except TorporError as error:
                assert isinstance(error, DONE.get(name, ())), where
            assert bench.wrong() == [], where


def _steps(use: Use) -> int:
    """How many steps it takes undisturbed."""
    steps: list[str] = []
    with _bench(use) as bench:
        use.run(bench.lab, steps.append)
    return len(steps)


@pytest.mark.parametrize("first", STOPPED)
def test_of_two_flows_at_once_none_loses_a_byte(first: str) -> None:
    """The second runs as a whole before a random step of the first. Either may be refused."""
    seed = secrets.randbelow(1 << 32)
    dice = random.Random(seed)
    last = _steps(USES[first])
    for second in dice.sample([*USES], SOME):
        number = dice.randrange(last)
        where = f"{first}, {second} before step {number} of {last}, seed {seed}"
        with _bench(USES[first]) as bench:
            begun = itertools.count()

            def before(step: str) -> None:
                if next(begun) == number:  # noqa: B023 - it is called in this round alone
                    _refused(lambda: USES[second].run(bench.lab))  # noqa: B023

            _refused(lambda: USES[first].run(bench.lab, before))
            assert bench.wrong() == [], where


def _refused(run: Callable[[], object]) -> None:
    with suppress(TorporError):
        run()
