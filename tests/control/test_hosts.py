"""Host keys of users' own machines are pinned at first use."""

from __future__ import annotations

import msgspec
import pytest

from tests.fixtures.contested_store import ContestedStore
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.records import put_record
from torpor.control.hosts import KnownHosts
from torpor.shared.errors import HostKeyChanged, StoreError
from torpor.shared.values import Endpoint, WorkspaceName

DEMO, OTHER = WorkspaceName("demo"), WorkspaceName("other")
HOST = Endpoint("203.0.113.7", 22022, "root")
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKx"


def test_a_host_key_is_pinned_at_first_use(store: MemoryStore) -> None:
    hosts = KnownHosts(store, DEMO)
    assert hosts.pinned(HOST) == HOST
    hosts.pin(HOST, KEY)
    assert KnownHosts(store, DEMO).pinned(HOST).host_key == KEY
    hosts.pin(HOST, KEY)
    other_port = msgspec.structs.replace(HOST, port=22023)
    assert hosts.pinned(other_port) == other_port
    assert KnownHosts(store, OTHER).pinned(HOST) == HOST
    told = msgspec.structs.replace(HOST, host_key="ssh-ed25519 told-by-the-provider")
    assert hosts.pinned(told) == told  # the provider's own stands above a pin


def test_the_jump_host_of_a_machine_is_kept_with_its_pin(store: MemoryStore) -> None:
    hosts = KnownHosts(store, DEMO)
    behind = msgspec.structs.replace(HOST, jump=Endpoint("198.51.100.1", 22, "jump", KEY))
    hosts.pin(behind, KEY)
    assert hosts.pinned(HOST) == msgspec.structs.replace(behind, host_key=KEY)


@pytest.mark.rule(8)
def test_another_host_key_is_never_pinned_over_the_first(store: MemoryStore) -> None:
    hosts = KnownHosts(store, DEMO)
    hosts.pin(HOST, KEY)
    with pytest.raises(HostKeyChanged) as changed:
        hosts.pin(HOST, "ssh-ed25519 another")
    for part in ("203.0.113.7:22022", store.address, "if you set it up again, delete", "attacker"):
        assert part in str(changed.value)
    assert hosts.pinned(HOST).host_key == KEY


@pytest.mark.rule(18)
def test_of_two_first_logins_at_once_one_pins_its_key() -> None:
    contested = ContestedStore()
    hosts = KnownHosts(contested, DEMO)
    contested.meanwhile = lambda: hosts.pin(HOST, KEY)
    with pytest.raises(HostKeyChanged, match="shows another host key"):
        hosts.pin(HOST, "ssh-ed25519 another")
    assert hosts.pinned(HOST).host_key == KEY


def test_a_damaged_pin_is_not_an_absent_one(store: MemoryStore) -> None:
    KnownHosts(store, DEMO).pin(HOST, KEY)
    (found,) = store.list("workspaces/demo/hosts/")
    for damaged in (b"{", b"", b"\xff"):
        put_record(store, found.key, damaged)
        with pytest.raises(StoreError, match=r"is not (what this torpor writes|believed)"):
            KnownHosts(store, DEMO).pinned(HOST)
