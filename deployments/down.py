"""``torpor down``: end everything that ``torpor up`` started. Files, blocks and snapshots stay."""

from __future__ import annotations

from deployments import server, supervisor, worker
from deployments.installation import Installation
from deployments.local_machines import running_machines, stop_machines
from deployments.processes import end, running
from torpor.control.own_server import api_url, recorded_port
from torpor.control.store import embedded


def runs(installation: Installation) -> bool:
    """Whether anything runs that looks after machines, or knows of them."""
    return bool(running(installation, supervisor.ROLE, server.ROLE, *worker.ROLES))


def own_server(installation: Installation) -> str | None:
    """The address of the installation's own server; None where it does not run."""
    here = running(installation, server.ROLE)
    return api_url(recorded_port(installation.folder)) if here else None


def down(installation: Installation, *, machines: bool = False, wait_s: float = 0.0) -> None:
    """End workers, store and server, and local machines only with ``machines``: they hold work.
    ``wait_s``: how long another `make up` or `make down` may go on first."""
    with installation.locked(wait_s=wait_s):
        supervisor.end_on_purpose(installation)  # first: it would start again what ends
        ended = {
            "workers": worker.stop(installation),  # its flow runs still report
            "store": embedded.stop(installation.store),
            "Prefect server": server.stop(installation),
        }
        # Of a `make up` or a supervisor that was killed.
        end(installation, "register", supervisor.STORE_ROLE, polite_s=5.0)
        if machines:
            stop_machines(installation)
        names = [name for name, was_there in ended.items() if was_there]
        print(f"torpor is down: ended {', '.join(names)}." if names else "torpor was not up.")
        for machine in running_machines(installation):
            print(
                f"  machine {machine.id} still runs, as a rented one would; "
                "`torpor down --machines` ends its processes too and keeps its files"
            )
