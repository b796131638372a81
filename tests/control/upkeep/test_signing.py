"""An installation that wrote its records before torpor signed them goes on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flows import hibernate, prune, verify, wake, watch
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.records import read_record
from torpor.control.hosts import KnownHosts
from torpor.control.jobs.records import Job, Stop
from torpor.control.store.receipts import newest_verified
from torpor.control.upkeep.pins import is_own, pin, pinned
from torpor.control.upkeep.signing import is_signed_kind, sign_records
from torpor.shared.errors import RecordRefused, WorkspaceAwake
from torpor.shared.values import MIB, Endpoint, ObjectKey, SnapshotId

HOST = Endpoint("192.0.2.1", 22, "me")


class _Starts(PlainRunner):
    """Keeps the names of the flows that watch starts, and starts none."""

    def __init__(self, *opened: Any) -> None:
        super().__init__(*opened, wait_factor=0.001)
        self.started: list[str] = []

    def start(self, flow: Any, key: str, **parameters: Any) -> str:
        self.started.append(flow.name)
        return ""


def records(lab: Lab) -> list[ObjectKey]:
    return [found.key for found in lab.store.list("") if is_signed_kind(found.key)]


def unsign(lab: Lab, kind: str = "") -> None:
    """As the version before wrote them. ``kind``: a part of their names."""
    for key in records(lab):
        if kind in key:
            lab.store.put(key, msgspec.json.encode(read_record(lab.store, key)))


@pytest.fixture
def older(lab: Lab) -> Lab:
    """An awake workspace with unsaved work, and records of every kind, none of them signed."""
    machine = wake_plainly(lab.opened).machine if lab.snapshots() else lab.rent().id
    place = lab.workspace(machine)
    place.mkdir(exist_ok=True)
    (place / "kept.txt").write_text("stored")
    hibernate_plainly(lab.opened)
    woken = wake_plainly(lab.opened)
    (lab.workspace(woken.machine) / "late.txt").write_text("not stored yet")
    KnownHosts(lab.store, lab.opened.spec.name).pin(HOST, "ssh-ed25519 AAAA")
    facts: dict[str, Any] = {"workspace": lab.opened.spec.name, "block": "b", "command": ["true"]}
    lab.opened.jobs.take(Job(id="0123456789ab", created_unix=1.0, **facts), "run-1")
    unsign(lab)
    return lab


@pytest.mark.rule("H17")
def test_its_records_are_refused_until_they_are_signed_once(older: Lab) -> None:
    lab = older
    for read in (
        lab.opened.rentals.open,
        lab.opened.jobs.open,
        lambda: hibernate_plainly(lab.opened),
    ):
        with pytest.raises(RecordRefused, match="workspaces/demo/"):
            read()
    assert newest_verified(lab.store, lab.opened.spec.name) is None  # it is verified again
    assert len(lab.machines()) == 1
    there = records(lab)
    assert sorted(sign_records(lab.store).signed) == sorted(there)
    assert sign_records(lab.store) == ([], {})
    assert KnownHosts(lab.store, lab.opened.spec.name).pinned(HOST).host_key == "ssh-ed25519 AAAA"
    (job,) = lab.opened.jobs.open()
    lab.opened.jobs.end(lab.opened.jobs.take(job, "run-1"))
    before = newest_verified(lab.store, lab.opened.spec.name)
    slept = hibernate_plainly(lab.opened)
    assert lab.machines() == []
    assert before is not None and slept.snapshot > before
    woken = wake_plainly(lab.opened)
    assert (lab.workspace(woken.machine) / "late.txt").read_text() == "not stored yet"


def test_what_was_changed_is_signed_only_where_its_user_asks_for_it(older: Lab) -> None:
    lab = older
    sign_records(lab.store)
    key = lab.opened.rentals.key(lab.opened.rentals.open()[0].label)
    blob = lab.store.get(key, max_bytes=MIB)
    lab.store.put(key, blob.replace(b'"state":"handed over"', b'"state":"abandoned"'))
    with pytest.raises(RecordRefused):
        lab.opened.rentals.open()
    assert sign_records(lab.store).signed == [key]


def test_what_is_no_record_stays_as_it_is_and_is_named(lab: Lab) -> None:
    bodies = {"a": b"\xff{", "b": b"[" * 200_000, "c": bytes(40 * MIB)}
    keys = {ObjectKey(f"workspaces/demo/jobs/open/{name}"): bodies[name] for name in bodies}
    for key, body in keys.items():
        lab.store.put(key, body)
    done = sign_records(lab.store)
    assert (done.signed, done.left.keys()) == ([], keys.keys())
    assert {key: lab.store.get(key, max_bytes=50 * MIB) for key in keys} == keys


def test_the_order_of_what_ended_outlives_the_signing(lab: Lab) -> None:
    """The store has new times of all of them."""
    rentals = lab.opened.rentals
    for number in range(60):
        rental = lab.record(state="handed over")
        rentals.change(rental, state="ended", snapshot=f"s-{number:02}")
    last = rentals.last_stored()
    assert last is not None and last.snapshot == "s-59"
    unsign(lab)
    sign_records(lab.store)
    assert rentals.last_stored() == last


def test_what_a_run_writes_meanwhile_is_signed_in_another_pass(
    older: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, plainly = older, type(older.store).put
    late = ObjectKey("workspaces/demo/rentals/open/late")

    def put(store: Any, key: ObjectKey, body: bytes, **how: Any) -> Any:
        if store.head(late) is None:
            plainly(store, late, b"{}")
        return plainly(store, key, body, **how)

    monkeypatch.setattr(type(lab.store), "put", put)
    assert late in sign_records(lab.store).signed


def test_only_the_workspaces_that_are_meant_are_signed(older: Lab) -> None:
    assert sign_records(older.store, of=lambda name: name == "another").signed == []
    assert sign_records(older.store, of=lambda name: name == "demo").signed


@pytest.mark.rule("H17")
@pytest.mark.parametrize("kind", ["rentals/open", "jobs/open", "jobs/stop", "verified", "pins", ""])
def test_what_an_older_control_side_writes_after_that_is_refused_and_not_lost(
    older: Lab, kind: str
) -> None:
    """One on another host, where a wake and a job run on across the upgrade."""
    lab, demo = older, older.opened.spec.name
    sign_records(lab.store)
    lab.opened.jobs.ask_stop("0123456789ab", Stop("cancelled", "hibernate", "by its user", 1.0))
    (first,) = lab.snapshots()
    pin(lab.store, demo, first.snapshot, "a paper needs it")
    unsign(lab, kind)
    names = [key for key in records(lab) if kind in key]
    orders, is_open = len(lab.market.orders), kind in ("", "rentals/open", "jobs/open")
    with _Starts(lab.opened) as runner:
        report = watch.fn(dry_run=False)
    said = str([(row.reason, row.next_step) for row in report.watched])
    if is_open:
        assert runner.started == [] and any(key in said for key in names)
        for words in ("runs an older torpor", "`torpor down`", "`torpor up --believe-records`",
                      "nobody else can write to the bucket"):  # fmt: skip
            assert words in said
    for flow in (wake, hibernate, prune) if is_open else ():
        with pytest.raises((RecordRefused, WorkspaceAwake)):
            run_plainly(lab.opened, flow)
    assert (len(lab.machines()), len(lab.market.orders)) == (1, orders)
    assert [*pinned(lab.store, demo)] == [first.snapshot]
    sign_records(lab.store)
    (job,) = lab.opened.jobs.open()
    assert lab.opened.jobs.stop_asked(job.id) is not None
    lab.opened.jobs.end(lab.opened.jobs.take(job, "run-1"))
    hibernate_plainly(lab.opened)
    woken = wake_plainly(lab.opened)
    assert (lab.workspace(woken.machine) / "late.txt").read_text() == "not stored yet"


# -- what somebody with the bucket's key writes


@pytest.mark.parametrize("kind", ["rentals", "jobs"])
def test_a_name_among_the_ended_ones_ends_nothing(older: Lab, kind: str) -> None:
    """Before, a job's machine was ended, and a rental was forgotten, for the name of an object."""
    lab = older
    sign_records(lab.store)
    (there,) = lab.store.list(f"workspaces/demo/{kind}/open/")
    lab.store.put(ObjectKey(there.key.replace("/open/", "/ended/")), b"anything")
    for run in (
        lab.opened.rentals.open if kind == "rentals" else lab.opened.jobs.open,
        lambda: hibernate_plainly(lab.opened),
    ):
        with pytest.raises(RecordRefused, match=f"{kind}/ended/"):
            run()
    assert len(lab.machines()) == 1


def test_a_receipt_that_is_not_believed_is_written_again(lab: Lab) -> None:
    machine = lab.rent().id
    lab.workspace(machine).mkdir()
    (lab.workspace(machine) / "kept.txt").write_text("stored")
    slept = hibernate_plainly(lab.opened).snapshot
    (receipt,) = lab.store.list("workspaces/demo/verified/")
    lab.store.put(receipt.key, b"anything")
    assert newest_verified(lab.store, lab.opened.spec.name) is None
    run_plainly(lab.opened, verify)
    assert newest_verified(lab.store, lab.opened.spec.name) == slept


def test_the_reason_of_a_pin_that_torpor_did_not_write_is_not_shown(lab: Lab) -> None:
    name, snapshot = lab.opened.spec.name, SnapshotId("20270101T000000Z-00000000")
    lab.store.put(ObjectKey(f"workspaces/demo/pins/{snapshot}"), b'{"reason":"x","pinned_unix":1}')
    assert "torpor did not write it" in pinned(lab.store, name)[snapshot]
    assert not is_own(lab.store, name, snapshot)
