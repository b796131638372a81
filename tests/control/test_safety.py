"""The rules that stand between the only copy and its loss: each test breaks without its rule."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from tests.fixtures.engine import WORKSPACE, Engine
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.trees import content, let_settle
from tests.fixtures.waiting import PATIENCE_S
from torpor.control import safety
from torpor.control.safety import (
    HOLDS_S,
    Verified,
    Warrant,
    beyond_reach,
    never_handed_over,
    verify_snapshot,
    warrant_to_destroy,
)
from torpor.control.store.manifests import find_snapshot, read_manifest, read_with_object
from torpor.control.store.packs import claims_of, compare_packs, stored_packs
from torpor.control.upkeep.verification import Verification
from torpor.machine.agent.machine import machine_id
from torpor.shared.errors import (
    HandedOver,
    MachineInUse,
    ManifestInvalid,
    NotOurs,
    SnapshotDamaged,
    SnapshotMissing,
    StillChanging,
    StoreArchived,
    StoreUnavailable,
    TorporError,
    UnsafeDestroy,
    WrongKey,
)
from torpor.shared.format.keys import Seal
from torpor.shared.format.manifest import Pack, encode_manifest
from torpor.shared.format.names import manifest_key, pack_key, packs_prefix
from torpor.shared.transfer.retries import Retries
from torpor.shared.values import (
    Label,
    Machine,
    MachineId,
    ObjectKey,
    SnapshotId,
    StoredObject,
    WorkspaceName,
    new_snapshot_id,
)
from torpor.shared.wire.snapshot import Confirmed

LABEL = Label("me", WORKSPACE, "lease-1")
MACHINE = Machine(MachineId("m-1"), "local:/machines", LABEL, "running", None)
SAME = Confirmed(0, [])


class Kept:
    """A workspace on a machine, and its snapshot in a store."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore()
        self.was = folder / "was"
        self.was.mkdir()
        for number in range(3):
            (self.was / str(number)).write_bytes(content(number, 70_000))
        let_settle()
        self.engine = Engine(self.store, folder / "home")
        self.engine.snapshot([self.was])
        self.stored = find_snapshot(self.store, WORKSPACE, None)
        self.agent_machine = machine_id(folder / "home")
        self.seal = self.engine.seal
        self.manifest_key = manifest_key(WORKSPACE, self.stored.snapshot)

    def manifest(self, **changes: object) -> bytes:
        """As it was written, or with changes."""
        manifest = read_manifest(self.store, self.stored, self.seal)
        return encode_manifest(msgspec.structs.replace(manifest, **changes), self.seal)[0]

    def verify(self) -> Verified:
        return verify_snapshot(self.store, self.stored, self.seal)

    def warrant(
        self,
        verified: Verified | None = None,
        machine: Machine = MACHINE,
        agent_machine: str | None = None,
        confirm: Callable[[], Confirmed] = lambda: SAME,
        ask: Callable[[], None] = lambda: None,
    ) -> Warrant:
        agent_machine = self.agent_machine if agent_machine is None else agent_machine
        return warrant_to_destroy(
            self.store, self.seal, verified or self.verify(), machine, agent_machine, confirm, ask
        )

    def pack(self) -> ObjectKey:
        (found,) = self.store.list(packs_prefix(WORKSPACE))
        return found.key

    def change_pack(self, change: Callable[[bytes], bytes]) -> None:
        blob = self.store.get(self.pack(), max_bytes=1 << 30)
        self.store.put(self.pack(), change(blob))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kept = Kept(tmp_path_factory.mktemp("kept"))
    yield kept
    kept.engine.runs.close()
    kept.store.close()


@pytest.fixture
def kept(made: Kept) -> Iterator[Kept]:
    with made.store.undone():
        yield made


# -- proofs cannot be made by hand


@pytest.mark.rule(1)
def test_a_verified_is_made_by_verification_alone(kept: Kept) -> None:
    verified = kept.verify()
    for mint in (None, object(), True, "mint"):
        with pytest.raises(UnsafeDestroy, match=r"only torpor\.control\.safety\.verify_snapshot"):
            Verified(mint, verified.manifest, verified.root)


