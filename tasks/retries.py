"""How steps are retried: the error says whether the same call may succeed later."""

from __future__ import annotations

from typing import Final, NamedTuple

from torpor.shared.errors import StoreUnreachable, TorporError, WorkspaceBusy


class StepRetries(NamedTuple):
    """The waits between the tries of a step; after the last wait there is one more try."""

    waits_s: tuple[float, ...]
    busy_too: bool = False
    unreachable_too: bool = True

    def again(self, error: BaseException) -> bool:
        """Whether a step that failed with ``error`` may succeed when it is called again."""
        if self.busy_too and isinstance(error, WorkspaceBusy):
            return True
        if isinstance(error, StoreUnreachable) and not self.unreachable_too:
            return False
        return isinstance(error, TorporError) and error.retryable


USUAL: Final = StepRetries((1.0, 5.0, 20.0))
"""The retries of a step that may be repeated. Every step of torpor is idempotent."""

FIRST_OF_STORE: Final = StepRetries(USUAL.waits_s, unreachable_too=False)
"""The retries of the first step of a run that asks the store. A store that cannot be reached fails
the step after the five attempts of the request, within seconds; one that is slow or busy is asked
again."""

WHILE_BUSY: Final = StepRetries((15.0,) * 6, busy_too=True)
"""The retries of a step that waits for another run that holds the workspace on the machine: 90 s,
longer than the minute after which a run without its control side gives up."""

ONCE: Final = StepRetries(())
"""The retries of a step that must not be repeated, or whose own loop waits and repeats."""
