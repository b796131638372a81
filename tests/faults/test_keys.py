"""Storage keys stay on the control side: nothing on the machine holds them, at any time."""

from __future__ import annotations

import base64
import os
import random
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tasks.phases import phases_told_to
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.trees import fill
from tests.fixtures.world import World
from torpor.shared.values import MachineId

BLOCK = 1 << 20


def test_no_key_is_on_the_machine_during_or_after_a_run(
    sealed_world: World, short_agent: None
) -> None:
    world = sealed_world
    machine = world.rent()
    fill(world.workspace(machine.id), random.Random(6), big=2)
    looked: list[str] = []

    def look(phase: str) -> None:
        for live in world.machines():
            found = list(_holders(world, live.id, _secrets(world)))
            assert found == [], f"in {phase}: {found}"
            looked.append(f"{phase} {len(world.agents(live.id))}")

    with phases_told_to(look):
        hibernate_plainly(world.opened, destroy=False)
        look("after a hibernate")
        hibernate_plainly(world.opened)
        wake_plainly(world.opened)
    look("after a wake")
    # The agent was there to be looked at while it stored, and while it restored.
    assert {"commit 1", "confirm 1", "after a hibernate 1", "restore 1", "after a wake 1"} <= {
        *looked
    }


def test_the_search_finds_what_a_machine_does_hold(world: World, short_agent: None) -> None:
    """Else the test above would prove nothing."""
    machine = world.rent()
    fill(world.workspace(machine.id), random.Random(7), big=1, big_bytes=1_500_000)
    (world.workspace(machine.id) / "note").write_bytes(b"planted in a file")
    hibernate_plainly(world.opened, destroy=False)
    needles = {"planted": b"planted in a file", "machine": machine.id.encode()}
    found = {*_holders(world, machine.id, needles)}
    (agent,) = world.agents(machine.id)
    assert {f"machine in /proc/{agent}/environ", f"machine in /proc/{agent}/mem"} <= found
    assert any(line.startswith("planted") and line.endswith("/note") for line in found)


def _secrets(world: World) -> dict[str, bytes]:
    access = world.access
    assert access.store_key is not None
    raw = bytes.fromhex(access.store_key)
    private = access.private_key.split("-----")[2].split()
    return {
        "secret key": access.secret_key.encode(),
        "secret key, quoted": urllib.parse.quote(access.secret_key).encode(),
        "encryption key": raw,
        "encryption key, hex": access.store_key.encode(),
        "encryption key, base64": base64.b64encode(raw)[:40],
        "private key": private[len(private) // 2].encode(),
        # Part of every grant, so in the memory of who holds one; it must not be written down.
        "access key": access.access_key.encode(),
    }


def _holders(world: World, machine: MachineId, needles: dict[str, bytes]) -> Iterator[str]:
    """Which of ``needles`` is in which file, environment, argument, mapped file or memory."""
    mapped: set[str] = set()
    for folder, _, names in os.walk(world.machine_folder(machine).root):
        mapped.update(os.path.join(folder, name) for name in names)
    for process in world.processes(machine):
        proc = f"/proc/{process.pid}"
        for name in ("environ", "cmdline"):
            yield from _found(f"{proc}/{name}", needles)
        in_memory = {name: key for name, key in needles.items() if name != "access key"}
        with suppress(OSError):
            maps = Path(proc, "maps").read_text(errors="replace").splitlines()
            mapped.update(words[5] for words in map(str.split, maps) if len(words) == 6)
            yield from _in_memory(proc, maps, in_memory)
    for path in sorted(mapped):
        if os.path.isfile(path) and not os.path.islink(path):
            yield from _found(path, needles)


def _found(path: str, needles: dict[str, bytes]) -> Iterator[str]:
    with suppress(OSError), open(path, "rb") as file:
        body = file.read()
        yield from (f"{name} in {path}" for name, needle in needles.items() if needle in body)


def _in_memory(proc: str, maps: list[str], needles: dict[str, bytes]) -> Iterator[str]:
    longest = max(map(len, needles.values()))
    with open(f"{proc}/mem", "rb", buffering=0) as memory:
        for line in maps:
            area, rights = line.split()[:2]
            first, last = (int(end, 16) for end in area.split("-"))
            if not rights.startswith("rw"):
                continue
            tail = b""
            for at in range(first, last, BLOCK):
                try:
                    memory.seek(at)
                    block = tail + memory.read(min(BLOCK, last - at))
                except (OSError, ValueError, OverflowError):  # gone, or no memory behind it
                    break
                for name, needle in needles.items():
                    if needle in block:
                        yield f"{name} in {proc}/mem"
                tail = block[-longest:]
