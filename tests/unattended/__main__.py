"""The unattended installation for an hour, with kills of each of its processes.

    python -m tests.unattended --minutes 60 [--seed 1] [--report FILE]

Cycle after cycle, an idle machine, a spent budget, a job, backups, an abandoned machine and a
deadline are left to the schedules. In each, the job loses its run, worker and machine, and another
part of the installation is killed. Ends with an error if an outcome does not come.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from deployments.processes import running
from tests.campaign.command import Command, Found, Given
from tests.fixtures.own_installation import installed_alone
from tests.unattended.story import Story, cycle, unattended

STRIKES: Final[dict[str, Callable[[Story], None]]] = {
    "everything": Story.lose_everything,
    "server": lambda story: story.lose("server"),
    "store": lambda story: story.lose("store"),
    "worker": lambda story: story.lose("worker"),
    "job worker": lambda story: story.lose("job-worker"),
    "supervisor": lambda story: _lose_supervisor(story),
}


def _carry_out(seed: int, minutes: int, given: Given) -> Found:
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {words}", flush=True)

    rng = random.Random(seed)
    cycles: list[dict[str, Any]] = []
    with installed_alone() as alone, unattended(alone, say) as story:
        alone.up()
        story.switch_on()
        while time.monotonic() - began < minutes * 60:
            name = rng.choice([*STRIKES]) if cycles else "everything"
            say(f"cycle {len(cycles) + 1}, with a kill of: {name}")
            cycle(story, STRIKES[name])
            cycles.append({"killed": name, "seconds_to": dict(story.seen)})
            say(f"memory: {_memory_mib(story)}")
            story.tidy_up()
        report = {
            "cycles": cycles,
            "runs": dict(sorted(story.runs().items())),
            "memory_mib": _memory_mib(story),
            "database_mib": _database_mib(story),
            "told": [
                {"at_s": round(at - story.began_unix), "subject": mail["subject"]}
                for at, mail in zip(story.inbox.arrived_unix, story.inbox.mail, strict=True)
            ],
        }
    return Found(f"{len(cycles)} cycles", [], report)


def _lose_supervisor(story: Story) -> None:
    """The server, the store and the workers end with it: nothing starts them but `make up`."""
    story.lose("supervisor")
    story.alone.up()
    story.say("make up")


def _memory_mib(story: Story) -> dict[str, int]:
    """What each process of the installation itself holds, in MiB."""
    found = {}
    for role in ("supervisor", "server", "worker", "job-worker"):
        ours = running(story.alone.installation, role)
        oldest = min(ours, key=lambda process: process.create_time(), default=None)
        found[role] = oldest.memory_info().rss >> 20 if oldest else 0
    return found


def _database_mib(story: Story) -> int:
    home = story.alone.installation.prefect_home
    return sum(file.stat().st_size for file in home.glob("prefect.db*")) >> 20


COMMAND: Final = Command("tests.unattended", "minutes", 60, _carry_out)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
