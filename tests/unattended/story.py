"""An installation that nobody looks at: real schedules act, and everything is killed meanwhile.

A person has run `make up`, saved blocks, submitted a job and switched schedules on, as the UI does.
From then on, nobody calls a flow; after a crash, somebody runs `make up`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from deployments.api import Api
from deployments.installation import CHECKOUT
from deployments.schedules import WATCH
from deployments.server import Server
from flows.procedures.run_key import RETRY_S
from tests.fixtures.inbox import Inbox
from tests.fixtures.own_installation import Alone
from tests.fixtures.waiting import PATIENCE_S
from tests.markets.gcp import FakeGcp, gcp_wares
from tests.markets.market import Clock, Market
from torpor.control.providers.gcp.deadline import DEADLINE_KEY
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.remote.probe import DEFAULT_HOME
from torpor.control.safety import never_handed_over
from torpor.machine.sampler.ring import RING

WATCH_S: Final = 30
BACKUP_S: Final = 120
"""A round of backups is six runs, one for each machine and one that starts them: 60 s of CPU."""
KEEP_LAST: Final = 2
STEPS: Final = 100
VISIT: Final = f"until [ -e {DEFAULT_HOME}/{RING} ]; do sleep 1; done; sleep 60"
"""A person stays for a minute after the first look, which starts the sampler: a machine on which
nobody was seen is not idle. Whoever kills everything first delays that."""
COUNT: Final = f"""\
starts=$(($(cat starts 2>/dev/null || echo 0) + 1)); echo $starts >starts
i=$(cat n 2>/dev/null || echo 0)
while [ "$i" -lt {STEPS} ]; do i=$((i+1)); echo $i >n.new; mv n.new n; sleep 0.1; done
while [ $starts -lt 2 ]; do sleep 1; done
echo "counted to $i"
"""
"""Ends only where it went on from a save: the first machine is lost."""
LOG: Final = """
from flows import job_status
say(job_status(sys.argv[1], sys.argv[2], lines=200).log.text)
"""


@dataclass
class Story:
    """``told``: when each outcome was first seen, in seconds since the cycle began."""

    alone: Alone
    inbox: Inbox
    gcp: FakeGcp
    say: Callable[[str], None]
    number: int = 0
    began_unix: float = field(default_factory=time.time)
    begun: float = field(default_factory=time.monotonic)
    seen: dict[str, float] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    visits: list[subprocess.Popen[bytes]] = field(default_factory=list)

    # -- what a person does

    def switch_on(self) -> None:
        """Shorten the schedules and switch them on."""
        thinned = {"keep_daily": 0, "keep_weekly": 0, "keep_monthly": 0, "keep_last": KEEP_LAST}
        switch_on(self.alone.server, "backup/backup-all", BACKUP_S, thinned)
        told = {"notify": ["custom-webhook/tests"], "backup_hours": 26}
        switch_on(self.alone.server, WATCH, WATCH_S, told)

    def set_up(self) -> None:
        """The blocks and machines of a new cycle, and its job."""
        self.number += 1
        self.begun, self.seen, self.kept = time.monotonic(), {}, set()
        wanted = {
            "number": self.number,
            "machines": str(self.alone.installation.machines),
            "hook": self.inbox.url,
            "gcp": {**self.gcp.settings(), "deadline_h": 1},
        }
        said, _ = self._python("tests.unattended.prepare", json.dumps(wanted)).communicate()
        self._visit(**json.loads(said))
        self.gcp.market.clock.now_unix = time.time()
        items = self.gcp.market.rented[-1].request["metadata"]["items"]
        for item in items:
            if item["key"] == DEADLINE_KEY:
                item["value"] = str(time.time() + 600)
        with Api(self.alone.server) as api:
            deployment = api.ask("GET", "deployments/name/job/job")
            given = {
                "workspace": f"work{self.number}",
                "command": ["sh", "-c", COUNT],
                "save_minutes": 0.1,
            }
            url = f"deployments/{deployment['id']}/create_flow_run"
            api.ask("POST", url, {"parameters": given})

    def tidy_up(self) -> None:
        """A person's work is over. Else each cycle would find a larger installation."""
        process = self._python("tests.unattended.prepare", json.dumps({"number": self.number}))
        process.communicate()
        assert process.returncode == 0, "tidy_up has failed"

    # -- what happens to it

    def lose_work(self) -> None:
        """The worker, the run and the machine of the job, at once."""
        self.say(f"killed: {len(self.alone.kill('job-worker'))} processes of the job worker")
        provider = LocalProvider(self.alone.installation.machines)
        for machine in provider.list_own():
            if machine.label is not None and machine.label.workspace == f"work{self.number}":
                provider.destroy(machine, never_handed_over(machine, machine.label))
                self.say(f"lost: machine {machine.id}")

    def lose(self, *roles: str) -> None:
        """What nobody but the supervisor brings back."""
        self.say(f"killed: {len(self.alone.kill(*roles))} processes of {', '.join(roles)}")

    def lose_everything(self) -> None:
        """Also the supervisor: `make up` is all that a person does then."""
        self.say(f"killed: all {len(self.alone.kill_everything())} processes of the installation")
        self.alone.up()
        self.say("make up")

    # -- what a person would find

    @contextmanager
    def looking(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """What was last seen of the workspaces of this cycle; each call waits for a new look."""
        found: dict[str, Any] = {}
        process = self._python("tests.unattended.look", str(self.number))

        def look() -> dict[str, Any]:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "the look ended"
            found.pop("error", None)  # of an earlier look
            found.update(json.loads(line))
            return found

        try:
            yield look
        finally:
            process.kill()
            process.communicate()

    def notice(self, found: dict[str, Any]) -> None:
        """Note each outcome that is there now."""
        if not found.keys() >= {"idle", "spent", "kept", "work", "left"}:
            return
        self.kept |= set(found["kept"]["snapshots"])
        work = found["work"]
        outcomes = {
            "an idle machine is hibernated": self._slept(found["idle"]),
            "a machine is hibernated when its budget is spent": self._slept(found["spent"]),
            "a job that lost its run, its worker and its machine has ended": (
                self._slept(work) and set(work["jobs"].values()) == {"succeeded"}
            ),
            "a backup was made and thinned": (
                len(self.kept) > KEEP_LAST and len(found["kept"]["snapshots"]) <= KEEP_LAST
            ),
            "an abandoned machine is ended": not (
                found["left"]["open"] + found["left"]["machines"]
            ),
            "an alert is delivered": bool(self.inbox.of(f"spent{self.number}")),
            "a deadline is renewed": self._deadline() > time.time() + 1800,
        }
        for outcome, there in outcomes.items():
            if there and outcome not in self.seen:
                self.seen[outcome] = time.monotonic() - self.begun
                self.say(f"{self.seen[outcome]:4.0f} s: {outcome}")

    def saved(self, found: dict[str, Any]) -> bool:
        """Whether the job has a save that it can continue from."""
        return any(found.get("work", {}).get("saves", []))

    def runs(self) -> Counter[str]:
        """How many runs there are of each flow and state."""
        with Api(self.alone.server) as api:
            flows = {flow["id"]: flow["name"] for flow in api.all("flows/filter", {})}
            runs = api.all("flow_runs/filter", {})
        return Counter(f"{flows[run['flow_id']]} {run['state_name']}" for run in runs)

    def log_of_job(self, found: dict[str, Any]) -> str:
        (job,) = found["work"]["jobs"]
        said: str = self.alone.python(LOG, f"work{self.number}", job)
        return said

    def _visit(self, host: str, port: int, user: str, key: str) -> None:
        """A person logs in for a while: a machine that nobody ever used is not idle."""
        file = self.alone.installation.folder / "a-person"
        file.touch(mode=0o600)
        file.write_text(key)
        argv = ["ssh", "-i", str(file), "-p", str(port), "-q", "-o", "StrictHostKeyChecking=no"]
        argv += ["-o", "UserKnownHostsFile=/dev/null", f"{user}@{host}", VISIT]
        self.visits.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL))

    def _slept(self, state: dict[str, Any]) -> bool:
        return bool(state["snapshots"]) and not state["open"] and not state["machines"]

    def _deadline(self) -> float:
        items = self.gcp.market.rented[-1].request["metadata"]["items"]
        return next((float(item["value"]) for item in items if item["key"] == DEADLINE_KEY), 0.0)

    def _python(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=CHECKOUT,
            env=self.alone.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )


