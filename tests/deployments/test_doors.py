"""A whole installation, scanned by another account of this host: no port and no file of it is open.

What may answer without a key is listed here, with the reason.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import re
import stat
from pathlib import Path
from typing import Final
from uuid import UUID

import asyncssh
import psutil
import pytest
from starlette.routing import WebSocketRoute
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from deployments.installation import Installation
from deployments.local_machines import running_machines
from tests.fixtures.own_installation import Alone, installed
from tests.fixtures.stranger import Door, answers, doors_of, open_files, questions
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.providers.local.folder import folders_in
from torpor.control.providers.local.server import machine_processes

STORE_PATHS: Final = ("/", "/torpor", "/torpor/workspaces", "/buckets/torpor/", "/dir/assign")
UI: Final = (
    "GET /",
    "GET /ui-settings",
    "GET /docs",
    "GET /openapi.json",
    "PUT /",
    "OPTIONS /api/",
)
ALLOWED: Final = (
    "GET /api/health",  # whether it runs
    "GET /api/ready",
    # Prefect's UI, as in its package, where it asks for the login; its settings name its address.
    "GET /",
    "GET /ui-settings",
    # The API's description, as Prefect publishes it.
    "GET /docs",
    "GET /openapi.json",
)
"""What the server says to everyone."""


@pytest.mark.rule(21)
def test_no_port_and_no_file_of_an_installation_is_open_without_a_key(alone: Alone) -> None:
    alone.installation.folder.chmod(0o755)  # as `mkdir` makes it
    printed = alone.up()
    folder = alone.installation.folder
    ours = _processes(alone.installation)
    doors = doors_of(ours)
    assert {door.host for door in doors if door.port} == {"127.0.0.1"}
    server = Door("127.0.0.1", int(alone.server.ui_url.rpartition(":")[2]))
    ends = [machine.endpoint for machine in running_machines(alone.installation)]
    machines = [Door(end.host, end.port) for end in ends if end]
    assert len(machines) == 1
    assert {server, *machines} <= {*doors}
    store = [door for door in doors if door != server and door not in machines]
    assert len(store) >= 10

    assert answers(store, questions(*STORE_PATHS)) == []
    said = answers([server], [*UI, *_operations()])
    assert [answer for answer in said if answer.question not in ALLOWED] == []
    assert _open_web_sockets(alone) == []
    for machine in machines:
        with pytest.raises(asyncssh.PermissionDenied):
            asyncio.run(_log_in(machine))

    assert open_files([folder, *folder.rglob("*")]) == []
    assert open_files(_written(ours)) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert open_files(Path(f"/proc/{process.pid}/environ") for process in ours) == []
    shown = " ".join([printed, *(word for process in ours for word in process.cmdline())])
    shown += "".join(log.read_text() for log in folder.glob("*.log"))
    secrets = _secrets(folder)
    assert [secret for secret in secrets if secret in shown] == []
    assert min(map(len, secrets)) >= 32


def _processes(installation: Installation) -> list[psutil.Process]:
    """Those that `make up` started, the store among them, and those of the machines."""
    (machine,) = folders_in(installation.machines)
    record = machine.read_machine()
    assert record
    return [*installed(installation), *machine_processes(machine, record.id)]


def _operations() -> list[str]:
    """All that Prefect's API can do, by its own description."""
    from prefect.server.api.server import create_api_app  # 3 s: not for each worker

    paths: dict[str, dict[str, object]] = create_api_app().openapi()["paths"]
    return [
        f"{method.upper()} /api{re.sub('{[^}]*}', str(UUID(int=0)), path)}"
        for path, methods in paths.items()
        for method in methods
    ]


def _open_web_sockets(alone: Alone) -> list[str]:
    """Those that say anything to whoever has no login."""
    from prefect.server.api.server import API_ROUTERS  # 3 s: not for each worker

    found = []
    routes = [route for router in API_ROUTERS for route in router.routes]
    paths = [route.path for route in routes if isinstance(route, WebSocketRoute)]
    assert len(paths) >= 5
    for path in paths:
        url = alone.server.api_url.replace("http", "ws", 1)
        url += path.format(work_pool_name="torpor")
        for greeting in ("{}", '{"type": "auth", "token": "torpor:wrong"}'):
            for protocol in (None, "prefect"):
                try:
                    with connect(
                        url,
                        subprotocols=[Subprotocol(protocol)] if protocol else None,
                        open_timeout=PATIENCE_S,
                        proxy=None,
                    ) as asked:
                        asked.send(greeting)
                        found.append(f"{path}: {asked.recv(PATIENCE_S)!r}")
                except WebSocketException:
                    continue  # it was refused, or closed before it said anything
    return found


async def _log_in(machine: Door) -> None:
    await asyncssh.connect(
        machine.host,
        machine.port,
        known_hosts=None,
        username=getpass.getuser(),
        client_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        config=None,
    )


def _written(processes: list[psutil.Process]) -> set[Path]:
    """The files that these processes have open to write, wherever they are."""
    return {
        Path(file.path)
        for process in processes
        for file in process.open_files()
        if file.mode != "r"
    }


def _secrets(folder: Path) -> list[str]:
    files = [folder / name for name in ("login", "block-key", "store-key")]
    (identity,) = json.loads((folder / "store" / "identities.json").read_text())["identities"]
    keys = [file.read_text().strip() for file in files]
    return [*keys, identity["credentials"][0]["secretKey"]]
