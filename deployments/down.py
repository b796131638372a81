"""``torpor down``: end everything that ``torpor up`` started. Files, blocks and snapshots stay."""

from __future__ import annotations

from deployments import parent, server, worker
from deployments.installation import Installation
from deployments.local_machines import running_machines, stop_machines
from deployments.processes import running
from torpor.control.own_server import api_url, recorded_port
from torpor.control.supervision import LOCK, STORE, is_held, living


def runs(installation: Installation) -> bool:
    """Whether any process of the installation runs: one that looks after machines, or a flow run
    that may have rented some. Flow runs outlive a supervisor that was killed; a worker and a server
    of an earlier version do, too."""
    left = running(installation, server.ROLE, *worker.ROLES)
    return is_held(installation.folder / LOCK) or bool(left)


def served(installation: Installation) -> str | None:
    """The address of the server that the installation's workers serve, its own or its user's; None
    where that is not known."""
    there = living(installation.folder)
    if there is None:  # an earlier version's workers may run
        here = running(installation, server.ROLE)
        return api_url(recorded_port(installation.folder)) if here else None
    return there.api_url


def down(installation: Installation, *, machines: bool = False) -> None:
    """End workers, flow runs, store and server, and local machines only with ``machines``: they
    hold work."""
    with installation.locked():
        ended = parent.end(installation)
        if machines:
            stop_machines(installation)
        named = {**dict.fromkeys(worker.ROLES, "workers"), parent.RUNS: "flow runs"}
        named |= {STORE: "store", server.ROLE: "Prefect server"}
        ran = {named.get(role) for role in ended.roles}
        names = [name for name in dict.fromkeys(named.values()) if name in ran]
        print(f"torpor is down: ended {', '.join(names)}." if names else "torpor was not up.")
        if ended.note:
            print(f"  note      {ended.note}")
        for machine in running_machines(installation):
            print(
                f"  machine {machine.id} still runs, as a rented one would; "
                "`torpor down --machines` ends its processes too and keeps its files"
            )
