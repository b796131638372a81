"""The steps of a workspace's programs: a wake starts them on the machine, or lets them go on where
a hibernate froze them."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from typing import Final, NamedTuple

from tasks.canaries import keep_canary
from tasks.retries import ONCE
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.remote.agent import Agent
from torpor.control.remote.criu import criu_bundle
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.rental.records import Rental
from torpor.control.rental.renting import Tenancy
from torpor.control.safety import Verified
from torpor.shared.errors import MachineUnfit, StillChanging, TorporError
from torpor.shared.values import PROGRAMS, WorkspaceSpec
from torpor.shared.wire.job import JobState, LookAtJob, StartJob, Tried, TryFreezing
from torpor.shared.wire.snapshot import IMAGE_FILES, Froze, Program

START_S: Final = 300.0
THAW_S: Final = 3 * 3600.0
"""Seconds for reading the memory of a large program back."""
_UNSEALED: Final = (
    "snapshots would hold its memory, and the store block has no `encryption_key` to seal them with"
)


class Freezer(NamedTuple):
    """The folder of CRIU on the machine, ``criu``; empty where nothing can be frozen there, with
    the reason in ``why_not``."""

    criu: str = ""
    why_not: str = ""


NEVER: Final = Freezer(why_not="`process` is never in the workspace block")
OWN_MACHINE: Final = Freezer(
    why_not="this is a machine of your own: torpor cannot tell whether they run on another one"
)


class Quiet(NamedTuple):
    """What stopping the programs led to: ``words`` about each program for people, and the images of
    the frozen ones, as paths in the first directory."""

    words: Sequence[str] = ()
    images: Sequence[str] = ()


@step("quiesce", retries=ONCE, phase="quiesce", says="bringing programs to rest")
def quiesce(
    snapshot: RemoteSnapshot, session: Agent, *, hook: bool, freezes: bool, sealed: bool
) -> Quiet:
    """Run the user's hook, and freeze the programs of a machine that ends. MachineUnfit where a
    program must be frozen (``process: require``) and cannot be."""
    spec = snapshot.spec
    if not freezes:
        snapshot.quiesce(hook=hook)
        return Quiet()
    programs = {_id(spec, line): line for line in spec.programs}
    wanted = [Program(name, _images(spec, line)) for name, line in programs.items()]
    freezer = _freezer(session) if sealed else Freezer(why_not=_UNSEALED)
    froze = snapshot.quiesce(wanted if freezer.criu else [], freezer.criu, hook=hook)
    if freezer.why_not:
        froze = [Froze(program.job, why_not=freezer.why_not) for program in wanted]
    faults = [f"{programs[found.job]}: {found.why_not}" for found in froze if found.why_not]
    if faults and spec.process == "require":
        raise MachineUnfit(
            f"workspace {spec.name} requires that its programs are frozen, and they were not: "
            f"{'; '.join(faults)}. The machine was kept: set `process` to try in the workspace "
            "block, and hibernate again"
        )
    for fault in faults:
        runner().log.warning("a program is not frozen, and a wake starts it afresh: %s", fault)
    return Quiet(
        [_frozen(programs[found.job], found) for found in froze],
        [f"{PROGRAMS}/{found.job}" for found in froze if found.bytes],
    )


def check_frozen(images: Sequence[str], verified: Verified) -> None:
    """Raise StillChanging unless the snapshot holds the images of all frozen programs: the
    machine's word alone is not enough."""
    wanted = {os.fsencode(f"{folder}/{name}") for folder in images for name in IMAGE_FILES}
    if wanted:
        wanted -= {entry.path for entry in verified.manifest.entries if entry.root == 0}
    if wanted:
        raise StillChanging(
            f"snapshot {verified.snapshot} lacks {os.fsdecode(min(wanted))}, which was frozen for "
            "it: the machine was not destroyed. Hibernate again"
        )


@step("prove freezing", retries=ONCE, says="trying whether the machine can freeze programs")
def prove_freezing(
    opened: OpenWorkspace,
    session: Agent,
    rental: Rental | None,
    *,
    strict: bool = True,
    kept: bool = True,
) -> Freezer:
    """Freeze a small process tree of torpor's own and let it go on, because only that proves that
    the machine can freeze programs. The result is ``kept`` for later rankings under the machine's
    ``rental``. With ``strict``, MachineUnfit where programs must be frozen and cannot be."""
    spec, freezer = opened.spec, Freezer(why_not=_UNSEALED)
    if opened.seal.sealed:
        try:
            freezer, answer = _tried(session, with_canary=True)
            if kept:
                keep_canary(opened, rental, answer)
        except TorporError as error:
            freezer = Freezer(why_not=str(error))
    if freezer.why_not and spec.process == "require" and strict:
        raise MachineUnfit(
            f"workspace {spec.name} requires a machine that can freeze its programs: "
            f"{freezer.why_not}. Set `process` to try in the workspace block, or rent a virtual "
            "machine"
        )
    return freezer


