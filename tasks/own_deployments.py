"""Which deployments of a Prefect server are torpor's: a team's flow may have the same name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound

from tasks.runs import FLOW_POOL, JOB_POOL, TAG
from torpor.control.own_server import choose_server, how_to_start
from torpor.shared.errors import InvalidInput

_POOLS: Final = (FLOW_POOL, JOB_POOL)
_NAMED: Final = 5  # most deployments that an error names
_ENOUGH: Final = 2
"""How many of the three signs make a deployment torpor's. A user may take the tag off, use a pool
of their own or delete ours, and a later version may move the code; a team's
`flows/backup.py:backup` shares one sign at most."""


def is_own(there: DeploymentResponse, entrypoint: str) -> bool:
    """Whether at least two of tag, work pool and entrypoint are torpor's."""
    signs = (TAG in there.tags, there.work_pool_name in _POOLS, there.entrypoint == entrypoint)
    return sum(signs) >= _ENOUGH


def read_own(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    """The deployment of that full name. InvalidInput where it is somebody else's, and where there
    is none: with the server that was asked, and the command that makes it."""
    try:
        there = client.read_deployment_by_name(name)
    except ObjectNotFound:
        raise InvalidInput(_absent(name, str(client.api_url))) from None
    function = name.partition("/")[0].replace("-", "_")
    if not is_own(there, f"flows/{function}.py:{function}"):
        raise InvalidInput(refusal({name: there}, str(client.api_url)))
    return there


def check_own(name: str) -> None:
    """Raise as read_own() does; for a caller that is about to start a run of the deployment."""
    with get_client(sync_client=True) as client:
        read_own(client, name)


def _absent(name: str, api_url: str) -> str:
    server = api_url.rstrip("/")
    choice = choose_server(set_in=server)
    chosen = choice.taken if choice and choice.taken.api_url == server else None
    why = f" ({chosen.named_by})" if chosen else ""
    return (
        f"the Prefect server {server}{why} has no deployment {name}: torpor's deployments were "
        f"never made there, or this one was deleted. {how_to_start(server)} makes them, and starts "
        "the worker that runs them"
    )


def refusal(others: dict[str, DeploymentResponse], server: str) -> str:
    """The message about deployments that have torpor's names and belong to somebody else."""
    shown = list(others.items())[:_NAMED]
    found = "; ".join(f"{name} ({_whose(one)})" for name, one in shown)
    found += f"; and {len(others) - len(shown)} more" if len(others) > len(shown) else ""
    return (
        f"somebody else's deployments at {server} have names that torpor needs, and torpor neither "
        f"changes nor starts them: {found}. Give torpor a Prefect server of its own (`torpor up` "
        "without PREFECT_API_URL), or ask their owner to deploy them under another name and delete "
        "these. A deployment of torpor's that was changed by hand is known again by the tag "
        f"`{TAG}` and the work pool `{FLOW_POOL}`"
    )


def _whose(one: DeploymentResponse) -> str:
    by = f"made by {one.created_by.display_value}, " if one.created_by else ""
    return (
        f"{by}it runs {one.entrypoint or 'no file'} in the work pool "
        f"{one.work_pool_name or 'none'}, tags: {_listed(one.tags)}"
    )


def _listed(words: Collection[str]) -> str:
    return ", ".join(words) or "none"
