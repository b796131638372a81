"""Whatever a hostile machine answers, the control side raises an error of ours, and signs no more
than it decided."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flows.procedures.restore import restore_all, restore_run
from flows.procedures.save import Snapshot
from flows.procedures.sync import Synchronisation
from tasks.jobs import end_command, look_at_command, start_command
from tasks.plain_runner import PlainRunner
from tasks.workspace import StoredWorkspace
from tests.fixtures.engine import MACHINE, WORKSPACE
from tests.fixtures.hostile_machine import FEW, anything
from tests.fixtures.manifests import SNAPSHOT
from tests.fixtures.memory_store import MemoryStore
from torpor.control.idleness import judge_idleness
from torpor.control.remote import limits, snapshot
from torpor.control.remote.examination import Examination, PackWork
from torpor.control.remote.preview import preview
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.snapshot import RemoteSnapshot
from torpor.control.reports import moment
from torpor.shared.errors import GrantExpired, MachineError, TorporError
from torpor.shared.format.manifest import Chunk, Pack
from torpor.shared.format.names import new_pack_key, packs_prefix
from torpor.shared.values import (
    MIB,
    Grant,
    IdleRules,
    ObjectKey,
    StoredSnapshot,
    WorkspaceName,
    WorkspaceSpec,
)
from torpor.shared.wire.activity import ReadActivity
from torpor.shared.wire.job import StartJob
from torpor.shared.wire.losses import LeftBehind, Losses
from torpor.shared.wire.preview import Preview
from torpor.shared.wire.protocol import PROTOCOL, Hello, parse_said
from torpor.shared.wire.request import Event, Request, parse_answer
from torpor.shared.wire.restore import (
    BeginRestore,
    FetchPart,
    RestorePart,
    RestorePlan,
    Served,
)
from torpor.shared.wire.snapshot import (
    Froze,
    ListPacks,
    PackClaim,
    Packs,
    PassesOutcome,
    Program,
    Quiesced,
    SnapshotBegun,
    StorePasses,
)

A = TypeVar("A")
Answer = Callable[[Request[Any]], Any]

WANTED = StoredSnapshot(WORKSPACE, SNAPSHOT, "0" * 64, 1000, 0.0)
SPEC = WorkspaceSpec(WORKSPACE, ["~/work"], parts=FEW)


class Hostile:
    """An agent as torpor.control.remote.agent says it, that answers with ``answer``."""

    hello = Hello(PROTOCOL, "agent", "hostile", 0.0, False)

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: list[Request[Any]] = []

    def call(
        self,
        request: Request[A],
        *,
        request_id: str,
        on_event: Callable[[Event], None] | None = None,
        within_s: float | None = None,
    ) -> A:
        """The answer as it comes over the wire."""
        self.asked.append(request)
        line = json.dumps({"id": request_id, "result": self._answer(request)}).encode()
        said = parse_said(line)
        if said is None:
            raise MachineError("a line that is no message")
        return parse_answer(type(request), said.result)

    def cancel(self, request_id: str) -> None:
        """Nothing runs here."""

    @property
    def grants(self) -> list[list[Grant]]:
        return [asked.packs for asked in self.asked if isinstance(asked, (StorePasses, FetchPart))]


def _honest(**fixed: msgspec.Struct | Answer) -> Answer:
    """Answers by the operation's class."""

    def answer(request: Request[Any]) -> Any:
        said = fixed[type(request).__name__]
        return msgspec.to_builtins(said if isinstance(said, msgspec.Struct) else said(request))

    return answer


@pytest.fixture(autouse=True)
def _few_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_PACKS", FEW)
    monkeypatch.setattr(snapshot, "PACKS_AT_ONCE", FEW)


WORKS = [
    PackWork(Pack(bytes([n]) * 16, 100, bytes(16)), [Chunk(bytes(32), 10, 0, 0, 0, 10)])
    for n in range(2)
]


def _stores(agent: Hostile, store: MemoryStore) -> None:
    with Snapshot(StoredWorkspace(SPEC, store, None), agent, MACHINE, guards=()) as snapshot:
        snapshot.save()


def _restores(agent: Hostile, store: MemoryStore) -> None:
    remote = RemoteRestore(agent, store, WANTED, None, "run", parts=FEW)
    with restore_run(remote):
        remote.serve("127.0.0.1", MIB)
        restore_all(remote, "near")


def _syncs(agent: Hostile, store: MemoryStore) -> None:
    kept = StoredWorkspace(SPEC, store, None)
    Synchronisation(kept, agent, MACHINE.id, WANTED).run(discard_local=False, full_check=True)


def _verifies(agent: Hostile, store: MemoryStore) -> None:
    Examination(agent, store, WORKSPACE, None, WORKS).run()


