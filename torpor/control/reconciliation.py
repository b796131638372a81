"""Compares what exists at the providers with what the rentals say of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Final, Literal

import msgspec

from torpor.control.providers.provider import FREE, Residue
from torpor.control.rental.records import Rental, by_label, rental_named
from torpor.control.reports import Row, WorkspaceReport, moment, without
from torpor.shared.errors import InvalidInput, NotOurs, UnsafeDestroy
from torpor.shared.values import RESERVED, Label, Machine, MachineId, WorkspaceName

Kind = Literal[
    "abandoned",
    "unfinished",
    "without a rental",
    "not believed",
    "residue",
    "lost",
    "being ended",
    "in use",
    "asked for",
    "at another provider",
    "another workspace's",
]

_ADVICE: Final[dict[Kind, str]] = {
    "abandoned": "an attempt that failed, or whose answer was lost: nobody uses it. The next run "
    "ends it, or reconcile with `abandoned`",
    "unfinished": "a run works on it now, or was killed: the next wake or replicate continues "
    "with it. If it never answers again, name its id in `end`",
    "without a rental": "this store has no rental for it, so it is left alone: reconcile with the "
    "store block that it was created with, or check the provider's console",
    "not believed": "what is on record of it cannot be believed, so it is left alone and costs "
    "money: the note on its record says what to do",
    "residue": "it outlived its machine and may cost money: look at it in the provider's console",
    "lost": "the provider does not list this machine: it was ended there, or was lost, or a "
    "hibernate was killed in its last step. Wake restores the newest snapshot. The next watch or "
    "wake, or reconcile with `abandoned`, closes the rental once the provider proves that it is "
    "gone, or has not shown it in three looks where it forgets. Otherwise, if you know that it is "
    "gone, name rental {rental} in `gone`",
    "being ended": "its work is stored, and its provider ends it, which may take hours: do not "
    "work on it. A wake rents another one. Reconcile with `abandoned` records its end once that is "
    "proven",
    "in use": "yours to work on; hibernate ends it while it runs",
    "asked for": "there is no machine: a run is about to create it, or was killed before that. "
    "A later run closes the rental",
    "at another provider": "no provider block is for {provider}, or it did not answer: add one, or "
    "run reconcile again. If you changed the API key of that account, write {provider} into "
    "`account` of its provider block. If you know that the machine is gone, name rental {rental} "
    "in `gone`",
    "another workspace's": "reconcile the workspace that it belongs to",
}
_ADVICE_ON_SCRATCH: Final[dict[Kind, str]] = {
    "unfinished": "a job on several nodes, a benchmark or a drill works on it now, or was killed: "
    "then `watch` ends it, or a later run of its kind. To end it now, name its id in `end`",
    "asked for": "there is no machine: a benchmark, a drill or a job on several nodes is about to "
    "create it, or was killed. A later one closes the rental",
}
_FREE_RESIDUE: Final = (
    "it outlived its machine and costs nothing: a later end of a machine deletes it, or you do in "
    "the provider's console"
)
_UNMARKED: Final = (
    "the machine was adopted. If it is there, its mark is missing: run `torpor adopt` again, or "
    "give it up with `torpor adopt --release`"
)
_ORDER: Final = tuple(_ADVICE)
"""Findings in a report's order: those that may cost money for nothing come first."""


_KINDS: Final[dict[str, Kind]] = {"handed over": "in use", "abandoned": "abandoned"}


