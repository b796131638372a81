"""Results of canaries (freeze tests): kept after each test, read before offers are ranked."""

from __future__ import annotations

from tasks.runner import runner
from tasks.workspace import StoredWorkspace
from torpor.control.rental.canaries import Canary, CanaryRecords, CanaryResults
from torpor.control.rental.records import Rental
from torpor.shared.errors import StoreError
from torpor.shared.wire.job import Tried


def read_canaries(opened: StoredWorkspace) -> CanaryResults:
    """Read the canaries' results of all accounts in the store; none where that fails, with a
    warning."""
    try:
        return CanaryRecords(opened.store).results()
    except StoreError as error:
        runner().log.warning("where processes went on is not known: %s", error)
        return CanaryResults()


def keep_canary(opened: StoredWorkspace, rental: Rental | None, answer: Tried) -> None:
    """Store the result of the canary on this rental's machine; a warning where that fails. Results
    of a user's own machine are not stored, nor failures on a machine in use: what its user does
    there may be the cause."""
    if rental is None or (answer.why_not and rental.state == "handed over"):
        return
    try:
        CanaryRecords(opened.store).keep(
            rental.provider, Canary.of(rental, answer.why_not, answer.host)
        )
    except StoreError as error:
        runner().log.warning("how the canary fared is not on record: %s", error)
