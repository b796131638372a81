"""Guards: what keeps a machine from being destroyed.

Every flow that hibernates a machine brings a list of guards. All of them are asked before the
quiesce command runs, again right before the destroy, and those that need only the store again each
time the provider is asked to destroy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tasks.jobs import check_no_job
from tasks.ownership import check_still_owner
from tasks.questions import ask
from tasks.snapshot import log_losses
from tasks.watch import check_idle, check_nothing_began, who_uses
from tasks.workspace import OpenWorkspace
from torpor.control.losses import USER_FILES, Lost
from torpor.control.remote.agent import Agent
from torpor.control.safety import Verified, boot_clock_s
from torpor.shared.errors import MachineInUse, UnsavedWork
from torpor.shared.values import Machine


@dataclass(frozen=True)
class EndingMachine:
    """A machine that is to end. ``lost``: what its snapshot lacks, as far as that is known.
    ``verified``: the verified snapshot; None before it is committed. ``nothing_new``: the store has
    all content already, so that the snapshot would only repeat the last one."""

    machine: Machine
    lost: Lost = field(default_factory=Lost)
    verified: Verified | None = None
    nothing_new: bool = False


class Guard(Protocol):
    """One reason to keep a machine."""

    needs_machine: bool
    """Whether the guard asks the machine itself, which may not answer once its provider was asked
    to destroy it."""

    def check(self, ending: EndingMachine) -> None:
        """Raise MachineInUse or UnsavedWork if the machine must be kept."""


def check_guards(
    guards: Sequence[Guard], ending: EndingMachine, *, only_store: bool = False
) -> None:
    """Ask all guards; with ``only_store``, only those that need no answer of the machine."""
    for guard in guards:
        if not (only_store and guard.needs_machine):
            guard.check(ending)


def ask_first(guards: Sequence[Guard], ending: EndingMachine) -> None:
    """Have the guards ask the person at the terminal, before the disk is compared for the last
    time: files change while an answer is waited for."""
    for guard in guards:
        if isinstance(guard, NothingLost):
            guard.ask(ending)


class NoJob:
    """Keeps a machine on which a job runs, or is about to. A job that runs on another machine of
    the workspace does not keep this one."""

    needs_machine = False

    def __init__(self, opened: OpenWorkspace) -> None:
        self._opened = opened

    def check(self, ending: EndingMachine) -> None:
        check_no_job(self._opened, ending.machine.id)


class NothingLost:
    """Keeps a machine that holds data which the user wants kept and which is in no snapshot. What
    the user wrote beside the workspace is such data: a person at the terminal is asked once, and
    nobody else may end the machine. ``block``: the name of the workspace's block. ``repeated``: the
    hibernation is tried again and again; if nothing is new, these files make no new snapshot."""

    needs_machine = False

    def __init__(self, block: str, *, repeated: bool = False) -> None:
        self._block = block
        self._repeated = repeated
        self._accepted = ""
        self._logged: list[str] = []

    def ask(self, ending: EndingMachine) -> None:
        """Ask the person at the terminal whether the user's own files may be lost, once for the
        same files; UnsavedWork after a no. Asks nothing where nobody is there."""
        lost, machine = ending.lost, ending.machine
        if ending.verified is None or lost.keep or lost.user_files in ("", self._accepted):
            return
        stored = f"Snapshot {ending.verified.snapshot} is verified"
        answer = ask(f"{lost.user_files}. {stored}. Destroy machine {machine.id} all the same?")
        if answer is False:
            raise self._kept(machine, lost.user_files, stored)
        self._accepted = lost.user_files if answer else ""

    def check(self, ending: EndingMachine) -> None:
        if ending.verified is not None:
            stored = f"Snapshot {ending.verified.snapshot} is verified"
        elif self._repeated and ending.nothing_new:
            stored = "Nothing is new since the last snapshot"
        else:
            return
        lost = ending.lost
        if lost.lines != self._logged:
            log_losses(ending.machine, lost.lines)
            self._logged = lost.lines
        if lost.keep:
            raise UnsavedWork(f"{_kept(ending.machine)}: {'; '.join(lost.keep)}. {stored}")
        if lost.user_files not in ("", self._accepted):
            raise self._kept(ending.machine, lost.user_files, stored)

    def _kept(self, machine: Machine, user_files: str, stored: str) -> UnsavedWork:
        return UnsavedWork(
            f"{_kept(machine)}: {user_files}. {stored}. Move these files into the workspace and "
            f"hibernate again, or accept their loss: `torpor hibernate {self._block} --machine "
            f"{machine.id} --accept-lost '{USER_FILES}'`"
        )


def _kept(machine: Machine) -> str:
    price = f"{machine.price_usd_h:.2f} $/h"
    return f"machine {machine.id} was not destroyed, and still costs {price}"


class StillOwner:
    """Keeps a machine that another control side owns by now."""

    needs_machine = False

    def __init__(self, opened: OpenWorkspace) -> None:
        self._opened = opened

    def check(self, ending: EndingMachine) -> None:
        if ending.verified is not None:
            check_still_owner(self._opened)


class StaysIdle:
    """Keeps a machine that counts as working by the idle rules of its workspace, when it is asked
    or at any later time."""

    needs_machine = True

    def __init__(self, opened: OpenWorkspace, machine: Machine, session: Agent) -> None:
        self._opened = opened
        self._session = session
        self._since_s = check_idle(opened, machine, session, None)

    def check(self, ending: EndingMachine) -> None:
        check_idle(self._opened, ending.machine, self._session, self._since_s)


class StaysUnused:
    """Keeps a machine that somebody uses or has used, or where that is unknown, when it is asked or
    at any later time."""

    needs_machine = True

    def __init__(self, opened: OpenWorkspace, machine: Machine, session: Agent) -> None:
        self._opened = opened
        self._session = session
        self.check(EndingMachine(machine))

    def check(self, ending: EndingMachine) -> None:
        name, machine = self._opened.spec.name, ending.machine
        used, unsure = who_uses(self._opened, machine, self._session)
        if why := used or unsure:
            raise MachineInUse(
                f"machine {machine.id} of workspace {name} was kept: {why}. Hibernate it when "
                f"nobody needs it: `torpor hibernate {name} --machine {machine.id}`"
            )


class NothingBegan:
    """Keeps a machine on which a job's command or a server was started since ``began_s`` on this
    host's boot clock."""

    needs_machine = True

    def __init__(self, opened: OpenWorkspace, session: Agent, began_s: float) -> None:
        self._opened = opened
        self._session = session
        self._began_s = began_s

    def check(self, ending: EndingMachine) -> None:
        since_s = boot_clock_s() - self._began_s
        check_nothing_began(self._opened, ending.machine, self._session, since_s)
