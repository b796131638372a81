"""Commands that start and end everything on this host."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter


def up(*, port: int | None = None) -> None:
    """Start a Prefect server, a store, workers and their supervisor on this host.

    Running it again starts only what is missing.

    Args:
        port: The port of the Prefect server, 4200 if it is free.
    """
    from deployments.installation import Installation
    from deployments.up import up as start

    start(Installation.here(), port)


def down(*, machines: Annotated[bool, Parameter(negative=())] = False) -> None:
    """End everything that `up` started. Files, blocks and snapshots stay.

    Args:
        machines: Also end the processes of local machines; their files stay.
    """
    from deployments.down import down as end
    from deployments.installation import Installation

    end(Installation.here(), machines=machines)
