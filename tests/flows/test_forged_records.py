"""Somebody who holds the bucket's key alone writes records: torpor does nothing that they say."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flows import hibernate, reconcile, wake, watch
from tasks.plain_runner import PlainRunner
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.manifests import PLAIN
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.records import read_record
from torpor.control.hosts import KnownHosts
from torpor.control.store.manifests import open_manifest
from torpor.control.store.signatures import Signer
from torpor.control.watch_report import WatchReport
from torpor.shared.errors import RecordRefused, TorporError
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import Endpoint, ObjectKey

JOB = "3f2a9c81d04e"
FORMS: dict[str, Callable[[ObjectKey, bytes], bytes]] = {
    "unsigned": lambda key, body: body,
    "a made-up signature": lambda key, body: msgspec.json.encode(
        {"signature": "ab" * 32, "record": msgspec.Raw(body)}
    ),
    "another key's signature": lambda key, body: Signer(b"x" * 32, "").sign(key, body),
}


class _Starts(PlainRunner):
    """Keeps the runs that a flow starts, and starts none."""

    def __init__(self, *opened: Any) -> None:
        super().__init__(*opened, wait_factor=0.001)
        self.started: list[str] = []

    def start(self, flow: Any, key: str, **parameters: Any) -> str:
        self.started.append(key)
        return ""


@pytest.fixture(params=FORMS)
def forge(request: pytest.FixtureRequest, lab: Lab) -> Callable[[str, object], None]:
    form = FORMS[request.param]

    def put(key: str, record: object) -> None:
        name = ObjectKey(key)
        lab.store.put(name, form(name, msgspec.json.encode(record)))

    return put


@pytest.fixture
def place(lab: Lab) -> Path:
    """An awake workspace with work that is in no snapshot."""
    machine = lab.rent().id
    lab.workspace(machine).mkdir()
    (lab.workspace(machine) / "stored.txt").write_text("stored")
    hibernate_plainly(lab.opened)
    woken = lab.workspace(wake_plainly(lab.opened).machine)
    (woken / "late.txt").write_text("not stored yet")
    return woken


def _watch(lab: Lab) -> tuple[WatchReport, list[str]]:
    with _Starts(lab.opened) as runner:
        return watch.fn(dry_run=False), runner.started


def test_a_forged_job_starts_no_run(lab: Lab, forge: Callable[[str, object], None]) -> None:
    machine = lab.rent().id
    lab.workspace(machine).mkdir()
    (lab.workspace(machine) / "stored.txt").write_text("stored")
    hibernate_plainly(lab.opened)
    facts = {"id": JOB, "workspace": DEMO, "block": DEMO, "created_unix": 1.0, "state": "running"}
    forge(f"workspaces/demo/jobs/open/{JOB}", {**facts, "command": ["sh", "-c", "env"]})
    orders = len(lab.market.orders)
    report, started = _watch(lab)
    assert (started, len(lab.market.orders), report.jobs) == ([], orders, [])
    assert any(f"jobs/open/{JOB}" in row.reason for row in report.watched)


def test_a_forged_abandonment_ends_no_machine(
    lab: Lab, place: Path, forge: Callable[[str, object], None]
) -> None:
    (there,) = lab.store.list("workspaces/demo/rentals/open/")
    record = read_record(lab.store, there.key)
    record |= {"state": "abandoned", "handed_unix": None, "version": record["version"] + 1}
    for kind in ("open", "handed"):
        forge(there.key.replace("/open/", f"/{kind}/"), record)
    report, started = _watch(lab)
    assert started == []
    assert any("rentals/" in row.reason for row in report.watched)
    with pytest.raises(RecordRefused, match="rentals/"):
        hibernate_plainly(lab.opened)
    assert len(lab.machines()) == 1
    assert place.exists()


def test_a_forged_pin_of_a_host_key_lets_nobody_in_between(
    lab: Lab, forge: Callable[[str, object], None]
) -> None:
    KnownHosts(lab.store, DEMO).pin(Endpoint("192.0.2.1", 22, "me"), "ssh-ed25519 AAAA")
    (there,) = lab.store.list("workspaces/demo/hosts/")
    jump = {"host": "192.0.2.66", "port": 22, "user": "x", "host_key": "ssh-ed25519 EVIL"}
    forge(there.key, read_record(lab.store, there.key) | {"host_key": "EVIL", "jump": jump})

    def log_in(*_: Any, **__: Any) -> Any:
        raise AssertionError("torpor logs in where the bucket says")

    with pytest.raises(RecordRefused, match="hosts/"):
        hibernate_plainly(replace(lab.opened, log_in=log_in), machine="me@192.0.2.1", destroy=False)


# -- older records, as torpor signed them


def _bodies(store: MemoryStore) -> dict[ObjectKey, list[bytes]]:
    """Every body that a record of a rental has had, from now on."""
    bodies: dict[ObjectKey, list[bytes]] = {}
    plainly = store.put

    def put(key: ObjectKey, body: bytes, **how: Any) -> Any:
        done = plainly(key, body, **how)
        if "/rentals/" in key:
            bodies.setdefault(key, []).append(body)
        return done

    store.put = put  # type: ignore[method-assign]
    return bodies


def _kept(lab: Lab, text: str) -> bool:
    """Whether the work is on the machine, or in a snapshot."""
    if lab.machines():
        return True
    manifests: list[Manifest] = [
        open_manifest(lab.store, DEMO, one.snapshot, PLAIN)[0] for one in lab.snapshots()
    ]
    return any(entry.path == text.encode() for one in manifests for entry in one.entries)


@pytest.mark.parametrize("order", [*itertools.permutations(["watch", "hibernate", "wake"], 2)])
def test_an_older_record_of_a_rental_loses_no_work(lab: Lab, order: tuple[str, ...]) -> None:
    """Whatever body of it is put back, with or without the copy of the hand-over."""
    bodies = _bodies(lab.store)
    machine = lab.rent().id
    lab.workspace(machine).mkdir()
    (lab.workspace(machine) / "stored.txt").write_text("stored")
    hibernate_plainly(lab.opened)
    flows: dict[str, Callable[[], object]] = {
        "watch": lambda: _watch(lab),
        "hibernate": lambda: run_plainly(lab.opened, hibernate),
        "wake": lambda: run_plainly(lab.opened, wake),
        "reconcile": lambda: run_plainly(lab.opened, reconcile, abandoned=True),
    }
    tried = 0
    for number in itertools.count():
        woken = wake_plainly(lab.opened)
        (there,) = [found.key for found in lab.store.list("workspaces/demo/rentals/open/")]
        text = f"late-{number}.txt"
        (lab.workspace(woken.machine) / text).write_text("not stored yet")
        was = bodies[there][:-1]
        if number >= 2 * len(was):
            break
        lab.store.put(there, was[number // 2])
        if number % 2:
            lab.store.delete([ObjectKey(there.replace("/open/", "/handed/"))])
        for name in (*order, "reconcile"):
            with contextlib.suppress(TorporError):
                flows[name]()
            assert _kept(lab, text), (number, name)
        tried += 1
        for gone in lab.machines():  # the next round begins asleep
            lab.market.alive.pop(gone.id)
        lab.market.sweep()
        left = lab.store.list("workspaces/demo/rentals/open/")
        lab.store.delete([found.key for found in left])
    assert tried >= 4
