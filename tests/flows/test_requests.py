"""How many requests a run sends to the store. Each takes 30 to 200 ms at a store far away, and the
store's provider bills it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from flows import backup, prune
from tasks.overview import live_machines, overview
from tests.fixtures.lab import Lab, make_lab
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from torpor.control.store.manifests import snapshot_ids
from torpor.control.store.workspace_records import Settings
from torpor.shared.format.names import manifest_key, settings_key
from torpor.shared.transfer.transfer import Range
from torpor.shared.values import ObjectKey, StoredObject

pytestmark = pytest.mark.rule(1)


class Counting(MemoryStore):
    """``asked``: the kind of each request, with the key or prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []

    @property
    def kinds(self) -> dict[str, int]:
        return dict(Counter(kind for kind, _ in self.asked))

    def put(
        self,
        key: ObjectKey,
        body: bytes,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
    ) -> StoredObject:
        self.asked.append(("PUT", key))
        return super().put(key, body, if_absent=if_absent, if_version=if_version)

    def get(self, key: ObjectKey, *, max_bytes: int) -> bytes:
        self.asked.append(("GET", key))
        return super().get(key, max_bytes=max_bytes)

    def get_range(self, key: ObjectKey, wanted: Range) -> bytes:
        self.asked.append(("GET", f"{key} in part"))
        return super().get_range(key, wanted)

    def head(self, key: ObjectKey) -> StoredObject | None:
        self.asked.append(("HEAD", key))
        return super().head(key)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        self.asked.append(("LIST", prefix))
        return super().list(prefix)

    def delete(self, keys: Iterable[ObjectKey]) -> None:
        self.asked.append(("DELETE", ""))
        super().delete(keys)


@pytest.fixture
def stored() -> Iterator[tuple[Lab, Counting]]:
    """A workspace that was backed up, and that nobody has changed since."""
    store = Counting()
    with make_lab(store) as lab:
        home = lab.workspace(lab.rent().id)
        (home / "notes").mkdir(parents=True)
        (home / "notes" / "a.txt").write_text("first\n")
        (home / "weights.bin").write_bytes(os.urandom(100_000))
        settings = Settings(block="demo", blocks={"workspace/demo": {"name": "demo"}})
        lab.opened = replace(lab.opened, side="11111111", settings=lambda: settings)
        run_plainly(lab.opened, backup)  # which writes its settings beside it
        store.asked.clear()
        yield lab, store
    store.close()


def test_an_unchanged_backup_sends_few_requests(stored: tuple[Lab, Counting]) -> None:
    lab, store = stored
    run_plainly(lab.opened, backup)
    assert store.kinds == {"LIST": 21, "GET": 17, "HEAD": 3, "PUT": 2}
    _check_read_twice(lab, store)


def test_an_unchanged_hibernate_sends_few_requests(stored: tuple[Lab, Counting]) -> None:
    """What a destroy rests on is asked anew: the listing of the snapshots, of the jobs, and
    who owns the workspace, before the warrant and right before the market is asked."""
    lab, store = stored
    assert hibernate_plainly(lab.opened).destroyed
    assert store.kinds == {"LIST": 20, "GET": 18, "HEAD": 3, "PUT": 5, "DELETE": 1}
    _check_read_twice(lab, store)


def test_a_look_at_a_workspace_that_is_asleep_sends_few_requests(
    stored: tuple[Lab, Counting],
) -> None:
    """`torpor status` looks at all of them; one listing shows the nodes of all."""
    lab, store = stored
    hibernate_plainly(lab.opened)
    store.asked.clear()
    (seen,) = overview({"demo": lab.opened}, live_machines, [])
    assert (seen.state, seen.month_usd is not None) == ("asleep", True)
    assert store.kinds == {"LIST": 6, "GET": 2}


@pytest.mark.rule(24)
def test_each_flow_asks_who_owns_the_workspace_and_again_before_it_rents_ends_or_deletes(
    stored: tuple[Lab, Counting],
) -> None:
    """The settings are written again where they differ."""
    lab, store = stored
    key = settings_key(lab.opened.spec.name)

    def asked() -> list[str]:
        found = [kind for kind, of in store.asked if of == key]
        store.asked.clear()
        return found

    run_plainly(lab.opened, backup)
    assert asked() == ["GET", "GET"]  # the second one before older saves are deleted
    other = Settings(block="demo", blocks={"workspace/demo": {"name": "demo", "exclude": ["a"]}})
    changed = replace(lab.opened, settings=lambda: other)
    run_plainly(changed, backup)
    assert asked() == ["GET", "PUT", "GET"]
    run_plainly(changed, prune, dry_run=False)
    assert asked() == ["GET", "GET"]
    hibernate_plainly(changed)
    assert asked() == ["GET", "GET", "GET", "GET"]
    wake_plainly(changed)
    assert asked() == ["GET", "GET"]  # the second one before the market is asked


def _check_read_twice(lab: Lab, store: Counting) -> None:
    """The new manifest is read back once for what it goes on from and for what it lacks, and once
    more for the proof. The commit's own request is the machine's."""
    newest = max(snapshot_ids(lab.direct, lab.opened.spec.name))
    key = manifest_key(lab.opened.spec.name, newest)
    assert [kind for kind, asked in store.asked if asked == key and kind == "GET"] == ["GET"] * 2
