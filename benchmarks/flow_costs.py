"""What a flow costs the control side: seconds, CPU, memory, requests to store and Prefect server.

The benchmarks of history, of workspaces and of a flow's overhead run their flows in a process of
their own, with a Prefect server and a bucket of their own.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.kept import summed_up
from deployments.demo import clear_up, environment
from deployments.demo_story import BUCKET, save_blocks
from deployments.installation import CHECKOUT, Installation
from deployments.processes import mark
from torpor.control.store.embedded import EmbeddedStore
from torpor.control.store.s3_requests import S3Requests
from torpor.shared.values import MIB

VERBS: Final = ("list", "get", "head", "put", "delete")
PREFECT: Final = "prefect"
"""Requests to the Prefect server, beside the store's verbs."""


def in_own_installation(name: str, *arguments: str) -> Any:
    """What `python -m benchmarks.NAME ARGUMENTS --inside FOLDER` prints as its last line, read as
    JSON. Its process has a Prefect server of its own, which ends with the call."""
    installation = Installation(Path(tempfile.mkdtemp(prefix=f"torpor-{name}-")))
    try:
        scratch = installation.folder / "tmp"
        scratch.mkdir()
        inside = ["--inside", str(installation.folder)]
        told = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *arguments, *inside],
            cwd=CHECKOUT,
            env=environment(installation, scratch, verbose=False) | mark(installation, "demo"),
            stdout=subprocess.PIPE,
            check=True,
        )
    finally:
        clear_up(installation)
    return json.loads(told.stdout.splitlines()[-1])


@contextmanager
def own_bucket(installation: Installation) -> Iterator[EmbeddedStore]:
    """A store on this host, and the demo's blocks that name it."""
    access, secret = f"bench-{secrets.token_hex(4)}", secrets.token_urlsafe(24)
    with EmbeddedStore.start(installation.store, access, secret, BUCKET) as store:
        save_blocks(installation, store)
        yield store


def cost(act: Callable[[], object]) -> dict[str, float]:
    """Of one call in this process: ``s`` by the clock, ``cpu_s``, the most memory in ``peak_mib``,
    and the requests by verb of the store and to the Prefect server."""
    Path("/proc/self/clear_refs").write_text("5")  # from now on, the peak of memory is this call's
    with _counted() as requests:
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        act()
        seconds, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    counts = {what: requests[what] for what in (*VERBS, PREFECT)}
    return {"s": seconds, "cpu_s": cpu_s, "peak_mib": _peak_mib(), **counts}


def summed_up_costs(costs: list[dict[str, float]]) -> dict[str, Any]:
    """``first``: the first call, which is not counted. Requests and memory: the most."""
    first, *others = costs
    return {
        "s": summed_up([one["s"] for one in others]),
        "cpu_s": summed_up([one["cpu_s"] for one in others]),
        "peak_mib": max(one["peak_mib"] for one in costs),
        "requests": {what: max(one[what] for one in others) for what in (*VERBS, PREFECT)},
        "first": first,
    }


def with_p95(values: Sequence[float]) -> dict[str, float]:
    """n, median, spread and 95th percentile of one figure."""
    return {**summed_up(values), "p95": sorted(values)[math.ceil(0.95 * len(values)) - 1]}


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024 / MIB


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """The requests that this process sends meanwhile."""
    requests = Counter[str]()
    to_store, to_prefect, to_prefect_async = (
        S3Requests.send,
        httpx.Client.send,
        httpx.AsyncClient.send,
    )

    def counting(self: S3Requests, what: str, request: Callable[[], Any]) -> Any:
        requests[what.split()[0]] += 1
        return to_store(self, what, request)

    def asking(self: httpx.Client, *args: Any, **kwargs: Any) -> httpx.Response:
        requests[PREFECT] += 1
        return to_prefect(self, *args, **kwargs)

    async def asking_async(self: httpx.AsyncClient, *args: Any, **kwargs: Any) -> httpx.Response:
        requests[PREFECT] += 1
        return await to_prefect_async(self, *args, **kwargs)

    S3Requests.send = counting  # type: ignore[method-assign]
    httpx.Client.send = asking  # type: ignore[method-assign]
    httpx.AsyncClient.send = asking_async  # type: ignore[method-assign]
    try:
        yield requests
    finally:
        S3Requests.send = to_store  # type: ignore[method-assign]
        httpx.Client.send = to_prefect  # type: ignore[method-assign]
        httpx.AsyncClient.send = to_prefect_async  # type: ignore[method-assign]
