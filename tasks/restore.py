"""The steps of a restore as tasks."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from tasks.autosave import pinned_for_others
from tasks.events import FirstRestored, emit
from tasks.lineage import lacks
from tasks.machines import endpoint_of
from tasks.phases import seconds_by_phase
from tasks.progress import Progress
from tasks.prune import named_by_records
from tasks.retries import WHILE_BUSY
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace, StoredWorkspace
from torpor.control.losses import clean, left_behind, size
from torpor.control.remote.agent import Agent
from torpor.control.remote.paths import SnapshotPath
from torpor.control.remote.restore import RemoteRestore
from torpor.control.rental.search import fit
from torpor.control.reports import FirstReport, WakeReport, moment
from torpor.control.safety import check_packs
from torpor.control.store.manifests import (
    find_snapshot,
    open_manifest,
    read_manifest,
    snapshot_ids,
)
from torpor.control.store.receipts import is_autosave, is_verified, verified_snapshots
from torpor.control.upkeep.differences import compare, entry_at
from torpor.control.upkeep.lineage import StoredState, choose_newest, lacking, named
from torpor.control.upkeep.presence import all_named, not_listed
from torpor.shared.errors import (
    LacksWork,
    ManifestInvalid,
    OtherPaths,
    SnapshotDamaged,
    SnapshotError,
    TorporError,
)
from torpor.shared.format.lineage import Lineage, lineage_of
from torpor.shared.format.manifest import Manifest, disk_bytes
from torpor.shared.format.missed import recorded_missing
from torpor.shared.format.names import packs_prefix
from torpor.shared.format.roots import places_of
from torpor.shared.values import (
    HOME,
    Machine,
    SnapshotId,
    StoredSnapshot,
    Want,
    snapshot_id,
    tidy_path,
)
from torpor.shared.wire.restore import Checked, Finished, RestoredPart, RestorePart, RestorePlan

NEWEST = "newest"
_NAMED: Final = 5


def snapshot_to_wake(opened: OpenWorkspace, wanted: str) -> tuple[StoredSnapshot, OpenWorkspace]:
    """The snapshot to wake, and the workspace with its requirements on disk, architecture and CUDA
    set from that snapshot. A snapshot that lacks packs is refused, and the message names the newest
    whole one."""
    of = opened.spec
    try:
        found, manifest, others, refused = picked(opened, wanted)
        manifest = manifest or check_packs(
            opened.store,
            found,
            opened.seal,
            "No machine can restore it, so nothing was rented",
            of.restorable,
        )
    except OtherPaths:
        raise
    except (ManifestInvalid, SnapshotDamaged) as damage:
        raise type(damage)(f"{damage}. {_instead(opened)}") from None
    if not is_verified(opened.store, found):
        runner().log.warning(
            "snapshot %s was never verified: its packs are there, and the restore checks each hash",
            found.snapshot,
        )
    if others is None:
        others = lacking(opened.store, of.name, opened.seal, lineage_of(manifest))
    aside = lacks(of.name, found.snapshot, others, _beside(opened, manifest))
    for words in aside:
        runner().log.warning("%s", words)
    spec = msgspec.structs.replace(of, want=fitted(of.want, manifest))
    left = [
        *(_gone(opened, lineage_of(manifest)) if _is_newest(wanted) else []),
        *_saved_by_itself(opened, found, manifest),
        *aside,
        *refused,
        *_missing(manifest),
        *pinned_for_others(opened, found.snapshot, others),
        *_mixed(manifest),
        *left_behind(manifest.environment),
        *_of_homes(opened),
    ]
    return found, replace(opened, spec=spec, left=left, places=places_of(manifest))


pick_snapshot_to_wake = step(
    "pick snapshot", phase="prepare", says="reading the snapshots of {opened.spec.name}"
)(snapshot_to_wake)


def _beside(opened: OpenWorkspace, woken: Manifest) -> Callable[[StoredState], str]:
    """Text about what a snapshot holds that the ``woken`` one lacks, or has with other content."""

    def words(stored: StoredState) -> str:
        try:
            other, _ = open_manifest(opened.store, opened.spec.name, stored.snapshot, opened.seal)
        except SnapshotError:
            return "; its manifest cannot be read"
        held = [
            one
            for one in compare(woken, other).changes
            if one.difference in ("added", "changed") and one.kind in ("file", "hard link")
        ]
        files = f"{len(held):,} file{'' if len(held) == 1 else 's'}"
        return f"; new or changed there: {files}, {size(sum(one.bytes_after for one in held))}"

    return words


def _of_homes(opened: OpenWorkspace) -> list[str]:
    """A sentence saying that files of a home are stored beside the workspace, and how to restore
    them."""
    home = opened.home
    ids = snapshot_ids(home.store, home.spec.name) if home else []
    if home is None or not ids:
        return []
    name, earlier = f"{HOME}{opened.spec.name}", f", and {len(ids) - 1} earlier" if ids[1:] else ""
    kept = sum(pack.bytes for pack in home.store.list(packs_prefix(home.spec.name)))
    return [
        "files that were written in a home, beside the workspace, are stored and not restored: "
        f"snapshot {ids[-1]} of {name}{earlier}, {size(kept)} in all. `torpor snapshots {name} "
        f"newest` lists them, and `torpor restore {name} '~' DIRECTORY` brings them into a "
        f"directory. They stay, and this line comes, until you run delete-snapshots for {name}"
    ]


def check_still_newest(opened: OpenWorkspace, there: Collection[SnapshotId]) -> None:
    """Raise LacksWork where a snapshot was verified that is not among those ``there``: a
    hibernation has stored later work since the run picked its snapshot."""
    store, name = opened.store, opened.spec.name
    for snapshot, receipt in verified_snapshots(store, name, lambda one: one not in there):
        if not receipt.autosave:
            raise LacksWork(
                f"workspace {name} was stored as {snapshot} after this run had picked its "
                "snapshot: start it again, or name the snapshot"
            )


def picked(opened: StoredWorkspace, wanted: str) -> Picked:
    """The snapshot of that name, or the newest state."""
    if _is_newest(wanted):
        return _newest(opened)
    return Picked(find_snapshot(opened.store, opened.spec.name, snapshot_id(wanted)))


class Picked(NamedTuple):
    """A picked snapshot. ``manifest``, and ``others``, the tips whose work it lacks, are None where
    the snapshot is not whole or was not read. ``refused``: newer snapshots that are not used, in
    words."""

    snapshot: StoredSnapshot
    manifest: Manifest | None = None
    others: list[StoredState] | None = None
    refused: Sequence[str] = ()


def _newest(opened: StoredWorkspace, *, saves: bool = True) -> Picked:
    """The newest state, by default also of autosaves (``saves``). An autosave is used only if it is
    whole. A newer snapshot that a run made is never passed over: if it is not whole, it is returned
    and its use fails; if it names other directories than the block, OtherPaths is raised."""
    store, of = opened.store, opened.spec
    chosen = choose_newest(store, of.name, opened.seal, of.restorable, saves=saves)
    refused: list[str] = []
    for one, error in chosen.refused:
        if isinstance(error, OtherPaths):
            raise error
        if not one.own:
            return Picked(find_snapshot(store, of.name, one.snapshot))
        refused.append(f"a newer save of the machine is not used: {error}")
        runner().log.warning("%s", refused[-1])
    if chosen.snapshot is None and chosen.refused:
        raise chosen.refused[0].error
    if chosen.snapshot is None:
        # raises SnapshotMissing where there is none
        return Picked(find_snapshot(store, of.name, None))
    return Picked(chosen.snapshot, chosen.manifest, chosen.aside, refused)


def _saved_by_itself(opened: OpenWorkspace, found: StoredSnapshot, manifest: Manifest) -> list[str]:
    """What a wake says of an own save that it brings, and of the end of the machine that made
    it."""
    if not is_autosave(manifest):
        return []
    words = f"this is what the machine saved by itself at {moment(found.modified_unix)}"
    ended = [
        rental
        for rental in opened.rentals.history(found.modified_unix)
        if rental.handed_unix and not rental.snapshot
    ]
    last = max(ended, key=lambda rental: rental.ended_unix or 0.0, default=None)
    if last is not None and last.ended_unix and last.ended_unix >= found.modified_unix:
        words += f"; machine {last.machine} was found lost at {moment(last.ended_unix)}"
    runner().log.warning("%s", words)
    return [words]


def _instead(opened: OpenWorkspace) -> str:
    of = opened.spec
    whole = choose_newest(opened.store, of.name, opened.seal, of.restorable).snapshot
    if whole is None:
        return "The workspace has no whole snapshot: use restore-path to save single files"
    return (
        f"The newest whole one is {whole.snapshot}: name it to wake it. restore-path saves single "
        "files of the other"
    )


def fitted(want: Want, manifest: Manifest) -> Want:
    """``want``, changed so that it describes a machine on which this snapshot can be woken."""
    return fit(want, manifest.environment, disk_bytes(manifest))


@step("pick snapshot", phase="prepare", says="reading the snapshots of {opened.spec.name}")
def pick_snapshot(opened: StoredWorkspace, wanted: str) -> StoredSnapshot:
    """The newest snapshot or the named one; its manifest is read and checked here, so that a
    wrong key, a damaged manifest or other directories cost no machine."""
    found, manifest, *_ = picked(opened, wanted)
    if manifest is None:
        _read(opened, found)
    return found


@step("pick snapshot", phase="prepare", says="reading the snapshots of {opened.spec.name}")
def pick_snapshot_to_sync(opened: StoredWorkspace, wanted: str) -> tuple[StoredSnapshot, Lineage]:
    """The newest snapshot that no machine made on its schedule or the named one, and its lineage.
    LacksWork where the newest one lacks work that another such one has: only a name takes it
    then."""
    named_by_user = wanted not in ("", NEWEST)
    found, manifest, others, _ = (
        picked(opened, wanted) if named_by_user else _newest(opened, saves=False)
    )
    line = lineage_of(manifest or _read(opened, found))
    if others is None and not named_by_user:
        others = lacking(opened.store, opened.spec.name, opened.seal, line, saves=False)
    of_runs = [one for one in others or [] if not one.autosave]
    if of_runs:
        raise LacksWork(
            f"snapshot {found.snapshot}, the newest of workspace {opened.spec.name}, lacks the "
            f"work in {named(of_runs)}: a sync could take that back. Nothing was changed: name the "
            "snapshot to sync to in `snapshot`, or delete or pin the other one first"
        )
    return found, line


@step("choose path", phase="prepare")
def choose_path(opened: StoredWorkspace, wanted: StoredSnapshot, path: str) -> SnapshotPath:
    """The entry that ``path`` names in a snapshot; InvalidInput if there is none."""
    return SnapshotPath(*entry_at(_read(opened, wanted), path))


def new_restore(
    opened: StoredWorkspace, session: Agent, wanted: StoredSnapshot, *, wakes: bool = False
) -> RemoteRestore:
    """A restore of this snapshot on the session's machine, which has not begun. ``wakes``: the
    machine becomes the workspace's, with its packages where the workspace keeps its environment."""
    of = opened.spec
    return RemoteRestore(
        session,
        opened.store,
        wanted,
        opened.key,
        runner().run,
        paths=of.restorable,
        parts=of.parts,
        part_bytes=of.part_bytes,
        gpu=of.compression.gpu,
        first=of.first,
        aside=of.move_aside,
        keep_packages=wakes and of.environment == "keep",
    )


