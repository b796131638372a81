"""The canary: a small process tree of our own, dumped and restored on this machine.

Only that is a proof that checkpoints work here: capabilities, the container's filter, the kernel
and CRIU each have a say, and none of them tells all of it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from torpor.machine.checkpoint.criu import CheckpointFailed, Criu
from torpor.machine.checkpoint.namespace import Namespace, begin

DUMP_S: Final = 10.0
RESTORE_S: Final = 10.0
_ANSWER_S: Final = 5.0

# A token is in its memory alone, and its child, which it asks for it, reverses it. It listens as
# servers do: CRIU before 4.2 dumps no socket of the network on kernels from 6.16 on.
_TREE: Final = """
import os, socket, sys, time
token = sys.stdin.readline().strip().encode()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
server = socket.create_server(("127.0.0.1", 0))
mine, its = socket.socketpair()
if os.fork() == 0:
    mine.close()
    while data := its.recv(64):
        its.send(data[::-1])
    os._exit(0)
its.close()
open("began", "x").close()
for _ in range(3000):  # a minute, also where whoever started it is killed
    if os.path.exists("go"):
        break
    time.sleep(0.02)
mine.send(token)
with open("said.new", "wb") as file:
    file.write(mine.recv(64))
os.rename("said.new", "said")
"""


class CanaryResult(NamedTuple):
    """How long the canary took, in seconds."""

    dump_s: float
    restore_s: float


def run_canary(criu: Criu, folder: Path) -> CanaryResult:
    """Dump and restore the tree, with all its files below ``folder``. CheckpointFailed says which
    step failed, and why. Only for a process without threads. Nothing of it is left."""
    place = Path(tempfile.mkdtemp(prefix="canary-", dir=folder))
    tree: subprocess.Popen[bytes] | None = None
    namespace: Namespace | None = None
    try:
        token = secrets.token_hex(16)
        tree = subprocess.Popen(
            [sys.executable, "-I", "-c", _TREE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=place,
            start_new_session=True,
        )
        if tree.stdin is not None:
            tree.stdin.write(f"{token}\n".encode())
            tree.stdin.close()
        _await(place / "began", "the canary did not begin")
        images = place / "images"
        images.mkdir(mode=0o700)
        dump_s = _timed("the canary's dump failed", lambda: criu.dump(tree.pid, images, DUMP_S))
        os.killpg(tree.pid, signal.SIGKILL)
        tree.wait()
        began_s = time.monotonic()
        try:
            namespace = begin(lambda: criu.restore(images, RESTORE_S), tree.pid)
        except CheckpointFailed as error:
            raise CheckpointFailed(f"the canary's restore failed: {error}") from None
        restore_s = time.monotonic() - began_s
        (place / "go").touch()
        _await(place / "said", "the restored canary did not answer")
        if (place / "said").read_text() != token[::-1]:
            raise CheckpointFailed("the restored canary has another memory than before")
        return CanaryResult(dump_s, restore_s)
    finally:
        first = namespace.first if namespace else 0
        for end, pid in ((os.killpg, tree.pid if tree else 0), (os.kill, first)):
            if pid:
                with suppress(ProcessLookupError):
                    end(pid, signal.SIGKILL)
        if namespace is not None:
            os.close(namespace.hold)
        if tree is not None:
            tree.wait()
        shutil.rmtree(place, ignore_errors=True)


def _timed(what: str, step: Callable[[], None]) -> float:
    began_s = time.monotonic()
    try:
        step()
    except CheckpointFailed as error:
        raise CheckpointFailed(f"{what}: {error}") from None
    return time.monotonic() - began_s


def _await(file: Path, otherwise: str) -> None:
    until = time.monotonic() + _ANSWER_S
    while not file.exists():
        if time.monotonic() >= until:
            raise CheckpointFailed(otherwise)
        time.sleep(0.02)
