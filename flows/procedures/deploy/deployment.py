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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import msgspec

from flows.procedures.deploy.server import Serving
from flows.procedures.rented_machine import rented_machine
from flows.procedures.restore import (
    restore_all,
    restore_parts,
    restore_run,
    restore_run_before_handover,
)
from flows.procedures.save import take_snapshot
from tasks.autosave import start_autosave
from tasks.deploy import (
    distrust_base,
    drop_base,
    facts_of,
    find_base,
    holds_files,
    keep_base,
    note_ready,
    run_on_machine,
)
from tasks.jobs import machine_in_use
from tasks.machines import (
    end_abandoned,
    endpoint_of,
    hand_over,
    make_paths,
    note_made_again,
    open_session,
    renting,
)
from tasks.phases import measured_phases, phase, phases_told_to, seconds_by_phase
from tasks.restore import (
    NEWEST,
    check_restore,
    check_still_newest,
    finish_restore,
    moved,
    new_restore,
    pick_snapshot_to_wake,
)
from tasks.runner import runner
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.deploy.report import DeployReport
from torpor.control.deploy.stack import (
    Stack,
    StackPaths,
    Strategy,
    StrategyName,
    base_name,
    check_apart,
    sharers,
    strategy_named,
)
from torpor.control.measure.scratch import machines_name, scratch_name
from torpor.control.remote.agent import Session
from torpor.control.remote.restore import RemoteRestore
from torpor.control.rental.renting import AT_ONCE_S, Tenancy
from torpor.control.store.manifests import snapshot_ids
from torpor.shared.errors import (
    DeployFailed,
    InvalidInput,
    RestoreUnfinished,
    RunCancelled,
    SnapshotDamaged,
    TorporError,
)
from torpor.shared.values import Machine, StoredSnapshot, WorkspaceName, workspace_name


@dataclass
class DeployTrial:
    """Deploys that are only measured: each on a machine of its own, which is destroyed at the end,
    with an environment under a scratch name. ``bases``: the workspaces of these environments."""

    name: str
    bases: dict[WorkspaceName, StoredWorkspace] = field(default_factory=dict)


class DeployRequest(NamedTuple):
    """What a user asks for. ``early``: the server may start when the files that an earlier server
    used are restored, before all others are."""

    stack: Stack
    strategy: StrategyName
    full_check: bool
    trial: DeployTrial | None
    early: bool = True

    @property
    def how(self) -> Strategy:
        return strategy_named(self.strategy)


@contextmanager
def deployment_on_a_machine(
    opened: OpenWorkspace, request: DeployRequest, snapshot: str
) -> Iterator[Deployment]:
    """A deployment on the workspace's machine, or on a new one that is destroyed after an error. If
    the deploy fails on a machine that was in use before, only its server is stopped."""
    in_use = None
    if not request.trial:
        end_abandoned(renting(opened), AT_ONCE_S)
        in_use = machine_in_use(opened, None)
    if in_use is not None:
        with open_session(opened, in_use[0]) as session:
            yield Deployment(opened, request, session, in_use[0])
        return
    stack_image = request.stack.image_for(request.how)
    before, wanted = snapshot_ids(opened.store, opened.spec.name), None
    if snapshot not in ("", NEWEST) or before:
        wanted, opened = pick_snapshot_to_wake(opened, snapshot)
    want = msgspec.structs.replace(opened.spec.want, image=stack_image or opened.spec.want.image)
    opened = replace(opened, spec=msgspec.structs.replace(opened.spec, want=want))
    began = time.monotonic()
    rents = opened.under(machines_name(opened.spec.name)) if request.trial else opened
    with (
        rented_machine(rents) as tenancy,
        open_session(opened, tenancy.machine) as session,
    ):
        if snapshot in ("", NEWEST) and not request.trial:
            check_still_newest(opened, before)
        yield Deployment(opened, request, session, tenancy.machine, tenancy, wanted, began)


