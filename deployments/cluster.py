"""What a cluster's workers need on their Prefect server, and the budgets of its teams.

    python -m deployments.cluster values.yaml

A Job of the chart runs it (deployments/chart/torpor). Unlike ``make up``, it makes no store,
machine or key: these blocks are the users'. It may be repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
from prefect.client.orchestration import get_client

from blocks import Budget
from blocks.reference import load_named
from deployments import idle
from deployments.installation import BELIEVE, BELIEVE_HELP, Installation
from deployments.record_signing import sign_stores
from deployments.register import (
    deploy,
    exists,
    make_pools,
    make_stacks,
    register_types,
)
from deployments.schedules import NIGHTLY, WATCH, offer_schedules
from tasks.own_deployments import read_own
from torpor.shared.errors import InvalidInput, TorporError
from torpor.shared.values import IdleChoice, learned


class Team(msgspec.Struct, frozen=True):
    """A team of the chart's values, as far as Prefect's server must know it."""

    name: str
    usd_month: float


class _Values(msgspec.Struct, frozen=True):
    teams: list[Team] = []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments.cluster")
    parser.add_argument("values", help="the chart's values, of which `teams` become budgets")
    words = "what becomes of idle machines, until somebody switches the schedule of watch"
    parser.add_argument("--idle", choices=get_args(IdleChoice), default="off", help=words)
    words = "whether each machine is backed up at night, until somebody switches that schedule"
    parser.add_argument("--nightly", choices=("on", "off"), default="off", help=words)
    parser.add_argument(BELIEVE, action="store_true", help=BELIEVE_HELP)
    options = parser.parse_args(arguments)
    try:
        teams = read_teams(Path(options.values))
        register_types()
        signed = sign_stores() if options.believe_records else []
        make_stacks()
        make_pools()
        deploy(Installation.here())
        offer_schedules(_switched_on(options.idle, options.nightly))
        for team in teams:
            set_budget(team)
        print(*signed, sep="\n")
    except TorporError as error:
        print(f"torpor: {error}", file=sys.stderr)
        return 1
    return 0


def _switched_on(chosen: IdleChoice, nightly: str) -> list[str]:
    """The deployments whose schedules begin switched on. What watch does with idle machines is set
    before watch has a schedule. From then on the users decide."""
    on = [NIGHTLY] if nightly == "on" else []
    if chosen == "off":
        return on
    with get_client(sync_client=True) as client:
        new = not read_own(client, WATCH).schedules
    if new:
        idle.choose(Installation.here(), chosen)
    return [*on, WATCH]


def read_teams(file: Path) -> list[Team]:
    """The teams in a file of values; raises InvalidInput."""
    try:
        return msgspec.yaml.decode(file.read_bytes(), type=learned(_Values), strict=False).teams
    except (OSError, msgspec.MsgspecError) as cause:
        raise InvalidInput(f"{file} has no list of teams that can be read: {cause}") from cause


def set_budget(team: Team) -> None:
    """Make or change the Budget block that is named as the team: it counts the project of that
    name. What else its user has set, such as a time zone, stays."""
    budget = (
        load_named(Budget, team.name, of=f"team {team.name}")
        if exists(Budget, team.name)
        else Budget(usd_month=team.usd_month, project=team.name)
    )
    budget.usd_month = team.usd_month
    budget.save(team.name, overwrite=True)


if __name__ == "__main__":
    sys.exit(main())