class Finding(msgspec.Struct, frozen=True):
    """A machine, a rental, or both where they have one label; or what outlived a machine."""

    kind: Kind
    machine: Machine | None
    rental: Rental | None
    residue: Residue | None = None

    @property
    def label(self) -> Label | None:
        named = self.rental or self.machine or self.residue
        return named.label if named else None

    @property
    def workspace(self) -> str:
        return self.label.workspace if self.label else ""

    @property
    def price_usd_h(self) -> float:
        """What the finding costs an hour; 0 where that is unknown."""
        if self.residue:
            return self.residue.price_usd_h or 0.0
        known = self.rental.price_usd_h if self.rental and self.rental.adopted else 0.0
        return (self.machine.price_usd_h or known) if self.machine else 0.0

    @property
    def is_free(self) -> bool:
        """Whether the finding certainly costs nothing."""
        return self.residue is not None and self.residue.kind in FREE

    @property
    def next_step(self) -> str:
        advice = _ADVICE[self.kind]
        if self.workspace.startswith(RESERVED):
            advice = _ADVICE_ON_SCRATCH.get(self.kind, advice)
        if self.is_free:
            advice = _FREE_RESIDUE
        if self.kind == "lost" and self.rental and self.rental.adopted:
            advice = f"{_UNMARKED}. Otherwise: {advice}"
        provider = self.rental.provider if self.rental else ""
        return advice.format(rental=self.label.rental if self.label else "", provider=provider)

    def row(self, now_unix: float) -> Row:
        """The finding as a row of a table."""
        machine, rental, residue = self.machine, self.rental, self.residue
        costs = "no machine"
        if machine or residue:
            costs = f"{self.price_usd_h:.2f} $/h" if self.price_usd_h else "no price known"
        if self.is_free:
            costs = "nothing"
        if machine and self.price_usd_h and rental:
            spent = (
                max(self.price_usd_h, rental.most_usd_h) * (now_unix - rental.created_unix) / 3600
            )
            costs += f", at most {spent:.2f} $ so far"
        where = machine or residue or rental
        return {
            "machine": machine.id if machine else residue.id if residue else "",
            "state": machine.state if machine else residue.kind if residue else "",
            "what": self.kind,
            "next step": self.next_step,
            "costs": costs,
            "workspace": self.workspace,
            "rental": rental.label.rental if rental else "",
            "since": moment(rental.created_unix) if rental else "",
            "provider": where.provider if where else "",
        }


class Reconciliation(WorkspaceReport, frozen=True):
    """What there is after the run, which machines it ended, and which rentals it closed by their
    user's word. ``unread``: why records of these rentals cannot be trusted; the findings leave them
    out."""

    provider: str
    findings: list[Finding]
    ended: list[MachineId]
    closed: list[str] = msgspec.field(default_factory=list)
    unread: dict[str, str] = msgspec.field(default_factory=dict)

    def rows(self) -> list[Row]:
        """One row for each finding, those that may cost for nothing first, and one for each record
        that cannot be believed."""
        now_unix = time.time()
        rows = [finding.row(now_unix) for finding in self.findings]
        return rows + [
            {"what": "not believed", "next step": why, "rental": rental_named(key)}
            for key, why in self.unread.items()
        ]

    def title(self) -> str:
        """One sentence: how many of each kind, and what was ended."""
        kinds = [finding.kind for finding in self.findings]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        ended = f"; ended {', '.join(self.ended)}" if self.ended else ""
        ended += f"; closed rental {', '.join(self.closed)}" if self.closed else ""
        ended += without(self.unread)
        hourly = sum(finding.price_usd_h for finding in self.findings)
        costs = f", {hourly:.2f} $/h in all" if hourly else ""
        found = f"{counts or 'nothing'}{costs}{ended}"
        return f"Workspace {self.workspace} at {self.provider}: {found}"