@step(
    "begin restore",
    retries=WHILE_BUSY,
    phase="plan",
    says="reading the manifest of {restore.wanted.snapshot}",
)
def begin_restore(restore: RemoteRestore, resume: bool, rented: bool) -> RestorePlan:
    """Check the manifest, the targets and the space on the machine."""
    return restore.begin(resume=resume, rented=rented)


@step("restore part", run_name="restore part {plan.part}")
def restore_part(restore: RemoteRestore, plan: RestorePart, progress: Progress) -> RestoredPart:
    """Fetch, check and write one part; data on the disk that is verified already is not fetched
    again."""
    return restore.restore_part(plan, lambda event: progress.event(plan.part, event))


@step("finish what comes first")
def finish_first(restore: RemoteRestore, machine: Machine | None) -> None:
    """Set attributes, links and directories of the files that come first; sends the event that they
    can be used on ``machine``."""
    _right(restore, restore.finish_first())
    first = FirstReport.of(restore.plan, restore.first_s)
    if machine is not None and first is not None:
        emit(
            FirstRestored(
                workspace=restore.wanted.workspace,
                snapshot=restore.wanted.snapshot,
                machine=machine.id,
                provider=machine.provider,
                names=first.names,
                bytes=first.bytes,
                seconds=first.seconds,
            )
        )


