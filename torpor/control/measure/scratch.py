"""A benchmark's scratch name in a store, held by one run at a time and cleared by the next.

Everything that a benchmark stores and pins is under a reserved name, so deleting it loses
no work. Machines have rentals under a second name: a flow that runs under the first name would take
them for an earlier run's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from torpor.control.processes import ProcessRecord, boot_id, identify, is_alive
from torpor.control.store.object_store import ObjectStore
from torpor.control.store.records import Records
from torpor.shared.errors import ObjectChanged, ObjectExists, StoreError, WorkspaceBusy
from torpor.shared.values import (
    BENCHMARK,
    BENCHMARK_MACHINES,
    ObjectKey,
    WorkspaceName,
    reserved_name,
)

STALE_S: Final = 600.0
"""Seconds after which a claim of another host that was not renewed belongs to a dead run."""
BEAT_S: Final = 60.0
_CLAIM_MAX_BYTES: Final = 4096


class Claim(msgspec.Struct, frozen=True):
    """The run that holds the name, its process, and its last heartbeat. ``boot`` identifies the
    process's host: a boot, and a PID namespace on it."""

    run: str
    boot: str
    process: ProcessRecord
    beat_unix: float

    def alive(self) -> bool:
        """Whether the run may still be at work. Certain for a process of this host; judged by the
        claim's age for another host or container, whose processes cannot be seen from here."""
        if self.boot == this_host():
            return is_alive(self.process)
        return time.time() - self.beat_unix < STALE_S


def scratch_name(workspace: WorkspaceName) -> WorkspaceName:
    """The name that a benchmark of ``workspace`` works under."""
    return reserved_name(BENCHMARK, workspace)


def machines_name(workspace: WorkspaceName) -> WorkspaceName:
    """The name that the machines of a benchmark of ``workspace`` are rented under."""
    return reserved_name(BENCHMARK_MACHINES, workspace)


@contextmanager
def held(store: ObjectStore, name: WorkspaceName, run: str) -> Iterator[Callable[[], bool]]:
    """Hold ``name`` in ``store`` while a benchmark works there; WorkspaceBusy while another does.

    A claim that a killed run left is taken over. The caller clears what that run left. Yields a
    function that says whether ``name`` is still held: after a sleep of the host, another run may
    hold it.
    """
    _take(store, name, run)

    def ours() -> bool:
        found = _read(store, name)
        return found is not None and found[0].run == run

    ended = threading.Event()
    beats = threading.Thread(target=keep, args=(store, name, run, ended), daemon=True)
    beats.start()
    try:
        yield ours
    finally:
        ended.set()
        beats.join()
        if ours():
            store.delete([_key(name)])


def clear(store: ObjectStore, name: WorkspaceName, *, below: str = "") -> int:
    """Delete every object of the scratch workspace but the claim; returns how many there were.

    Never rentals: only its rental knows a machine at another provider.
    """
    if not name.startswith(BENCHMARK):
        raise AssertionError(f"{name} is not the name of a benchmark's scratch workspace")
    keys = [found.key for found in store.list(f"workspaces/{name}/{below}")]
    keys = [key for key in keys if key != _key(name)]
    store.delete(keys)
    return len(keys)


def storage_prefix(name: WorkspaceName) -> str:
    """Where raw objects are written while a store is measured."""
    return f"workspaces/{name}/storage"


def _take(store: ObjectStore, name: WorkspaceName, run: str) -> None:
    claims, key = _claims(store), _key(name)
    found = _read(store, name)
    try:
        if found is None:
            claims.create(key, _claim(run))
        else:
            other, version = found
            if other.run != run and other.alive():
                raise WorkspaceBusy(
                    f"another benchmark (run {other.run}) uses {name} in {store.address}: wait "
                    "until it has ended, or cancel it"
                )
            claims.replace(key, _claim(run), version)
        mine = _read(store, name)  # where the store cannot refuse, the last writer has the claim
    except (ObjectExists, ObjectChanged):
        mine = None
    if mine is None or mine[0].run != run:
        raise WorkspaceBusy(
            f"another benchmark began at the same time under {name} in {store.address}: run it "
            "again once that one has ended"
        )


def keep(store: ObjectStore, name: WorkspaceName, run: str, ended: threading.Event) -> None:
    """Renew the run's claim on ``name`` until ``ended``, or until the name is no longer its."""
    while not ended.wait(BEAT_S):
        try:
            found = _read(store, name)
            if found is None or found[0].run != run:
                return
            _claims(store).replace(_key(name), _claim(run), found[1])
        # the next beat tries again; the claim counts as dead after ten missed beats
        except StoreError:
            continue


def _claim(run: str) -> Claim:
    process = identify(os.getpid())
    if process is None:
        raise AssertionError("this very process is not there")
    return Claim(run, this_host(), process, time.time())


def this_host() -> str:
    """The boot of this host and its PID namespace: containers of one host share the boot, and each
    has its own processes."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


def _claims(store: ObjectStore) -> Records[Claim]:
    return Records(store, Claim, _CLAIM_MAX_BYTES, "check that no benchmark runs there")


def _read(store: ObjectStore, name: WorkspaceName) -> tuple[Claim, str] | None:
    return _claims(store).read(_key(name))


def _key(name: WorkspaceName) -> ObjectKey:
    return ObjectKey(f"workspaces/{name}/claim")
