"""One round: the attacker acts on the bucket while torpor goes on, judged from outside."""

from __future__ import annotations

import base64
import logging
import random
import re
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from flows import (
    backup,
    cancel_job,
    compare,
    hibernate,
    job,
    job_status,
    jobs,
    prune,
    reconcile,
    snapshots,
    spend,
    verify,
    wake,
    watch,
)
from flows.procedures.job import attempt, driver, stopped_machine
from tasks.alert_server import NobodyListens
from tasks.plain_runner import PlainRunner
from tests import independent_reader as reader
from tests.attacker.attacks import MARK, Attacker
from tests.attacker.installation import (
    ASLEEP,
    AWAKE,
    COMMANDS,
    DESK,
    ENDED,
    LOGIN,
    LONG_AGO,
    NEAR,
    OPEN,
    OWN,
    STOPPED,
    Installation,
    Tree,
)
from tests.fixtures.memory_store import MemoryStore
from torpor.control.alerts.delivery import Remembered
from torpor.control.jobs import driven_job, policy
from torpor.control.jobs.driven_job import Driven
from torpor.control.jobs.records import Job
from torpor.control.recovery import look_at_bucket
from torpor.control.reports import Row, WakeReport
from torpor.control.store.manifests import snapshot_ids
from torpor.control.store.signatures import Forged, Unsigned
from torpor.shared.errors import (
    InvalidInput,
    MachineInUse,
    RunCancelled,
    StoreMissing,
    TorporError,
    WorkspaceAsleep,
    WorkspaceAwake,
)
from torpor.shared.format.names import manifest_key, settings_key, snapshot_of, snapshots_prefix
from torpor.shared.values import Endpoint, Machine, MachineId, ObjectKey, WorkspaceName

_JOB_FLOW: Final = import_module("flows.job")  # whose name in the package is the flow itself
_NAMED: Final = re.compile(r"workspaces/|canaries/")
_READ: Final = re.compile(r"/rentals/open/[^/]+$|/jobs/open/[0-9a-f]{12}$")
"""What `watch` reads of each workspace."""
_USUAL: Final = (WorkspaceAwake, WorkspaceAsleep, MachineInUse, InvalidInput)
"""What a flow may answer where nobody attacked: it was asked for what is not so."""
_MOST: Final = 1 << 30
_STEPS: Final = (3, 7)
_PATIENT: Final = 20
"""So often a job waits for its turn in one step, before its user cancels it."""


class Memory(NobodyListens):
    """An installation's memory of its alerts, in the round."""

    def __init__(self) -> None:
        self._kept: dict[object, Remembered] = {}

    def remembered(self) -> list[Remembered]:
        return [*self._kept.values()]

    def remember(self, one: Remembered) -> None:
        self._kept[one.key] = one

    def forget(self, one: Remembered) -> None:
        self._kept.pop(one.key, None)


class Runner(PlainRunner):
    """Runs what watch starts, and keeps what every table shows."""

    def __init__(self, *opened: Any, alerts: Memory) -> None:
        super().__init__(*opened, wait_factor=0.0, at_once=4, alerts=alerts)
        self.tables: dict[str, list[Row]] = {}

    def table(self, key: str, rows: Sequence[Row], description: str) -> None:
        self.tables[key] = list(rows)


