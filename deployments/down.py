"""``torpor down``: end everything that ``torpor up`` started. Files, blocks and snapshots stay."""

from __future__ import annotations

from deployments import parent, server, worker
from deployments.installation import Installation
from deployments.local_machines import running_machines, stop_machines
from deployments.processes import flow_runs
from torpor.control.supervision import LOCK, STORE, is_held, living


def runs(installation: Installation) -> bool:
    """Whether anything runs that looks after machines, or has rented some. Flow runs outlive a
    supervisor that was killed."""
    return is_held(installation.folder / LOCK) or bool(flow_runs(installation, *worker.ROLES))


def own_server(installation: Installation) -> str | None:
    """The address of the installation's own server; None where it does not run."""
    there = living(installation.folder)
    return there.api_url if there is not None and there.own else None


def down(installation: Installation, *, machines: bool = False) -> None:
    """End workers, flow runs, store and server, and local machines only with ``machines``: they
    hold work."""
    with installation.locked():
        ended = parent.end(installation)
        if machines:
            stop_machines(installation)
        named = {**dict.fromkeys(worker.ROLES, "workers"), parent.RUNS: "flow runs"}
        named |= {STORE: "store", server.ROLE: "Prefect server"}
        names = [name for name in dict.fromkeys(named.values()) if name in map(named.get, ended)]
        print(f"torpor is down: ended {', '.join(names)}." if names else "torpor was not up.")
        for machine in running_machines(installation):
            print(
                f"  machine {machine.id} still runs, as a rented one would; "
                "`torpor down --machines` ends its processes too and keeps its files"
            )
