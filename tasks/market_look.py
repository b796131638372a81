"""What exists at the markets, compared with the rentals of workspaces: one reading, of which
`watch` and `reconcile` each show their part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from tasks.trouble import trouble
from tasks.workspace import OpenWorkspace
from torpor.control.providers.provider import Provider, Residue
from torpor.control.reconciliation import Finding, compare
from torpor.control.rental.markets import ask_all, recall
from torpor.control.rental.records import Rental, rental_named
from torpor.control.store.records import Unread
from torpor.control.store.shared_listings import SharedListings
from torpor.shared.errors import MachineUnread, TorporError
from torpor.shared.values import Machine, WorkspaceName, names_of

Listing: TypeAlias = tuple[list[Machine], list[Residue]]


class MarketLook(NamedTuple):
    """``shown``: all machines, of whatever workspace. ``silent``: the error of each provider that
    did not answer, or lists a machine which cannot be read; ``silent_before``: the errors of the
    listing that was made before the rentals were read. ``away``: the error of each workspace whose
    store did not answer. ``refused``: the records of each workspace that cannot be trusted."""

    findings: list[Finding]
    shown: list[Machine]
    silent: dict[str, TorporError]
    silent_before: dict[str, TorporError]
    away: dict[WorkspaceName, TorporError]
    refused: dict[WorkspaceName, Unread]


def look_at_markets(
    workspaces: Sequence[OpenWorkspace], providers: Sequence[Provider], once: SharedListings
) -> MarketLook:
    """The machines and the residue at these providers, compared with the rentals of the workspaces
    under all of their names. Changes nothing. What does not answer is left out and named. ``once``:
    a new one, because the rentals are read after a first listing of the machines; later looks may
    share it."""
    before, silent_before = listed(providers)
    rentals = list[Rental]()
    away, refused = dict[WorkspaceName, TorporError](), dict[WorkspaceName, Unread]()
    for opened in workspaces:
        unread = Unread()
        try:
            rentals += open_rentals(opened.through(once.of), unread)
        except Exception as error:  # noqa: BLE001 - the others are looked at all the same
            away[opened.spec.name] = trouble(error)
        if unread:
            refused[opened.spec.name] = unread
    after, silent = listed(providers, rentals)
    read = [opened for opened in workspaces if opened.spec.name not in away]
    of = {name: opened for opened in read for name in names_of(opened.spec.name)}
    shown = [machine for machines, _ in after.values() for machine in machines]
    found = compare(
        after.keys(),
        [*of],
        rentals,
        [machine for machines, _ in before.values() for machine in machines],
        shown,
        [one for _, residue in after.values() for one in residue],
        {rental_named(key) for unread in refused.values() for key in unread},
    )
    findings = list[Finding]()
    for finding in found:
        name = WorkspaceName(finding.workspace)
        try:
            if name in of and _just_ended(of[name], finding):
                continue
        except Exception as error:  # noqa: BLE001 - as above
            away[of[name].spec.name] = trouble(error)
        findings.append(finding)
    return MarketLook(findings, shown, silent, silent_before, away, refused)


def open_rentals(opened: OpenWorkspace, unread: Unread | None = None) -> list[Rental]:
    """The open rentals of the workspace, under all of its names. ``unread``: as in
    Records.read_each."""
    names = names_of(opened.spec.name)
    return [one for name in names for one in opened.under(name).rentals.open(unread)]


def listed(
    providers: Sequence[Provider],
    rentals: Sequence[Rental] = (),
) -> tuple[dict[str, Listing], dict[str, TorporError]]:
    """The machines and the residue by the identity of each provider that answered, and the error of
    each that did not. A provider that lists a machine which cannot be read is among both. Each is
    told first which machines the open ``rentals`` adopted there."""
    answers = ask_all(providers, partial(_listing, rentals=rentals))
    found: dict[str, Listing] = {}
    silent: dict[str, TorporError] = {}
    for provider, answer in zip(providers, answers, strict=True):
        if isinstance(answer, TorporError):
            silent[provider.identity] = answer
            continue
        machines, residue, unread = answer
        found[provider.identity] = machines, residue
        if unread is not None:
            silent[provider.identity] = unread
    return found, silent


def _just_ended(opened: OpenWorkspace, finding: Finding) -> bool:
    """Whether the rental of a machine that looks lost has ended by now, because a hibernate has
    just ended the machine."""
    rental = finding.rental if finding.kind == "lost" else None
    return rental is not None and opened.rentals.of(rental.label) is None


def _listing(
    provider: Provider, rentals: Sequence[Rental]
) -> tuple[list[Machine], list[Residue], MachineUnread | None]:
    recall([provider], rentals)
    try:
        return provider.list_own(), provider.residue(), None
    except MachineUnread as error:
        return [*error.machines], provider.residue(), error
