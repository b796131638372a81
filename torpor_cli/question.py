"""Questions at the terminal. The one before a machine is rented shows the best offers and their
prices."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from deployments.terminal import folded
from torpor.shared.errors import InvalidInput, RunCancelled
from torpor.shared.values import WantChange
from torpor_cli.output import print_rows, shown_progress

if TYPE_CHECKING:
    from blocks import Workspace

_SHOWN: Final = 5
"""Offers that the question shows."""
_CHOICE: Final = " [y/N] "


def agrees(question: str) -> bool:
    """Whether the person at the terminal says yes. Progress lines are hidden meanwhile.
    RunCancelled where the input ends before an answer."""
    from tasks.questions import ask

    by_flow = ask(question)
    return _is_yes(answer(f"{question}{_CHOICE}")) if by_flow is None else by_flow


def says_yes(question: str) -> bool:
    """As ``agrees``, for callers that show the progress themselves; no answer counts as a no."""
    with suppress(EOFError):
        return _is_yes(_read(f"{question}{_CHOICE}"))
    return False


def check_attended(question: str) -> None:
    """InvalidInput if nobody can answer."""
    if not sys.stdin.isatty():
        raise InvalidInput(f"{question} Nobody is at the terminal to answer: add --yes")


def confirm(question: str, no: str) -> None:
    """Ask. InvalidInput if nobody can answer, RunCancelled with the words ``no`` after a no."""
    check_attended(question)
    if not agrees(question):
        raise RunCancelled(no)


def answer(question: str) -> str:
    """The answer of the person at the terminal. RunCancelled where the input ends before an
    answer."""
    try:
        return _read(question)
    except EOFError:
        raise RunCancelled("the input ended before an answer: nothing was done") from None


def _read(question: str) -> str:
    with _seen():
        return input(f"{folded(question.rstrip(), sys.stdout)} ").strip()


def _is_yes(text: str) -> bool:
    return text.lower() in ("y", "yes")


@contextmanager
def _seen() -> Iterator[None]:
    """Print questions to standard error where standard output is a file or a pipe: nobody would see
    them, and the output of a job would begin with them."""
    if sys.stdout.isatty():
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def ask_to_rent(
    workspace: str,
    snapshot: str,
    count: int,
    *,
    starts: bool,
    change: WantChange = WantChange(),  # noqa: B008 - it is never changed
    again: bool = False,
    after: str = "",
    wide: bool = False,
    max_usd: float = 0.0,
    together: bool = False,
) -> float:
    """Show the best offers, and ask; returns what a machine may cost by the hour after a yes, in
    USD, rounded up to the tenth of a cent that is shown. InvalidInput if nobody can answer,
    RunCancelled after a no.
    ``starts``: whether the workspace's programs are started there. ``again``: a job rents another
    machine whenever one is lost. ``after``: what else a yes gives. ``max_usd``: what a job may
    cost; 0 for no limit. ``together``: the machines are the nodes of a job."""
    from tasks.progress import doing
    from torpor.control.rental.renting import MOST_ATTEMPTS

    with shown_progress(), doing("asking the markets for machines"):
        nodes = count if together else 1
        found = offers_of(
            workspace, snapshot, starts=starts, change=change, nodes=nodes, max_usd=max_usd
        )
    with _seen():
        print_rows(found.rows()[: min(_SHOWN, len(found.fitting))], wide=wide)
    tried: list[float] = [one.offer.bound_usd_h for one in found.fitting[:MOST_ATTEMPTS]]
    price, most = tried[0] * count, max(tried) * count
    machines = "a machine" if count == 1 else f"{count} machines"
    asked = f"Rent {machines} for {workspace} at {price:.3f} $/h, {price * 24:.2f} $ a day"
    if most > price:
        asked += f" (up to {most:.3f} $/h where the first offers fail)"
    if again:
        asked += f", and another one whenever one is lost, {_later(found.max_price_usd_h, max_usd)}"
    confirm(f"{asked}{after}?", "nothing was rented")
    return ceil(max(tried) * 1000) / 1000


def _later(limit_usd_h: float | None, max_usd: float) -> str:
    """The sentence about what limits the price of a machine that a job rents later."""
    if limit_usd_h is not None:
        return f"for at most {limit_usd_h:.3f} $/h"
    if max_usd:
        return f"within the {max_usd:.2f} $ of the job"
    return "at what it costs then (max_price_usd_h of the workspace limits that)"


def offers_of(
    workspace: Workspace | str,
    snapshot: str,
    *,
    starts: bool = True,
    change: WantChange = WantChange(),  # noqa: B008
    nodes: int = 1,
    max_usd: float = 0.0,
) -> Any:
    from flows.procedures.listing import list_offers

    return list_offers(workspace, snapshot, starts, change, nodes=nodes, max_usd=max_usd)
