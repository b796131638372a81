"""How fast one agent can feed a line: a snapshot into a store that throws the packs away.

    python -m benchmarks.feed [--gib 2] [--rounds 3] [--keep NAME]

The store's process reads the packs in the kernel, without a copy, and answers with the MD5 that the
agent sent, so that the agent's own limits are left. Each round has other bytes: BF16 weights, which
compress, and random ones, which do not. The share of the time for which a thread holds Python's
lock (GIL) is sampled by py-spy. Prints JSON; --keep keeps it under benchmarks/results.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.kept import summed_up, write_result
from benchmarks.machine import BenchMachine
from torpor.control.measure.host import host_facts
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.s3 import S3Store
from torpor.machine.agent.content import weights
from torpor.shared.values import GIB, MIB, Grant, ObjectKey

_BLOCK: Final = 32 * MIB
_READ: Final = 4 * MIB
_SAMPLES_S: Final = 100
_BURST_S: Final = 0.02  # what a line may catch up on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torpor-feed-", dir=options.folder) as scratch:
        kinds = measure(Path(scratch), options.gib, options.rounds)
    result = {"benchmark": "feed", "host": host_facts(), "gib": options.gib, **kinds}
    print(json.dumps(result, indent=1))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def measure(folder: Path, gib: float, rounds: int) -> dict[str, Any]:
    """By kind of bytes: the rate at which files are read and packs are sent, the agent's CPU and
    memory, and the share of time with the GIL held."""
    found: dict[str, list[dict[str, float]]] = {"weights": [], "random": []}
    keys = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
    with (
        thrown_away() as url,
        EmbeddedStore.start(folder / "store", *keys, "torpor") as store,
    ):
        for number in range(rounds):
            for kind, runs in found.items():
                with BenchMachine(folder / f"{kind}{number}", store) as machine:
                    runs.append(_feed(machine, Discarding(machine.store, url), kind, gib, number))
    return {
        kind: {name: summed_up([run[name] for run in runs]) for name in runs[0]}
        for kind, runs in found.items()
    }


@dataclass(frozen=True)
class Discarding:
    """A store whose grants for packs lead elsewhere."""

    store: S3Store
    url: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def grant(self, verb: str, key: ObjectKey, **more: Any) -> Grant:
        grant = self.store.grant(verb, key, **more)
        return msgspec.structs.replace(grant, url=self.url) if "/packs/" in key else grant


def _feed(
    machine: BenchMachine, store: Discarding, kind: str, gib: float, number: int
) -> dict[str, float]:
    machine.workspace.mkdir()
    dice = random.Random(number)
    with (machine.workspace / "file").open("wb") as file:
        for _ in range(int(gib * GIB) // _BLOCK):
            file.write(weights(_BLOCK // 2, dice) if kind == "weights" else dice.randbytes(_BLOCK))
    size = (machine.workspace / "file").stat().st_size
    with _held(machine) as held:
        cost, stored_bytes = machine.feed(store)
    (machine.workspace / "file").unlink()
    return {
        "read_gb_s": size / 1e9 / cost.wall_s,
        "sent_gbit_s": 8 * stored_bytes / 1e9 / cost.wall_s,
        "agent_cpu_s_gib": cost.agent_cpu_s / (size / GIB),
        "agent_peak_mib": machine.peak_bytes() / MIB,
        "gil_share": held[0] / _SAMPLES_S / cost.wall_s,
    }


@contextmanager
def _held(machine: BenchMachine) -> Iterator[list[int]]:
    """How often a thread of the agent held the GIL, of _SAMPLES_S looks a second."""
    machine.attach()
    (agent,) = (pid for pid in machine.agent_pids() if " daemon " in _words(pid))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "samples"
        options = ["--gil", "--nonblocking", "--rate", str(_SAMPLES_S), "--format", "raw"]
        options += ["--duration", "unlimited"]
        spy_at = str(Path(sys.executable).with_name("py-spy"))
        spy = subprocess.Popen(
            [spy_at, "record", *options, "--pid", str(agent), "--output", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(1.0)
        held: list[int] = []
        yield held
        spy.send_signal(2)
        spy.wait()
        lines = out.read_text().splitlines() if out.exists() else []
        held.append(sum(int(line.rpartition(" ")[2]) for line in lines))


def _words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@contextmanager
def thrown_away(bytes_s: float = 0.0) -> Iterator[str]:
    """The URL of a process that reads what is sent there, at that rate in all; 0: at any rate."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    process = multiprocessing.get_context("fork").Process(target=_listen, args=(listener, bytes_s))
    process.start()
    port = listener.getsockname()[1]
    listener.close()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.join()


def _listen(listener: socket.socket, bytes_s: float) -> None:
    line = Line(bytes_s)
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=_read, args=(peer, line), daemon=True).start()


class Line:
    """So many bytes a second for all that share it; 0: at once. Thread-safe."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, count: int) -> None:
        if not self._bytes_s:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_S) + count / self._bytes_s
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)


def _read(peer: socket.socket, line: Line) -> None:
    """Requests of one connection. MSG_TRUNC drops bytes of TCP in the kernel, by tcp(7)."""
    buffer, waiting = bytearray(_READ), b""
    with peer, suppress(ConnectionError):
        while data := peer.recv(1 << 16):
            waiting += data
            if b"\r\n\r\n" not in waiting:
                continue
            head, _, body = waiting.partition(b"\r\n\r\n")
            named = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
            named = {name.lower(): value for name, value in named.items()}
            left = int(named["content-length"]) - len(body)
            while left > 0:
                got = peer.recv_into(buffer, min(left, _READ), socket.MSG_TRUNC)
                line.take(got)
                left -= got
            md5 = base64.b64decode(named.get("content-md5", "")).hex()
            answer = f'HTTP/1.1 200 OK\r\nETag: "{md5}"\r\nContent-Length: 0\r\n\r\n'
            peer.sendall(answer.encode())
            waiting = b""


if __name__ == "__main__":
    main()