@step("finish restore", phase="finish", says="setting attributes and links")
def finish_restore(restore: RemoteRestore) -> Finished:
    """Set attributes, links and directories of the restored files."""
    return restore.finish()


@step("check restore", phase="check", says="checking what was restored")
def check_restore(restore: RemoteRestore, full: bool) -> Checked:
    """Compare the machine's disk with the snapshot; SnapshotDamaged names what differs."""
    hint = ""
    if restore.plan.first:
        hint = (
            "A program that was started when what comes `first` was there may have written to "
            "them before they were restored: name them in `first` too, or let it write elsewhere. "
        )
    return _right(restore, restore.check(full=full), hint)


def woken(
    opened: OpenWorkspace, machine: Machine, restore: RemoteRestore, full_check: bool
) -> WakeReport:
    """The report of a restore, after its machine was handed over."""
    plan, finished, wanted = restore.plan, restore.finished, restore.wanted
    endpoint = endpoint_of(machine)
    checked = "every byte and attribute" if full_check else "names and attributes"
    if plan.complete:
        checked = "by the earlier wake that restored it; nothing was written by this one"
    warnings = [
        f"{path} is not among the workspace's paths: no further snapshot keeps it"
        for path in opened.spec.accept_paths
    ]
    return WakeReport(
        workspace=wanted.workspace,
        snapshot=wanted.snapshot,
        root=wanted.root,
        machine=machine.id,
        host=endpoint.host,
        port=endpoint.port,
        user=endpoint.user,
        roots=plan.roots,
        files=finished.files,
        bytes=finished.bytes,
        stored_bytes=plan.stored_bytes,
        checked=checked,
        warnings=[*warnings, *finished.warnings, *opened.left, *moved(opened, machine, plan)],
        seconds=seconds_by_phase(),
        price_usd_h=machine.price_usd_h,
        decoding=finished.decoding,
        provider=machine.provider,
        first=FirstReport.of(plan, restore.first_s),
    )


