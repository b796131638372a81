"""The rules, checked from outside: each method returns what is violated, in words."""

from __future__ import annotations

import secrets
import shutil
import time
from pathlib import Path
from typing import Final

from tests.fixtures.engine import Engine
from tests.fixtures.mapper import stored
from tests.fixtures.trees import Tree, differences, facts
from tests.fixtures.waiting import PATIENCE_S
from tests.fixtures.world import World
from torpor.control.processes import all_processes
from torpor.control.providers.local.folder import MARK
from torpor.shared.errors import TorporError
from torpor.shared.values import Machine, SnapshotId

MAPPED: Final = "mapped.bin"
"""The file of the workspace that a program writes through a mapping. Snapshots of a machine that is
kept may hold any of its states, so it is judged by itself."""


class Judge:
    """Remembers what the workspace was, and judges what became of it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.states: list[Tree] = []
        self.last_store: int | None = None
        """What a program stored last through a mapping of MAPPED, before it was killed."""
        self._checked: dict[SnapshotId, Tree] = {}
        self._stores: dict[SnapshotId, int] = {}

    def see(self, machine: Machine) -> None:
        """The workspace as it is now is a state that may be found in a snapshot."""
        self.states.append(_tree(self._world.workspace(machine.id)))

    def snapshots(self, *, again: bool = False) -> list[str]:
        """Every listed snapshot restores to one of the states; ``again``: also those that did."""
        found = []
        for snapshot in [listed.snapshot for listed in self._world.snapshots()]:
            if snapshot in self._checked and not again:
                continue
            try:
                restored = self._restored(snapshot)
            except (TorporError, AssertionError) as error:
                found.append(
                    f"snapshot {snapshot} is listed and does not restore: "
                    f"{type(error).__name__}: {error}"
                )
                continue
            self._checked[snapshot] = restored
            if restored not in self.states:
                found.append(
                    f"snapshot {snapshot} is no state that the workspace had; from the last: "
                    f"{differences(self.states[-1], restored)}"
                )
        return found

    def destruction(self, before: Machine, allowed: bool) -> list[str]:
        """The machine is there with its workspace as it was, or the newest snapshot is that."""
        truth = self.states[-1]
        live = self._world.provider.find(before.id)
        if isinstance(live, Machine) and live.state != "stopping":
            here = _tree(self._world.workspace(before.id))
            wrong = differences(truth, here) + self._lost(self._world.workspace(before.id))
            return [f"hibernate changed the workspace: {wrong}"] if wrong else []
        if not allowed:
            return [f"machine {before.id} was destroyed by a hibernate that was to keep it"]
        return self.asleep(truth)

    def asleep(self, truth: Tree) -> list[str]:
        """The newest snapshot is the workspace."""
        listed = self._world.snapshots()
        if not listed:
            return ["the machine is gone and there is no snapshot"]
        kept = self._checked.get(listed[0].snapshot)
        wrong = differences(truth, kept or {})
        store = self._stores.get(listed[0].snapshot, 0)
        if self.last_store is not None and store != self.last_store:
            wrong.append(f"of a program's stores, {store} is there and not {self.last_store}")
        return [f"the machine is gone and the newest snapshot differs: {wrong}"] if wrong else []

    def awake(self) -> list[str]:
        """Exactly one machine, handed over, with the workspace on it."""
        machines = self._world.machines()
        if [m.state for m in machines] != ["running"]:
            return [f"after a wake there are {[(m.id, m.state) for m in machines]}"]
        woken = self._world.workspace(machines[0].id)
        wrong = differences(self.states[-1], _tree(woken)) + self._lost(woken)
        return [f"the woken workspace differs: {wrong}"] if wrong else []

    def leaks(self) -> list[str]:
        """No process and no unfinished rental of a machine that is not listed."""
        found = self._world.leaks()
        end = time.monotonic() + PATIENCE_S
        while strays := self._strays():
            if time.monotonic() > end:
                found.append(f"processes {strays} of machines that are gone")
                break
            time.sleep(0.1)
        return found

    def _lost(self, workspace: Path) -> list[str]:
        store = stored(workspace / MAPPED)
        if self.last_store in (None, store):
            return []
        return [f"of a program's stores, {store} is there and not {self.last_store}"]

    def _strays(self) -> list[int]:
        own = {f"{MARK}={machine.id}".encode() for machine in self._world.machines()}
        home = f"HOME={self._world.access.machines}".encode()
        return [
            process.pid
            for process, words in all_processes().items()
            if any(word.startswith(home) for word in words)
            and {word for word in words if word.startswith(f"{MARK}=".encode())} - own
        ]

    def _restored(self, snapshot: SnapshotId) -> Tree:
        scratch = self._world.folder / f"judge-{secrets.token_hex(4)}"
        key = self._world.access.store_key
        engine = Engine(
            self._world.direct, scratch / "home", None if key is None else bytes.fromhex(key)
        )
        try:
            engine.restore(snapshot, [scratch / "workspace"], full=False)
            self._stores[snapshot] = stored(scratch / "workspace" / MAPPED)
            return _tree(scratch / "workspace")
        finally:
            engine.runs.close()
            shutil.rmtree(scratch)


def _tree(workspace: Path) -> Tree:
    """The workspace, without the file that is judged by itself."""
    return {path: fact for path, fact in facts(workspace).items() if path != MAPPED.encode()}
