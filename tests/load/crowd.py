"""Many jobs at once, each on a workspace of its own, in a real installation over fake markets."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from botocore.exceptions import BotoCoreError

from blocks import ObjectStore, Tuning, Workspace
from blocks.reference import load_named
from deployments.api import Api
from deployments.worker import POOLS
from tasks.runs import JOB_POOL
from tasks.workspace_blocks import open_workspace
from tests.campaign.command import Violations
from tests.fixtures.deployed import ENDED, Deployed
from tests.fixtures.manifests import entry, honest
from tests.fixtures.own_installation import Alone
from tests.jobs import training
from tests.jobs.saved_state import state_in
from tests.markets.every import Markets
from tests.markets.market import Rented
from tests.markets.world import AheadClock
from torpor.control.jobs.policy import MOST_LOSSES, losses
from torpor.control.jobs.records import Job, Jobs, new_job_id
from torpor.control.providers.labels import label_in
from torpor.control.rental.records import Rentals
from torpor.control.store.object_store import ObjectStore as Store
from torpor.shared.errors import TorporError
from torpor.shared.format.keys import Seal, workspace_key
from torpor.shared.format.manifest import DIRECTORY, encode_manifest
from torpor.shared.format.names import manifest_key
from torpor.shared.values import WorkspaceName, new_snapshot_id

BLOCK: Final = "load"
MARKETS: Final = ("vast", "runpod")
QUEUES: Final = next(pool.queues for pool in POOLS if pool.name == JOB_POOL)
STEPS: Final = 100
LOOK_S: Final = 3.0
RUNS_S: Final = 20.0
POLL_S: Final = 5.0
"""A worker asks for runs every two seconds, and takes what it got one after the other."""


@dataclass
class Task:
    """A job as its user submitted it."""

    workspace: WorkspaceName
    queue: str
    run: str
    submitted_unix: float
    taken_unix: float = 0.0
    job: Job | None = None
    lost: str = ""

    @property
    def over(self) -> bool:
        return bool(self.lost) or (self.job is not None and self.job.ended)

    @property
    def may_lose(self) -> bool:
        """Whether it goes on after the loss of its machine, as far as its record says."""
        return self.job is not None and losses(self.job.attempts[:-1]) < MOST_LOSSES - 1

    @property
    def to_gpu_s(self) -> float | None:
        """Seconds from its submission to the first start of its command."""
        begun = self.job.attempts if self.job else []
        return begun[0].began_unix - self.submitted_unix if begun else None


@dataclass
class Crowd:
    """``preempted``: machines that their market took away, by workspace."""

    alone: Alone
    markets: Markets
    rng: random.Random
    store: Store
    store_key: bytes
    violations: Violations = field(default_factory=Violations)
    preempted: Counter[str] = field(default_factory=Counter)
    tasks: list[Task] = field(default_factory=list)
    _runs_at: float = 0.0

    def submit(self, number: int, seconds: float) -> None:
        """Submit so many jobs, whose commands work for ``seconds`` each, in random queues."""
        source = Path(training.__file__).read_text()
        command = ["python3", "-c", source, str(STEPS), str(seconds / STEPS)]
        deployed = Deployed(self.alone.server.api_url)
        for name in names(number):
            self._store_nothing(name)
            queue = self.rng.choice(QUEUES)
            given = {"workspace": name, "command": command, "save_minutes": 0.2, "spot": "allowed"}
            asked_unix = time.time()
            run = deployed.start("job", given, queue)
            self.tasks.append(Task(name, queue, run, asked_unix))

    def _store_nothing(self, name: WorkspaceName) -> None:
        """The workspace's first snapshot, of an empty directory: a job wakes what was stored."""
        snapshot = new_snapshot_id(datetime.now(timezone.utc))
        empty = {"entries": [entry(DIRECTORY, b"")], "chunks": [], "packs": []}
        manifest = honest(workspace=name, snapshot=snapshot, **empty)
        blob, _ = encode_manifest(manifest, Seal(workspace_key(self.store_key, name)))
        self.store.put(manifest_key(name, snapshot), blob)

    def look(self) -> bool:
        """Read the records of the jobs that have not ended; whether all have."""
        for task in self.tasks:
            if not task.over:
                with suppress(TorporError, BotoCoreError):  # the store is away
                    task.job = self.jobs(task).of(new_job_id(task.run)) or task.job
        if time.monotonic() > self._runs_at + RUNS_S:
            self._runs_at = time.monotonic()
            with suppress(TorporError):  # the server is away
                self._look_for_lost_runs()
        return all(task.over for task in self.tasks)

    def _look_for_lost_runs(self) -> None:
        states = {run["id"]: run["state_type"] for run in self.runs()}
        for task in self.tasks:
            # one that crashed starts again
            if task.job is None and states.get(task.run) in {*ENDED} - {"CRASHED"}:
                task.job = self.jobs(task).of(new_job_id(task.run))  # its run has just ended
                if task.job is None:
                    task.lost = f"its run is {states[task.run]} and has begun no job"

    def runs(self) -> list[dict[str, Any]]:
        """All runs of the pool of jobs."""
        with Api(self.alone.server) as api:
            return api.all(
                "flow_runs/filter",
                {"work_pools": {"name": {"any_": [JOB_POOL]}}, "sort": "ID_DESC"},
            )

    def jobs(self, task: Task) -> Jobs:
        return Jobs(self.store, task.workspace)

    def working(self) -> list[tuple[Task, str, Rented]]:
        """The jobs whose command was last seen on a machine that its market still has."""
        machines = {m.id: (at, m) for at in MARKETS for m in self.markets.fakes[at].market.alive()}
        return [
            (task, *machines[task.job.attempt.machine])
            for task in self.tasks
            if task.job and task.job.attempt and task.job.attempt.machine in machines
        ]

    # -- what must hold

    def judge(self, *, ordered: bool) -> None:
        """At the end. ``ordered``: no fault has changed the order in which runs began."""
        for task in self.tasks:
            self._judge_task(task)
        for at in MARKETS:
            for machine in self.markets.fakes[at].market.alive():
                self.violations.add(f"machine {machine.id} at {at} ({machine.label}) is left")
        self._judge_rents()
        self._see_when_taken()
        if ordered:
            self._judge_order()

    def _judge_task(self, task: Task) -> None:
        if task.job is None or task.job.state != "succeeded" or task.job.final is None:
            outcome = task.job.outcome if task.job else task.lost or "never begun"
            self.violations.add(f"the job of {task.workspace} (run {task.run}): {outcome}")
            return
        state = state_in(self.store, self.store_key, task.workspace, task.job.final)
        if state != training.uninterrupted(STEPS):
            self.violations.add(f"the job of {task.workspace} ended with {state}")
        for rental in Rentals(self.store, task.workspace).open():
            self.violations.add(f"rental {rental.label.rental} of {task.workspace} is open")

    def _judge_rents(self) -> None:
        """No two machines of a workspace at the same time."""
        rented: dict[str, list[Rented]] = {}
        for at in MARKETS:
            for machine in self.markets.fakes[at].market.rented:
                label = label_in(machine.label)
                assert label is not None
                rented.setdefault(label.workspace, []).append(machine)
        for workspace, machines in rented.items():
            for a, b in pairwise(sorted(machines, key=lambda one: one.created_unix)):
                if b.created_unix < (a.ended_unix or time.time()):
                    self.violations.add(f"{workspace}: machine {b.id} beside {a.id}")

    def _see_when_taken(self) -> None:
        with Api(self.alone.server) as api:
            for task in self.tasks:
                states = api.ask("GET", f"flow_run_states/?flow_run_id={task.run}")
                began = min((s["timestamp"] for s in states if s["type"] == "RUNNING"), default="")
                at = [s["timestamp"] for s in states if s["type"] == "PENDING"]
                if at := [one for one in at if one < began]:
                    # a worker puts back what it took before one of a better queue had come
                    last = max(at).replace("Z", "+00:00")
                    task.taken_unix = datetime.fromisoformat(last).timestamp()

    def _judge_order(self) -> None:
        """No run is taken while one of a better queue waits."""
        for task in self.tasks:
            for better in self.tasks:
                waited = better.submitted_unix + POLL_S < task.taken_unix
                late = task.taken_unix + POLL_S < better.taken_unix
                if QUEUES.index(better.queue) < QUEUES.index(task.queue) and waited and late:
                    self.violations.add(
                        f"{task.workspace} ({task.queue}) was taken "
                        f"{better.taken_unix - task.taken_unix:.0f} s before "
                        f"{better.workspace} ({better.queue})"
                    )

    @property
    def recovered(self) -> int:
        """Losses of machines whose job has ended well."""
        well = [one.workspace for one in self.tasks if one.job and one.job.state == "succeeded"]
        return sum(self.preempted[workspace] for workspace in well)


@contextmanager
def gathered(alone: Alone, markets: Markets, number: int, seed: int) -> Iterator[Crowd]:
    """A crowd of so many workspaces, whose blocks are deleted in the end: runs of other tests load
    all that a server has. This process talks to the installation's server."""
    for name in MARKETS:
        markets.fakes[name].market.clock = AheadClock()
        for block in markets.blocks(name, BLOCK):
            block.save(BLOCK, overwrite=True)
    Tuning().save(BLOCK, overwrite=True)
    first, *more = [f"{name}-provider/{BLOCK}" for name in MARKETS]
    for workspace in names(number):
        Workspace(
            name=workspace, provider=first, more_providers=more, gpu="H100", tuning=BLOCK
        ).save(workspace, overwrite=True)
    opened = open_workspace(names(number)[0])
    key = load_named(ObjectStore, "default", of="a test").key()
    assert key is not None
    try:
        yield Crowd(alone, markets, random.Random(seed), opened.store, key)
    finally:
        for workspace in names(number):
            Workspace.delete(workspace)
        markets.delete_blocks(MARKETS, BLOCK)
        Tuning.delete(BLOCK)


def names(number: int) -> list[WorkspaceName]:
    return [WorkspaceName(f"load-{n:03}") for n in range(number)]
