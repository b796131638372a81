"""What is killed, and when."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from tests.campaign.controls import Control
from tests.fixtures.fault_proxy import Fault
from tests.fixtures.world import OwnStore, World, kill, until_gone

Victim = Literal["agent", "control side", "sshd", "connection", "store", "skewed clock", "mmap"]
"""``skewed clock``: an agent whose clock is hours off. ``mmap``: a program on the machine that
writes through a mapping, without a pause, until it is killed. Only a hibernate has it."""
VICTIMS: Final[tuple[Victim, ...]] = (
    "agent",
    "control side",
    "sshd",
    "connection",
    "store",
    "skewed clock",
)

_EVENTS: Final = {
    "hibernate": (
        *("phase scan", "phase store", "phase commit", "phase verify", "phase confirm"),
        *("phase destroy", "phase destroy", "PUT /packs/", "PUT /packs/", "PUT /snapshots/"),
        *("PUT /snapshots/", "GET /snapshots/"),
    ),
    "wake": (
        *("phase machine", "phase connect", "phase plan", "phase restore", "phase finish"),
        *("phase check", "PUT /rentals/open/", "GET /packs/", "GET /packs/", "GET /snapshots/"),
        "handing over",
    ),
}
_HELD_S: Final = 0.25  # how long a request that a strike waits for is held, so that it falls inside
_POLL_S: Final = 0.002


@dataclass(frozen=True)
class Strike:
    """One kill: ``after_s`` seconds after the start, or after ``event`` where there is one."""

    victim: Victim
    event: str
    after_s: float
    revive_s: float  # how long sshd stays away

    @property
    def when(self) -> str:
        return f"{self.after_s:.2f} s after {self.event or 'the start'}"


def choose(rng: random.Random, flow: str, usual_s: float) -> Strike:
    """A random strike at a flow that takes ``usual_s`` seconds when nothing happens."""
    victim = rng.choice((*VICTIMS, "mmap") if flow == "hibernate" else VICTIMS)
    revive_s = rng.uniform(0, 1.5)
    if rng.random() < 0.5 or victim == "mmap":  # while it writes, many a phase never comes
        return Strike(victim, "", rng.uniform(0, usual_s), revive_s)
    return Strike(victim, rng.choice(_EVENTS[flow]), rng.choice((0, rng.uniform(0, 0.3))), revive_s)


def carry_out(
    strike: Strike,
    control: Control,
    world: World,
    store: OwnStore,
    end_program: Callable[[], None] | None = None,
) -> str | None:
    """Wait for the moment and kill; the phase that was hit, or None where it never came.
    ``end_program`` ends the program that writes through a mapping; it has been there all the
    time, so there is no run that it missed."""
    if strike.event.startswith(("PUT", "GET")):
        verb, part = strike.event.split()
        world.proxy.add(
            Fault("delay", lambda m, p: m == verb and part in p, count=1, delay_s=_HELD_S)
        )
    if not _await(lambda: _has_come(strike.event, control, world), control):
        return None
    end = time.monotonic() + strike.after_s
    while time.monotonic() < end and not control.ended():
        time.sleep(_POLL_S)
    if end_program is not None:
        end_program()
        return control.phase()
    if control.ended():
        return None
    hit = False

    def strikes() -> bool:
        nonlocal hit
        hit = _kill(strike, control, world, store)
        return hit

    if not _await(strikes, control):
        return None
    phase = control.phase()
    if strike.victim == "sshd":
        time.sleep(strike.revive_s)
        for machine in world.machines():
            world.revive_server(machine.id)
    if strike.victim == "store":
        store.revive()
    return phase


def _has_come(event: str, control: Control, world: World) -> bool:
    if not event:
        return True
    if event.startswith("phase "):
        return control.entered(event.removeprefix("phase "))
    if event == "handing over":  # the third time that the rental is written
        asked = [r for r in list(world.proxy.requests) if r[0] == "PUT" and "/rentals/" in r[1]]
        return len(asked) > 2
    verb, part = event.split()
    return any(m == verb and part in p for m, p in list(world.proxy.requests))


def _kill(strike: Strike, control: Control, world: World, store: OwnStore) -> bool:
    """Whether there was something to kill."""
    if strike.victim == "control side":
        control.kill()
        return True
    if strike.victim == "store":
        store.kill()
        return True
    pids: list[int] = []
    for machine in world.machines():
        if strike.victim in ("agent", "skewed clock"):
            pids += world.agents(machine.id)
        else:
            pids += world.sessions(machine.id)
            pids += world.listener(machine.id) if strike.victim == "sshd" else []
    killed = kill(pids)
    until_gone(pids)  # a server that is not gone yet would not be started again
    return killed > 0


def _await(done: Callable[[], bool], control: Control) -> bool:
    """False where the control side ended first."""
    while not done():
        if control.ended():
            return False
        time.sleep(_POLL_S)
    return True
