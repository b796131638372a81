"""``make down``: end everything that ``make up`` started. Files, blocks and snapshots stay."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deployments import server, supervisor, worker
from deployments.installation import Installation
from deployments.local_machines import running_machines, stop_machines
from deployments.processes import end
from torpor.control.store import embedded
from torpor.shared.errors import TorporError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make down", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--machines",
        action="store_true",
        help="also end the processes of local machines; their files stay",
    )
    options = parser.parse_args(arguments)
    try:
        down(Installation.here(), machines=options.machines)
    except TorporError as error:
        print(f"torpor: {error}", file=sys.stderr)
        return 1
    return 0


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
                "`make down MACHINES=1` ends its processes too and keeps its files"
            )


if __name__ == "__main__":
    sys.exit(main())
