"""A market that rents machines, without its HTTP: offers, machines, money, and a given clock."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self, now_unix: float = 1_900_000_000.0) -> None:
        self.now_unix = now_unix

    def advance(self, seconds: float) -> None:
        self.now_unix += seconds


class Body(Protocol):
    """What a machine runs on (tests/markets/boot.py)."""

    @property
    def address(self) -> str: ...

    @property
    def port(self) -> int: ...

    def end(self) -> None: ...


@dataclass
class Ware:
    """One thing on sale. ``gpu`` is written as the market writes it."""

    gpu: str
    gpu_count: int
    vram_gib: int
    usd_h: float
    region: str
    stock: int = 100
    spot_usd_h: float | None = None
    disk_gib: float = 500.0
    ram_gib: float = 64.0
    cores: int = 16
    cuda: str = "12.8"
    driver: str = "570.86.10"
    reliability: float = 0.99
    disk_usd_gib_month: float = 0.0
    name: str = ""  # of an instance type, where the market has such


@dataclass
class Rented:
    """One machine, from the create to its end. ``request`` is what the client sent."""

    id: str
    number: int
    ware: Ware
    label: str
    usd_h: float
    spot: bool
    created_unix: float
    request: dict[str, Any]
    disk_gib: float = 0.0
    hidden_looks: int = 0  # answers that do not show it yet
    starting_looks: int = 0  # answers in which it is still starting
    stopped: bool = False
    no_room: bool = False  # its market cannot start it again now
    suspended: bool = False  # with its memory kept; it is ``stopped``, too
    ended_unix: float | None = None
    body: Body | None = None

    @property
    def alive(self) -> bool:
        return self.ended_unix is None

    @property
    def address(self) -> str:
        return self.body.address if self.body else f"192.0.2.{self.number % 250 + 1}"

    @property
    def port(self) -> int:
        return self.body.port if self.body else 20000 + self.number


Boot = Callable[[list[str]], Body]
"""Starts a machine that runs this command once."""


@dataclass
class Market:
    """State and rules that all fake markets share.

    ``boot``: None leaves the machines without a body; their SSH never answers.
    ``next_hidden_looks`` and ``next_starting_looks`` apply to machines made from now on.
    ``page``: machines in one answer to a listing, where the market pages.
    """

    clock: Clock = field(default_factory=Clock)
    wares: list[Ware] = field(default_factory=list)
    boot: Boot | None = None
    balance_usd: float = 100.0
    page: int = 25
    next_hidden_looks: int = 0
    next_starting_looks: int = 0
    rented: list[Rented] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def rent(
        self,
        ware: Ware,
        label: str,
        request: dict[str, Any],
        *,
        id_of: Callable[[int], str],
        command: list[str] | None = None,
        variables_of: Callable[[str], dict[str, str]] = lambda id: {},
        script: str = "",
        spot: bool = False,
        bid_usd_h: float | None = None,
        disk_gib: float = 0.0,
        stopped: bool = False,
    ) -> Rented:
        """Make the machine; money runs from here. ``bid_usd_h``: of a market that bills the bid. A
        ``script`` runs where its first line says by what."""
        if script.startswith("#!"):
            command = ["/bin/sh", "-c", script]
        with self.lock:
            number = next(self._numbers)
            usd_h = bid_usd_h or (ware.spot_usd_h if spot else None) or ware.usd_h
            machine = Rented(
                id_of(number),
                number,
                ware,
                label,
                usd_h + disk_gib * ware.disk_usd_gib_month / 730,
                spot,
                self.clock.now_unix,
                request,
                disk_gib,
                self.next_hidden_looks,
                self.next_starting_looks,
                stopped,
            )
            ware.stock -= 1
            self.rented.append(machine)
        if self.boot is not None and command and not stopped:
            if own := variables_of(machine.id):
                command = ["env", *(f"{name}={value}" for name, value in own.items()), *command]
            machine.body = self.boot(command)
        return machine

    def end(self, machine: Rented) -> None:
        with self.lock:
            if machine.ended_unix is not None:
                return
            machine.ended_unix = self.clock.now_unix
            machine.ware.stock += 1
        if machine.body is not None:
            machine.body.end()

    def take(self, machine: Rented) -> None:
        """Stop it for somebody who pays more, and keep its disk."""
        with self.lock:
            machine.stopped = machine.no_room = True
        if machine.body is not None:
            machine.body.end()

    def alive(self) -> list[Rented]:
        with self.lock:
            return [machine for machine in self.rented if machine.alive]

    def spent_usd(self) -> float:
        """The bill until now, of all machines ever rented."""
        with self.lock:
            return sum(
                ((m.ended_unix or self.clock.now_unix) - m.created_unix) / 3600 * m.usd_h
                for m in self.rented
            )

    def visible(self) -> list[Rented]:
        """The live machines that a listing shows now; each call is one look."""
        with self.lock:
            shown = []
            for machine in self.alive():
                if machine.hidden_looks > 0:
                    machine.hidden_looks -= 1
                else:
                    shown.append(machine)
            return shown

    def hidden(self, machine: Rented) -> bool:
        """Whether a look at this machine alone does not show it yet; each call is one look."""
        with self.lock:
            if machine.hidden_looks > 0:
                machine.hidden_looks -= 1
                return True
            return False

    def starting(self, machine: Rented) -> bool:
        """Whether the machine still starts; each call is one look."""
        with self.lock:
            if machine.starting_looks > 0:
                machine.starting_looks -= 1
                return True
            return False

    def close(self) -> None:
        """End the machines' processes, not their rent: a test may still look at the books."""
        for machine in self.rented:
            if machine.body is not None:
                machine.body.end()
