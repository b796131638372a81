"""Deployment: one stack on one machine, from the rental to the first answer of its server."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import msgspec

from flows.procedures.deploy.server import Serving
from flows.procedures.rented import rented_machine
from flows.procedures.restore import arrival, begun, restore_parts
from flows.procedures.snapshot import take_snapshot
from tasks.deploying import (
    distrust_base,
    drop_base,
    facts_of,
    find_base,
    holds_files,
    keep_base,
    run_on_machine,
)
from tasks.jobs import machine_in_use
from tasks.machines import endpoint_of, hand_over, open_session
from tasks.phases import measured_phases, phase, phases_told_to, seconds_by_phase
from tasks.restore import NEWEST, check_restore, finish_restore, new_restore, pick_snapshot_to_wake
from tasks.runner import runner
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.deploy.report import DeployReport
from torpor.control.deploy.stack import Place, Stack, Strategy, base_name, check_apart, sharers
from torpor.control.measure.scratch import machines_name, scratch_name
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.seam import Session
from torpor.control.rental.renting import Tenancy
from torpor.control.store.snapshots import newest_snapshot
from torpor.shared.errors import (
    DeployFailed,
    InvalidInput,
    RestoreUnfinished,
    RunCancelled,
    SnapshotDamaged,
    TorporError,
)
from torpor.shared.format.keys import Seal
from torpor.shared.values import Machine, StoredSnapshot, workspace_name


class Deployment:
    """The order of one deploy.

    ``trial``: it is only measured, on a machine of its own that is destroyed at the end, with an
    environment of that name's own. ``base`` is the environment's workspace, once it is known.
    """

    def __init__(
        self,
        opened: OpenWorkspace,
        stack: Stack,
        strategy: Strategy,
        name: str,
        trial: str = "",
    ) -> None:
        self.opened = opened
        self.stack = stack
        self.strategy = strategy
        self.name = name
        self.trial = trial
        self.base: StoredWorkspace | None = None
        self.within: dict[str, float] = {}
        self.began = time.monotonic()

    def run(self, snapshot: str, full_check: bool) -> DeployReport:
        """Deploy on the workspace's machine, or on a new one."""
        found = None if self.trial else machine_in_use(self.opened, None)
        if found is not None:
            return _OnMachine(self, found[0], None, None, full_check).run()
        try:
            return self._on_new_machine(snapshot, full_check)
        except RestoreUnfinished as left:  # of another snapshot: that machine is destroyed
            runner().log.warning("%s; another machine is rented instead", left)
            return self._on_new_machine(snapshot, full_check)

    def _on_new_machine(self, snapshot: str, full_check: bool) -> DeployReport:
        wanted, opened = None, self.opened
        if snapshot not in ("", NEWEST) or newest_snapshot(opened.store, opened.spec.name):
            wanted, opened = pick_snapshot_to_wake(opened, snapshot)
        image = self.stack.image_for(self.strategy) or opened.spec.want.image
        want = msgspec.structs.replace(opened.spec.want, image=image)
        opened = replace(opened, spec=msgspec.structs.replace(opened.spec, want=want))
        self.began = time.monotonic()
        rents = opened.under(machines_name(opened.spec.name)) if self.trial else opened
        with rented_machine(rents) as tenancy:
            return _OnMachine(self, tenancy.machine, tenancy, wanted, full_check).run()


class _Wanted(NamedTuple):
    """A snapshot for a new machine; ``when_first`` is called when what it wants first is there."""

    tenancy: Tenancy
    snapshot: StoredSnapshot
    when_first: Callable[[], None]


