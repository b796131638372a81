"""What has become of a number of workspaces, as the store and the providers say.

A process of the installation's environment. Prints a line of JSON for each workspace, again and
again, until it is killed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import httpx

from tasks.workspace import OpenWorkspace
from tasks.workspace_blocks import open_workspace
from torpor.control.store.manifests import snapshot_ids
from torpor.shared.errors import TorporError

EVERY_S = 2.0


NAMES = ("work", "idle", "spent", "kept", "left", "far")


def main(number: int) -> None:
    opened: dict[str, OpenWorkspace] = {}
    while True:
        for name in NAMES:
            try:
                if name not in opened:
                    opened[name] = open_workspace(f"{name}{number}")
                print(json.dumps({name: _state(opened[name])}), flush=True)
            except (TorporError, OSError, httpx.HTTPError) as error:
                # The server or the store was just killed; the store comes back where it was.
                print(json.dumps({"error": str(error)}), flush=True)
        time.sleep(EVERY_S)


def _state(opened: OpenWorkspace) -> dict[str, Any]:
    name, rentals = opened.spec.name, opened.rentals.open()
    listed = [] if name.startswith("far") else opened.providers[0].list_own()
    mine = {
        machine.label.rental: machine.id
        for machine in listed
        if machine.label and machine.label.workspace == name
    }
    return {
        "open": [rental.state for rental in rentals],
        "machines": [*mine.values()],
        "snapshots": snapshot_ids(opened.store, name),
        "jobs": {job.id: job.state for job in [*opened.jobs.open(), *opened.jobs.ended()]},
        "saves": [job.newest for job in opened.jobs.open()],
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
