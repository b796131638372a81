"""The rules that protect a user's only copy (docs/contributing/safety.md).

A ``Verified`` proves that a snapshot is whole in the store; only ``verify_snapshot`` makes one. A
``Warrant`` allows one machine to be destroyed. Only this module makes one: from a ``Verified``
after the disk was compared once more, for a machine that never held any work, or for a job's
machine that its provider has stopped and does not start again. Providers' ``destroy`` takes a
warrant, so the type checker stops a destroy without proof. A warrant from a snapshot holds for a
minute after that comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Final

from torpor.control.store.catalog import Catalog
from torpor.control.store.manifests import read_manifest, read_with_object
from torpor.control.store.marks import LATEST_COMMIT_S, read_marks
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.packs import claims_of, compare_packs, stored_packs
from torpor.control.store.receipts import agent_of, is_autosave, withdraw_receipt, write_receipt
from torpor.shared.errors import (
    ManifestInvalid,
    NotOurs,
    SnapshotDamaged,
    SnapshotMissing,
    StillChanging,
    StoreArchived,
    UnsafeDestroy,
    WrongKey,
)
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import Manifest, Pack
from torpor.shared.format.names import manifest_key, pack_key
from torpor.shared.transfer.answer import archived_words
from torpor.shared.transfer.retries import hurried
from torpor.shared.values import (
    Grant,
    Label,
    Machine,
    MachineId,
    ObjectKey,
    SnapshotId,
    StoredObject,
    StoredSnapshot,
    WorkspaceName,
)
from torpor.shared.wire.snapshot import Confirmed

_MINT: Final = object()
_REREAD_GRANT_S: Final = 6 * 3600
_HEADS_AT_ONCE: Final = 16
HOLDS_S: Final = 60.0
"""Seconds that the last comparison of the disk may be old when a provider is asked to destroy. The
waits between the tries of the provider's client come on top."""


def _ask_nobody() -> None:
    """Nothing to check again."""


class _Check:
    """Asks before each destroy whether somebody else uses the machine, and knows how far the
    machine's end has come."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        # whether a destroy followed the check, and whether it was accepted
        self.checked = self.ends = False

    def __call__(self) -> None:
        """Raises the error of ``ask``."""
        self._ask()


class _LastLook(_Check):
    """A check that also fails once the last comparison of the disk is too old."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__(ask)
        self._made_s = boot_clock_s()

    def __call__(self) -> None:
        """StillChanging once that look is too old, also by the time of the answer; or the error of
        ``ask``, which does not wait for a store that is away."""
        if self.ends:
            return
        self._check_age()
        with hurried():
            super().__call__()
        self._check_age()

    def _check_age(self) -> None:
        age_s = boot_clock_s() - self._made_s
        if age_s > HOLDS_S:
            raise StillChanging(
                f"the disk was compared {age_s:.0f} s ago, and may have changed since: the machine "
                "was not destroyed. Hibernate again"
            )


def boot_clock_s() -> float:
    """Seconds on a clock that goes on while this host sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class _Proof:
    """A frozen value that only the holder of the mint can make."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise UnsafeDestroy(f"a {type(self).__name__} cannot be changed after it was made")


class Verified(_Proof):
    """A snapshot that is whole in the store: the manifest was read back, and every pack that it
    names exists with its size and checksum. Its receipt in the store says so to other runs."""

    __slots__ = ("machine", "manifest", "root", "snapshot", "workspace")

    workspace: WorkspaceName
    snapshot: SnapshotId
    machine: str
    root: str
    manifest: Manifest

    @property
    def agent(self) -> str:
        """The machine's own name for itself, as receipts have it."""
        return agent_of(self.manifest)

    def __init__(self, mint: object, manifest: Manifest, root: str) -> None:
        if mint is not _MINT:
            raise UnsafeDestroy("only torpor.control.safety.verify_snapshot can make a Verified")
        keep = super(_Proof, self).__setattr__
        keep("workspace", manifest.workspace)
        keep("snapshot", manifest.snapshot)
        keep("machine", manifest.machine)
        keep("root", root)
        keep("manifest", manifest)