def test_a_manifest_that_was_replaced_is_not_the_one_that_was_read(kept: Kept) -> None:
    read = read_with_object(kept.store, kept.stored, kept.seal)
    there = kept.store.head(kept.manifest_key)
    assert there is not None and read.is_of(there)
    assert not read.is_of(kept.store.put(kept.manifest_key, kept.manifest(machine="m")))


def test_a_warrant_is_made_by_safety_alone() -> None:
    for mint in (None, object(), True, "mint"):
        with pytest.raises(UnsafeDestroy, match=r"can only be made by torpor\.control\.safety"):
            Warrant(mint, MACHINE, "because I say so")


def test_a_proof_is_never_changed(kept: Kept) -> None:
    verified, warrant = kept.verify(), never_handed_over(MACHINE, LABEL)
    for proof, name in ((verified, "machine"), (verified, "snapshot"), (warrant, "_machine")):
        with pytest.raises(UnsafeDestroy, match="cannot be changed after it was made"):
            setattr(proof, name, "another")
    assert verified.machine == kept.agent_machine
    warrant.check(MACHINE)


@pytest.mark.rule(2)
def test_no_warrant_is_for_a_machine_without_our_label(kept: Kept) -> None:
    unlabelled = msgspec.structs.replace(MACHINE, label=None)
    with pytest.raises(NotOurs, match="carries label None"):
        kept.warrant(machine=unlabelled)
    with pytest.raises(NotOurs):
        never_handed_over(unlabelled, LABEL)
    with pytest.raises(NotOurs, match="carries no torpor label"):
        Warrant(safety._MINT, unlabelled, "this very module went wrong")


# -- what is verified


def test_a_whole_snapshot_is_verified(kept: Kept) -> None:
    verified = kept.verify()
    assert (verified.workspace, verified.snapshot) == (WORKSPACE, kept.stored.snapshot)
    assert (verified.machine, verified.root) == (kept.agent_machine, kept.stored.root)


@pytest.mark.rule(1)
@pytest.mark.parametrize("damage", ["missing", "longer", "flipped"])
def test_a_pack_that_is_not_as_written_is_damage(kept: Kept, damage: str) -> None:
    pack = kept.pack()
    if damage == "missing":
        kept.store.delete([pack])
    elif damage == "longer":
        kept.change_pack(lambda blob: blob + b"x")
    else:
        kept.change_pack(lambda blob: bytes([blob[0] ^ 1]) + blob[1:])
    with pytest.raises(
        SnapshotDamaged, match=r"has 1 of 1 packs missing.*The machine was not touched"
    ):
        kept.verify()
    there = stored_packs(kept.store, WORKSPACE)
    packs = read_manifest(kept.store, kept.stored, kept.seal).packs
    missing, unsure = compare_packs(there, claims_of(WORKSPACE, packs))
    assert (missing, unsure) == ([pack], [])


def test_a_pack_whose_md5_is_hidden_is_read_again(kept: Kept) -> None:
    kept.store.hide_md5(kept.pack())
    with pytest.raises(SnapshotDamaged, match=r"does not show the MD5 of 1 packs.*run a full"):
        kept.verify()
    reread = Mock(return_value=[])
    verify_snapshot(kept.store, kept.stored, kept.seal, reread)
    ((grant,),) = reread.call_args.args
    assert (grant.verb, grant.key) == ("GET", kept.pack())


def test_a_pack_in_an_archive_is_named_by_verify_and_before_a_machine_is_rented(
    kept: Kept,
) -> None:
    """Until somebody has restored it: the listing still says GLACIER then, and HEAD does not."""

    def before_renting() -> None:
        safety.check_packs(kept.store, kept.stored, kept.seal, "nothing was rented")

    def verify() -> None:
        verification = Verification(kept.store, WORKSPACE, kept.seal)
        verification.look(kept.stored.snapshot)
        verification.compare()
        assert verification.faults == {}

    kept.store.archive(kept.pack())
    for look in (before_renting, verify):
        with pytest.raises(StoreArchived, match=rf"restore-object .*{kept.pack()}"):
            look()
    assert kept.verify(), "the work is in the store all the same"
    kept.store.archive(kept.pack(), restored=True)
    before_renting()
    verify()