def moved(opened: OpenWorkspace, machine: Machine, plan: RestorePlan) -> list[str]:
    """The warning, logged too, where directories have another path than on the machine of the
    snapshot. Not for machines that are folders of this host, whose paths always differ."""
    if machine.label is not None and opened.markets.of(machine.provider).abilities.kind == "folder":
        return []
    pairs = zip(opened.places, map(tidy_path, plan.roots), strict=False)
    others = [f"{clean(was)} is {now} here" for was, now in pairs if was != now]
    if not others:
        return []
    words = (
        f"{', '.join(others)}: what holds the old path, such as the scripts of a venv, does not "
        "work. For one path on every machine, name an absolute path in the block's `paths`"
    )
    runner().log.warning("%s", words)
    return [words]


def _is_newest(wanted: str) -> bool:
    return wanted in ("", NEWEST)


def _gone(opened: OpenWorkspace, woken: Lineage) -> list[str]:
    """What a wake says of snapshots that a record or a lineage names, that the store does not show,
    and that nobody has deleted: their work is missing, unless the ``woken`` snapshot goes on from
    them."""
    store, name, found = opened.store, opened.spec.name, woken.snapshot
    try:
        records = named_by_records(opened)  # read before the manifests are listed
        naming = all_named(store, name, records)
        others = {
            one: by
            for one, by in naming.items()
            if one > found or (woken.whole and one not in {found, *woken.names})
        }
        lines = [
            f"snapshot {one} {_beside_it(one, found)}, and {others[one].what} names it, but "
            + (
                f"the listing of {store.address} lacks it: `torpor wake {name} --snapshot {one}` "
                "brings it"
                if there
                else f"it is gone from {store.address}, though nobody deleted it with torpor. Put "
                f"its manifest workspaces/{name}/snapshots/{one} back, say from an old version in "
                f'the bucket; the flow delete-snapshots gives it up: delete_snapshots("{name}", '
                f'["{one}"])'
            )
            for one, there in not_listed(store, name, others, snapshot_ids(store, name))
        ]
    except TorporError as error:
        lines = [f"whether a snapshot beside {found} is gone is not known: {error}"]
    for line in lines:
        runner().log.warning("%s", line)
    return lines


def _beside_it(one: SnapshotId, woken: SnapshotId) -> str:
    return f"is newer than {woken}" if one > woken else f"is no state that {woken} goes on from"


def _missing(manifest: Manifest) -> list[str]:
    """What a wake says where the machine missed files or disks when it made the snapshot."""
    paths = []
    for place in recorded_missing(manifest)[:_NAMED]:
        path = f"{manifest.roots[place.root]}/{os.fsdecode(place.path)}".rstrip("/")
        paths.append(clean(path + (f" ({place.files:,} files)" if place.files else "")))
    if not paths:
        return []
    words = f"when snapshot {manifest.snapshot} was made, its machine missed {', '.join(paths)}"
    runner().log.warning("%s", words)
    return [words]


def _mixed(manifest: Manifest) -> list[str]:
    """What a wake says of files that changed while they were stored."""
    names = [clean(os.fsdecode(entry.path)) for entry in manifest.entries if entry.changed]
    if not names:
        return []
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return [
        f"{', '.join(names[:_NAMED])}{more} changed while they were stored, so each may mix two "
        "states"
    ]


def _read(opened: StoredWorkspace, wanted: StoredSnapshot) -> Manifest:
    return read_manifest(opened.store, wanted, opened.seal, opened.spec.restorable)


def _right(restore: RemoteRestore, checked: Checked, hint: str = "") -> Checked:
    if checked.difference_count:
        raise SnapshotDamaged(
            f"after the restore, {checked.difference_count} names differ from snapshot "
            f"{restore.wanted.snapshot}: {'; '.join(checked.differences[:5])}. {hint}The "
            "snapshot is untouched: wake again on another machine"
        )
    return checked
