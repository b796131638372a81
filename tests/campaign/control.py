"""The control side as a process of its own, so that it can be killed like one.

``serve``: forks one control side for each line of its input, without Prefect; ``prefect``: one
run of the real flow against the server that PREFECT_API_URL names; ``blocks``: saves the blocks
that those runs load. What a run came to is written to its ``out`` file, the phases it went
through to ``phases``; a killed one leaves no ``out``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from pydantic import SecretStr

from tests.fixtures.plain_flows import hibernate_plainly, told_of_phases, wake_plainly
from tests.fixtures.world import Access
from torpor.errors import TorporError
from torpor.remote import bundle


class Order(msgspec.Struct, frozen=True):
    """One run of one flow."""

    flow: str  # hibernate or wake
    options: dict[str, Any]
    access: str
    source: str  # where the agent's packages are
    out: str
    phases: str


class Outcome(msgspec.Struct, frozen=True):
    """What a run came to; ``error`` is empty where it completed."""

    seconds: float
    error: str = ""
    message: str = ""
    trace: str = ""


def main(argv: list[str]) -> int:
    if argv[1:] == ["serve"]:
        return _serve()
    order = msgspec.json.decode(argv[2], type=Order)
    if argv[1] == "blocks":
        _save_blocks(read_access(order))
        return 0
    if argv[1] == "plain":
        return _carry_out(order, _plainly)
    return _carry_out(order, _by_prefect)


def read_access(order: Order) -> Access:
    return msgspec.json.decode(Path(order.access).read_bytes(), type=Access)


def _serve() -> int:
    """Importing all this takes seconds, forking none: one import for all the runs."""
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _carry_out(order, _plainly)
            finally:
                os._exit(code)
        print(json.dumps({"pid": child}), flush=True)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"ended": os.waitstatus_to_exitcode(status)}), flush=True)
    return 0


def _carry_out(order: Order, work: Callable[[Order], object]) -> int:
    began = time.monotonic()

    def enter(phase: str) -> None:
        with open(order.phases, "a") as phases:
            phases.write(phase + "\n")

    try:
        with patch.object(bundle, "_SOURCE", Path(order.source)), told_of_phases(enter):
            work(order)
        outcome = Outcome(time.monotonic() - began)
    except Exception as error:  # noqa: BLE001 - the process's border: all becomes an outcome
        trace = "" if isinstance(error, TorporError) else traceback.format_exc()
        outcome = Outcome(time.monotonic() - began, type(error).__name__, str(error), trace)
    partial = Path(order.out + ".new")
    partial.write_bytes(msgspec.json.encode(outcome))
    partial.replace(order.out)
    return 0


def _plainly(order: Order) -> None:
    run = hibernate_plainly if order.flow == "hibernate" else wake_plainly
    run(read_access(order).place(), **order.options)


def _by_prefect(order: Order) -> None:
    from flows import hibernate, wake

    flow: Callable[..., object] = hibernate if order.flow == "hibernate" else wake
    flow("demo", **order.options)


def _save_blocks(access: Access) -> None:
    from prefect_aws import MinIOCredentials

    from blocks import LocalProvider, ObjectStore, SSHIdentity, Workspace

    MinIOCredentials(
        minio_root_user=access.access_key, minio_root_password=SecretStr(access.secret_key)
    ).save("default", overwrite=True)
    ObjectStore(
        flavour="seaweedfs",
        bucket=access.bucket,
        prefix=access.prefix,
        endpoint_url=access.endpoint_url,
        credentials="minio-credentials/default",
        encryption_key=None if access.store_key is None else SecretStr(access.store_key),
    ).save("default", overwrite=True)
    SSHIdentity(private_key=SecretStr(access.private_key)).save("default", overwrite=True)
    LocalProvider(folder=access.machines, price_usd_h=1.5).save("default", overwrite=True)
    Workspace(
        name=access.spec.name, paths=access.spec.paths, parts=access.spec.parts, owner="tests"
    ).save("demo", overwrite=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
