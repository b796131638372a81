"""An installation that wrote its records before torpor signed them goes on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.fixtures.lab import Lab
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.records import read_record
from torpor.control.hosts import KnownHosts
from torpor.control.jobs.records import Job
from torpor.control.store.receipts import newest_verified
from torpor.control.upkeep.signing import is_signed_kind, sign_records
from torpor.shared.errors import RecordRefused
from torpor.shared.values import MIB, Endpoint, ObjectKey

HOST = Endpoint("192.0.2.1", 22, "me")


def records(lab: Lab) -> list[ObjectKey]:
    return [found.key for found in lab.store.list("") if is_signed_kind(found.key)]


def unsign(lab: Lab) -> None:
    """As the version before wrote them."""
    for key in records(lab):
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
    assert sorted(sign_records(lab.store)) == sorted(there)
    assert sign_records(lab.store) == []
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
    assert sign_records(lab.store) == []
    with pytest.raises(RecordRefused):
        lab.opened.rentals.open()
    assert sign_records(lab.store, whatever=True) == [key]


def test_what_is_no_json_stays_as_it_is(lab: Lab) -> None:
    key = ObjectKey("workspaces/demo/rentals/open/damaged")
    lab.store.put(key, b"\xff{")
    assert sign_records(lab.store, whatever=True) == []
    assert lab.store.get(key, max_bytes=MIB) == b"\xff{"