@step("start programs", retries=ONCE, says="starting the programs of the workspace")
def start_programs(
    opened: OpenWorkspace, session: Agent, tenancy: Tenancy, freezer: Freezer
) -> list[str]:
    """Start the workspace's programs on a machine that was handed over, so that no other run uses
    it. Returns for people how each program began. A failure does not fail the wake."""
    spec = opened.spec
    try:
        freezer = _alone(opened, tenancy, freezer)
    except TorporError as error:
        freezer = Freezer(why_not=f"whether they run elsewhere is not known: {error}")
    begun = []
    for line in spec.programs:
        try:
            begun.append(f"{line}: {_begun(_start(session, spec, line, freezer), freezer)}")
        except TorporError as error:
            begun.append(f"{line}: not started: {error}")
    for words in begun:
        runner().log.info("program %s", words)
    if tenancy.rental is not None:
        try:
            opened.rentals.change(tenancy.rental, starting=False)
        except TorporError as error:
            runner().log.warning("watch will say that these programs were not started: %s", error)
    return begun


@step("look at programs", retries=ONCE)
def look_at_programs(
    opened: OpenWorkspace, session: Agent, freezer: Freezer
) -> tuple[list[str], list[str]]:
    """Whether a hibernate would freeze each of the workspace's programs, for people, and why it
    would keep the machine, where all must be frozen. Stops none."""
    programs = {_id(opened.spec, line): line for line in opened.spec.programs}
    asked = TryFreezing("", [*programs])
    answer = session.call(asked, request_id=_request(), within_s=START_S)
    found = {froze.job: froze for froze in answer.programs}
    looks = [(line, found.get(job, Froze(job))) for job, line in programs.items()]
    words = [f"{line}: {_looks(look, freezer)}" for line, look in looks]
    required = opened.spec.process == "require"
    faults = [f"{line}: {why}" for line, look in looks if (why := freezer.why_not or look.why_not)]
    kept = [f"`process` requires that its programs are frozen: {one}" for one in faults]
    return words, kept if required else []


def _freezer(session: Agent) -> Freezer:
    """CRIU for the machine, unless its architecture or its capabilities rule CRIU out."""
    try:
        return _tried(session, with_canary=False)[0]
    except TorporError as error:
        return Freezer(why_not=str(error))


def _tried(session: Agent, *, with_canary: bool) -> tuple[Freezer, Tried]:
    """CRIU for the machine, and the machine's answer to TryFreezing; ``with_canary``: including a
    canary."""
    answer, criu = session.call(TryFreezing(""), request_id=_request(), within_s=START_S), ""
    if not answer.why_not:
        criu = session.send_bundle(criu_bundle())
    if criu and with_canary:
        answer = session.call(TryFreezing(criu), request_id=_request(), within_s=START_S)
    return Freezer(why_not=answer.why_not) if answer.why_not else Freezer(criu), answer


def _alone(opened: OpenWorkspace, tenancy: Tenancy, freezer: Freezer) -> Freezer:
    """The freezer, unless the workspace is on another machine, too: frozen programs may go on on
    one machine only."""
    if not freezer.criu or tenancy.rental is None:
        return freezer
    others = [
        rental.machine or rental.provider
        for rental in opened.rentals.open()
        if rental.label != tenancy.rental.label and rental.state == "handed over"
    ]
    if others:
        return Freezer(why_not=f"the workspace is also on machine {', '.join(others)}")
    return freezer


def _start(session: Agent, spec: WorkspaceSpec, line: str, freezer: Freezer) -> JobState:
    job, images = _id(spec, line), _images(spec, line)
    look = LookAtJob(job, 0, 0)
    was = session.call(look, request_id=_request(), within_s=START_S).state
    request = StartJob(
        job,
        was.attempt + (was.state != "running"),
        ["bash", "-lc", line],
        spec.paths[0],
        f"{images}.log",
        [],
        serves=True,
        images=images,
        criu=freezer.criu,
    )
    within_s = THAW_S if freezer.criu else START_S
    return session.call(request, request_id=_request(), within_s=within_s)


def _begun(state: JobState, freezer: Freezer) -> str:
    if state.error:
        return f"not started: {state.error}"
    words = "went on where it was frozen" if state.went_on else "started"
    if state.afresh:
        words = f"started afresh: {freezer.why_not or state.afresh}"
    return words if state.state == "running" else f"{words}, and has ended ({state.status})"


def _frozen(line: str, froze: Froze) -> str:
    if froze.why_not:
        return f"{line}: not frozen, a wake starts it afresh: {froze.why_not}"
    if not froze.bytes:
        return f"{line}: does not run here, a wake starts it afresh"
    return f"{line}: frozen, {froze.bytes:,} bytes in {froze.seconds:.1f} s"


def _looks(found: Froze, freezer: Freezer) -> str:
    if not found.bytes and not found.why_not:
        return "does not run here, a wake starts it afresh"
    if why_not := freezer.why_not or found.why_not:
        return f"would not be frozen: {why_not}"
    return f"would be frozen, with {found.bytes:,} bytes of memory"


def _id(spec: WorkspaceSpec, line: str) -> str:
    return hashlib.sha256(f"{spec.name}\n{line}".encode()).hexdigest()[:12]


def _images(spec: WorkspaceSpec, line: str) -> str:
    return f"{spec.paths[0]}/{PROGRAMS}/{_id(spec, line)}"


def _request() -> str:
    return f"{runner().run}:program:{secrets.token_hex(8)}"
