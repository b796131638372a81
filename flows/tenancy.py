"""Tenancy: one machine that a workspace is restored on, and whether a failed run may destroy it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.machines import create_machine, destroy_created, hand_over, own_machine
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.ledger import Lease
from torpor.control.providers.offers import Offer
from torpor.shared.errors import TorporError, WorkspaceBusy
from torpor.shared.values import Machine


class Tenancy:
    """On failure, a machine that this run created is destroyed. One that an earlier run left
    unfinished is destroyed only after its agent has said that it holds an unfinished restore and
    nothing else: unknown is not idle. One that was handed over is the user's.
    """

    def __init__(
        self, opened: OpenWorkspace, machine: Machine, lease: Lease | None, fresh: bool
    ) -> None:
        self.machine = machine
        self.fresh = fresh
        self._opened = opened
        self._lease = lease
        self._ours = fresh and lease is not None

    @classmethod
    def own(cls, opened: OpenWorkspace, text: str) -> Tenancy:
        """A machine of the user's own, ``user@host:port``: it is never destroyed."""
        return cls(opened, own_machine(text), None, fresh=True)

    def hand_over(self) -> None:
        self._ours = False  # first: a write whose answer is lost may have been done
        if self._lease is not None:
            hand_over(self._opened, self._lease, self.machine)

    def holds_nothing_else(self) -> None:
        """Record the agent's answer: the targets were empty, or an unfinished restore's."""
        self._ours = self._lease is not None

    def end_failed(self, cause: BaseException) -> None:
        if self._ours and self._lease is not None:
            _destroy_after(cause, self._opened, self._lease)


@contextmanager
def rented(
    opened: OpenWorkspace,
    offers: list[Offer],
    lease: Lease,
    fresh: bool,
    nap: Callable[[float], None] | None = None,
) -> Iterator[Tenancy]:
    """A machine under ``lease``, destroyed after a failure if that is safe.

    ``nap`` sleeps between two looks at a starting machine, and may raise to stop waiting.
    """
    try:
        machine = create_machine(opened, offers, lease, fresh, nap)
    except BaseException as cause:
        if fresh:  # one that an earlier run left may hold what that run restored
            _destroy_after(cause, opened, lease)
        raise
    tenancy = Tenancy(opened, machine, lease, fresh)
    try:
        yield tenancy
    except WorkspaceBusy:
        raise  # another run brings it to this very machine: hands off
    except BaseException as cause:
        tenancy.end_failed(cause)
        raise


def _destroy_after(cause: BaseException, opened: OpenWorkspace, lease: Lease) -> None:
    """If that fails too, an error of ours names both causes; a cancellation stays a
    cancellation.
    """
    try:
        destroy_created(opened, lease)
    except TorporError as error:
        runner().log.error("%s", error)
        if isinstance(cause, TorporError):
            raise type(cause)(
                f"{cause}. Its machine could not be destroyed either: {error}"
            ) from cause
