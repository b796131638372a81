"""Adoption: which machine of a market is meant, and whether it is its user's to give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from torpor.control.providers.provider import Absent, Adopts, Provider
from torpor.control.rental.records import Rental, Rentals
from torpor.control.reports import Row, WorkspaceReport
from torpor.shared.errors import InvalidInput, NotOurs, TorporError, UnsafeDestroy, WorkspaceAwake
from torpor.shared.values import Machine, MachineId


class AdoptReport(WorkspaceReport, frozen=True):
    """A machine that may be adopted, was adopted, or was given up. ``host_key``: the only one that
    it may show from now on."""

    machine: str
    provider: str
    state: str  # a state of _SAID, or "not adopted"
    price_usd_h: float = 0.0
    host_key: str = ""
    fingerprint: str = ""
    paths: list[str] = msgspec.field(default_factory=list)
    bytes: int = 0
    outside: list[str] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)

    def title(self) -> str:
        if not self.machine:
            return f"Workspace {self.workspace} has no such adopted machine"
        return f"Workspace {self.workspace}: machine {self.machine} {_SAID[self.state]}"

    def rows(self) -> list[Row]:
        """The report's rows: first what torpor may do, then what it would not keep."""
        if not self.fingerprint:
            warnings = [{"what": "warning", "value": line} for line in self.warnings]
            return [{"what": "state", "value": self.title()}, *warnings]
        found = [
            ("machine", f"{self.machine} at {self.provider}: {self.state}"),
            (
                "torpor may",
                "store the workspace, prove that every byte is in the store, and then DESTROY this "
                "machine with its disk: by hibernate, when it is idle, or when a budget is spent",
            ),
            *(("warning", line) for line in self.warnings),
            *(("not in the workspace, lost with it", line) for line in self.outside),
            ("workspace", f"{', '.join(self.paths)}: {self.bytes:,} bytes to store"),
            ("price", f"{self.price_usd_h:.3f} $/h"),
            ("host key, pinned", self.fingerprint),
        ]
        return [{"what": name, "value": value} for name, value in found]


_SAID: Final = {
    "can be adopted": "can be adopted; nothing was changed",
    "adopted": "was adopted: only a verified snapshot ends it",
    "can be given up": "can be given up; nothing was changed",
    "given up": "is no longer torpor's; it runs on and costs what it costs",
}


def provider_of(
    wanted: str,
    each: Sequence[tuple[str, Provider | TorporError]],
    named: Sequence[Provider],
    every: Sequence[Provider],
) -> tuple[Provider, MachineId]:
    """The provider and the machine's id that ``MARKET:ID`` or ``BLOCK:ID`` means. Of several
    accounts at a market, the one that the workspace names is meant."""
    where, colon, machine = wanted.strip().partition(":")
    if not colon or not where or not machine:
        raise InvalidInput(
            f"{wanted!r} names no machine: write MARKET:ID, such as vast:12345, or BLOCK:ID, such "
            "as vast-provider/mine:12345"
        )
    blocks = [opened for name, opened in each if where in (name, name.rpartition("/")[2])]
    found = [provider for provider in blocks if not isinstance(provider, TorporError)]
    if blocks and not found:
        raise next(error for error in blocks if isinstance(error, TorporError))
    found = found or _at(named, where) or _at(every, where)
    accounts = {provider.identity: provider for provider in found}
    if len(accounts) != 1:
        there = ", ".join(sorted({*accounts} or {known.identity for known in every}))
        raise InvalidInput(
            f"{where!r} names {len(accounts)} of the accounts that provider blocks are for "
            f"({there or 'none'}): name its block, as in vast-provider/mine:{machine}"
        )
    (provider,) = accounts.values()
    if not provider.abilities.adopts or not isinstance(provider, Adopts):
        why = provider.abilities.not_adopted
        raise InvalidInput(f"no machine of {provider.identity} can be adopted: {why}")
    return provider, MachineId(machine)


def adopted_before(
    rentals: Iterable[Rental], provider: Provider, machine: MachineId
) -> Rental | None:
    """The open record of an earlier adoption of this machine: complete, or killed half-way."""
    found = (r for r in rentals if r.adopted and _is_of(r, provider, machine))
    return next(found, None)


def check_free(
    ledgers: Iterable[Rentals], provider: Provider, machine: MachineId, own: Rental | None
) -> None:
    """NotOurs where a workspace of the store has an open rental of the machine, but ``own``."""
    for ledger in ledgers:
        for rental in ledger.open():
            if _is_of(rental, provider, machine) and (own is None or rental.label != own.label):
                raise NotOurs(
                    f"machine {machine} at {provider.identity} is rental {rental.label.rental} of "
                    f"workspace {ledger.workspace} already: it was not adopted"
                )


def usable(provider: Provider, machine: MachineId, own: Rental | None) -> Machine:
    """The live machine. Raises unless it is in the account, runs, and belongs to no rental but
    ``own``."""
    live = provider.find(machine)
    where = f"machine {machine} at {provider.identity}"
    if isinstance(live, Absent):
        raise NotOurs(
            f"{where} is not in this account{f' ({live.proof})' if live.proof else ''}: check the "
            "id, and that the block's key is of the account that rents it. Nothing was adopted"
        )
    if live.label is not None and (own is None or live.label != own.label):
        raise NotOurs(
            f"{where} is a rental of torpor already, of workspace {live.label.workspace} and owner "
            f"{live.label.owner}: it was not adopted"
        )
    if live.state != "running" or live.endpoint is None:
        raise UnsafeDestroy(
            f"{where} is {live.state} and cannot be looked at ({live.note or 'no address'}): start "
            "it first. Nothing was adopted"
        )
    return live


def check_asleep(
    rentals: Iterable[Rental],
    shown: Iterable[tuple[Machine, Rental | None]],
    machine: Machine,
    own: Rental | None,
) -> None:
    """WorkspaceAwake where the workspace is on another machine, or may be."""
    mine = own.label if own else None
    ids = [r.machine for r in rentals if r.state != "abandoned" and r.label != mine]
    ids += [live.id for live, rental in shown if live.id != machine.id and rental is None]
    for other in ids:
        raise WorkspaceAwake(
            f"the workspace is on machine {other or 'not named yet'} already, so {machine.id} was "
            "not adopted: hibernate it there first, or adopt into another workspace. Reconcile "
            "shows the machines of a workspace"
        )


def _at(providers: Iterable[Provider], market: str) -> list[Provider]:
    return [known for known in providers if known.identity.partition(":")[0] == market]


def _is_of(rental: Rental, provider: Provider, machine: MachineId) -> bool:
    return (rental.provider, rental.machine) == (provider.identity, machine)
