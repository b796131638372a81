"""What stands at a provider beside what the leases say of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from typing import Final, Literal

import msgspec

from torpor.control.ledger import Lease, lease_key
from torpor.control.reports import Row
from torpor.shared.errors import InvalidInput, NotOurs, UnsafeDestroy
from torpor.shared.values import RESERVED, Machine, MachineId, WorkspaceName

Kind = Literal[
    "unfinished",
    "without a lease",
    "lost",
    "in use",
    "asked for",
    "at another provider",
    "another workspace's",
]

_ADVICE: Final[dict[Kind, str]] = {
    "unfinished": "a run works on it now, or was killed: the next wake or replicate continues "
    "with it. If it never answers again, name its id in `end`",
    "without a lease": "this store has no lease for it, so it is left alone: reconcile with the "
    "store block that it was created with, or check the provider's console",
    "lost": "the provider does not list this machine: it was ended there, or was lost, or a "
    "hibernate was killed in its last step. Wake restores the newest snapshot. To remove "
    "this row, delete {key} in the bucket",
    "in use": "yours to work on; hibernate ends it while it runs",
    "asked for": "there is no machine: a run is about to create it, or was killed before that. "
    "The next run uses the lease",
    "at another provider": "reconcile with a workspace block that names that provider",
    "another workspace's": "reconcile the workspace that it belongs to",
}
_ADVICE_ON_SCRATCH: Final[dict[Kind, str]] = {
    "unfinished": "a benchmark or a drill works on it now, or was killed: a later benchmark, or "
    "a verify a day later, ends it. To end it now, name its id in `end`",
    "asked for": "there is no machine: a benchmark or a drill is about to create it, or was "
    "killed. A later one removes the lease",
}
_ORDER: Final = tuple(_ADVICE)
"""What may cost for nothing comes first."""


class Finding(msgspec.Struct, frozen=True):
    """A machine, a lease, or both where they have one label."""

    kind: Kind
    machine: Machine | None
    lease: Lease | None

    @property
    def workspace(self) -> str:
        labelled = self.lease or self.machine
        return labelled.label.workspace if labelled and labelled.label else ""

    @property
    def next_step(self) -> str:
        advice = _ADVICE[self.kind]
        if self.workspace.startswith(RESERVED):
            advice = _ADVICE_ON_SCRATCH.get(self.kind, advice)
        return advice.format(key=lease_key(self.lease.label) if self.lease else "")

    def row(self, now_unix: float) -> Row:
        """As a line of a table."""
        machine, lease = self.machine, self.lease
        costs = "no machine"
        if machine:
            costs = f"{machine.price_usd_h:.2f} $/h" if machine.price_usd_h else "no price known"
        if machine and machine.price_usd_h and lease:
            spent = machine.price_usd_h * (now_unix - lease.created_unix) / 3600
            costs += f", at most {spent:.2f} $ so far"
        return {
            "machine": machine.id if machine else "",
            "state": machine.state if machine else "",
            "what": self.kind,
            "next step": self.next_step,
            "costs": costs,
            "workspace": self.workspace,
            "lease": lease.label.rental if lease else "",
            "since": _utc(lease.created_unix) if lease else "",
            "provider": machine.provider if machine else lease.provider if lease else "",
        }


class Reconciliation(msgspec.Struct, frozen=True):
    """What there is after the run, and which machines it ended."""

    workspace: WorkspaceName
    provider: str
    findings: list[Finding]
    ended: list[MachineId]

    def rows(self) -> list[Row]:
        """One row for each finding, those that may cost for nothing first."""
        now_unix = time.time()
        return [finding.row(now_unix) for finding in self.findings]

    def message(self) -> str:
        """In a sentence: how many of each, and what was ended."""
        kinds = [finding.kind for finding in self.findings]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        ended = f"; ended {', '.join(self.ended)}" if self.ended else ""
        return f"Workspace {self.workspace} at {self.provider}: {counts or 'nothing'}{ended}"


def compare(
    provider: str,
    workspaces: Collection[WorkspaceName],
    leases: Sequence[Lease],
    before: Sequence[Machine],
    after: Sequence[Machine],
) -> list[Finding]:
    """The provider's live machines, and the leases of ``workspaces``, matched by label.

    ``before`` was listed before the leases were read, ``after`` was listed after it. Runs create
    and destroy meanwhile: only a machine that is in both can be without a lease, only a lease whose
    machine is in neither can be lost.
    """
    lease_of = {lease.label: lease for lease in leases}
    listed_before = {machine.id for machine in before}
    found = []
    for machine in after:
        if machine.label is None or machine.label.workspace not in workspaces:
            found.append(Finding("another workspace's", machine, None))
        elif machine.label in lease_of:
            lease = lease_of[machine.label]
            kind: Kind = "in use" if lease.state == "handed over" else "unfinished"
            found.append(Finding(kind, machine, lease))
        elif machine.id in listed_before:
            found.append(Finding("without a lease", machine, None))
    standing = {machine.label for machine in (*before, *after)}
    for lease in leases:
        if lease.label not in standing:
            kind = "lost" if lease.state == "handed over" else "asked for"
            if lease.provider != provider:
                kind = "at another provider"
            found.append(Finding(kind, None, lease))
    return sorted(found, key=lambda finding: _ORDER.index(finding.kind))


def choose(findings: Sequence[Finding], wanted: Sequence[str]) -> list[tuple[Machine, Lease]]:
    """The machines that ``wanted`` names by their ids, none of which was handed over.

    InvalidInput names one that is not there, UnsafeDestroy one that was handed over, NotOurs one
    that this workspace's leases do not speak of.
    """
    chosen = []
    by_id = {str(finding.machine.id): finding for finding in findings if finding.machine}
    for name in dict.fromkeys(wanted):
        if name not in by_id:
            raise InvalidInput(
                f"no machine {name!r} is at the provider (it has {', '.join(by_id) or 'none'}): "
                "nothing was ended; use the ids in this flow's table"
            )
        finding = by_id[name]
        if finding.kind == "in use":
            raise UnsafeDestroy(
                f"machine {name} was handed over and may hold work: nothing was ended. Run "
                "hibernate to end it with a verified snapshot, or use the provider's console to "
                "discard its work"
            )
        if finding.kind != "unfinished" or not finding.machine or not finding.lease:
            raise NotOurs(
                f"machine {name} is {finding.kind}: nothing was ended. {finding.next_step}"
            )
        chosen.append((finding.machine, finding.lease))
    return chosen


def _utc(unix: float) -> str:
    return datetime.fromtimestamp(unix, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
