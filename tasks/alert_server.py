"""What alerts need of the installation's server: runs, notification blocks, and a memory."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from torpor.control.alerts.delivery import Remembered
from torpor.control.alerts.runs import FailedRun, FlowSchedule
from torpor.control.reports import moment
from torpor.shared.errors import NotDelivered


class LiveRun(msgspec.Struct, frozen=True):
    """A run that has not ended, as the server shows it. Its process may be gone all the same."""

    name: str
    flow: str
    workspace: str  # the Workspace block; empty if the run is for no workspace
    began_unix: float


class ComingRun(msgspec.Struct, frozen=True):
    """The next run that a schedule starts. ``workspace``: the block; `all workspaces`; or empty."""

    flow: str
    workspace: str
    at_unix: float

    def words(self) -> str:
        return f"{self.flow} {moment(self.at_unix)}"


class Sleeping(msgspec.Struct, frozen=True):
    """What the schedule of `watch` does with idle machines. ``off``: why `watch` hibernates none.
    ``only``: the blocks that `watch` looks at; empty for all. ``at_unix``: by machine and provider,
    when the last look expects it to have been idle for long enough."""

    off: str = ""
    only: tuple[str, ...] = ()
    at_unix: dict[str, float] = {}

    def never(self, block: str) -> str:
        """Why `watch` hibernates no idle machine of this block's workspace; empty if it does."""
        if self.off or not self.only or block in self.only:
            return self.off
        return f"watch looks at other workspaces only: {', '.join(self.only)}"


NO_WATCH: Final = Sleeping("the schedule of watch is off")


class AlertServer(Protocol):
    """What alerts need of the installation's server. It sends by notification blocks, and remembers
    alerts beside those blocks. Any call may raise whatever the server's client raises."""

    def notifiers(self) -> list[str]:
        """The notification blocks that `torpor up --notify` has named, as type/name."""

    def notify(self, block: str, subject: str, body: str) -> None:
        """Send a message by this block; NotDelivered unless the block accepted it."""

    def remembered(self) -> list[Remembered]:
        """Every alert that an earlier run has remembered and none has forgotten."""

    def remember(self, one: Remembered) -> None:
        """Remember this state of the alert, in place of the earlier one."""

    def forget(self, one: Remembered) -> None:
        """Forget the alert. Forgetting an unknown alert is no error."""

    def failed_runs(self, since_unix: float) -> list[FailedRun]:
        """The runs of deployments that have failed or crashed since then."""

    def live_runs(self) -> list[LiveRun]:
        """The runs that work on a workspace now."""

    def schedule(self, flow: str, now_unix: float) -> FlowSchedule:
        """The schedules that are on, of all deployments of this flow."""

    def coming(self) -> list[ComingRun]:
        """The next run of each deployment whose schedule is on, for each workspace."""

    def sleeping(self) -> Sleeping:
        """What `watch` does with idle machines."""


class NobodyListens:
    """The alert server of runs without a Prefect server: it sends nothing and remembers nothing."""

    def notifiers(self) -> list[str]:
        return []

    def notify(self, block: str, subject: str, body: str) -> None:
        raise NotDelivered(f"{block} was not notified: this run has no server and so no blocks")

    def remembered(self) -> list[Remembered]:
        return []

    def remember(self, one: Remembered) -> None:
        """Does nothing: there is no memory."""

    def forget(self, one: Remembered) -> None:
        """Does nothing: there is no memory."""

    def failed_runs(self, since_unix: float) -> list[FailedRun]:
        return []

    def live_runs(self) -> list[LiveRun]:
        return []

    def schedule(self, flow: str, now_unix: float) -> FlowSchedule:
        return FlowSchedule(deployment=flow, active=False, coming={}, due_unix={}, ended_unix=None)

    def coming(self) -> list[ComingRun]:
        return []

    def sleeping(self) -> Sleeping:
        return NO_WATCH