def compare(
    providers: Collection[str],
    workspaces: Collection[WorkspaceName],
    rentals: Sequence[Rental],
    before: Sequence[Machine],
    after: Sequence[Machine],
    residue: Sequence[Residue] = (),
    unbelieved: Collection[str] = (),
) -> list[Finding]:
    """The live machines and the residue at ``providers`` (their identities), and the open rentals
    of ``workspaces``, matched by label.

    ``before`` was listed before the rentals were read, ``after`` was listed after it. Runs create
    and destroy meanwhile: only a machine that is in both can be without a rental, only a rental
    whose machine is in neither can be lost. ``unbelieved``: the ids of rentals whose records cannot
    be believed.
    """
    rental_of = by_label(rentals)
    listed_before = {machine.id for machine in before}
    found = []
    for machine in after:
        if machine.label is None or machine.label.workspace not in workspaces:
            found.append(Finding("another workspace's", machine, None))
        elif machine.label in rental_of:
            rental = rental_of[machine.label]
            kind = _KINDS.get(rental.state, "unfinished")
            if rental.is_ending(machine):
                kind = "being ended"
            found.append(Finding(kind, machine, rental))
        elif machine.label.rental in unbelieved:
            found.append(Finding("not believed", machine, None))
        elif machine.id in listed_before:
            found.append(Finding("without a rental", machine, None))
    shown_labels = {machine.label for machine in (*before, *after)}
    for rental in rentals:
        if rental.label not in shown_labels:
            kind = "lost" if rental.state == "handed over" else "asked for"
            if rental.state == "abandoned":
                kind = "abandoned"
            if rental.provider not in providers:
                kind = "at another provider"
            found.append(Finding(kind, None, rental))
    ours = [left for left in residue if left.label is None or left.label.workspace in workspaces]
    found += [
        Finding("residue", None, None, left) for left in ours if left.label not in shown_labels
    ]
    return sorted(found, key=lambda finding: _ORDER.index(finding.kind))


def choose_findings(
    findings: Sequence[Finding], wanted: Sequence[str]
) -> list[tuple[Machine, Rental]]:
    """The machines that ``wanted`` names by their ids, none of which was handed over.

    InvalidInput names one that is not there, UnsafeDestroy one that was handed over, NotOurs one
    that this workspace's rentals do not name.
    """
    chosen = []
    by_id = {str(finding.machine.id): finding for finding in findings if finding.machine}
    for name in dict.fromkeys(wanted):
        if name not in by_id:
            raise InvalidInput(
                f"no machine {name!r} is at the provider (it has {', '.join(by_id) or 'none'}): "
                "nothing was ended; `torpor reconcile WORKSPACE` lists the ids"
            )
        finding = by_id[name]
        if finding.kind == "in use":
            raise UnsafeDestroy(
                f"machine {name} was handed over and may hold work: nothing was ended. Run "
                "hibernate to end it with a verified snapshot, or use the provider's console to "
                "discard its work"
            )
        may_end = finding.kind in ("unfinished", "abandoned")
        if not may_end or not finding.machine or not finding.rental:
            raise NotOurs(
                f"machine {name} is {finding.kind}: nothing was ended. {finding.next_step}"
            )
        chosen.append((finding.machine, finding.rental))
    return chosen


def choose_gone(
    findings: Sequence[Finding], wanted: Sequence[str], blocks: Collection[str]
) -> list[Rental]:
    """The rentals that ``wanted`` names by their ids, none of whose machines is shown. ``blocks``:
    the accounts that provider blocks are for.

    InvalidInput names one that is not there, or whose provider may show it later, UnsafeDestroy one
    whose machine shows.
    """
    chosen = []
    by_id = {finding.rental.label.rental: finding for finding in findings if finding.rental}
    for name in dict.fromkeys(wanted):
        finding = by_id.get(name)
        if finding is None or finding.rental is None:
            raise InvalidInput(
                f"rental {name!r} is not open: nothing was closed; `torpor reconcile "
                "WORKSPACE` lists the open ones"
            )
        rental = finding.rental
        if finding.machine is not None:
            raise UnsafeDestroy(
                f"machine {finding.machine.id} at {finding.machine.provider} shows, so rental "
                f"{name} stays open: nothing was closed. {finding.next_step}"
            )
        if finding.kind == "at another provider" and rental.provider in blocks:
            raise InvalidInput(
                f"{rental.provider} did not answer, so nobody can say whether the machine of "
                f"rental {name} is there: nothing was closed. Run reconcile again"
            )
        if finding.kind not in ("lost", "at another provider"):
            raise InvalidInput(
                f"rental {name} is {finding.kind}: nothing was closed. {finding.next_step}"
            )
        chosen.append(rental)
    return chosen