def _follows(agent: Hostile, store: MemoryStore) -> None:
    request = StartJob("3f2a9c81d04e", 1, ["true"], "~/work", "~/work/log", [])
    start_command(agent, request)
    state = look_at_command(agent, request.job, 0, 1 << 20).state
    moment(state.ended_unix or state.started_unix)
    end_command(agent, request.job)


def _watches(agent: Hostile, store: MemoryStore) -> None:
    judge_idleness(agent.call(ReadActivity(3600.0), request_id="1"), IdleRules(), 1)


@pytest.mark.rule("H5")
@pytest.mark.parametrize("work", [_stores, _restores, _syncs, _verifies, _follows, _watches])
@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(seed=st.integers(0, 1 << 32), wrong=st.booleans())
def test_no_answer_gets_past_our_errors_and_limits(
    work: Callable[[Hostile, MemoryStore], None], seed: int, wrong: bool
) -> None:
    dice, store = random.Random(seed), MemoryStore()  # parts are asked for by several threads
    agent = Hostile(lambda request: anything(request.answer_type(), dice, wrong=wrong))
    log = logging.getLogger("torpor.plain")
    log.disabled = True  # pytest's workers cannot send on what it would keep of such names
    try:
        with PlainRunner(retries=0, at_once=1):
            work(agent, store)
    except TorporError as error:
        assert len(str(error)) < 1 << 20
    finally:
        log.disabled = False
        store.close()
    assert all(len(grants) <= FEW for grants in agent.grants)
    assert len(agent.grants) <= 30 * FEW
    for grant in (grant for grants in agent.grants for grant in grants):
        assert grant.key.startswith(packs_prefix(WORKSPACE))
        assert ".." not in grant.key


@pytest.mark.rule("H4")
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (PassesOutcome(0, 0, 0, 0, 0, []), "0 of 3 passes"),
        (PassesOutcome(4, 0, 0, 0, 0, []), "4 of 3 passes"),
        (PassesOutcome(3, 0, 0, 0, 0, [], packs=1), "3 of 3 passes"),
    ],
    ids=["none", "too many", "all, and asks for more"],
)
def test_passes_that_no_agent_makes_are_refused(
    memory_store: MemoryStore, answer: PassesOutcome, says: str
) -> None:
    agent = Hostile(_honest(StorePasses=answer))
    with pytest.raises(MachineError, match=f"machine hostile says that it has made {says}"):
        RemoteSnapshot(agent, memory_store, SPEC, None, "run").store(3)


@pytest.mark.parametrize("named", [[], ["1" * 12, "0" * 12], ["0" * 12] * 2, ["x"]])
def test_other_programs_than_were_to_be_frozen_are_refused(
    memory_store: MemoryStore, named: list[str]
) -> None:
    agent = Hostile(_honest(Quiesce=Quiesced([Froze(job, 1) for job in named])))
    remote = RemoteSnapshot(agent, memory_store, SPEC, None, "run")
    with pytest.raises(MachineError, match="machine hostile names other programs"):
        remote.quiesce([Program("0" * 12, "~/kept/.torpor-process/0")], "criu")


def test_a_preview_beside_a_snapshot_that_it_was_not_told_of_is_refused(
    memory_store: MemoryStore,
) -> None:
    nothing = LeftBehind("/", 0, 0, 0.0)
    losses = Losses(True, nothing, [], [], [], 0, [], 0, [], 0, [])
    agent = Hostile(_honest(PreviewSnapshot=Preview("00" * 32, 1, 1, 0, 0, 0, losses)))
    with pytest.raises(MachineError, match="machine hostile remembers a snapshot"):
        preview(agent, memory_store, SPEC, None, rented=True, whole=True, wait_s=1.0)


