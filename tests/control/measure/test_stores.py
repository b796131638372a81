"""Real stores: the line, and what is held and cleared."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from unittest.mock import patch

import msgspec
import pytest

import tasks.measure
from tasks.plain_runner import PlainRunner
from tests.fixtures.contested_store import HOUR_S, ContestedStore
from tests.fixtures.records import put_record, read_record
from tests.fixtures.stores import Server
from torpor.control.measure import scratch
from torpor.control.measure.rounds import Rounds
from torpor.control.measure.storage import measure_storage
from torpor.control.processes import ProcessRecord, boot_id, identify
from torpor.control.store.records import Records
from torpor.shared.errors import InvalidInput, StoreCorrupt, StoreError, WorkspaceBusy
from torpor.shared.transfer import throughput
from torpor.shared.values import KIB, MIB, RESERVED, ObjectKey, WorkspaceName

NAME = scratch.scratch_name(WorkspaceName("demo"))


def test_a_store_is_measured_both_ways_and_nothing_stays(seaweed: Server) -> None:
    store = seaweed.store()
    figures = measure_storage(
        store, "near", scratch.storage_prefix(NAME), throughput.move, range(2)
    )
    assert [(f.what, f.direction, f.n) for f in figures] == [("line", "up", 2), ("line", "down", 2)]
    assert all(figure.low > 0 for figure in figures)
    assert list(store.list("")) == []


def test_what_comes_back_is_compared(seaweed: Server) -> None:
    store = seaweed.store()
    one, other = ObjectKey("workspaces/x/one"), ObjectKey("workspaces/x/other")
    store.put(other, os.urandom(KIB))
    get = msgspec.structs.replace(store.grant("GET", other, expires_s=60), key=one)
    with pytest.raises(StoreCorrupt, match="came back with other bytes"):
        throughput.move([store.grant("PUT", one, expires_s=60)], [get], KIB, 1)


@pytest.mark.parametrize(("connections", "size"), [(0, KIB), (65, KIB), (1, 257 * MIB), (1, 0)])
def test_what_cannot_be_measured_is_refused(connections: int, size: int, seaweed: Server) -> None:
    store = seaweed.store()
    key = ObjectKey("workspaces/x/one")
    grants = [store.grant(verb, key, expires_s=60) for verb in ("PUT", "GET")]
    with pytest.raises(InvalidInput):
        throughput.move(grants[:1], grants[1:], size, connections)


def test_one_benchmark_at_a_time_holds_a_name(seaweed: Server) -> None:
    store = seaweed.store()
    with scratch.held(store, NAME, "run-1"):
        with pytest.raises(WorkspaceBusy, match="run-1"), scratch.held(store, NAME, "run-2"):
            pass
        store.put(ObjectKey(f"workspaces/{NAME}/packs/aa"), b"left")
        assert scratch.clear(store, NAME) == 1
        assert len(list(store.list(""))) == 1  # the claim is the holder's
    assert list(store.list("")) == []


def test_a_run_that_lost_its_name_while_it_slept_leaves_it_alone(seaweed: Server) -> None:
    store = seaweed.store()
    key = ObjectKey(f"workspaces/{NAME}/claim")
    with scratch.held(store, NAME, "run-1") as ours:
        assert ours()
        other = scratch.Claim("run-2", "another", ProcessRecord(1, 1), time.time())
        put_record(store, key, other)
        assert not ours()
        ended = threading.Event()
        with patch.object(scratch, "BEAT_S", 0.01):
            scratch.keep(store, NAME, "run-1", ended)  # ends by itself
    assert msgspec.convert(read_record(store, key), scratch.Claim) == other


def test_a_claim_that_cannot_be_read_counts_as_held(seaweed: Server) -> None:
    store = seaweed.store()
    put_record(store, ObjectKey(f"workspaces/{NAME}/claim"), {"of": "a later version"})
    with (
        pytest.raises(StoreError, match="then delete"),
        scratch.held(store, NAME, "run-2"),
    ):
        pass
    assert len(list(store.list(""))) == 1


def test_what_a_killed_run_left_in_a_further_store_goes_with_the_next(
    seaweed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = seaweed.store()
    store.put(ObjectKey(f"{scratch.storage_prefix(NAME)}/round-7/1/0"), b"left")
    monkeypatch.setattr(tasks.measure, "line_of", lambda *_: throughput.move)
    with PlainRunner():
        tasks.measure.measure_store(
            tasks.measure.MeasuredStore("further", store, None),
            None,  # type: ignore[arg-type]  # no machine: the line is measured from here
            NAME,
            Rounds(1, until=0.0),
        )
    assert list(store.list("")) == []


@pytest.mark.parametrize("where", ["this host", "another host"])
def test_a_claim_of_a_dead_run_is_taken_over(where: str, seaweed: Server) -> None:
    store = seaweed.store()
    boot = scratch.this_host() if where == "this host" else "00000000-another"
    dead = scratch.Claim("run-1", boot, ProcessRecord(1 << 22, 1), beat_unix=0.0)
    put_record(store, ObjectKey(f"workspaces/{NAME}/claim"), dead)
    with scratch.held(store, NAME, "run-2"):
        pass
    assert list(store.list("")) == []


@pytest.mark.parametrize("where", ["another", f"{boot_id()} pid:[1]"])
def test_a_live_claim_of_another_host_or_container_counts_for_ten_minutes(where: str) -> None:
    me, unseen = identify(os.getpid()), ProcessRecord(1 << 22, 1)
    assert scratch.Claim("r", where, unseen, time.time() - 500).alive()
    assert not scratch.Claim("r", where, me, time.time() - 700).alive()
    assert scratch.Claim("r", scratch.this_host(), me, 0.0).alive()


@pytest.mark.rule(18)
def test_a_claim_counts_by_the_store_s_clock() -> None:
    contested = ContestedStore()
    records = Records(contested, scratch.Claim, 4096, "look")
    other = scratch.Claim("run-1", "another", ProcessRecord(1, 1), 0.0)
    with contested.host(-HOUR_S):
        beat = msgspec.structs.replace(other, beat_unix=time.time())
        records.create(ObjectKey(f"workspaces/{NAME}/claim"), beat)
    with (
        contested.host(),
        pytest.raises(WorkspaceBusy, match="run-1"),
        scratch.held(contested, NAME, "run-2"),
    ):
        pass
    contested.pass_time(scratch.STALE_S + 1)
    with contested.host(), scratch.held(contested, NAME, "run-2") as ours:
        assert ours()


@pytest.mark.rule(18)
def test_of_two_that_find_a_dead_claim_one_holds_the_name() -> None:
    contested = ContestedStore()
    dead = scratch.Claim("run-1", "another", ProcessRecord(1, 1), 5.0)
    key = ObjectKey(f"workspaces/{NAME}/claim")
    put_record(contested, key, dead)
    late = msgspec.structs.replace(dead, run="run-3")
    contested.meanwhile = lambda: put_record(contested, key, late)
    with (
        pytest.raises(WorkspaceBusy, match="at the same time"),
        scratch.held(contested, NAME, "run-2"),
    ):
        pass


def test_only_a_benchmark_s_own_name_is_cleared(seaweed: Server) -> None:
    store = seaweed.store()
    with pytest.raises(AssertionError):
        scratch.clear(store, WorkspaceName("demo"))
    with pytest.raises(AssertionError):  # the leases of machines
        scratch.clear(store, scratch.machines_name(WorkspaceName("demo")))


@pytest.mark.parametrize("name", [scratch.scratch_name, scratch.machines_name])
def test_long_names_have_reserved_names_of_their_own(
    name: Callable[[WorkspaceName], WorkspaceName],
) -> None:
    names = [name(WorkspaceName("x" * 62 + last)) for last in "ab"]
    assert len(set(names)) == 2
    assert all(len(made) <= 63 and made.startswith(RESERVED) for made in names)