def test_a_look_for_archives_ends_with_the_first_request_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that is away is waited for once, and not again for each of a thousand packs."""
    asked: list[ObjectKey] = []
    ending = threading.Event()

    class Threads(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            ending.set()
            super().shutdown(wait, cancel_futures=cancel_futures)

    def head(key: ObjectKey) -> None:
        asked.append(key)
        if key == keys[0]:
            raise StoreUnavailable(f"HEAD {key}: away")
        ending.wait(PATIENCE_S)

    monkeypatch.setattr(safety, "ThreadPoolExecutor", Threads)
    packs = [Pack(number.to_bytes(16, "big"), 1, bytes(16)) for number in range(1000)]
    keys = [pack_key(WORKSPACE, pack.id) for pack in packs]
    there = {key: StoredObject(key, 1, None, 0.0, "GLACIER") for key in keys}
    with pytest.raises(StoreUnavailable, match=keys[0]):
        safety.check_readable(Mock(head=head), there, WORKSPACE, packs)
    assert len(asked) < 100


@pytest.mark.rule(1)
def test_a_hidden_pack_that_reads_wrong_is_damage(kept: Kept) -> None:
    kept.change_pack(lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]))
    kept.store.hide_md5(kept.pack())
    run = kept.engine.begin([kept.was])
    run.store(1)
    with pytest.raises(SnapshotDamaged, match="has 1 of 1 packs missing"):
        verify_snapshot(kept.store, kept.stored, kept.seal, run.reread)


def test_a_hidden_pack_of_another_size_is_damage_without_reading(kept: Kept) -> None:
    kept.change_pack(lambda blob: blob + b"x")
    kept.store.hide_md5(kept.pack())
    with pytest.raises(SnapshotDamaged, match="has 1 of 1 packs missing"):
        verify_snapshot(kept.store, kept.stored, kept.seal, lambda grants: [])


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (lambda kept: kept.manifest(run="another"), SnapshotMissing),
        (lambda kept: kept.manifest(entries=[]), ManifestInvalid),
        (lambda kept: kept.manifest(workspace="other"), ManifestInvalid),
        (lambda kept: kept.manifest()[:-3], ManifestInvalid),
    ],
    ids=["replaced", "lies", "another workspace's", "damaged"],
)
def test_a_manifest_that_was_replaced_is_not_verified(
    kept: Kept, changed: Callable[[Kept], bytes], error: type[TorporError]
) -> None:
    kept.store.put(kept.manifest_key, changed(kept))
    with pytest.raises(error):
        kept.verify()


@pytest.mark.parametrize("field", ["workspace", "snapshot"])
def test_a_manifest_copied_under_another_name_is_not_verified(kept: Kept, field: str) -> None:
    """Listed with its own root, so that only its name tells."""
    blob = kept.manifest()
    values = {"workspace": WorkspaceName("other"), "snapshot": new_snapshot_id(_now())}
    moved = msgspec.structs.replace(kept.stored, **{field: values[field]})
    kept.store.put(manifest_key(moved.workspace, moved.snapshot), blob)
    with pytest.raises(ManifestInvalid, match="is not what its name says"):
        verify_snapshot(kept.store, moved, kept.seal)


def test_a_manifest_that_is_gone_or_of_another_key_is_not_verified(kept: Kept) -> None:
    with pytest.raises(WrongKey):
        verify_snapshot(kept.store, kept.stored, Seal(b"k" * 32))
    kept.store.delete([kept.manifest_key])
    with pytest.raises(SnapshotMissing, match="deleted meanwhile"):
        kept.verify()


# -- what is warranted


def test_a_verified_newest_snapshot_of_this_machine_gives_a_warrant(kept: Kept) -> None:
    warrant = kept.warrant()
    warrant.check(MACHINE)
    assert kept.stored.snapshot in warrant.reason


@pytest.mark.rule(2)
def test_a_machine_of_another_workspace_is_not_destroyed(kept: Kept) -> None:
    label = Label("me", WorkspaceName("other"), "lease-1")
    with pytest.raises(NotOurs, match="not one of workspace demo"):
        kept.warrant(machine=msgspec.structs.replace(MACHINE, label=label))


@pytest.mark.parametrize("agent_machine", ["", "0" * 32])
def test_a_machine_that_the_snapshot_is_not_of_is_not_destroyed(
    kept: Kept, agent_machine: str
) -> None:
    with pytest.raises(UnsafeDestroy, match="was made on machine"):
        kept.warrant(agent_machine=agent_machine)


def _put_newer(kept: Kept, **changes: object) -> SnapshotId:
    newer = new_snapshot_id(_now(), kept.stored.snapshot)
    blob = kept.manifest(snapshot=newer, **changes)
    kept.store.put(manifest_key(WORKSPACE, newer), blob)
    return newer


@pytest.mark.rule(1)
def test_a_snapshot_that_is_not_the_newest_of_its_machine_destroys_nothing(kept: Kept) -> None:
    """Neither when the warrant is made nor right before the destroy."""
    verified = kept.verify()
    warrant = kept.warrant(verified)
    newer = _put_newer(kept)
    for look in (lambda: kept.warrant(verified), lambda: warrant.check(MACHINE)):
        with pytest.raises(UnsafeDestroy, match=f"has snapshot {newer}.*from another run"):
            look()
    kept.store.put(manifest_key(WORKSPACE, newer), b"whatever it is")
    with pytest.raises(UnsafeDestroy, match=f"has snapshot {newer}.*which cannot be read"):
        kept.warrant(verified)


def test_what_another_machine_of_the_workspace_saves_keeps_no_machine(kept: Kept) -> None:
    verified = kept.verify()
    _put_newer(kept, machine="another one, which saves each minute")
    kept.warrant(verified).check(MACHINE)


def test_a_store_that_is_slow_to_say_that_nobody_uses_it_lets_a_warrant_grow_old(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written on the machine meanwhile is in no snapshot."""
    now_s = [0.0]
    monkeypatch.setattr(safety, "boot_clock_s", lambda: now_s[0])

    def wait(seconds: float) -> None:
        now_s[0] += seconds

    warrant = kept.warrant(ask=lambda: wait(61.0))
    with pytest.raises(StillChanging, match="compared 61 s ago"):
        warrant.check(MACHINE)

    def away() -> None:
        raise StoreUnavailable("503 SlowDown")

    patient = Retries(patience_s=1800.0, sleep=wait, clock=lambda: now_s[0])
    warrant, began_s = kept.warrant(ask=lambda: patient.run(away)), now_s[0]
    with pytest.raises(StoreUnavailable, match="after 5 attempts"):
        warrant.check(MACHINE)
    assert now_s[0] - began_s < HOLDS_S