class Warrant(_Proof):
    """Permission to destroy one machine, after its live identity was compared. See ``check``."""

    __slots__ = ("_ask", "_label", "_machine", "_only_stopped", "_provider", "reason", "snapshot")

    _provider: str
    _machine: MachineId
    _label: Label
    _ask: _Check
    _only_stopped: bool
    reason: str
    snapshot: SnapshotId | None  # the snapshot that holds what was on the machine

    def __init__(
        self,
        mint: object,
        machine: Machine,
        reason: str,
        ask: Callable[[], None] = _ask_nobody,
        snapshot: SnapshotId | None = None,
        *,
        only_stopped: bool = False,
    ) -> None:
        if mint is not _MINT:
            raise UnsafeDestroy(
                "a Warrant can only be made by torpor.control.safety, from a verified snapshot, "
                "for a machine that was never handed over, or for one that is beyond reach"
            )
        if machine.label is None:
            raise NotOurs(f"machine {machine.id} at {machine.provider} carries no torpor label")
        keep = super(_Proof, self).__setattr__
        keep("_provider", machine.provider)
        keep("_machine", machine.id)
        keep("_label", machine.label)
        keep("_ask", ask if isinstance(ask, _Check) else _Check(ask))
        keep("_only_stopped", only_stopped)
        keep("reason", reason)
        keep("snapshot", snapshot)

    def check(self, live: Machine) -> None:
        """Compare with the provider's current answer, and check again that the warrant holds.
        Raises UnsafeDestroy, NotOurs, or the error of the check."""
        if live.label is None or live.label != self._label:
            raise NotOurs(
                f"machine {live.id} at {live.provider} carries label {live.label}, the warrant is "
                f"for {self._label}: nothing was destroyed; check the machine first"
            )
        if (live.provider, live.id) != (self._provider, self._machine):
            raise UnsafeDestroy(
                f"the warrant is for machine {self._machine} at {self._provider}, not for "
                f"{live.id} at {live.provider}: nothing was destroyed"
            )
        beyond = live.state == "stopped" or (live.state == "stopping" and self._ask.ends)
        if self._only_stopped and not beyond:
            raise UnsafeDestroy(
                f"machine {live.id} at {live.provider} is {live.state} and not stopped, so its "
                "disk may be reached: it was not destroyed"
            )
        self._ask()
        self._ask.checked = True

    @property
    def is_accepted(self) -> bool:
        """Whether the provider has accepted the end of the machine."""
        return self._ask.ends

    def accepted(self) -> None:
        """Note that the provider's ``destroy`` has returned. If it asked for the end of the
        machine, no work can begin there any more, so the last comparison of the disk stays
        valid."""
        self._ask.ends = self._ask.checked

    def check_label(self, label: Label | None) -> None:
        """Compare the label of what outlived the machine, such as a disk or an address, and check
        again that the warrant holds. Raises as ``check`` does."""
        if label != self._label:
            raise NotOurs(f"the warrant is for label {self._label}, not {label}: nothing was ended")
        self._ask()
        self._ask.checked = self._ask.ends  # there was no machine to end


def verify_snapshot(
    store: ObjectStore,
    wanted: StoredSnapshot,
    seal: Seal,
    reread: Callable[[Sequence[Grant]], Sequence[ObjectKey]] | None = None,
    machine: str = "",
    paths: Sequence[str] | None = None,
    made_by: str = "",
) -> Verified:
    """Read the manifest back and look at every pack; SnapshotDamaged names what is wrong.
    OtherPaths where it names other directories than ``paths``, if they are given.

    ``reread`` reads packs whole and returns those that do not match; it is asked for packs whose
    ETag is not an MD5. Without it, such packs cannot be verified. The snapshot then has a receipt,
    so that it counts; ``machine``: what its provider or its user calls the machine that it is of;
    ``made_by``: the flow that made it. Without ``machine``, an autosave gets no receipt.
    """
    seen, manifest = read_with_object(store, wanted, seal, paths)
    missing, unsure = compare_packs(
        stored_packs(store, manifest.workspace), claims_of(manifest.workspace, manifest.packs)
    )
    if unsure and reread is not None:
        missing += list(
            reread([store.grant("GET", key, expires_s=_REREAD_GRANT_S) for key in unsure])
        )
    elif unsure and not missing:
        raise SnapshotDamaged(
            f"{store.address} does not show the MD5 of {len(unsure)} packs of snapshot "
            f"{wanted.snapshot}, so they must be read again: run a full verify"
        )
    if missing:
        withdraw_receipt(store, wanted.workspace, wanted.snapshot)
        raise _damage(
            store, wanted, manifest, missing, "The machine was not touched; run hibernate again"
        )
    _check_not_late(store, manifest)
    if seen is not None and (machine or not is_autosave(manifest)):
        write_receipt(store, seen, manifest, wanted.root, machine, made_by)
    return Verified(_MINT, manifest, wanted.root)


