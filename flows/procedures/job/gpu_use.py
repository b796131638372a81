"""Takes what the machine's sampler saw of the GPUs into the record of the attempt."""

from __future__ import annotations

import time
from typing import Final

from tasks.jobs import read_activity
from tasks.runner import runner
from torpor.control.jobs.driven_job import Driven
from torpor.control.remote.seam import Agent
from torpor.shared.errors import AgentLost, TorporError

LOOK_S: Final = 60.0


class GpuUse:
    """What the running attempt uses. An earlier look covers the time until it was last seen."""

    def __init__(self, driven: Driven, session: Agent) -> None:
        attempt = driven.job.attempt
        self._driven = driven
        self._session = session
        self._since: float | None = None
        if attempt is not None:
            self._since = time.monotonic() - max(0.0, time.time() - attempt.seen_unix)

    def look(self) -> None:
        """Call it while the command runs. Costs a request every LOOK_S, and raises AgentLost."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        seconds = now - self._since
        if seconds < LOOK_S:
            return
        self._since = now
        try:
            activity = read_activity(self._session, seconds)
        except AgentLost:
            raise
        except TorporError as error:
            runner().log.warning("what the job uses of its GPUs is not known: %s", error)
            return
        self._driven.use(activity, seconds)
