"""The command that tries a provider block on the cheapest machine of its market."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from torpor.control.own_server import choose_server
from torpor.shared.errors import InvalidInput, ProviderError
from torpor_cli.flow_runs import Format
from torpor_cli.output import print_report, print_rows, quiet
from torpor_cli.server import connected

if TYPE_CHECKING:
    from torpor.control.smoke.plan import SmokePlan

Flag = Annotated[bool, Parameter(negative=())]


def smoke(
    provider: str,
    *,
    max_usd: float = 0.50,
    minutes: float = 10.0,
    gpu: str = "",
    full: Flag = False,
    store: str = "default",
    yes: Flag = False,
    options: Format | None = None,
) -> None:
    """Rent a market's cheapest machine for some minutes, and say what differs from the adapter.

    It asks with the worst case, ends the machine, proves that, and keeps each exchange with the
    market in a folder, without secrets. A second process ends the machine if this one cannot.

    Args:
        provider: The provider block, as type/name.
        max_usd: The most that it may cost, in the worst case.
        minutes: How long the machine may live.
        gpu: The GPU model, such as RTX 4090; empty takes the cheapest.
        full: Then hibernate and wake a workspace of 100 MB, on two more machines.
        store: The Object Store block that `full` stores it in.
        yes: Do not ask.
    """
    chosen = options or Format()
    choice = choose_server()
    if choice is not None and choice.taken.source == "connection":
        raise InvalidInput(
            f"this host is connected to {choice.taken.api_url}: run `torpor smoke` on the host of "
            "that server. What ends the rented machine if this command cannot is a second process, "
            "or the next `torpor up`, and both need the provider's block and a host that stays on"
        )
    with connected(), quiet(chosen.json):
        from deployments import smoke as trial

        def agree(plan: SmokePlan) -> None:
            if not chosen.json:
                print_rows(plan.rows(), plan.title(), wide=chosen.wide)
            if not yes:
                trial.ask(plan)

        report = trial.smoke(
            provider,
            max_usd=max_usd,
            minutes=minutes,
            gpu=gpu,
            store=store if full else "",
            agree=agree,
            say=(lambda words: None) if chosen.json else print,
        )
        print_report(report, as_json=chosen.json, wide=chosen.wide)
    if not report.passed:
        raise ProviderError("the market differs from its adapter: send the recording in")