def check_whole(
    store: ObjectStore,
    wanted: StoredSnapshot,
    seal: Seal,
    paths: Sequence[str] | None = None,
    packs: Mapping[ObjectKey, StoredObject] | None = None,
) -> Manifest:
    """The manifest; SnapshotDamaged unless every pack is there as far as the store shows it, and
    OtherPaths as in ``verify_snapshot``. For a snapshot whose machine is gone: no pack is read
    back, so it proves nothing; a restore checks each hash. ``packs``: the result of
    ``stored_packs``, if the caller has it."""
    advice = "An older one is used; delete this one"
    manifest = check_packs(store, wanted, seal, advice, paths, packs)
    _check_not_late(store, manifest)
    return manifest


def check_packs(
    store: ObjectStore,
    wanted: StoredSnapshot,
    seal: Seal,
    advice: str,
    paths: Sequence[str] | None = None,
    packs: Mapping[ObjectKey, StoredObject] | None = None,
) -> Manifest:
    """The manifest; SnapshotDamaged, with the ``advice``, if the store shows that a pack is missing
    or changed, StoreArchived if one cannot be read now. OtherPaths as in ``verify_snapshot``."""
    manifest = read_manifest(store, wanted, seal, paths)
    there = stored_packs(store, manifest.workspace) if packs is None else packs
    missing, _ = compare_packs(there, claims_of(manifest.workspace, manifest.packs))
    if missing:
        raise _damage(store, wanted, manifest, missing, advice)
    check_readable(store, there, manifest.workspace, manifest.packs)
    return manifest


def check_readable(
    store: ObjectStore,
    there: Mapping[ObjectKey, StoredObject],
    workspace: WorkspaceName,
    packs: Iterable[Pack],
) -> None:
    """StoreArchived where some of ``packs`` are in an archive, and nobody has restored them. Asks
    about each pack that may be archived by its class in the listing. The first request that fails
    ends the look; waiting ones are not sent."""
    keys = [key for pack in packs if (key := pack_key(workspace, pack.id)) in there]
    suspects = [key for key in keys if there[key].archive]
    # the contexts know how long a store is waited for
    contexts = [copy_context() for _ in suspects]
    with ThreadPoolExecutor(_HEADS_AT_ONCE, thread_name_prefix="archives") as threads:
        heads = threads.map(lambda own, key: own.run(store.head, key), contexts, suspects)
        archived = [now.key for now in heads if now is not None and now.archive]
    if archived:
        raise StoreArchived(
            f"workspace {workspace} in {store.address}: {archived_words(len(archived))}: "
            f"{', '.join(archived[:5])}"
        )


def _damage(
    store: ObjectStore,
    wanted: StoredSnapshot,
    manifest: Manifest,
    missing: Sequence[ObjectKey],
    advice: str,
) -> SnapshotDamaged:
    return SnapshotDamaged(
        f"snapshot {wanted.snapshot} of workspace {wanted.workspace} in {store.address} has "
        f"{len(missing)} of {len(manifest.packs)} packs missing or changed: "
        f"{', '.join(missing[:5])}. {advice}"
    )


def _check_not_late(store: ObjectStore, manifest: Manifest) -> None:
    """Refuse a manifest that appeared too long after a mark of a pack that it names: the sweep of
    that mark may have missed the manifest, so prune may delete the pack at any time."""
    named = {pack.id for pack in manifest.packs}
    marks = [mark for mark in read_marks(store, manifest.workspace) if named & mark.unnamed]
    if not marks:
        return
    found = store.head(manifest_key(manifest.workspace, manifest.snapshot))
    oldest = min(mark.made_unix for mark in marks)
    if found is None or found.modified_unix > oldest + LATEST_COMMIT_S:
        raise SnapshotDamaged(
            f"snapshot {manifest.snapshot} of workspace {manifest.workspace} in {store.address} "
            "was written long after prune marked packs that it names, so prune may delete them "
            "at any time. The machine was not touched; run hibernate again, and delete this "
            "snapshot"
        )


