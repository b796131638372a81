"""The steps of a workspace's programs: a wake starts them on the machine, or lets them go on where
a hibernate froze them."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from tasks.retries import ONCE
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.remote.criu import criu_bundle
from torpor.control.remote.seam import Agent
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.rental.renting import Tenancy
from torpor.shared.errors import MachineUnfit, TorporError
from torpor.shared.format.roots import PROGRAMS
from torpor.shared.values import WorkspaceSpec
from torpor.shared.wire.job import JobState, StartJob, TryFreezing
from torpor.shared.wire.snapshot import Froze, Program

START_S: Final = 300.0


@step("quiesce", retries=ONCE, phase="quiesce")
def quiesce(snapshot: RemoteSnapshot, session: Agent, *, ends: bool) -> list[str]:
    """Run the user's hook, and freeze the programs of a machine that ends. Returns what became of
    each, for people. MachineUnfit where one that has to be frozen cannot be."""
    spec = snapshot.spec
    programs = {_id(line): line for line in spec.programs}
    wanted = [Program(name, _images(spec, line)) for name, line in programs.items()]
    if not ends or spec.process == "never" or not wanted:
        snapshot.quiesce()
        return []
    try:
        criu, why_not = session.send_bundle(criu_bundle()), ""
    except MachineUnfit as error:
        criu, why_not = "", str(error)
    froze = snapshot.quiesce([] if why_not else wanted, criu)
    if why_not:
        froze = [Froze(program.job, why_not=why_not) for program in wanted]
    faults = [f"{programs[one.job]!r}: {one.why_not}" for one in froze if one.why_not]
    if faults and spec.process == "require":
        raise MachineUnfit(
            f"workspace {spec.name} requires that its programs are frozen, and they were not: "
            f"{'; '.join(faults)}. The machine was kept: set `process` to try in the workspace "
            "block, and hibernate again"
        )
    for fault in faults:
        runner().log.warning("a program is not frozen, and a wake starts it afresh: %s", fault)
    return [_frozen(programs[one.job], one) for one in froze]


@step("start programs", retries=ONCE)
def start_programs(opened: OpenWorkspace, session: Agent, tenancy: Tenancy) -> list[str]:
    """Start the workspace's programs on a machine that was restored and is not handed over yet.
    Returns how each began, for people. MachineUnfit where they have to be frozen one day, and the
    machine cannot do that; nothing else fails a wake."""
    spec = opened.spec
    if not spec.programs:
        return []
    criu, why_not = _proven(session) if spec.process != "never" else ("", "")
    if why_not and spec.process == "require":
        raise MachineUnfit(
            f"workspace {spec.name} requires a machine that can freeze its programs: {why_not}. "
            "Set `process` to try in the workspace block, or rent a virtual machine"
        )
    elsewhere = [
        rental.machine or rental.provider
        for rental in opened.rentals.open()
        if tenancy.rental is None or rental.label != tenancy.rental.label
    ]
    if elsewhere and criu:  # it may still run there
        why_not = f"the workspace is also on machine {', '.join(elsewhere)}"
    begun = []
    for line in spec.programs:
        try:
            state = _start(session, spec, line, "" if why_not else criu)
        except TorporError as error:
            runner().log.warning("program %r was not started: %s", line, error)
            begun.append(f"{line}: not started: {error}")
        else:
            begun.append(f"{line}: {_begun(state, why_not)}")
    return begun


def _proven(session: Agent) -> tuple[str, str]:
    """The folder of CRIU on the machine, or why no processes can be frozen there. Only a small tree
    that went on there is a proof."""
    try:
        why_not = session.call(TryFreezing(""), request_id=_request(), within_s=START_S).why_not
        if why_not:
            return "", why_not
        criu = session.send_bundle(criu_bundle())
        told = session.call(TryFreezing(criu), request_id=_request(), within_s=START_S)
    except MachineUnfit as error:
        return "", str(error)
    return criu, told.why_not


def _start(session: Agent, spec: WorkspaceSpec, line: str, criu: str) -> JobState:
    images = _images(spec, line)
    request = StartJob(
        _id(line),
        1,
        ["bash", "-lc", line],
        spec.paths[0],
        f"{images}.log",
        [],
        serves=True,
        images=images,
        criu=criu,
    )
    return session.call(request, request_id=_request(), within_s=START_S)


def _begun(state: JobState, why_not: str) -> str:
    if state.went_on:
        return "went on where it was frozen"
    why = state.afresh and (why_not or state.afresh)
    return f"started afresh: {why}" if why else "started"


def _frozen(line: str, froze: Froze) -> str:
    if froze.why_not:
        return f"{line}: not frozen, a wake starts it afresh: {froze.why_not}"
    return f"{line}: frozen, {froze.bytes:,} bytes in {froze.seconds:.1f} s"


def _id(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:12]


def _images(spec: WorkspaceSpec, line: str) -> str:
    return f"{spec.paths[0]}/{PROGRAMS}/{_id(line)}"


def _request() -> str:
    return f"{runner().run}:program:{secrets.token_hex(8)}"
