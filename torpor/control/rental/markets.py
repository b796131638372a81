"""The providers that one run deals with: several asked at once, none waited for without end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, TypeVar

from torpor.control.providers.provider import Adopts, Provider
from torpor.control.rental.records import Rental
from torpor.shared.errors import (
    InvalidInput,
    MachineUnread,
    ProviderUnavailable,
    TorporError,
    as_ours,
)
from torpor.shared.values import Machine

ANSWER_S: Final = 60.0
"""Seconds that a provider may take for one answer before the run goes on without it."""

Answer = TypeVar("Answer")


class Markets:
    """``named``: the workspace's providers, in its order. ``others`` opens all other provider
    blocks of the installation; called only where a rental is at none of the named ones."""

    def __init__(
        self, named: Sequence[Provider], others: Callable[[], Sequence[Provider]] = tuple
    ) -> None:
        self.named = tuple(named)
        self._others = others
        self._opened: tuple[Provider, ...] | None = None

    def every(self) -> tuple[Provider, ...]:
        """Every provider block of the installation, the named ones first."""
        if self._opened is None:
            known = {provider.identity: provider for provider in (*self.named, *self._others())}
            self._opened = tuple(known.values())
        return self._opened

    def of(self, identity: str) -> Provider:
        """The provider with this identity; InvalidInput if no block is for that account."""
        named = [provider for provider in self.named if provider.identity == identity]
        for provider in named or self.every():
            if provider.identity == identity:
                return provider
        raise InvalidInput(
            f"no provider block is for {identity}: save one on the UI's page Blocks, with a key of "
            "that account"
        )

    def concerned(self, rentals: Collection[Rental]) -> list[Provider]:
        """The named providers and those of open rentals. All of them where no block is for one of
        the rentals: the account may have another name by now (``look``)."""
        wanted = {rental.provider for rental in rentals}
        unnamed = wanted - {provider.identity for provider in self.named}
        if not unnamed:
            return [*self.named]
        more = [provider for provider in self.every() if provider.identity in unnamed]
        return [*self.named, *more] if len(more) == len(unnamed) else [*self.every()]

    def check_reached(self, rentals: Collection[Rental]) -> None:
        """InvalidInput where no block is for the account of a machine that was handed over, and
        whose work is not known to be stored: a machine that is rented instead would hold an older
        state."""
        known = {provider.identity for provider in self.concerned(rentals)}
        for rental in rentals:
            if (
                rental.state == "handed over"
                and rental.snapshot is None
                and rental.provider not in known
            ):
                raise InvalidInput(
                    f"machine {rental.machine} of workspace {rental.label.workspace} may hold its "
                    f"newest work, and no provider block is for {rental.provider}, its account: no "
                    "other machine is rented. Save that block again, with "
                    f"{rental.provider} in its `account` if its API key is new. If the machine is "
                    f"gone for certain: `torpor reconcile {rental.label.workspace} --gone "
                    f"{rental.label.rental}`"
                )


def ask_all(
    providers: Sequence[Provider],
    question: Callable[[Provider], Answer],
    *,
    timeout_s: float = ANSWER_S,
) -> list[Answer | TorporError]:
    """Ask all at once; each answers, fails, or has not answered in time (ProviderUnavailable). An
    error of one provider is returned for that provider only; Unforeseen, where it is not
    torpor's."""
    answers: queue.SimpleQueue[tuple[int, Answer | TorporError]] = queue.SimpleQueue()

    def ask(number: int) -> None:
        try:
            answers.put((number, question(providers[number])))
        except Exception as error:  # noqa: BLE001 - one market stops no run that asks several
            answers.put((number, as_ours(error)))

    for number in range(len(providers)):  # a thread that hangs keeps no process from ending
        threading.Thread(target=ask, args=(number,), name="market", daemon=True).start()
    heard: dict[int, Answer | TorporError] = {}
    until = time.monotonic() + timeout_s
    while len(heard) < len(providers):
        try:
            number, answer = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        heard[number] = answer
    return [
        heard.get(
            number,
            ProviderUnavailable(f"{provider.identity} did not answer within {timeout_s:.0f} s"),
        )
        for number, provider in enumerate(providers)
    ]


def recall(providers: Iterable[Provider], rentals: Collection[Rental]) -> None:
    """Tell each provider whose machines cannot be marked which ones the open ``rentals``
    adopted."""
    for provider in providers:
        if provider.abilities.adopts != "by record" or not isinstance(provider, Adopts):
            continue
        for rental in rentals:
            if rental.adopted and rental.machine and rental.provider == provider.identity:
                mine = Machine(rental.machine, rental.provider, rental.label, "running", None)
                provider.mark(mine, rental.label)


def machines_at(
    providers: Sequence[Provider],
    rentals: Collection[Rental],
    warn: Callable[[str], None],
) -> list[Machine]:
    """Every machine of torpor's at these providers. A provider that does not answer is an error
    where an open rental names it or where it is the only one, and otherwise a warning, because
    unknown is not none. The same holds for a machine that may be torpor's and cannot be read,
    unless the machines of all ``rentals`` in use there can be read."""
    found: list[Machine] = []
    needed = {rental.provider for rental in rentals}
    known = {provider.identity for provider in providers}
    for provider, answer in zip(
        providers, ask_all(providers, lambda provider: provider.list_own()), strict=True
    ):
        if isinstance(answer, list):
            found += answer
            continue
        shown = answer.machines if isinstance(answer, MachineUnread) else []
        found += shown
        labels = {machine.label for machine in shown}
        here = [
            rental
            for rental in rentals
            # a machine of an abandoned rental is looked for separately
            if rental.state != "abandoned"
            and (rental.provider == provider.identity or rental.provider not in known)
        ]
        if here and all(rental.label in labels for rental in here):
            warn(str(answer))
        elif provider.identity in needed or len(providers) == 1:
            raise answer
        else:
            warn(f"{provider.identity} was left out: {answer}")
    return found