class _OnMachine:
    """Without ``tenancy``, the machine is the user's: its workspace is there, and it stays."""

    def __init__(
        self,
        deployment: Deployment,
        machine: Machine,
        tenancy: Tenancy | None,
        wanted: StoredSnapshot | None,
        full_check: bool,
    ) -> None:
        self._of = deployment
        self._opened = deployment.opened
        self._stack = deployment.stack
        self._machine = machine
        self._tenancy = tenancy
        self._wanted = wanted
        self._full_check = full_check
        self._reached = time.monotonic()
        self._served = 0.0
        self._environment = "of the image"
        self._built = False
        self._began = ""  # the record on the machine that this deploy makes the environment
        self._restoring: list[RemoteRestore] = []
        self._stopped = threading.Event()
        self._environment_lined_up = threading.Event()
        self._warnings: list[str] = []

    def run(self) -> DeployReport:
        with open_session(self._opened, self._machine) as session:
            spec = self._opened.spec
            machine = session.machine
            place = Place(self._stack, machine.user_home, spec.paths[0], self._of.strategy.sets_up)
            check_apart(place.environment, [place.absolute(path) for path in spec.paths])
            # The id is of the store's key, whatever the name that the key is derived for.
            key_id = Seal(self._opened.base_key(workspace_name("environments"))).key_id.hex()
            key_id += self._of.trial
            name = base_name(self._stack, facts_of(machine), self._shared_by, key_id)
            base = self._of.base = self._opened.base(name, self._stack.environment)
            serving = Serving(session, spec.name, place)
            if self._tenancy is None:
                serving.check_port()
                if self._of.strategy.keeps:
                    self._check_room(session, place, base)
            self._stop(serving)

            def serve() -> None:
                self._fetch_model(session, place, serving)
                serving.serve()
                self._served = time.monotonic()

            try:
                with phase("restore"):
                    self._bring(session, place, base, serving, serve)
                if not self._served:
                    serve()
            except BaseException:
                if self._tenancy is None:  # else the machine is destroyed
                    with suppress(TorporError):
                        serving.stop()
                raise
            if self._built:
                with phase("store environment"), measured_phases():
                    self._store(session, base, serving)
            if self._began:
                # Before the last look: a deploy that finds it has ended this one's server before.
                run_on_machine(session, ["rm", "-rf", "--", self._began])
            serving.check_serving()
            if self._tenancy is not None and not self._of.trial:
                hand_over(self._tenancy, alone=True)
            return self._report(serving)

    @property
    def _shared_by(self) -> str:
        provider = self._opened.markets.of(self._machine.provider)
        many_owners = provider.abilities.many_owners
        return sharers(self._stack, provider.identity, many_owners, self._opened.spec.name)

    def _stop(self, serving: Serving) -> None:
        """End what earlier deploys have started here; HandedOver if it is a user's by now."""
        if self._tenancy is not None:
            self._tenancy.check_unclaimed()
        serving.stop()

    # -- what the server needs

    def _check_room(self, session: Session, place: Place, base: StoredWorkspace) -> None:
        """InvalidInput where the stored environment cannot be restored on the user's machine: the
        server that runs there is not stopped for that."""
        found = find_base(base, self._reason())
        if found is None:
            return
        try:
            with begun(new_restore(base, session, found, f"{runner().run}-look"), resume=True):
                pass
        except (InvalidInput, RestoreUnfinished) as error:
            raise InvalidInput(self._no_room(place, error, " Nothing was stopped.")) from error

    def _no_room(self, place: Place, error: TorporError, stopped: str = "") -> str:
        return (
            f"{', '.join(place.environment)} on the machine holds something else than the "
            f"environment of stack {self._stack.name}: {error}.{stopped} Move it away, or delete "
            "it if it is an older environment, which no wake takes; or name other environment "
            "paths in the stack; or hibernate the workspace and deploy it on a new machine"
        )

    def _bring(
        self,
        session: Session,
        place: Place,
        base: StoredWorkspace,
        serving: Serving,
        serve: Callable[[], None],
    ) -> None:
        """The environment and the workspace, at the same time; the environment's parts are fetched
        before the workspace's. Where the workspace wants something first, the server starts when
        that and the environment are there, and the rest follows.
        A command that fetches the model writes into the workspace, so it waits for all of it."""
        spec = self._opened.spec
        made: list[Future[None]] = []
        running: list[Future[None]] = []

        def when_first() -> None:
            if spec.first and not self._stack.fetch:
                for environment in made:
                    environment.result()
                serve()

        with (
            ThreadPoolExecutor(2, thread_name_prefix="deploy") as threads,
            phases_told_to(lambda name: None),  # it stays the phase `restore`
        ):
            try:
                if self._of.strategy.sets_up:
                    make = partial(self._make_environment, session, place, base, serving)
                    made.append(threads.submit(copy_context().run, make))
                    made[0].add_done_callback(lambda _: self._environment_lined_up.set())
                else:
                    self._environment_lined_up.set()
                if self._tenancy is not None and self._wanted is not None:
                    wanted = _Wanted(self._tenancy, self._wanted, when_first)
                    bring = partial(self._restore_workspace, session, wanted)
                    running.append(threads.submit(copy_context().run, bring))
                elif self._tenancy is not None:
                    folders = [place.absolute(path) for path in spec.paths]
                    run_on_machine(session, ["mkdir", "-p", "--", *folders])
                for one in as_completed([*made, *running]):
                    one.result()
            except BaseException:
                self._stopped.set()
                for restore in self._restoring:
                    restore.give_up(RunCancelled("another part of the deploy failed"))
                with suppress(TorporError):  # ends a setup command that still runs
                    self._stop(serving)
                raise

    def _restore_workspace(self, session: Session, wanted: _Wanted) -> None:
        restore = new_restore(self._opened, session, wanted.snapshot, runner().run)
        self._restoring.append(restore)
        with self._measured("workspace"), arrival(restore, wanted.tenancy):
            self._environment_lined_up.wait()
            self._check_wanted()
            if not restore.plan.complete:
                restore_parts(restore, "wake", wanted.tenancy.machine, when_first=wanted.when_first)
                finish_restore(restore)
                check_restore(restore, self._full_check)
        self._warnings += restore.finished.warnings

    @contextmanager
    def _measured(self, what: str) -> Iterator[None]:
        self._check_wanted()
        with measured_phases() as measured:
            yield
        for name, seconds in measured.items():
            self._of.within[f"{what}: {name}"] = seconds

    def _make_environment(
        self, session: Session, place: Place, base: StoredWorkspace, serving: Serving
    ) -> None:
        """From the store, or by the setup command."""
        mark = f"{place.home}/.torpor/deploy/{base.spec.name}"
        if self._tenancy is not None:
            begun = holds_files(session, [mark])
            self._tenancy.check_unclaimed()
            if begun:  # by a deploy that was killed, on this machine, which nobody got
                run_on_machine(session, ["rm", "-rf", "--", *place.environment, mark])
        if self._of.strategy.keeps:
            found = find_base(base, self._reason())
            if found is not None:
                self._restore_environment(session, place, base, found)
                return
        self._environment_lined_up.set()  # the setup command fetches what it needs by itself
        if not holds_files(session, place.environment):
            run_on_machine(session, ["mkdir", "-p", "--", f"{mark}/began"])
            self._began = mark
            self._built = self._of.strategy.keeps
        self._check_wanted()
        began = time.monotonic()
        serving.run("setup", place.filled(self._stack.setup), place.home)
        self._of.within["environment: setup"] = time.monotonic() - began
        self._environment = "made by the setup command"
        if not self._built and self._of.strategy.keeps:
            self._environment += ", not stored: its directories held files before"

    def _restore_environment(
        self, session: Session, place: Place, base: StoredWorkspace, found: StoredSnapshot
    ) -> None:
        try:
            restore = new_restore(base, session, found, f"{runner().run}-environment")
            self._restoring.append(restore)
            with self._measured("environment"), begun(restore, resume=True):
                if not restore.plan.complete:
                    lined_up = self._environment_lined_up.set
                    restore_parts(restore, "deploy", when_submitted=lined_up)
                    finish_restore(restore)
                    check_restore(restore, self._full_check)
            self._warnings += restore.finished.warnings
        except (InvalidInput, RestoreUnfinished) as error:  # it says nothing of the workspace
            raise DeployFailed(self._no_room(place, error)) from error
        except SnapshotDamaged as error:
            distrust_base(base, found)
            raise SnapshotDamaged(
                f"the stored environment of stack {self._stack.name} is damaged and is not used "
                f"any more: {error}. Deploy again: the setup command makes a new one"
            ) from error
        self._environment = f"restored from {found.snapshot} of {base.spec.name}"

    def _check_wanted(self) -> None:
        """RunCancelled once another part of the deploy has failed."""
        if self._stopped.is_set():
            raise RunCancelled("another part of the deploy failed")

    def _fetch_model(self, session: Session, place: Place, serving: Serving) -> None:
        """Unless the workspace says that it holds what this command fetches."""
        if not self._stack.fetch:
            return
        what = json.dumps([self._stack.model, self._stack.model_path, self._stack.fetch])
        mark = f"{place.absolute(place.workspace)}/.torpor-models/"
        mark += hashlib.sha256(what.encode()).hexdigest()[:16]
        if holds_files(session, [mark]):
            return
        with phase("fetch"):
            run_on_machine(session, ["mkdir", "-p", "--", os.path.dirname(place.model_path)])
            serving.run("fetch", place.filled(self._stack.fetch), place.absolute(place.workspace))
            run_on_machine(session, ["mkdir", "-p", "--", f"{mark}/fetched"])

    # -- after the first answer

    def _store(self, session: Session, base: StoredWorkspace, serving: Serving) -> None:
        """Store the environment that has just proven itself. The server runs: where this fails, the
        next deploy makes the environment again."""
        try:
            run = f"{runner().run}-environment"
            report, verified = take_snapshot(base, session, self._machine, run=run)
            try:
                serving.check_serving()  # else another deploy may have worked in the directories
            except DeployFailed:
                drop_base(base, verified)
                raise
            if report.changed:
                drop_base(base, verified)
                words = f"not stored: {', '.join(report.changed[:5])} changed while it was read"
            elif keep_base(base, verified, self._reason()):
                words = f"stored as {verified.snapshot} of {base.spec.name}"
            else:
                words = "not stored: another deploy has stored it meanwhile"
        except TorporError as error:
            words = f"not stored: {error}"
        runner().log.info("the environment of stack %s: %s", self._stack.name, words)
        self._environment += f", {words}"

    def _reason(self) -> str:
        workspace = self._opened.spec.name
        whose = f"{scratch_name(workspace)}: " if self._of.trial else ""
        of = f"environment of stack {self._stack.name}, made at {self._shared_by}"
        return f"{whose}{of}, for workspace {workspace}"[:400]

    def _report(self, serving: Serving) -> DeployReport:
        endpoint = endpoint_of(self._machine)
        served = self._served
        return DeployReport(
            workspace=self._opened.spec.name,
            stack=self._stack.name,
            strategy=f"{self._of.name}: {self._of.strategy.words}",
            snapshot=None if self._wanted is None else self._wanted.snapshot,
            environment=self._environment,
            machine=self._machine.id,
            host=endpoint.host,
            port=endpoint.port,
            user=endpoint.user,
            server_port=self._stack.port,
            log=serving.log("server"),
            seconds=seconds_by_phase(),
            within=self._of.within,
            from_rental_s=None if self._tenancy is None else served - self._of.began,
            from_ssh_s=served - self._reached,
            price_usd_h=self._machine.price_usd_h,
            warnings=self._warnings,
        )