def warrant_to_destroy(
    store: ObjectStore,
    seal: Seal,
    verified: Verified,
    machine: Machine,
    agent_machine: str,
    confirm: Callable[[], Confirmed],
    ask: Callable[[], None] = _ask_nobody,
) -> Warrant:
    """Permission to destroy ``machine``, whose agent calls itself ``agent_machine``.

    Raises UnsafeDestroy when the snapshot is not of that machine or not its newest, and
    StillChanging when the disk has changed since, in names that the user did not accept.

    The warrant holds for HOLDS_S after ``confirm``, until the provider has accepted the end. Until
    then it looks for a newer snapshot of the machine right before each destroy, and calls ``ask``,
    which raises if somebody else uses the machine.
    """
    if machine.label is None or machine.label.workspace != verified.workspace:
        raise NotOurs(
            f"machine {machine.id} at {machine.provider} carries label {machine.label}, not one of "
            f"workspace {verified.workspace}: it was not destroyed"
        )
    if agent_machine != verified.machine:
        raise UnsafeDestroy(
            f"snapshot {verified.snapshot} was made on machine {verified.machine}, and "
            f"{machine.id} is {agent_machine}: it was not destroyed"
        )

    agents: dict[tuple[SnapshotId, str], str] = {}  # so that the last look reads no manifest again

    def last_look() -> None:
        _check_own_newest(store, seal, verified, machine, agents)
        ask()

    _check_own_newest(store, seal, verified, machine, agents)
    confirmed = confirm()
    if confirmed.unaccepted_count:
        raise StillChanging(
            f"{confirmed.unaccepted_count} names changed on machine {machine.id} after snapshot "
            f"{verified.snapshot} was made: {', '.join(confirmed.unaccepted)}. The machine was "
            "not destroyed: stop the program that writes there (a quiesce hook can), or accept "
            "these names in `accept_changed`, and hibernate again"
        )
    reason = f"snapshot {verified.snapshot} is verified and the newest of its machine"
    return Warrant(_MINT, machine, reason, _LastLook(last_look), verified.snapshot)


def _check_own_newest(
    store: ObjectStore,
    seal: Seal,
    verified: Verified,
    machine: Machine,
    agents: dict[tuple[SnapshotId, str], str],
) -> None:
    """UnsafeDestroy where the store does not list the verified snapshot any more, or lists a newer
    one of the machine, or a newer one whose manifest cannot be read and that may be the machine's.
    Newer snapshots of other machines do not matter: they are tips of their own lines. ``agents``:
    the names of snapshots' machines for themselves, by the ETag of the manifest, as far as
    known."""
    catalog = Catalog(store, verified.workspace)
    if verified.snapshot not in catalog.manifests:
        raise UnsafeDestroy(
            f"{store.address} does not list the verified snapshot {verified.snapshot} of workspace "
            f"{verified.workspace} any more: machine {machine.id} was not destroyed; hibernate "
            "again"
        )
    for snapshot, found in catalog.manifests.items():
        if snapshot <= verified.snapshot:
            continue
        known = snapshot, found.etag
        try:
            if not found.etag or known not in agents:
                agents[known] = catalog.agent(snapshot, seal)
            agent, words = agents[known], "from another run"
        except (SnapshotMissing, ManifestInvalid, WrongKey) as error:
            agent, words = verified.agent, f"which cannot be read: {error}"
        if agent == verified.agent:
            raise UnsafeDestroy(
                f"{store.address} has snapshot {snapshot} of workspace {verified.workspace}, newer "
                f"than the verified {verified.snapshot} of machine {machine.id}, {words}: it was "
                "not destroyed; hibernate again"
            )


def never_handed_over(
    machine: Machine, label: Label, ask: Callable[[], None] = _ask_nobody
) -> Warrant:
    """A warrant for a machine under ``label`` that was never handed over.

    ``ask`` raises if the machine was handed over, or if the ledger does not answer. It is called
    right before each destroy, because another run may hand the machine over while a provider is
    slow.
    """
    if machine.label != label:
        raise NotOurs(
            f"machine {machine.id} at {machine.provider} carries label {machine.label}, not "
            f"{label}: nothing was destroyed"
        )
    return Warrant(_MINT, machine, "never handed over to anybody", ask)


def beyond_reach(
    store: ObjectStore,
    save: StoredSnapshot,
    seal: Seal,
    machine: Machine,
    ask: Callable[[], None],
) -> Warrant:
    """A warrant for a job's machine that its provider has stopped, and whose disk nobody can reach:
    the job goes on from ``save``, and what was written after it is lost.

    SnapshotDamaged unless the save is whole in the store, and the store shows the MD5 of each pack,
    because the packs are not read. The warrant holds only while the machine is stopped: one that
    starts can be reached soon. ``ask`` is called right before each destroy, and raises if somebody
    else uses the machine.
    """
    if machine.label is None or machine.label.workspace != save.workspace:
        raise NotOurs(
            f"machine {machine.id} at {machine.provider} carries label {machine.label}, not one of "
            f"workspace {save.workspace}: it was not destroyed"
        )
    verify_snapshot(store, save, seal)
    reason = f"it is stopped and does not start again; snapshot {save.snapshot} is whole"
    return Warrant(_MINT, machine, reason, ask, only_stopped=True)
