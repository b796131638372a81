"""One round: two control sides of one bucket work on one workspace at once, and burn down at random
requests, judged from outside."""

from __future__ import annotations

import contextvars
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final
from unittest.mock import patch

from flows import backup, create, hibernate, prune, reconcile, wake, watch
from flows.procedures.job import attempt, driver, stopped_machine
from tasks import watch as watch_steps
from tasks.autosave import NO_SAVES, AutosaveSummary
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.attacker.round import tree_of
from tests.fixtures.lab import DEMO, Lab
from tests.sides.side import Burnt, Side, asking, owner_of
from torpor.control.jobs import driven_job, policy
from torpor.control.jobs.driven_job import Driven
from torpor.control.safety import Warrant
from torpor.control.store.manifests import snapshot_ids
from torpor.shared.errors import RunCancelled, StoreCorrupt, StoreUnavailable, TorporError
from torpor.shared.values import Machine, MachineId

_JOB: Final = import_module("flows.job")  # whose name in the package is the flow itself
_STEPS: Final = (4, 9)
_REQUESTS: Final = (1, 260)
"""A flow sends some hundred requests at most: it burns down at any of them."""
_FAULTS: Final = (StoreUnavailable, StoreCorrupt)
"""Of which neither says that nobody owns the workspace."""
_LEFT_OUT: Final = ["*.tmp"]
_PATIENT: Final = 40
"""So often a job looks what comes next, before its user cancels it."""
Tree = dict[str, bytes]


