"""A market that answers as it was recorded, and how the samples were recorded from the fakes.

python -m tests.contracts.replay vast runpod
"""

from __future__ import annotations

import secrets
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import asyncssh
import msgspec

from tests.markets.every import FAKES
from tests.markets.server import KEY, Answer, FakeMarket, Request
from torpor.control.providers.market_client import observed
from torpor.control.rental.records import Rental
from torpor.control.smoke.login import Inside
from torpor.control.smoke.plan import Plan, make_plan
from torpor.control.smoke.recording import PLAN, Recorder
from torpor.control.smoke.redact import Redactor
from torpor.control.smoke.trial import SmokeReport, Trial
from torpor.shared.errors import ProviderError
from torpor.shared.values import Endpoint

RECORDED: Final = Path(__file__).with_name("recorded")
_SAMPLE: Final = Inside(
    umask="0022", python="Python 3.12.3", system="Ubuntu 24.04.2 LTS", variables=("HOME", "PATH")
)


class Recording(msgspec.Struct, frozen=True):
    """What a folder holds."""

    plan: Plan
    rentals: tuple[str, str]
    report: SmokeReport
    exchanges: list[dict[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> Recording:
        told = msgspec.json.decode((folder / f"{PLAN}.json").read_bytes())
        report = msgspec.json.decode((folder / "report.json").read_bytes(), type=SmokeReport)
        files = sorted(folder.glob("[0-9]*.json"))
        exchanges = [msgspec.json.decode(file.read_bytes()) for file in files]
        plan, rentals = told["plan"], told["rentals"]
        return cls(msgspec.convert(plan, Plan), tuple(rentals), report, exchanges)


class Replay:
    """Answers for a fake. A request that changes something moves on to the next one like it. Until
    the one after that, looks get their answers in order, and the last of them again."""

    def __init__(self, exchanges: list[dict[str, Any]]) -> None:
        self._exchanges = exchanges
        self._begin = 0  # of the looks that may follow now
        self._used: set[int] = set()
        self.missing: list[tuple[str, str]] = []

    def answer(self, request: Request, authorization: str) -> Answer | None:
        asked = request.method, request.path
        same = [
            number
            for number, exchange in enumerate(self._exchanges)
            if (exchange["method"], exchange["path"]) == asked
        ]
        if request.method == "GET":
            end = self._next_change()
            fresh = [n for n in same if self._begin <= n < end and n not in self._used]
            number = fresh[0] if fresh else max((n for n in same if n < end), default=-1)
        else:
            later = [n for n in same if n >= self._begin]
            number = later[0] if later else max(same, default=-1)
            self._begin = max(self._begin, number + 1)
        if number < 0:
            self.missing.append(asked)
            return Answer(404, {"error": "this was not recorded"})
        self._used.add(number)
        exchange = self._exchanges[number]
        status, body = exchange["status"], exchange["body"]
        return None if status is None else Answer(status, body)

    def _next_change(self) -> int:
        for number, exchange in enumerate(self._exchanges):
            if number >= self._begin and exchange["method"] != "GET":
                return number
        return len(self._exchanges)


class Told:
    """A machine's SSH server that says what it said when it was recorded."""

    def __init__(self, inside: Inside | None) -> None:
        self._inside = inside

    def fault(self, endpoint: Endpoint, host_key: str | None) -> str | None:
        return None

    def look(self, endpoint: Endpoint) -> Inside:
        if self._inside is None:
            raise ProviderError("nobody logged in when it was recorded")
        return self._inside


def tried(
    provider: Any, plan: Plan, rentals: tuple[str, str], inside: Inside | None
) -> SmokeReport:
    """The smoke test without SSH, on a clock that only waits move."""
    now_s = 0.0

    def nap(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def nobody(rental: Rental) -> None:
        """Nothing is rented here."""

    key = asyncssh.generate_private_key("ssh-ed25519")
    plan = msgspec.structs.replace(plan, provider=provider.identity)
    trial = Trial(provider, plan, key, Told(inside), nobody, rentals, nap=nap, clock=lambda: now_s)
    return trial.run()


def replayed(fake: FakeMarket, recording: Recording) -> tuple[SmokeReport, Replay]:
    """The smoke test at a market that answers as recorded. ``fake`` gives its adapter alone."""
    replay = Replay(recording.exchanges)
    fake.answer = replay.answer  # type: ignore[method-assign]
    provider = fake.connect()
    make_plan(provider, max_usd=1000.0)
    report = tried(provider, recording.plan, recording.rentals, recording.report.inside)
    return report, replay


def record(market: str, folder: Path) -> str:
    """Run the smoke test at the fake of that market, and keep what was said; returns what the
    market was asked for, with its secrets."""
    shutil.rmtree(folder, ignore_errors=True)
    recorder = Recorder(folder, Redactor([KEY]))
    with FAKES[market]() as fake:
        fake.market.next_starting_looks = 1
        with observed(recorder):
            provider = fake.connect()
        plan = make_plan(provider, max_usd=1000.0)
        rentals = secrets.token_hex(8), secrets.token_hex(8)
        recorder.keep(PLAN, {"plan": plan.without_account(), "rentals": rentals})
        gpus = (f"NVIDIA {plan.offer.gpu}, 24564 MiB, 570.86",) * plan.offer.gpu_count
        inside = msgspec.structs.replace(_SAMPLE, gpus=gpus)
        recorder.keep("report", tried(provider, plan, rentals, inside))
        return str([machine.request for machine in fake.market.rented])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        record(name, RECORDED / f"{name}-sample")