def test_a_snapshot_that_was_deleted_destroys_nothing(kept: Kept) -> None:
    verified = kept.verify()
    kept.store.delete([kept.manifest_key])
    with pytest.raises(UnsafeDestroy, match="was not destroyed"):
        kept.warrant(verified)


@pytest.mark.rule(4)
def test_a_disk_that_changed_since_destroys_nothing(kept: Kept) -> None:
    changed = Confirmed(2, ["results.csv", "model.pt"])
    with pytest.raises(StillChanging, match=r"2 names changed.*results.csv, model.pt"):
        kept.warrant(confirm=lambda: changed)
    with pytest.raises(StillChanging, match="was lost"):
        kept.warrant(confirm=Mock(side_effect=StillChanging("the agent was lost")))
    kept.warrant(confirm=lambda: Confirmed(0, []))  # changed, and accepted by the user


@pytest.mark.rule(4)
def test_the_disk_is_looked_at_last(kept: Kept) -> None:
    """Whatever else takes long, nothing may change unseen between the look and the warrant."""
    confirm = Mock(return_value=SAME)
    for machine, agent_machine in (
        (msgspec.structs.replace(MACHINE, label=None), kept.agent_machine),
        (MACHINE, "another"),
    ):
        with pytest.raises(TorporError):
            kept.warrant(machine=machine, agent_machine=agent_machine, confirm=confirm)
    confirm.assert_not_called()
    kept.warrant(confirm=confirm)
    confirm.assert_called_once()


