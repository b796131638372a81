"""Leases and pins are in the store, where the next run finds them."""

from __future__ import annotations

import msgspec
import pytest

from tests.fixtures.memory_store import MemoryStore
from torpor.control.ledger import Ledger
from torpor.shared.errors import HostKeyChanged, StoreError, StoreMissing
from torpor.shared.values import Endpoint, Label, ObjectKey, WorkspaceName

DEMO, OTHER = WorkspaceName("demo"), WorkspaceName("other")
HERE, THERE = "local:/here", "local:/there"
HOST = Endpoint("203.0.113.7", 22022, "root")
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKx"


@pytest.fixture
def store(memory_store: MemoryStore) -> MemoryStore:
    return memory_store


def test_a_lease_is_in_the_store_before_its_machine_is_made(store: MemoryStore) -> None:
    lease = Ledger(store, DEMO).open_lease("me", HERE)
    assert (lease.label.owner, lease.label.workspace, lease.state) == ("me", DEMO, "creating")
    assert Ledger(store, DEMO).unfinished(HERE) == [lease]  # as the next run sees it
    assert Ledger(store, DEMO).lease_of(lease.label) == lease


def test_every_lease_has_a_label_of_its_own(store: MemoryStore) -> None:
    ledger = Ledger(store, DEMO)
    assert ledger.open_lease("me", HERE).label != ledger.open_lease("me", HERE).label


def test_a_lease_of_another_workspace_or_provider_is_not_taken_up(store: MemoryStore) -> None:
    Ledger(store, DEMO).open_lease("me", HERE)
    assert Ledger(store, DEMO).unfinished(THERE) == []
    assert Ledger(store, OTHER).unfinished(HERE) == []


def test_one_whose_machine_stands_here_is_taken_up_whatever_the_provider_was_called(
    store: MemoryStore,
) -> None:
    ledger = Ledger(store, DEMO)
    lease, other = ledger.open_lease("me", THERE), ledger.open_lease("me", THERE)
    assert ledger.unfinished(HERE, [lease.label, None]) == [lease]
    ledger.hand_over(lease)
    assert ledger.unfinished(HERE, [lease.label]) == []
    assert ledger.unfinished(HERE, [other.label]) == [other]


def test_a_machine_that_was_handed_over_is_nobody_s_to_take_up(store: MemoryStore) -> None:
    ledger = Ledger(store, DEMO)
    lease = ledger.open_lease("me", HERE)
    ledger.hand_over(lease)
    assert ledger.unfinished(HERE) == []
    held = ledger.lease_of(lease.label)
    assert held == msgspec.structs.replace(lease, state="handed over")


def test_a_closed_lease_is_gone_and_may_be_closed_again(store: MemoryStore) -> None:
    ledger = Ledger(store, DEMO)
    lease, kept = ledger.open_lease("me", HERE), ledger.open_lease("me", HERE)
    ledger.close_lease(lease.label)
    ledger.close_lease(lease.label)
    assert ledger.lease_of(lease.label) is None
    assert ledger.unfinished(HERE) == [kept]
    assert ledger.lease_of(Label("me", DEMO, "never")) is None


def test_a_host_key_is_pinned_at_first_use(store: MemoryStore) -> None:
    ledger = Ledger(store, DEMO)
    assert ledger.pinned(HOST) == HOST
    ledger.pin(HOST, KEY)
    assert Ledger(store, DEMO).pinned(HOST).host_key == KEY
    ledger.pin(HOST, KEY)
    other_port = msgspec.structs.replace(HOST, port=22023)
    assert ledger.pinned(other_port) == other_port
    assert Ledger(store, OTHER).pinned(HOST) == HOST


def test_a_key_of_the_provider_s_own_stands_above_a_pin(store: MemoryStore) -> None:
    ledger = Ledger(store, DEMO)
    ledger.pin(HOST, KEY)
    told = msgspec.structs.replace(HOST, host_key="ssh-ed25519 told-by-the-provider")
    assert ledger.pinned(told) == told


def test_another_host_key_is_never_pinned_over_the_first(store: MemoryStore) -> None:
    ledger = Ledger(store, DEMO)
    ledger.pin(HOST, KEY)
    with pytest.raises(HostKeyChanged) as changed:
        ledger.pin(HOST, "ssh-ed25519 another")
    for part in ("203.0.113.7:22022", store.address, "if you rented it again, delete", "attacker"):
        assert part in str(changed.value)
    assert ledger.pinned(HOST).host_key == KEY


def test_the_ledger_lies_beside_the_snapshots_and_holds_no_secret(store: MemoryStore) -> None:
    ledger = Ledger(store, DEMO)
    ledger.open_lease("me", HERE)
    ledger.pin(HOST, KEY)
    keys = [found.key for found in store.list("")]
    assert {key.rsplit("/", 1)[0] for key in keys} == {
        "workspaces/demo/leases",
        "workspaces/demo/hosts",
    }


def test_a_store_that_is_away_is_not_an_empty_ledger(store: MemoryStore) -> None:
    store.fails = StoreMissing("no such bucket")
    with pytest.raises(StoreMissing, match="no such bucket"):
        Ledger(store, DEMO).unfinished(HERE)


def test_a_damaged_lease_is_not_an_absent_one(store: MemoryStore) -> None:
    ledger = Ledger(store, DEMO)
    lease = ledger.open_lease("me", HERE)
    key = ObjectKey(f"workspaces/demo/leases/{lease.label.rental}")
    for damaged in (b'{"label": "x"}', b"", b"{", b"\xff"):
        store.put(key, damaged)
        with pytest.raises(StoreError, match=f"{key} .* is not what torpor wrote"):
            ledger.unfinished(HERE)