OUTCOMES: Final = 7


def switch_on(server: Server, name: str, every_s: float, parameters: Mapping[str, Any]) -> None:
    """Switch the schedule of a deployment on, with the requests that the UI sends."""
    with Api(server) as api:
        deployment = api.ask("GET", f"deployments/name/{name}")
        wanted = {"parameters": {**deployment["parameters"], **parameters}}
        api.ask("PATCH", f"deployments/{deployment['id']}", wanted)
        (schedule,) = deployment["schedules"]
        url = f"deployments/{deployment['id']}/schedules/{schedule['id']}"
        api.ask("PATCH", url, {"active": False, "schedule": {"interval": every_s}})
        api.ask("PATCH", url, {"active": True})


@contextmanager
def unattended(alone: Alone, say: Callable[[str], None]) -> Iterator[Story]:
    inbox, gcp = Inbox(), FakeGcp(Market(clock=Clock(time.time()), wares=gcp_wares()))
    try:
        story = Story(alone, inbox, gcp, say)
        try:
            yield story
        finally:
            for visit in story.visits:
                visit.kill()
                visit.wait()
    finally:
        inbox.close()
        gcp.close()


def cycle(story: Story, strike: Callable[[Story], None]) -> dict[str, Any]:
    """One cycle, in which the job loses everything, and then ``strike`` is done. Returns the last
    look; fails once it counts as a hang."""
    story.set_up()
    hangs = time.monotonic() + RETRY_S + PATIENCE_S
    struck = False
    with story.looking() as look:
        while len(story.seen) < OUTCOMES:
            found = look()
            story.notice(found)
            if not struck and story.saved(found):
                story.lose_work()
                strike(story)
                struck = True
            assert time.monotonic() < hangs, f"seen only {story.seen} of {found}"
    assert struck
    return found
