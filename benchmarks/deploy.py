"""Deploys of a real llama.cpp server with a model of random weights, over limited lines.

    python -m benchmarks.deploy [--gib 4] [--rest 0] [--lines 1000 200] [--rounds 10] [--keep NAME]

Each round deploys cold (no environment in the store: the setup command installs the server, and the
environment is stored) and warm (the environment is restored). Both restore the workspace, which
holds the model. With --rest GIB of other data beside the model, each round deploys warm: without an
order, with the model first as a list says, and as was learned. Only the line
between the machine and the store is limited. The wheel comes from this host's disk. The flow runs
without Prefect, on local machines; the S3 server (SeaweedFS) shares the host. Prints a table and
JSON; --keep keeps the JSON under benchmarks/results.

``--prepare`` only installs the server and what makes the model, into .venv/llama.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import asyncssh
import msgspec

from benchmarks.content import make_below
from benchmarks.kept import summed_up, write_result
from benchmarks.shaping import Shaper
from blocks import Stack
from deployments.stacks import ready_made
from flows import create, deploy, hibernate
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from torpor.control.deploy.report import DeployReport
from torpor.control.measure.host import host_facts
from torpor.control.ports import free_ports
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.remote.ssh import Identity
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.manifests import find_snapshot, read_manifest
from torpor.control.store.s3 import S3Store
from torpor.shared.format.file_use import BEFORE_READY, LATER, NEVER, recorded_use
from torpor.shared.values import BASE, GIB, WorkspaceName, WorkspaceSpec

NAME: Final = WorkspaceName("served")
ROOT: Final = Path(__file__).resolve().parents[1]
TOOLS: Final = ROOT / ".venv" / "llama"
GGUF: Final = "gguf==0.19.0"
"""MIT. Writes the model; in a place of its own, because nothing else needs it."""
_BUCKET: Final = "torpor"
_RATIOS: Final = ("ratio", "learned ratio")
"""Names of the ratios of the other kinds to the first, in the JSON."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="of the model")
    parser.add_argument("--weights", choices=["BF16", "F16"], default="BF16")
    parser.add_argument("--rest", type=float, default=0.0, help="GiB of other data")
    parser.add_argument("--lines", type=float, nargs="+", default=[1000.0, 200.0], help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", default="", help="name of the JSON under results/")
    parser.add_argument("--prepare", action="store_true")
    options = parser.parse_args()
    prepare()
    if options.prepare:
        return
    result = measure(
        options.folder, options.gib, options.lines, options.rounds, options.weights, options.rest
    )
    _print(result)
    print(json.dumps(result, indent=1, sort_keys=True))
    if options.keep:
        print(f"kept as {write_result(options.keep, result)}")


def prepare() -> None:
    """Install what makes the model, and fetch the server's wheel, unless they are there."""
    ready = TOOLS / "ready"
    wanted = f"{GGUF} {_wheel()}"
    if ready.exists() and ready.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", str(TOOLS)], check=True)
    pip = [str(TOOLS / "bin" / "pip"), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--only-binary", ":all:", GGUF], check=True)
    fetch = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(TOOLS / "wheels")]
    subprocess.run([*pip, *fetch, _wheel()], check=True)
    ready.write_text(wanted)


def measure(
    folder: Path,
    gib: float,
    lines: list[float],
    rounds: int,
    weights: str = "BF16",
    rest_gib: float = 0.0,
) -> dict[str, Any]:
    """Deploys of each kind, ``rounds`` of each in turn, over each line."""
    host = host_facts()  # the code is read now, whatever is committed meanwhile
    kinds: dict[str, list[str]] = {"cold": [], "warm": []}
    if rest_gib:  # without a list, the order is learned
        kinds = {"usual": ["*"], "first": ["models/*"], "learned": []}
    with opened_here(folder) as (opened, store, place):
        model_bytes, whole_bytes = _sleep_with_model(opened, place, gib, weights, rest_gib)
        if rest_gib:
            with PlainRunner(opened):  # stores the environment, and learns the order
                deploy.fn(NAME, stack())
            with PlainRunner(opened):
                hibernate.fn(NAME)
        used = used_bytes(opened) if rest_gib else {}
        measured = [
            _over_line(opened, store, line, rounds, kinds)
            | {"bound_s": model_bytes / (line * 1e6 / 8)}
            for line in lines
        ]
    return {
        "benchmark": "deploy",
        "host": host,
        "weights": weights,
        "model_bytes": model_bytes,
        "workspace_bytes": whole_bytes,
        "used_bytes": used,
        "rounds": rounds,
        "server": _wheel(),
        "lines": measured,
    }


def used_bytes(opened: OpenWorkspace) -> dict[str, int]:
    """The plain bytes of the newest snapshot by whether they were used on its machine."""
    newest = find_snapshot(opened.store, NAME, None)
    manifest = read_manifest(opened.store, newest, opened.seal)
    use = recorded_use(manifest)
    if not use:
        raise SystemExit(f"snapshot {newest.snapshot} does not say what was used")
    names = {NEVER: "never", BEFORE_READY: "before ready", LATER: "later"}
    sums = dict.fromkeys(names.values(), 0)
    for entry, when in zip(manifest.entries, use, strict=True):
        sums[names[when]] += entry.size
    return sums


@contextmanager
def opened_here(folder: Path) -> Iterator[tuple[OpenWorkspace, EmbeddedStore, Path]]:
    """A workspace with a store and a provider of its own; machines are in the folder ``m`` of the
    place."""
    with tempfile.TemporaryDirectory(prefix="torpor-deploy-", dir=folder) as scratch:
        place = Path(scratch)
        keys = ("ak" + secrets.token_hex(8), secrets.token_hex(20))
        identity = asyncssh.generate_private_key("ssh-ed25519")
        with EmbeddedStore.start(place / "store", *keys, _BUCKET) as store:
            opened = OpenWorkspace(
                spec=WorkspaceSpec(NAME, ["~/workspace"]),
                store=S3Store.connect(store.settings(_BUCKET, root=bytes(32))),
                sealing=None,
                providers=(LocalProvider(place / "m"),),
                identity=Identity(identity.export_private_key().decode()),
                owner="benchmark",
            )
            yield opened, store, place


def _wheel() -> str:
    return ready_made()["llama-cpp"].setup[-1]


def stack() -> Stack:
    """The ready-made one, with a free port and the wheel from this host's disk."""
    made = ready_made()["llama-cpp"]
    (made.port,) = free_ports(1)
    made.setup = [*made.setup[:-1], "--no-index", "--find-links", str(TOOLS / "wheels"), _wheel()]
    made.server = [*made.server[:-1], "256"]  # tokens of context, which the model has
    return made


def _sleep_with_model(
    opened: OpenWorkspace, place: Path, gib: float, weights: str, rest_gib: float
) -> tuple[int, int]:
    """Hibernate a workspace that holds the model; returns the sizes of the model and of all."""
    with PlainRunner(opened):
        create.fn(NAME)
        (home,) = (place / "m").glob("m-*/home")
        model = home / "workspace" / "models" / "model.gguf"
        model.parent.mkdir(parents=True)
        maker = [str(TOOLS / "bin" / "python"), str(ROOT / "benchmarks" / "random_gguf.py")]
        subprocess.run([*maker, str(model), str(round(gib * 1024)), weights], check=True)
        sizes = model_bytes = model.stat().st_size
        if rest_gib:
            made = make_below(home / "workspace" / "rest", int(rest_gib * GIB), seed=1)
            sizes += made.bytes
        hibernate.fn(NAME)
    return model_bytes, sizes


def _over_line(
    opened: OpenWorkspace,
    store: EmbeddedStore,
    mbit_s: float,
    rounds: int,
    kinds: dict[str, list[str]],
) -> dict[str, Any]:
    """``kinds``: what the workspace wants first, for each kind of deploy."""
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    bytes_s = mbit_s * 1e6 / 8
    with _behind(opened, store, bytes_s) as (behind, shaper):
        for _ in range(rounds):
            for kind, found in runs.items():
                if kind == "cold":
                    bases = [stored.key for stored in opened.store.list(f"workspaces/{BASE}")]
                    opened.store.delete(bases)
                carried = shaper.carried.total()
                spec = msgspec.structs.replace(behind.spec, first=kinds[kind])
                with PlainRunner(replace(behind, spec=spec)):
                    report = deploy.fn(NAME, stack())
                _see(report, kind)
                found.append(_figures(report, shaper.carried.total() - carried, bytes_s))
                with PlainRunner(opened):
                    hibernate.fn(NAME)
    line: dict[str, Any] = {"mbit_s": mbit_s} | {
        kind: {name: summed_up([figures[name] for figures in found]) for name in found[0]}
        for kind, found in runs.items()
    }
    usual, *others = (line[kind]["from rental"]["median"] for kind in kinds)
    return line | {name: median / usual for name, median in zip(_RATIOS, others, strict=False)}


@contextmanager
def _behind(
    opened: OpenWorkspace, store: EmbeddedStore, bytes_s: float
) -> Iterator[tuple[OpenWorkspace, Shaper]]:
    """The workspace, where each machine's line to the store carries that many bytes a second."""
    where = urlsplit(store.endpoint_url)
    with Shaper(machine_bytes_s=bytes_s) as shaper:
        port = shaper.relay(where.hostname or "", where.port or 80, what="store")
        seen = replace(store, endpoint_url=f"http://127.0.0.1:{port}")
        yield replace(opened, store=S3Store.connect(seen.settings(_BUCKET, root=bytes(32)))), shaper


def _see(report: DeployReport, kind: str) -> None:
    made = "made by" if kind == "cold" else "restored from"
    if not report.environment.startswith(made):
        raise SystemExit(f"a {kind} deploy said of its environment: {report.environment}")


def _figures(report: DeployReport, carried: int, bytes_s: float) -> dict[str, float]:
    """Seconds by phase, and the share of the line that carried the bytes while parts were
    fetched."""
    seconds = {**report.seconds, **report.within}
    fetching = max(seconds.get(f"{what}: restore", 0.0) for what in ("workspace", "environment"))
    return {
        **seconds,
        "from rental": report.from_rental_s or 0.0,
        "from ssh": report.from_ssh_s,
        "line share": carried / (fetching * bytes_s),
    }


def _print(result: dict[str, Any]) -> None:
    for line in result["lines"]:
        kinds = [kind for kind, of in line.items() if isinstance(of, dict)]
        for kind in kinds:
            print(f"\n{line['mbit_s']:g} Mbit/s, {kind}, median (min to max)")
            for name, of in line[kind].items():
                print(f"  {name:26}{of['median']:8.2f}  ({of['min']:.2f} to {of['max']:.2f})")
        for ratio, kind in zip(_RATIOS, kinds[1:], strict=False):
            print(f"{kind} over {kinds[0]}, from rental: {line[ratio]:.3f}")
        print(f"the model's plain bytes over the line: {line['bound_s']:.2f} s")


if __name__ == "__main__":
    main()