@pytest.mark.rule("H1")
@pytest.mark.parametrize(
    "key",
    [
        new_pack_key(WorkspaceName("other")),
        ObjectKey("rentals/open/1"),
        ObjectKey(f"workspaces/{WORKSPACE}/snapshots/{SNAPSHOT}"),
        ObjectKey("no pack"),
    ],
    ids=["another workspace's pack", "a record", "a manifest", "no pack"],
)
def test_a_machine_gets_no_grant_for_what_is_no_pack_of_its_workspace(
    memory_store: MemoryStore, key: ObjectKey
) -> None:
    plan = RestorePlan(False, [], 1, 1, 1, [RestorePart(0, 1, 1, [key])])
    agent = Hostile(_honest(BeginRestore=plan, ListPacks=Packs([PackClaim(key, 1, "")])))
    with pytest.raises(MachineError, match="no pack of demo"):
        RemoteRestore(agent, memory_store, WANTED, None, "run").begin()
    with pytest.raises(MachineError, match="none of workspace demo"):
        RemoteSnapshot(agent, memory_store, SPEC, None, "run").unusable_packs()
    assert [type(asked) for asked in agent.asked] == [BeginRestore, ListPacks]


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_pack_whose_md5_the_store_hides_is_not_stored_again(
    memory_store: MemoryStore, is_hidden: bool
) -> None:
    """Its size is right. Whether its bytes are is what the verification reads."""
    key, changed = new_pack_key(WORKSPACE), new_pack_key(WORKSPACE)
    for one in (key, changed):
        memory_store.put(one, b"a pack")
    if is_hidden:
        memory_store.hide_md5(key)
    md5 = hashlib.md5(b"a pack", usedforsecurity=False).hexdigest()
    claims = [PackClaim(key, 6, md5), PackClaim(changed, 7, md5)]
    begun = SnapshotBegun(claims)
    agent = Hostile(
        _honest(
            BeginSnapshot=begun,
            ListPacks=Packs(claims),
            StorePasses=PassesOutcome(1, 0, 0, 0, 0, []),
        )
    )
    run = RemoteSnapshot(agent, memory_store, SPEC, None, "run")
    run.begin()
    run.walk()
    assert run.unusable_packs() == [changed]
    (store,) = [asked for asked in agent.asked if isinstance(asked, StorePasses)]
    assert store.resumed == [key]


@pytest.mark.rule("H3")
@pytest.mark.parametrize(("honours", "hours"), [(True, 2), (False, 1)])
def test_a_grant_that_can_replace_what_was_verified_ends_within_the_hour(
    honours: bool, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a pass that takes longer gets new ones, as long as it gets anywhere."""
    monkeypatch.setattr(snapshot, "PACKS_AT_ONCE", 200)
    store = MemoryStore()
    store.takes_conditions = honours
    asked: list[StorePasses] = []

    def stores(request: Any) -> PassesOutcome:
        asked.append(request)
        if len(asked) == 4:
            return PassesOutcome(1, 4, 3, 0, 0, [])
        done = replace(_ASKS, new_bytes=1, stored_bytes=1, packs=113)  # for two hours at 1 MiB/s
        if not request.packs:
            return done
        key = request.packs[7].key
        store.put(key, b"a pack")
        return replace(done, stored=key, why="an hour is over")

    run = RemoteSnapshot(Hostile(_honest(StorePasses=stores)), store, SPEC, None, "run")
    done = run.store(2)
    assert (done.passes, done.new_bytes, done.stored_bytes) == (1, 4, 3)
    grants = [grant for request in asked for grant in request.packs]
    assert len({grant.key for grant in grants}) == len(grants) == 3 * 113
    for grant in grants:
        assert abs(grant.expires_unix - time.time() - hours * 3600) < 120
    store.close()


_ASKS = PassesOutcome(0, 0, 0, 0, 0, [], packs=1 << 50, why="an hour is over")


@pytest.mark.rule("H4")
@pytest.mark.parametrize("says", ["nothing", "a pack of another", "a pack that is not there"])
def test_a_machine_that_asks_for_grants_again_and_again_gets_few(
    memory_store: MemoryStore, says: str
) -> None:
    other = new_pack_key(WORKSPACE)
    memory_store.put(other, b"x")

    def asks(request: Any) -> PassesOutcome:
        assert len(agent.asked) <= 10 * FEW, "it goes on for ever"
        mine = request.packs[0].key if request.packs else other
        told = {"nothing": "", "a pack of another": other}.get(says, mine)
        return replace(_ASKS, stored=told)

    agent = Hostile(_honest(StorePasses=asks))
    with pytest.raises(GrantExpired, match=r"has stored none .*: an hour is over"):
        RemoteSnapshot(agent, memory_store, SPEC, None, "run").store(2)
    assert [len(grants) for grants in agent.grants] == [0, FEW]


@pytest.mark.rule("H4")
def test_a_machine_that_stores_one_byte_each_time_is_stopped(
    memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MOST_REQUESTS", 20)

    def asks(request: Any) -> PassesOutcome:
        if not request.packs:
            return _ASKS
        memory_store.put(request.packs[0].key, b"x")
        return replace(_ASKS, stored=request.packs[0].key)

    agent = Hostile(_honest(StorePasses=asks))
    with pytest.raises(GrantExpired, match="asked 20 times for more grants"):
        RemoteSnapshot(agent, memory_store, SPEC, None, "run").store(2)
    assert len(agent.asked) == 20


def test_a_served_address_is_no_more_than_that() -> None:
    for url in ("../x", "0" * 64 + "\r\nX: y", "a@b"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"port": 1, "url": url, "certificate": ""}, Served)