class Deployment:
    """One stack on one machine. Without ``tenancy``, the machine is the user's: it holds the
    workspace already, and it stays. ``began``: when the machine's rental began."""

    def __init__(
        self,
        opened: OpenWorkspace,
        request: DeployRequest,
        session: Session,
        machine: Machine,
        tenancy: Tenancy | None = None,
        wanted: StoredSnapshot | None = None,
        began: float = 0.0,
    ) -> None:
        self._opened = opened
        self._stack = request.stack
        self._strategy = request.how
        self._request = request
        self._session = session
        self._machine = machine
        self._tenancy = tenancy
        self._wanted = wanted
        self._began = began
        self._reached = time.monotonic()
        self._served = 0.0
        # the server started early, although nobody has named what comes first
        self._started_early = False
        self._environment = "of the image"
        self._built = False
        self._mark = ""  # the record on the machine that says: this deploy makes the environment
        self._within: dict[str, float] = {}
        self._restoring: list[RemoteRestore] = []
        self._stopped = threading.Event()
        self._environment_lined_up = threading.Event()
        self._warnings: list[str] = []
        spec, home = opened.spec, session.machine.user_home
        self._place = StackPaths(request.stack, home, spec.paths[0], self._strategy.sets_up)
        check_apart(self._place.environment, [self._place.absolute(path) for path in spec.paths])
        self._base = self._environments_workspace()
        check = (lambda: None) if tenancy is None else tenancy.check_unclaimed
        self._serving = Serving(session, spec.name, self._place, check)

    def stop_earlier(self) -> None:
        """End the commands that earlier deploys have started here, once it is certain that this
        deploy can begin."""
        if self._tenancy is None:
            self._serving.check_port()
            if self._strategy.keeps:
                self._check_room()
        self._stop()

    def bring(self) -> None:
        """Restore the environment and the workspace at the same time, the environment's parts
        first. Where something of the workspace comes first, the server starts when that and the
        environment are there, and the rest follows."""
        if self._place.environment:
            note_made_again(self._session, self._place.environment)
        with phase("restore"), self._server_stopped_after_errors():
            self._bring_both()

    def serve(self) -> None:
        """Start the server, unless it serves already, and have it answer one request."""
        with self._server_stopped_after_errors():
            if not self._served:
                self._serve()

    def store_environment(self) -> None:
        """Store the environment that this deploy made, after its server has answered."""
        if self._built:
            with phase("store environment"), measured_phases():
                self._store()
        if self._mark:
            # Before the last look, so that another deploy which ends this one's server is seen.
            run_on_machine(self._session, ["rm", "-rf", "--", self._mark])

    def hand_over(self) -> None:
        """Leave a new machine, on which the server runs, to its user."""
        self._serving.check_serving()
        if self._tenancy is not None and self._request.trial is None:
            make_paths(self._opened, self._session)
            hand_over(self._tenancy, alone=True)
            start_autosave(self._opened, self._session, self._machine)

    def report(self) -> DeployReport:
        endpoint = endpoint_of(self._machine)
        served = self._served
        return DeployReport(
            workspace=self._opened.spec.name,
            stack=self._stack.name,
            strategy=f"{self._request.strategy}: {self._strategy.words}",
            snapshot=None if self._wanted is None else self._wanted.snapshot,
            environment=self._environment,
            machine=self._machine.id,
            host=endpoint.host,
            port=endpoint.port,
            user=endpoint.user,
            server_port=self._stack.port,
            log=self._serving.log("server"),
            seconds=seconds_by_phase(),
            within=self._within,
            from_rental_s=None if self._tenancy is None else served - self._began,
            from_ssh_s=served - self._reached,
            price_usd_h=self._machine.price_usd_h,
            warnings=self._warnings,
        )

    def _environments_workspace(self) -> StoredWorkspace:
        # The id is of the store's key, whatever the name that the key is derived for.
        key_id = self._opened.base(workspace_name("environments"), []).seal.key_id.hex()
        trial = self._request.trial
        if trial is not None:
            key_id += trial.name
        name = base_name(self._stack, facts_of(self._session.machine), self._shared_by, key_id)
        base = self._opened.base(name, self._stack.environment)
        # the environment may be stored although the hand-over fails
        if trial is not None and self._strategy.keeps:
            trial.bases[name] = base
        return base

    def _serve(self) -> None:
        self._fetch_model()
        self._serving.serve()
        self._served = time.monotonic()
        if self._tenancy is not None:  # otherwise the user has worked there, too
            note_ready(self._session, self._opened.spec.name)

    @contextmanager
    def _server_stopped_after_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self._tenancy is None:  # otherwise the machine is destroyed
                with suppress(TorporError):
                    self._serving.stop()
            raise

    @property
    def _shared_by(self) -> str:
        provider = self._opened.markets.of(self._machine.provider)
        many_owners = provider.abilities.many_owners
        return sharers(self._stack, provider.identity, many_owners, self._opened.spec.name)

    def _stop(self) -> None:
        """End the commands that earlier deploys have started here; HandedOver if the machine is a
        user's by now."""
        if self._tenancy is not None:
            self._tenancy.check_unclaimed()
        self._serving.stop()

    # -- what the server needs

    def _check_room(self) -> None:
        """InvalidInput where the stored environment cannot be restored on the user's machine.
        Checked first, so that the running server is not stopped for a deploy that must fail."""
        found = find_base(self._base, self._reason())
        if found is None:
            return
        look = new_restore(self._base, self._session, found)
        try:
            with restore_run(look, resume=True):
                pass
        except (InvalidInput, RestoreUnfinished) as error:
            raise InvalidInput(self._no_room(error, " Nothing was stopped.")) from error

    def _no_room(self, error: TorporError, stopped: str = "") -> str:
        return (
            f"{', '.join(self._place.environment)} on the machine holds something else than the "
            f"environment of stack {self._stack.name}: {error}.{stopped} Move it away, or delete "
            "it if it is an older environment, which no wake takes; or name other environment "
            "paths in the stack; or hibernate the workspace and deploy it on a new machine"
        )

    def _bring_both(self) -> None:
        """Restore the environment and the workspace. A command that fetches the model writes into
        the workspace, so that command waits for all of the workspace."""
        spec = self._opened.spec
        made: list[Future[None]] = []
        running: list[Future[None]] = []

        def when_first() -> None:
            if self._stack.fetch or not (spec.first or self._request.early):
                return
            for environment in made:
                environment.result()
            self._started_early = not spec.first
            try:
                deploy.run(self._serve)
            except InvalidInput:  # the command can never be started
                self._started_early = False
                raise
            except DeployFailed as error:
                if spec.first:
                    raise
                # The list of what comes first was learned from an earlier server, and this server
                # may need more.
                self._stop()
                words = f"the server is started again when all is restored: {error}"
                runner().log.warning("%s", words)
                self._warnings.append(words)

        with (
            ThreadPoolExecutor(2, thread_name_prefix="deploy") as threads,
            phases_told_to(lambda name: None),  # the run stays in the phase `restore`
        ):
            # the server's phases are those of the deploy, not of the workspace
            deploy = copy_context()
            try:
                if self._strategy.sets_up:
                    made.append(threads.submit(copy_context().run, self._make_environment))
                    made[0].add_done_callback(lambda _: self._environment_lined_up.set())
                else:
                    self._environment_lined_up.set()
                if self._tenancy is not None and self._wanted is not None:
                    restore = partial(
                        self._restore_workspace, self._tenancy, self._wanted, when_first
                    )
                    running.append(threads.submit(copy_context().run, restore))
                elif self._tenancy is not None:
                    folders = [self._place.absolute(path) for path in spec.paths]
                    run_on_machine(self._session, ["mkdir", "-p", "--", *folders])
                for one in as_completed([*made, *running]):
                    one.result()
            except BaseException:
                self._stopped.set()
                for begun_restore in self._restoring:
                    begun_restore.give_up(RunCancelled("another part of the deploy failed"))
                with suppress(TorporError):  # ends a setup command that still runs
                    self._stop()
                raise

    def _restore_workspace(
        self, tenancy: Tenancy, wanted: StoredSnapshot, when_first: Callable[[], None]
    ) -> None:
        restore = new_restore(self._opened, self._session, wanted)
        self._restoring.append(restore)
        with self._measured("workspace"), restore_run_before_handover(restore, tenancy):
            self._environment_lined_up.wait()
            self._check_wanted()
            restore_all(
                restore,
                "wake",
                tenancy.machine,
                full_check=self._request.full_check,
                when_first=when_first,
                started_early=lambda: self._started_early,
            )
        self._warnings += [
            *moved(self._opened, tenancy.machine, restore.plan),
            *restore.finished.warnings,
        ]

    @contextmanager
    def _measured(self, what: str) -> Iterator[None]:
        self._check_wanted()
        with measured_phases() as measured:
            yield
        for name, seconds in measured.items():
            self._within[f"{what}: {name}"] = seconds

    def _make_environment(self) -> None:
        """Bring the environment: from the store, or by the setup command."""
        session, environment = self._session, self._place.environment
        mark = f"{self._place.home}/.torpor/deploy/{self._base.spec.name}"
        if self._tenancy is not None:
            begun = holds_files(session, [mark])
            self._tenancy.check_unclaimed()
            # a deploy that was killed has begun it on this machine, which was not handed over
            if begun:
                run_on_machine(session, ["rm", "-rf", "--", *environment, mark])
        if self._strategy.keeps:
            found = find_base(self._base, self._reason())
            if found is not None:
                self._restore_environment(found)
                return
        self._environment_lined_up.set()  # the setup command fetches by itself what it needs
        if not holds_files(session, environment):
            run_on_machine(session, ["mkdir", "-p", "--", f"{mark}/began"])
            self._mark = mark
            self._built = self._strategy.keeps
        self._check_wanted()
        began = time.monotonic()
        self._serving.run("setup", self._place.filled(self._stack.setup), self._place.home)
        self._within["environment: setup"] = time.monotonic() - began
        self._environment = "made by the setup command"
        if not self._built and self._strategy.keeps:
            self._environment += ", not stored: its directories held files before"

    def _restore_environment(self, found: StoredSnapshot) -> None:
        try:
            restore = new_restore(self._base, self._session, found)
            self._restoring.append(restore)
            with self._measured("environment"), restore_run(restore, resume=True):
                if not restore.plan.complete:
                    lined_up = self._environment_lined_up.set
                    restore_parts(restore, "deploy", when_submitted=lined_up)
                    finish_restore(restore)
                    check_restore(restore, self._request.full_check)
            self._warnings += restore.finished.warnings
        # this error does not concern the workspace
        except (InvalidInput, RestoreUnfinished) as error:
            raise DeployFailed(self._no_room(error)) from error
        except SnapshotDamaged as error:
            distrust_base(self._base, found)
            raise SnapshotDamaged(
                f"the stored environment of stack {self._stack.name} is damaged and is not used "
                f"any more: {error}. Deploy again: the setup command makes a new one"
            ) from error
        self._environment = f"restored from {found.snapshot} of {self._base.spec.name}"

    def _check_wanted(self) -> None:
        """RunCancelled once another part of the deploy has failed."""
        if self._stopped.is_set():
            raise RunCancelled("another part of the deploy failed")

    def _fetch_model(self) -> None:
        """Run the stack's fetch command, unless the workspace says that it holds the model
        already."""
        if not self._stack.fetch:
            return
        session, folder = self._session, self._place.absolute(self._place.workspace)
        what = json.dumps([self._stack.model, self._stack.model_path, self._stack.fetch])
        mark = f"{folder}/.torpor-models/{hashlib.sha256(what.encode()).hexdigest()[:16]}"
        if holds_files(session, [mark]):
            return
        with phase("fetch"):
            model = os.path.dirname(self._place.model_path)
            run_on_machine(session, ["mkdir", "-p", "--", model])
            self._serving.run("fetch", self._place.filled(self._stack.fetch), folder)
            run_on_machine(session, ["mkdir", "-p", "--", f"{mark}/fetched"])

    # -- after the first answer

    def _store(self) -> None:
        """Store the environment. The server runs: if storing fails, the next deploy makes the
        environment again."""
        base = self._base
        try:
            report, verified = take_snapshot(base, self._session, self._machine)
            try:
                # otherwise another deploy may have worked in the environment
                self._serving.check_serving()
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
        whose = f"{scratch_name(workspace)}: " if self._request.trial else ""
        of = f"environment of stack {self._stack.name}, made at {self._shared_by}"
        return f"{whose}{of}, for workspace {workspace}"[:400]
