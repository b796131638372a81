"""Whoever can write in the bucket edits it in every way of ``FORGERIES`` and ``SPOILS``; each flow
that reads it refuses, before it rents a machine or writes to one.

A forged manifest is sealed with the workspace's key: a hostile machine had that key.

Of a spoiled pack the store shows another size or MD5. Where it hides these, a machine compares the
pack with its hashes: that machine ends, and nothing wrong is handed over.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import flows
from tasks.plain_runner import PlainRunner
from tasks.restore import fitted
from tasks.workspace import OpenWorkspace
from tests.fixtures.engine import Engine
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.manifests import entry
from tests.fixtures.market import Market
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.small_stack import small_stack
from tests.fixtures.trees import Tree, differences, facts, let_settle
from torpor.control.store.manifests import open_manifest
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.receipts import verified_snapshots
from torpor.control.upkeep.lineage import JobLineage, choose_newest, sure_save
from torpor.shared.errors import (
    InvalidInput,
    MachineError,
    ManifestInvalid,
    OtherPaths,
    SnapshotDamaged,
    StoreError,
    TorporError,
    WrongKey,
)
from torpor.shared.format.manifest import (
    DIRECTORY,
    FILE,
    HARDLINK,
    SYMLINK,
    Entry,
    Manifest,
    encode_manifest,
)
from torpor.shared.format.names import manifest_key, packs_prefix
from torpor.shared.transfer import retries
from torpor.shared.values import GIB, ObjectKey, SnapshotId, Want, WorkspaceName, tidy_path
from torpor.shared.wire.request import Request
from torpor.shared.wire.snapshot import BeginSnapshot

KEY = bytes(range(32))
OWN = "me@192.0.2.1"
PACKAGES = "~/.local/lib/python3.11/site-packages"


class _Session(Engine):
    """An agent in this process, as an open session."""

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        """Stays for the next session."""


@dataclass
class Bucket:
    """Two honest snapshots of ``~/workspace`` in a store, and the home of the machine that every
    session leads to: the user's own one and each rented one."""

    market: Market
    opened: OpenWorkspace
    home: Path
    older: SnapshotId
    newest: SnapshotId

    @property
    def store(self) -> ObjectStore:
        return self.opened.store

    def manifest(self, snapshot: SnapshotId | None = None) -> Manifest:
        return open_manifest(self.store, DEMO, snapshot or self.newest, self.opened.seal)[0]

    def forge(self, forged: Manifest, name: SnapshotId | None = None) -> None:
        """Write it in the place of the newest snapshot."""
        blob, _ = encode_manifest(forged, self.opened.seal)
        self.store.put(manifest_key(DEMO, name or self.newest), blob)

    def change(self, **fields: Any) -> None:
        self.forge(msgspec.structs.replace(self.manifest(), **fields))

    def add(self, *entries: Entry) -> None:
        self.change(entries=[*self.manifest().entries, *entries])

    def packs(self) -> list[ObjectKey]:
        return [found.key for found in self.store.list(packs_prefix(DEMO))]

    def run(self, flow: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with PlainRunner(self.opened, retries=0, at_once=4):
            return flow(DEMO, *args, **options)

    def files(self) -> Tree:
        return facts(self.home)

    def rented(self) -> int:
        return len(self.market.orders)


class Honest(NamedTuple):
    """The store and the home that all tests share: no test may change the home, and what one
    changes in the store is put back."""

    store: MemoryStore
    session: _Session
    home: Path
    snapshots: list[SnapshotId]


@pytest.fixture(scope="module", params=[None, KEY], ids=["plain", "sealed"])
def honest(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Honest]:
    home, store = tmp_path_factory.mktemp("home"), MemoryStore()
    notes = home / "workspace" / "notes"
    notes.mkdir(parents=True)
    session = _Session(store, tmp_path_factory.mktemp("agent"), request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        taken = []
        for _ in range(2):
            for name in "ab":
                (notes / name).write_bytes(os.urandom(20_000))
            let_settle()
            taken.append(session.snapshot([Path("~/workspace")]))
        yield Honest(store, session, home, taken)
    session.runs.close()
    store.close()


@pytest.fixture
def bucket(honest: Honest, lab: Lab) -> Iterator[Bucket]:
    opened = replace(
        lab.opened,
        store=honest.store,
        sealing=honest.session.key,
        store_key=honest.session.store_key,
        log_in=lambda *_, **__: honest.session,
    )
    kept = {one.key: honest.store.get(one.key, max_bytes=GIB) for one in honest.store.list("")}
    yield Bucket(lab.market, opened, honest.home, *honest.snapshots)
    honest.store.delete([one.key for one in honest.store.list("") if one.key not in kept])
    for key, body in kept.items():
        honest.store.put(key, body)


# -- what a flow does with a bucket


class Flow(NamedTuple):
    """``fresh``: it goes to a machine that does not hold the workspace yet."""

    name: str
    run: Callable[[Bucket], Any]
    fresh: bool = False


def _find(bucket: Bucket) -> None:
    """What it cannot trust it names beside what it finds; here that is the error. It writes
    nothing, so it lists any directory, under its own name."""
    found = bucket.run(flows.list_versions, "*")
    assert bucket.newest not in {one.last for one in found.versions}
    (unread,) = found.unread
    raise ManifestInvalid(unread)


FLOWS = [
    Flow("wake", lambda b: b.run(flows.wake.fn), fresh=True),
    Flow("wake-own", lambda b: b.run(flows.wake.fn, machine=OWN), fresh=True),
    Flow("replicate", lambda b: b.run(flows.replicate.fn, 1), fresh=True),
    Flow("sync", lambda b: b.run(flows.sync.fn, machine=OWN)),
    Flow("verify-quick", lambda b: b.run(flows.verify.fn)),
    Flow("verify-full", lambda b: b.run(flows.verify.fn, depth="full")),
    Flow("drill", lambda b: b.run(flows.verify.fn, depth="drill"), fresh=True),
    Flow("find", _find),
    Flow("deploy", lambda b: b.run(flows.deploy.fn, small_stack()), fresh=True),
    Flow(
        "restore-path",
        lambda b: b.run(flows.restore_path.fn, "notes", "~/into", machine=OWN),
    ),
]
FLOW_IDS = [one.name for one in FLOWS]


# -- forged manifests


class Forgery(NamedTuple):
    name: str
    edit: Callable[[Bucket], None]
    roots: Sequence[str] = ()  # it names these, of which the block has not all


def _of_roots(name: str, *roots: str) -> Forgery:
    """Each has a directory entry, and the first one has the files."""

    def edit(bucket: Bucket) -> None:
        more = [entry(DIRECTORY, b"", root=number) for number in range(1, len(roots))]
        bucket.change(roots=list(roots), entries=[*bucket.manifest().entries, *more])

    return Forgery(name, edit, roots)


def _of_another_workspace(bucket: Bucket) -> None:
    bucket.change(workspace=WorkspaceName("other"))


def _an_older_one_again(bucket: Bucket) -> None:
    bucket.forge(bucket.manifest(bucket.older))


def _blob(make: Callable[[bytes], bytes]) -> Callable[[Bucket], None]:
    def edit(bucket: Bucket) -> None:
        key = manifest_key(DEMO, bucket.newest)
        bucket.store.put(key, make(bucket.store.get(key, max_bytes=1 << 24)))

    return edit


def _file(path: bytes, **changes: Any) -> Callable[[Bucket], None]:
    return lambda bucket: bucket.add(entry(FILE, path, **changes))


FORGERIES = [
    _of_roots("packages", PACKAGES),
    _of_roots("one-more", "~/workspace", PACKAGES),
    _of_roots("absolute", "/etc/cron.d"),
    _of_roots("home", "~/"),
    _of_roots("above", "~/workspace/../.ssh"),
    _of_roots("below", "~/workspace/notes"),
    _of_roots("another-user's", "~root/workspace"),
    _of_roots("a-tilde-by-name", "./~/workspace"),
    _of_roots("relative", "workspace"),
    _of_roots("twice", "~/workspace", "~//workspace/"),
    Forgery("through-its-own-symlink", lambda b: b.add(
        entry(SYMLINK, b"s", target=b"../.ssh"), entry(FILE, b"s/authorized_keys")
    )),
    Forgery("hard-link-outside", lambda b: b.add(entry(HARDLINK, b"h", target=b"../.ssh/id"))),
    Forgery("dot-dot", _file(b"../.ssh/authorized_keys")),
    Forgery("absolute-name", _file(b"/etc/passwd")),
    Forgery("twice-a-name", _file(b"notes/a")),
    Forgery("size", _file(b"x", size=1)),
    Forgery("another-workspace's", _of_another_workspace),
    Forgery("an-older-one-again", _an_older_one_again),
    Forgery("empty", _blob(lambda blob: b"")),
    Forgery("cut", _blob(lambda blob: blob[:-1])),
    Forgery("flipped", _blob(lambda blob: blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:])),
    Forgery("html", _blob(lambda blob: b"<html>not found</html>" * 10)),
]  # fmt: skip


def _refused(bucket: Bucket, flow: Flow, *kinds: type[TorporError]) -> str:
    """What the flow says, which rents nothing and leaves the home as it was."""
    with _empty(bucket) if flow.fresh else nullcontext():
        before = bucket.files()
        with pytest.raises(kinds) as refused:
            flow.run(bucket)
        assert bucket.rented() == 0
        assert differences(before, bucket.files()) == []
    return str(refused.value)


@contextmanager
def _empty(bucket: Bucket) -> Iterator[None]:
    """The home of a machine that does not hold the workspace."""
    place, aside = bucket.home / "workspace", bucket.home / "elsewhere"
    place.rename(aside)
    try:
        yield
    finally:
        if place.exists():
            shutil.rmtree(place)
        aside.rename(place)


@pytest.mark.rule(7, "H10")
@pytest.mark.parametrize("flow", FLOWS, ids=FLOW_IDS)
@pytest.mark.parametrize("forgery", FORGERIES, ids=[one.name for one in FORGERIES])
def test_a_forged_manifest_is_refused_before_anything_is_rented_or_written(
    bucket: Bucket, forgery: Forgery, flow: Flow
) -> None:
    forgery.edit(bucket)
    if forgery.roots and flow.name == "find":
        bucket.run(flows.list_versions, "*")
        assert bucket.rented() == 0
        return
    said = _refused(bucket, flow, ManifestInvalid, SnapshotDamaged, WrongKey)
    assert bucket.newest in said
    for other in {tidy_path(one) for one in forgery.roots} - {"~/workspace"}:
        for words in (other, "'~/workspace'", "`paths`", "`accept_paths`"):
            assert words in said


# -- packs


def _another(body: bytes) -> bytes:
    """A pack of the same size, with other bytes: a chunk's name is the hash of its content."""
    return os.urandom(len(body))


SPOILS: dict[str, Callable[[bytes], bytes | None]] = {
    "swapped": _another,
    "flipped": lambda body: bytes([body[0] ^ 1]) + body[1:],
    "cut": lambda body: body[:-1],
    "gone": lambda body: None,
}


@pytest.fixture
def machine(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every session leads to a machine that holds nothing yet; its home."""
    session = _Session(bucket.store, tmp_path / "agent", bucket.opened.store_key)
    bucket.opened = replace(bucket.opened, log_in=lambda *_, **__: session)
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.001)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    yield home
    session.runs.close()


RENT = {"wake", "replicate", "verify-full", "drill"}
"""What rents a machine for an honest bucket."""
COME_THROUGH = [one for one in FLOWS if one.name not in ("find", "deploy")]


@pytest.mark.parametrize("flow", COME_THROUGH, ids=lambda one: one.name)
def test_an_honest_bucket_comes_through(bucket: Bucket, machine: Path, flow: Flow) -> None:
    """Else every refusal here would prove nothing."""
    flow.run(bucket)
    assert bucket.rented() == (flow.name in RENT)
    if flow.name in ("wake", "wake-own", "sync"):
        was = facts(bucket.home / "workspace")
        assert differences(was, facts(machine / "workspace")) == []


@pytest.mark.rule("H16")
@pytest.mark.parametrize("flow", COME_THROUGH, ids=lambda one: one.name)
@pytest.mark.parametrize("spoil", SPOILS)
def test_of_a_spoiled_pack_nothing_is_handed_over(
    bucket: Bucket, machine: Path, spoil: str, flow: Flow
) -> None:
    for key in bucket.packs():
        body = SPOILS[spoil](bucket.store.get(key, max_bytes=GIB))
        if body is None:
            bucket.store.delete([key])
        else:
            bucket.store.put(key, body)
    with pytest.raises((SnapshotDamaged, StoreError, MachineError)):
        flow.run(bucket)
    assert bucket.rented() == (flow.name == "verify-full")  # it reads them, to name the files
    assert bucket.market.alive == {}
    assert {one.state for one in bucket.opened.rentals.history()} <= {"ended"}
    assert bucket.opened.rentals.open() == []
    assert [name for name, fact in facts(machine).items() if fact.data] == []


# -- whose word counts


@pytest.mark.rule(7)
def test_directories_that_the_user_names_are_restored_and_reported(
    bucket: Bucket, machine: Path
) -> None:
    """As after a path was removed from the block."""
    _of_roots("", "~/old").edit(bucket)
    with pytest.raises(OtherPaths, match="'~/old'"):
        bucket.run(flows.wake.fn, machine=OWN, accept_paths=["~/other"])
    with pytest.raises(InvalidInput, match="goes up"):
        bucket.run(flows.wake.fn, machine=OWN, accept_paths=["~/../x"])
    report = bucket.run(flows.wake.fn, machine=OWN, accept_paths=["~//old/"])
    assert differences(facts(bucket.home / "workspace"), facts(machine / "old")) == []
    assert [one for one in report.warnings if "~/old is not among the workspace's paths" in one]
    with pytest.raises(OtherPaths, match="'~/old'"):
        bucket.run(flows.sync.fn, machine=OWN)
    bucket.run(flows.sync.fn, machine=OWN, accept_paths=["~/old"])


@pytest.mark.rule(7)
def test_a_snapshot_from_before_a_path_was_added_or_tidied_is_restored(
    bucket: Bucket, machine: Path
) -> None:
    bucket.change(roots=["~//workspace/"])
    spec = msgspec.structs.replace(bucket.opened.spec, paths=["~/more", "~/workspace"])
    replace(bucket, opened=replace(bucket.opened, spec=spec)).run(flows.wake.fn, machine=OWN)
    assert differences(facts(bucket.home / "workspace"), facts(machine / "workspace")) == []
    assert not (machine / "more").exists()


@pytest.mark.rule(7)
def test_a_job_goes_on_from_the_save_before_one_with_other_directories(bucket: Bucket) -> None:
    _of_roots("", PACKAGES).edit(bucket)
    (agent,) = {receipt.agent for _, receipt in verified_snapshots(bucket.store, DEMO)}
    own = JobLineage(bucket.older, frozenset([agent]), frozenset())
    of, paths = (bucket.store, DEMO, bucket.opened.seal), bucket.opened.spec.restorable
    found, _, refused, _ = choose_newest(*of, paths, own)
    assert found is not None and found.snapshot == bucket.older
    assert [type(error) for _, error in refused] == [OtherPaths]
    with pytest.raises(OtherPaths):  # and its machine is kept
        sure_save(*of, own, paths)


class _Liar(_Session):
    """A machine that stores another directory than the block's."""

    def call(self, request: Request[Any], **options: Any) -> Any:
        if isinstance(request, BeginSnapshot):
            request = msgspec.structs.replace(request, roots=["~/packages"])
        return super().call(request, **options)


@pytest.mark.rule(7)
def test_a_machine_that_stored_another_directory_is_not_believed(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "evil.pth").write_text("import evil")
    let_settle()
    liar = _Liar(bucket.store, tmp_path / "agent", bucket.opened.store_key)
    with pytest.raises(OtherPaths, match="'~/packages'"):
        liar.hibernate([Path("~/workspace")])
    liar.runs.close()


@pytest.mark.rule("H15")
@pytest.mark.parametrize("claimed", [{}, {"bytes": -(1 << 60)}, {"bytes": 1 << 60}])
def test_a_machine_is_rented_for_the_files_and_not_for_a_claim(
    bucket: Bucket, claimed: dict[str, int]
) -> None:
    held = fitted(Want(), bucket.manifest())
    bucket.change(statistics=claimed)
    assert fitted(Want(), bucket.manifest()) == held