# -- the last comparison, at the provider


@pytest.mark.rule(10, "H9")
@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"label": None}, NotOurs, "carries label None"),
        ({"label": Label("me", WORKSPACE, "lease-2")}, NotOurs, "nothing was destroyed"),
        ({"label": Label("you", WORKSPACE, "lease-1")}, NotOurs, "nothing was destroyed"),
        ({"label": Label("me", WorkspaceName("x"), "lease-1")}, NotOurs, "nothing was destroyed"),
        ({"id": MachineId("m-2")}, UnsafeDestroy, "not for m-2"),
        ({"provider": "local:/elsewhere"}, UnsafeDestroy, "at local:/elsewhere"),
    ],
    ids=["no label", "other lease", "other owner", "other workspace", "other id", "other provider"],
)
def test_a_warrant_fits_one_machine_only(
    kept: Kept, changes: dict[str, object], error: type[TorporError], says: str
) -> None:
    live = msgspec.structs.replace(MACHINE, **changes)
    for warrant in (kept.warrant(), never_handed_over(MACHINE, LABEL)):
        with pytest.raises(error, match=says):
            warrant.check(live)


def test_a_warrant_fits_its_machine_in_any_state() -> None:
    warrant = never_handed_over(MACHINE, LABEL)
    for state in ("starting", "running", "stopped", "stopping"):
        warrant.check(msgspec.structs.replace(MACHINE, state=state))


def _beyond_reach(kept: Kept, machine: Machine = MACHINE, *, used: bool = False) -> Warrant:
    ask = Mock(side_effect=MachineInUse("another job works there") if used else None)
    return beyond_reach(kept.store, kept.stored, kept.seal, machine, ask)


@pytest.mark.rule(16)
def test_a_machine_beyond_reach_is_ended_only_while_it_is_stopped(kept: Kept) -> None:
    """Its disk may hold work that is in no snapshot, and can be reached once it runs."""
    warrant = _beyond_reach(kept)
    assert warrant.snapshot is None  # of what it held to the last there is none
    warrant.accepted()  # of no destroy
    for state in ("queued", "starting", "running", "stopping"):
        with pytest.raises(UnsafeDestroy, match=f"is {state} and not stopped"):
            warrant.check(msgspec.structs.replace(MACHINE, state=state))
    warrant.check(msgspec.structs.replace(MACHINE, state="stopped"))
    warrant.accepted()
    warrant.check(msgspec.structs.replace(MACHINE, state="stopping"))  # its end goes on
    for state in ("queued", "starting", "running"):
        with pytest.raises(UnsafeDestroy, match="was not destroyed"):
            warrant.check(msgspec.structs.replace(MACHINE, state=state))
    used = _beyond_reach(kept, used=True)
    with pytest.raises(MachineInUse):
        used.check(msgspec.structs.replace(MACHINE, state="stopped"))


@pytest.mark.rule(16)
def test_a_machine_beyond_reach_is_ended_only_for_a_whole_save_of_its_workspace(
    kept: Kept,
) -> None:
    other = Label("me", WorkspaceName("x"), "lease-1")
    with pytest.raises(NotOurs, match="was not destroyed"):
        _beyond_reach(kept, msgspec.structs.replace(MACHINE, label=other))
    kept.store.hide_md5(kept.pack())  # nobody has compared what is in it
    with pytest.raises(SnapshotDamaged, match="does not show the MD5"):
        _beyond_reach(kept)
    kept.store.delete([kept.pack()])
    with pytest.raises(SnapshotDamaged, match="missing or changed"):
        _beyond_reach(kept)