class Round:
    """``violations``: what must never be; ``did``: what was done, in words; ``counts``: of what
    remains possible."""

    def __init__(self, made: Installation, rng: random.Random) -> None:
        self.violations: list[str] = []
        self.did: list[str] = []
        self.counts: Counter[str] = Counter()
        self._made = made
        self._rng = rng
        self._attacker = Attacker(rng, made.one, made.two)
        self._passed_s = 0.0
        self._memory = Memory()
        self._worked = {str(machine) for machine in made.market.alive}
        """The machines on which their user has worked, or a command."""
        self._of_jobs: set[str] = set()
        self._looks = False
        self._waits = 0
        self._written = 0
        asleep = max(snapshot_ids(made.one, ASLEEP))
        self._newest = {ASLEEP: tree_of(made.one, ASLEEP, asleep, made.store_key)}
        """What the machine held last that torpor has ended, by workspace."""
        made.log_in = self._enter
        made.market.ending = self._ending

    def run(self) -> None:
        """All of it."""
        with self._quick():
            self._attack()
            for _ in range(self._rng.randint(*_STEPS)):
                if self._rng.random() < 0.3:
                    self._attack()
                self._go_on()
            self._watch()
            self._goes_on_elsewhere()

    def _attack(self) -> None:
        for _ in range(self._rng.randint(1, 2)):
            self.did.append(self._attacker.act())

    # -- torpor goes on

    def _go_on(self) -> None:
        self._waits = 0
        steps: list[tuple[int, Callable[[], None]]] = [
            (30, self._watch),
            (25, lambda: self._hibernate(self._rng.choice([AWAKE, AWAKE, NEAR, ASLEEP]))),
            (20, lambda: self._wake(self._rng.choice([ASLEEP, AWAKE, NEAR]))),
            (10, self._job),
            (12, lambda: self._reconcile(self._rng.choice([AWAKE, ASLEEP, NEAR]))),
            (10, self._back_up_own),
            (8, self._back_up),
            (5, self._prune),
            (12, self._look),
            (12, self._recover),
            (15, self._pass),
        ]
        weights, does = zip(*steps, strict=True)
        self._rng.choices(does, weights)[0]()

    def _pass(self) -> None:
        passed_s = self._rng.choice([60, 700, 700, 7300, 90_000])
        self._passed_s += passed_s
        self.did.append(f"{passed_s} s pass")

    def _watch(self) -> None:
        refused = self._refused()
        runner = self._runner()
        report, said = None, ""
        self._looks = True
        try:
            with runner:
                report = watch.fn(dry_run=False)
        except TorporError as error:
            said = str(error)
            self._judge_error("watch", "", error)
        except Exception:  # noqa: BLE001 - the border of the product
            self._violate(f"watch ended with {traceback.format_exc()}")
            return
        finally:
            self._looks = False
        self.did.append(f"watch: {report.message()[:200] if report else said[:200]}")
        if report is None and "watch" not in runner.tables:
            self._violate(f"watch did not complete: {said}")
        shown = f"{runner.tables} {report} {said}"
        for name, keys in refused.items():
            # the first that is refused hides the others of its workspace
            if not re.search(rf"workspaces/{name}/(rentals|jobs)/", shown):
                self._violate(f"watch names no refused record of {name}: {sorted(keys)}")

    def _refused(self) -> dict[str, set[ObjectKey]]:
        """What `watch` must name: records that it reads, and that torpor did not write."""
        one, found = self._made.one, dict[str, set[ObjectKey]]()
        for key in one.names():
            workspace = key.split("/")[1] if key.startswith("workspaces/") else ""
            if workspace not in (AWAKE, ASLEEP, OWN):
                continue
            if not _READ.search(key):
                continue
            ended = ObjectKey(key.replace("/open/", "/ended/"))
            if one.head(ended) is not None and self._is_own(ended):
                continue
            if not self._is_own(key):
                found.setdefault(workspace, set()).add(key)
        return found

    def _is_own(self, key: ObjectKey) -> bool:
        try:
            self._made.one.signer.check(key, self._made.one.body(key))
        except (Forged, Unsigned):
            return False
        return True

    def _hibernate(self, name: WorkspaceName) -> None:
        there = self._made.machines_of(name)
        machine = there[0] if len(there) > 1 else ""
        self._flow(f"hibernate {name}", name, hibernate, machine=machine)

    def _wake(self, name: WorkspaceName) -> None:
        report = self._flow(f"wake {name}", name, wake)
        if not isinstance(report, WakeReport):
            return
        brought = self._made.work(report.machine)
        if any(MARK.encode() in body for body in brought.values()):
            self._violate(f"a wake of {name} brings what the attacker wrote")
        newest = self._newest.pop(name, {})
        if not newest.items() <= brought.items():
            if not self._is_touched(name):
                self._violate(f"a wake of {name} brings an older state, and nobody touched it")
            named = bool(report.warnings)
            words = "and warns" if named else "and says nothing"
            self.counts[f"a wake brings an older snapshot, {words}"] += 1
        self._use(MachineId(report.machine))

    def _job(self) -> None:
        name, one = self._rng.choice([(ASLEEP, OPEN), (ASLEEP, STOPPED), (ASLEEP, ENDED),
                                      (AWAKE, LONG_AGO), (AWAKE, "e" * 12)])  # fmt: skip
        self._flow(f"job {one} of {name}", name, job, job=one)

    def _reconcile(self, name: WorkspaceName) -> None:
        self._flow(f"reconcile {name}", name, reconcile, abandoned=self._rng.random() < 0.8)

    def _back_up_own(self) -> None:
        self._flow("back up my own", OWN, hibernate, machine=DESK, destroy=False)

    def _back_up(self) -> None:
        """With a retention, which deletes what its receipts let it."""
        there = self._made.machines_of(AWAKE)
        held = self._made.work(there[0]) if len(there) == 1 else None
        done = self._flow(f"back up {AWAKE}", AWAKE, backup, keep_last=1)
        if done is not None and held is not None and not self._is_stored(AWAKE, held):
            self._violate("a backup says that it has stored what no snapshot has")

    def _look(self) -> None:
        """What shows, and what checks."""
        name = self._rng.choice([AWAKE, ASLEEP, OWN])
        one = self._rng.choice([*COMMANDS, "e" * 12])
        looks: list[tuple[str, Any, dict[str, Any]]] = [
            ("snapshots", snapshots, {}),
            ("verify", verify, {"snapshot": self._rng.choice(["newest", "all"])}),
            ("job-status", job_status, {"job": one}),
            ("cancel-job", cancel_job, {"job": one}),
            ("jobs", jobs, {}),
        ]
        if self._rng.random() < 0.2:  # of all workspaces of the bucket
            what, flow = self._rng.choice([("spend", spend), ("compare", compare)])
            self._flow(what, name, flow, of_all=True)
            return
        what, flow, options = self._rng.choice(looks)
        self._flow(f"{what} {name}", [name] if flow is jobs else name, flow, **options)

    def _recover(self) -> None:
        """Another host makes the blocks again: only with settings that torpor wrote last, as far as
        anybody can tell."""
        one, made = self._made.one, self._made
        try:
            found, _ = look_at_bucket(one, made.store_key)
        except TorporError as error:
            self._judge_error("recover", "", error)
            return
        there = {of.name: of.settings for of in found if of.settings is not None}
        for name, settings in there.items():
            own = made.opened.get(name)
            wanted = own.settings() if own is not None else None
            if settings == wanted:
                continue
            if settings_key(name) not in self._attacker.played_back:
                self._violate(f"recover takes settings that torpor did not write: {settings}")
            else:
                self.counts["recover takes older settings, which were put back"] += 1
        unread = {key for of in found for key in of.unread}
        for name in (AWAKE, ASLEEP, OWN):
            key = settings_key(name)
            if key not in self._attacker.touched and name not in there:
                self._violate(f"recover lacks {key}, which nobody touched")
            if one.head(key) is not None and name not in there and key not in unread:
                self._violate(f"recover neither takes nor names {key}")
        said = b"".join(body for bodies in one.bodies.values() for body in bodies)
        if made.store_key is not None and LOGIN.encode() in said:
            self._violate("the login to machines is in the bucket for everybody")
        self.did.append(f"recover: {len(there)} records, {len(unread)} not believed")

    def _prune(self) -> None:
        name = self._rng.choice([AWAKE, ASLEEP, OWN])
        self._flow(f"prune {name}", name, prune, dry_run=False)

    def _flow(
        self, what: str, name: Any, flow: Any, *, of_all: bool = False, **options: Any
    ) -> Any:
        """What the flow reports; None where it fails, as it should. ``of_all``: it reads what other
        workspaces have, too."""
        answer: Any = None
        try:
            with self._runner():
                answer = flow.fn(name, **options)
            said = type(answer).__name__
        except TorporError as error:
            said = f"{type(error).__name__}: {error}"
            of = name if isinstance(name, str) else name[0]
            self._judge_error(what, "" if of_all else of, error)
        except Exception:  # noqa: BLE001 - the border of the product
            self._violate(f"{what} ended with {traceback.format_exc()}")
            said = "a bug"
        self.did.append(f"{what}: {said[:300]}")
        return answer

    def _runner(self) -> Runner:
        return Runner(*self._made.opened.values(), alerts=self._memory)

    def _use(self, host: str) -> None:
        """Its user works there."""
        self._written += 1
        self._made.write(host, f"late-{self._written}.txt", b"not saved %d" % self._written)
        self._worked.add(host)

    # -- the judge

    def _violate(self, words: str) -> None:
        self.violations.append(words)

    def _judge_error(self, what: str, name: str, error: TorporError) -> None:
        words = str(error)
        if not _NAMED.search(words) and not any(one in words for one in self._made.opened):
            self._violate(f"{what} fails and names neither object nor workspace: {words}")
        if name and not self._is_touched(name) and not isinstance(error, _USUAL):
            self._violate(f"{what} fails, though nobody touched {name}: {error!r}")

    def _is_touched(self, name: str) -> bool:
        if name == NEAR:
            return False
        return any(key.split("/")[1] == name or key.startswith("canaries/")
                   for key in self._attacker.touched)  # fmt: skip

    def _enter(self, endpoint: Endpoint) -> Callable[[bytes], None]:
        host = endpoint.host
        machine = self._made.market.alive.get(MachineId(host))
        if host != "desk" and machine is None:
            self._violate(f"a login on {endpoint}, which nobody named")
        if endpoint.jump is not None:
            self._violate(f"a login on {host} through {endpoint.jump.host}, which nobody named")
        if endpoint.host_key not in (None, self._made.host_key(host)):
            self._violate(f"a login on {host} takes the key {endpoint.host_key}")
        if endpoint.host_key is None and host in self._made.met:
            what = "my own machine" if host == "desk" else "a rented machine"
            self.counts[f"pinned again at a login: the host key of {what}"] += 1
        label = None if machine is None else machine.label
        of = OWN if host == "desk" else label.workspace if label else ""
        foreign = {
            name: base64.b64encode(key)
            for name, key in self._made.keys.items()
            if key is not None and name != of
        }

        def hear(line: bytes) -> None:
            for name, key in foreign.items():
                if key in line:
                    self._violate(f"the key of workspace {name} goes to {host} of {of}")
            if MARK.encode() in line:
                self._violate(f"{host} is asked for what the attacker wrote: {line[:300]!r}")

        return hear

    def _ending(self, machine: Machine) -> Callable[[], None]:
        held = self._made.work(machine.id)
        name = WorkspaceName(machine.label.workspace) if machine.label else WorkspaceName("")

        def ended() -> None:
            self.did.append(f"machine {machine.id} of {name} was ended")
            if machine.id in self._worked:
                self._newest[name] = held
            if self._looks and machine.id in self._worked - self._of_jobs:
                self.counts["watch hibernates a machine in use, whose work is stored"] += 1
            if machine.id in self._worked and not self._is_stored(name, held):
                self._violate(f"machine {machine.id} of {name} was ended; no snapshot has its work")

        return ended

    def _is_stored(self, name: WorkspaceName, work: Tree) -> bool:
        store = self._made.store_of(name)
        for found in sorted(store.list(snapshots_prefix(name)), key=lambda one: one.key)[::-1]:
            try:
                tree = tree_of(store, name, snapshot_of(found.key), self._made.store_key)
            except (reader.RefusedError, StoreMissing, InvalidInput, TorporError):
                continue
            if work.items() <= tree.items():
                return True
        return False

    def command(self, driven: Driven) -> None:
        """A command is about to start."""
        one = driven.job
        if one.command != COMMANDS.get(one.id) or one.env or one.secrets or one.save:
            self._violate(f"job {one.id} runs {one.command}, {one.env}, {one.secrets}, {one.save}")
        if one.id in (ENDED, LONG_AGO):
            self.counts["an ended job of the user's own runs again"] += 1
        if one.id == STOPPED:
            self.counts["a job of the user's own runs that was to be stopped"] += 1
        self.did.append(f"the command of job {one.id} runs")

    def use(self, host: str) -> None:
        """A command works there."""
        self._of_jobs.add(host)
        self._use(host)

    def _goes_on_elsewhere(self) -> None:
        """The workspace of the other bucket, which nobody could touch, is saved and woken."""
        before = len(self.violations)
        there = self._made.machines_of(NEAR)
        if there:
            self._hibernate(NEAR)
        self._wake(NEAR)
        if not self._made.machines_of(NEAR) and len(self.violations) == before:
            self._violate(f"workspace {NEAR} of the other bucket does not go on")

    # -- time

    @contextmanager
    def _quick(self) -> Iterator[None]:
        """Hours pass between two steps, and a job waits for nobody."""
        real, story, wait = time.time, self, driver.Driver.wait_for_turn

        def wait_for_turn(waiting: driver.Driver) -> Job | None:
            """For as long as its user is patient: what the first job needs may be gone."""
            story._waits += 1
            if story._waits > _PATIENT:
                name = waiting.job.workspace
                raise RunCancelled(f"its user cancels a job of workspace {name} that waits")
            return wait(waiting)

        class Ends:
            """The command of a job, which writes a file and ends."""

            def __init__(self, _: Any, driven: Driven, machine: Machine, *__: Any) -> None:
                self._driven, self._machine = driven, machine

            def run(self) -> None:
                if self._driven.job.attempt is None:
                    story.command(self._driven)
                    self._driven.begin_attempt(self._machine, False, 4.0)
                    story.use(self._machine.id)
                stops = self._driven.look_for_stop() is not None
                end = {"end": "stopped"} if stops else {"end": "command ended", "status": 0}
                self._driven.change_attempt(**end)

        with ExitStack() as stack:
            stack.enter_context(patch("time.time", lambda: real() + self._passed_s))
            for module, name, value in (
                (driven_job, "STOP_S", 0.05),
                (attempt, "POLL_S", 0.01),
                (driver, "RETRY_S", 0.01),
                (driver, "LONGEST_S", 0.02),
                (driver, "SURE_S", 0.01),
                (driver, "UNPROVEN_S", 0.05),
                (driver, "TURN_S", 0.01),
                (stopped_machine, "POLL_S", 0.01),
                (stopped_machine, "RESTART_S", 0.05),
                (stopped_machine, "GONE_S", 0.05),
                (policy, "WAITS_S", (0.01,)),
                (driver, "Attending", Ends),
                (driver.Driver, "wait_for_turn", wait_for_turn),
            ):
                stack.enter_context(patch.object(module, name, value))
            logging.disable(logging.CRITICAL)
            try:
                yield
            finally:
                logging.disable(logging.NOTSET)


def tree_of(store: MemoryStore, name: WorkspaceName, taken: str, store_key: bytes | None) -> Tree:
    """What a snapshot restores to, by a reader that shares no code with torpor."""
    keys = reader.Keys(store_key, name)
    blob = store.get(manifest_key(name, snapshot_of(f"/{taken}")), max_bytes=_MOST)
    manifest = reader.read_manifest(blob, keys, name, taken)
    folder = Path(tempfile.mkdtemp(prefix="torpor-judge-"))

    def get(key: str, offset: int, length: int) -> bytes:
        return store.get(ObjectKey(key), max_bytes=_MOST)[offset : offset + length]

    try:
        targets = [str(folder / str(number)).encode() for number in range(len(manifest.roots))]
        reader.restore(manifest, get, keys, targets)
        root = folder / "0"
        files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
        return {str(path.relative_to(root)): path.read_bytes() for path in files}
    finally:
        shutil.rmtree(folder)
