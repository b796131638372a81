"""What a smoke test keeps of its exchanges with a market holds no secret, and an answer that its
adapter does not understand fails the test."""

from __future__ import annotations

import base64
import re
import secrets
from pathlib import Path
from typing import Any, Final

import asyncssh
import msgspec
import pytest

from tests.markets.every import FAKES
from tests.markets.server import KEY, Answer, FakeMarket, Request
from torpor.control.providers.market_client import observed
from torpor.control.rental.records import Rental
from torpor.control.smoke.login import Inside
from torpor.control.smoke.plan import make_plan
from torpor.control.smoke.recording import Recorder
from torpor.control.smoke.redact import Redactor
from torpor.control.smoke.trial import SmokeReport, SmokeTrial
from torpor.shared.values import Endpoint

_PACKED_SCRIPT: Final = base64.b64encode(b"#!/bin/sh\nse").decode()
_SAMPLE: Final = Inside(
    umask="0022", python="Python 3.12.3", system="Ubuntu 24.04.2 LTS", variables=("HOME", "PATH")
)


class _Door:
    """A machine's SSH server, without SSH."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside

    def fault(self, endpoint: Endpoint, host_key: str | None) -> str | None:
        return None

    def look(self, endpoint: Endpoint) -> Inside:
        return self._inside


def _tried(fake: FakeMarket, recorder: Recorder) -> SmokeReport:
    """The smoke test, on a clock that only waits move."""
    now_s = 0.0

    def nap(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def nobody(rental: Rental) -> None:
        """No watchdog is there."""

    fake.market.next_starting_looks = 1
    with observed(recorder):
        provider = fake.connect()
    plan = make_plan(provider, max_usd=1000.0)
    gpus = (f"NVIDIA {plan.offer.gpu}, 24564 MiB, 570.86",) * plan.offer.gpu_count
    door = _Door(msgspec.structs.replace(_SAMPLE, gpus=gpus))
    key = asyncssh.generate_private_key("ssh-ed25519")
    rentals = secrets.token_hex(8), secrets.token_hex(8)
    trial = SmokeTrial(provider, plan, key, door, nobody, rentals, nap=nap, clock=lambda: now_s)
    return trial.run()


@pytest.mark.parametrize("market", sorted({*FAKES} - {"ec2"}))  # boto3 sends for it
def test_a_recording_holds_no_secret(market: str, tmp_path: Path) -> None:
    redactor = Redactor([KEY])
    with FAKES[market]() as fake:
        report = _tried(fake, Recorder(tmp_path / "recorded", redactor))
        asked = str([machine.request for machine in fake.market.rented])
    assert report.passed
    files = [*(tmp_path / "recorded").iterdir()]
    exchanges = [msgspec.json.decode(file.read_bytes()) for file in files]
    assert exchanges
    assert all(redactor.value(exchange) == exchange for exchange in exchanges)
    written = "".join(file.read_text() for file in files)
    passwords = re.findall(r"'root_pass': '([^']+)'", asked)
    for secret in (KEY, _PACKED_SCRIPT, "BEGIN OPENSSH", "AAAAC3Nza", *passwords):
        assert secret not in written
    assert bool(passwords) == (market == "hostkey")


@pytest.mark.parametrize("market", ["vast", "runpod"])
def test_an_answer_of_another_shape_is_noticed_and_its_machine_ends(
    market: str, tmp_path: Path
) -> None:
    """A market that has renamed the fields of its answer to a create."""
    with FAKES[market]() as fake:
        as_ever = fake.answer

        def renamed(request: Request, authorization: str) -> Answer | None:
            before = len(fake.market.rented)
            answer = as_ever(request, authorization)
            if answer is None or len(fake.market.rented) == before:
                return answer
            body: Any = {f"new_{name}": value for name, value in answer.body.items()}
            return Answer(answer.status, body)

        fake.answer = renamed  # type: ignore[method-assign]
        report = _tried(fake, Recorder(tmp_path / "recorded", Redactor([KEY])))
        assert not report.passed
        assert len(fake.market.rented) == 1 and fake.market.alive() == []