@pytest.mark.rule(1)
def test_a_warrant_holds_for_a_minute_after_the_last_look(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(safety, "boot_clock_s", lambda: now_s[0])

    def confirm() -> Confirmed:
        now_s[0] += 500.0  # the walk of a large disk
        return SAME

    warrant = kept.warrant(confirm=confirm)
    now_s[0] += HOLDS_S
    warrant.check_label(LABEL)
    warrant.check(MACHINE)
    now_s[0] += 1.0
    with pytest.raises(StillChanging, match=r"compared 61 s ago.* was not destroyed"):
        warrant.check(MACHINE)
    with pytest.raises(StillChanging):
        warrant.check_label(LABEL)
    warrant.accepted()  # the first destroy, by the provider: the machine ends in any case
    warrant.check(MACHINE)
    warrant.check_label(LABEL)
    with pytest.raises(NotOurs):
        warrant.check_label(Label("me", WORKSPACE, "lease-2"))


def test_what_no_destroy_asked_for_was_not_accepted(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider's destroy also returns where it does not find the machine."""
    now_s = [1000.0]
    monkeypatch.setattr(safety, "boot_clock_s", lambda: now_s[0])
    warrant = kept.warrant()
    warrant.check_label(LABEL)
    warrant.accepted()
    warrant.check(MACHINE)  # a destroy that fails
    warrant.check_label(LABEL)  # and one that finds no machine
    warrant.accepted()
    now_s[0] += HOLDS_S + 1
    with pytest.raises(StillChanging):
        warrant.check(MACHINE)


@pytest.mark.rule(1)
def test_whoever_uses_the_machine_is_asked_for_at_each_destroy(kept: Kept) -> None:
    ask = Mock()
    warrant = kept.warrant(ask=ask)
    warrant.check(MACHINE)
    ask.side_effect = MachineInUse("a job runs there")
    with pytest.raises(MachineInUse):
        warrant.check(MACHINE)
    warrant.accepted()
    warrant.check(MACHINE)


@pytest.mark.rule(5)
def test_the_ledger_is_asked_at_each_destroy_of_a_machine_not_handed_over() -> None:
    ask = Mock(side_effect=[None, HandedOver("handed over meanwhile"), HandedOver("too")])
    warrant = never_handed_over(MACHINE, LABEL, ask)
    ask.assert_not_called()
    warrant.check(MACHINE)
    with pytest.raises(HandedOver):
        warrant.check(MACHINE)
    with pytest.raises(UnsafeDestroy):  # of another machine, whatever the answer would be
        warrant.check(msgspec.structs.replace(MACHINE, id=MachineId("m-2")))
    assert ask.call_count == 2
    warrant.accepted()  # also after an accepted end
    with pytest.raises(HandedOver):
        warrant.check(MACHINE)


@pytest.mark.rule(5)
def test_what_another_run_created_is_not_destroyed_as_ours() -> None:
    for label in (None, Label("me", WORKSPACE, "lease-2"), Label("you", WORKSPACE, "lease-1")):
        with pytest.raises(NotOurs, match="nothing was destroyed"):
            never_handed_over(msgspec.structs.replace(MACHINE, label=label), LABEL)


def test_packs_of_one_workspace_do_not_stand_for_another_s(kept: Kept) -> None:
    packs = read_manifest(kept.store, kept.stored, kept.seal).packs
    other = WorkspaceName("other")
    missing, _ = compare_packs(stored_packs(kept.store, WORKSPACE), claims_of(other, packs))
    assert missing == [pack_key(other, pack.id) for pack in packs]


def test_a_listing_names_what_a_person_can_choose_from(kept: Kept) -> None:
    with pytest.raises(SnapshotMissing, match=f"there: {kept.stored.snapshot}"):
        find_snapshot(kept.store, WORKSPACE, SnapshotId("20200101T000000Z-00000000"))
    with pytest.raises(SnapshotMissing, match="there: none"):
        find_snapshot(kept.store, WorkspaceName("other"), None)
    assert find_snapshot(kept.store, WORKSPACE, kept.stored.snapshot) == kept.stored


def _now() -> datetime:
    return datetime.now(timezone.utc)