class Round:
    """``violations``: what must never be; ``did``: what was done, in words."""

    def __init__(self, lab: Lab, rng: random.Random) -> None:
        self.violations: list[str] = []
        self.did: list[str] = []
        self.counts: Counter[str] = Counter()
        self._lab, self._rng = lab, rng
        self._sides = Side("aaaaaaaa", lab), Side("bbbbbbbb", lab)
        self._passed_s = 0.0
        self._written = 0
        self._worked: set[MachineId] = set()
        self._burnt = False  # and an agent may hold the workspace for a run of it
        self._newest: Tree = {}
        self._starts: Counter[tuple[str, int]] = Counter()
        self._looks: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._real_destroy = lab.market.destroy
        lab.market.destroy = self._destroy  # type: ignore[method-assign]
        self._real_create = lab.market.create
        lab.market.create = self._create  # type: ignore[method-assign]

    def run(self) -> None:
        """All of it."""
        with self._quick():
            one, two = self._sides
            one.edit(_LEFT_OUT)
            two.edit(_LEFT_OUT)
            self._flow(one, "create", create)
            for _ in range(self._rng.randint(*_STEPS)):
                self._step()
            self._end()

    def _step(self) -> None:
        for machine in self._machines():
            self._use(machine)
        draw = self._rng.random()
        if draw < 0.3:
            self._edit()
        elif draw < 0.45:
            self._passed_s += self._rng.choice([130, 700, 7300, 90_000])
            self.did.append("time passes")
        threads = []
        for side in self._sides:
            burns = self._rng.random() < 0.4
            fault = self._rng.choice(_FAULTS) if self._rng.random() < 0.15 else None
            side.rise(self._rng.randint(*_REQUESTS) if burns else float("inf"), fault)
            asked = (side, *self._chosen())
            run = partial(contextvars.copy_context().run, self._flow)
            threads.append(threading.Thread(target=run, args=asked, name=side.name))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._burnt |= any(side.dead for side in self._sides)
        if self._rng.random() < 0.7:
            self._let_go()
        handed = [one for one in self._lab.opened.rentals.open() if one.state == "handed over"]
        there = [one for one in handed if one.machine in self._lab.market.alive]
        if len(there) > 1:
            self._violate(f"{len(there)} machines of the workspace were handed over: {there}")

    def _chosen(self) -> tuple[str, Any, dict[str, Any]]:
        flows: list[tuple[int, tuple[str, Any, dict[str, Any]]]] = [
            (25, ("hibernate", hibernate, {})),
            (10, ("hibernate if idle", hibernate, {"only_if_idle": True})),
            (25, ("wake", wake, {})),
            (12, ("watch", watch, {"dry_run": False})),
            (12, ("backup", backup, {"keep_last": 1})),
            (12, ("job", _JOB.job, {"command": ["train"]})),
            (6, ("reconcile", reconcile, {"abandoned": True})),
            (4, ("prune", prune, {"dry_run": False})),
            (12, ("recover", None, {})),
        ]
        weights, does = zip(*flows, strict=True)
        return self._rng.choices(does, weights)[0]

    def _edit(self) -> None:
        """The user of the owner edits what is left out; while there is none, of both sides."""
        owner = owner_of(self._lab)
        exclude = [] if self._sides[0].exclude else _LEFT_OUT
        for side in self._sides:
            if owner in ("", side.name):
                side.edit(exclude)
                self.did.append(f"{side.name}: leaves out {side.exclude}")

    def _flow(self, side: Side, what: str, flow: Any, options: dict[str, Any] | None = None) -> Any:
        name = [] if flow is watch else [DEMO]
        answer, said = None, ""
        try:
            with PlainRunner(side.opened, wait_factor=0.0, at_once=4, alerts=side.alerts):
                answer = side.recover() if flow is None else flow.fn(*name, **(options or {}))
            said = type(answer).__name__
        except Burnt:
            said = "burnt down"
            self.counts["control sides that burnt down"] += 1
        except TorporError as error:
            said = f"{type(error).__name__}: {error}"
        except BaseException:  # noqa: BLE001 - the border of the product
            if side.dead:
                said = "burnt down"
            else:
                self._violate(f"{what} ended with {traceback.format_exc()}")
                said = "a bug"
        self.counts[f"{what}: {said.partition(':')[0]}"] += 1
        self.did.append(f"{side.name} {what}: {said[:300]}")
        return answer

    def _end(self) -> None:
        """Nothing burns any more. One side recovers the workspace, ends what is left, and the work
        comes back to it; the other one does nothing."""
        one, two = self._sides
        for side in self._sides:
            side.rise(float("inf"))
        one.recover()
        self._let_go()
        self._passed_s += 90_000
        left = {*self._lab.market.alive}
        for flow, options in ((reconcile, {"abandoned": True}), (hibernate, {}), (wake, {})):
            self._flow(two, f"{flow.name} of the other side", flow, options)
        if {*self._lab.market.alive} != left:
            self._violate("the side that is not the owner has rented or ended a machine")
        for _ in range(4):
            self._passed_s += 90_000
            self._flow(one, "watch at the end", watch, {"dry_run": False})
            self._flow(one, "reconcile", reconcile, {"abandoned": True})
            rentals = self._lab.opened.rentals.open()
            unfinished = [one.machine for one in rentals if one.unfinished]
            if named := [str(one) for one in unfinished if one in self._lab.market.alive]:
                self._flow(one, "reconcile what is left", reconcile, {"left": named})
            for job in self._lab.opened.jobs.open():
                self._flow(one, "job at the end", _JOB.job, {"job": job.id})
            for machine in self._machines():
                self._flow(one, "hibernate at the end", hibernate, {"machine": machine})
        if self._lab.market.alive:
            self._violate(f"nobody ends machine {[*self._lab.market.alive]}")
            return
        report = self._flow(one, "wake at the end", wake)
        there = self._machines()
        if report is None or len(there) != 1:
            self._violate(f"the workspace does not come back: {there}")
            return
        brought = self._tree(there[0])
        lost = sorted(name for name, body in self._newest.items() if brought.get(name) != body)
        if lost:
            self._violate(f"the wake at the end lacks {lost}")

    # -- the machine

    def _let_go(self) -> None:
        """A minute later: agents end what runs of control sides that are gone have begun."""
        for near in self._lab.market.near.values() if self._burnt else ():
            near.restart()
        self._burnt = False

    def _machines(self) -> list[MachineId]:
        rentals = self._lab.opened.rentals.open()
        over = {one.machine for one in rentals if one.state == "handed over"}
        return [one for one in self._lab.market.alive if one in over]

    def _use(self, machine: MachineId) -> None:
        """Its user works there: on a file that each side keeps, and on one that may be left out."""
        self._worked.add(machine)
        place = self._lab.home(machine) / "workspace"
        place.mkdir(exist_ok=True)
        for name in ("work.txt", "draft.tmp"):
            self._written += 1
            (place / name).write_bytes(b"%d" % self._written)

    def _tree(self, machine: MachineId) -> Tree:
        place = self._lab.home(machine) / "workspace"
        files = [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else []
        return {str(path.relative_to(place)): path.read_bytes() for path in files}

    def _kept(self, tree: Tree, side: Side) -> Tree:
        """What of it is to be kept by the settings of the side that ends the machine."""
        return {name: body for name, body in tree.items() if not (side.exclude and ".tmp" in name)}

    def _create(self, order: Any) -> Machine:
        """The market rents a machine: to a side that has not heard of another owner?"""
        self._check_owner(asking.side, "rented a machine")
        return self._real_create(order)

    def _destroy(self, machine: Machine, warrant: Warrant) -> None:
        """The market ends it: is its work stored, and is it the owner who asks?"""
        side: Side = asking.side
        with self._lock:
            used = machine.id in self._machines() or self._was_handed_over(machine)
            tree = self._tree(machine.id) if machine.id in self._lab.market.near else {}
            held = self._kept(tree, side)
            if used and machine.id in self._lab.market.alive:
                self._check_owner(side, f"ended machine {machine.id}")
            if used and not self._is_stored(held):
                self._violate(f"machine {machine.id} was ended; no snapshot has {sorted(held)}")
            self._real_destroy(machine, warrant)
            if machine.id in self._lab.market.alive:
                return
            if machine.id in self._worked:
                self._newest = held
                self.counts["machines that ended with proof"] += 1
            elif used:  # it was woken and nobody worked there
                self._newest = self._kept(self._newest, side)

    def _check_owner(self, side: Side, did: str) -> None:
        if side.fault is not None:
            self._violate(f"{side.name} {did}, and no record said who is the owner")
        if side.saw not in ("", side.name):
            self._violate(f"{side.name} {did}, and knew that {side.saw} is the owner")
        if owner_of(self._lab) not in ("", side.name):
            self.counts["recovered between the last look and the request"] += 1

    def _was_handed_over(self, machine: Machine) -> bool:
        rental = self._lab.opened.rentals.of(machine.label) if machine.label else None
        return rental is not None and rental.handed_unix is not None

    def _is_stored(self, work: Tree) -> bool:
        store, key = self._lab.store, self._lab.opened.store_key
        for taken in snapshot_ids(store, DEMO)[::-1]:
            if work.items() <= tree_of(store, DEMO, taken, key).items():
                return True
        return not work

    def _violate(self, words: str) -> None:
        self.violations.append(words)

    # -- time

    def begun(self, driven: Driven) -> None:
        """A command is started."""
        with self._lock:
            started = (driven.job.id, len(driven.job.attempts))
            self._starts[started] += 1
            self.counts["commands started"] += 1
            if self._starts[started] > 1:
                self._violate(f"attempt {started[1]} of job {started[0]} was begun twice")

    def _renew(self, opened: OpenWorkspace, *_: object) -> AutosaveSummary:
        """`watch` tells a machine how to save itself."""
        (side,) = [one for one in self._sides if one.name == opened.side]
        self.counts["machines that were told how to save themselves"] += 1
        self._check_owner(side, "told a machine how to save itself")
        return NO_SAVES

    @contextmanager
    def _quick(self) -> Iterator[None]:
        """Hours pass between two steps, and a job waits for nobody."""
        real, story, look = time.time, self, driver.Driver.look

        def impatient(driving: driver.Driver) -> Any:
            """For as long as its user is patient: the run that holds its machine may be gone."""
            with story._lock:
                story._looks[driving.job.id] += 1
            if story._looks[driving.job.id] > _PATIENT:
                raise RunCancelled(f"its user cancels a job of {driving.job.workspace} that waits")
            return look(driving)

        class Ends:
            """The command of a job, which writes a file and ends."""

            def __init__(self, _: Any, driven: Driven, machine: Machine, *__: Any) -> None:
                self._driven, self._machine = driven, machine

            def run(self) -> None:
                if self._driven.job.attempt is None:
                    self._driven.begin_attempt(self._machine, False, 4.0)
                    story.begun(self._driven)
                    story._use(self._machine.id)
                stops = self._driven.look_for_stop() is not None
                end = {"end": "stopped"} if stops else {"end": "command ended", "status": 0}
                self._driven.change_attempt(**end)

        fast: list[tuple[Any, str, Any]] = [
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
            (driver.Driver, "look", impatient),
            (watch_steps, "renew_autosave", self._renew),
        ]
        with ExitStack() as stack:
            stack.enter_context(patch("time.time", lambda: real() + self._passed_s))
            for module, name, value in fast:
                stack.enter_context(patch.object(module, name, value))
            yield
