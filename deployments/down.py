"""``torpor down``: end everything that ``torpor up`` started. Files, blocks and snapshots stay."""

from __future__ import annotations

from deployments import parent, server, worker
from deployments.installation import Installation
from deployments.local_machines import running_machines, stop_machines
from torpor.control.store import embedded
from torpor.control.supervision import STORE, living_parent


def runs(installation: Installation) -> bool:
    """Whether anything runs that looks after machines, or knows of them."""
    return parent.lives(installation)


def own_server(installation: Installation) -> str | None:
    """The address of the installation's own server; None where it does not run."""
    there = living_parent(installation.folder)
    return there.api_url if there is not None and there.own else None


def down(installation: Installation, *, machines: bool = False, wait_s: float = 0.0) -> None:
    """End workers, store and server, and local machines only with ``machines``: they hold work.
    ``wait_s``: how long another `make up` or `make down` may go on first."""
    with installation.locked(wait_s=wait_s):
        ended = parent.end_on_purpose(installation)
        if embedded.stop(installation.store):  # of an earlier version
            ended.append(STORE)
        if machines:
            stop_machines(installation)
        named = {**dict.fromkeys(worker.ROLES, "workers"), STORE: "store"}
        named[server.ROLE] = "Prefect server"
        names = [name for name in dict.fromkeys(named.values()) if name in map(named.get, ended)]
        print(f"torpor is down: ended {', '.join(names)}." if names else "torpor was not up.")
        for machine in running_machines(installation):
            print(
                f"  machine {machine.id} still runs, as a rented one would; "
                "`torpor down --machines` ends its processes too and keeps its files"
            )
