"""The machine ends, however the command that rented it goes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import asyncssh
import msgspec
import psutil
import pytest

from deployments.installation import CHECKOUT
from tests.fixtures.machines import KeyPair
from tests.fixtures.waiting import PATIENCE_S, until
from tests.markets.faults import Fault
from tests.markets.server import KEY
from tests.markets.vast import FakeVast
from torpor.control.providers.vast import VastProvider
from torpor.control.rental.order import order_for
from torpor.control.rental.records import Rental
from torpor.control.smoke.ending import end
from torpor.control.smoke.plan import make_plan
from torpor.control.smoke.trial import OWNER, WORKSPACE
from torpor.control.smoke.watchdog import LEDGER, Watchdog, end_left, serve, watch
from torpor.shared.errors import InvalidInput, ProviderError
from torpor.shared.values import Label, Machine

IDENTITY: Final = VastProvider(KEY).identity


@pytest.fixture
def vast() -> Iterator[FakeVast]:
    with FakeVast() as fake:
        yield fake


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        self._master, slave = pty.openpty()
        hears = ["env", "--default-signal=HUP"]  # also where these tests run under nohup
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *hears, *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=CHECKOUT,
        )
        os.close(slave)
        self._is_open = True

    def close(self) -> None:
        """Its session gets SIGHUP."""
        if self._is_open:
            self._is_open = False
            os.close(self._master)


@pytest.mark.parametrize("goes", ["its terminal is closed", "it is killed"])
def test_a_command_that_is_gone_after_the_create_leaves_no_machine(
    vast: FakeVast, tmp_path: Path, goes: str
) -> None:
    log = tmp_path / "watchdog.log"
    module = "tests.control.smoke.terminal"
    terminal = Terminal(sys.executable, "-m", module, "command", vast.url, str(log))
    until(lambda: vast.market.alive() or terminal.process.poll() is not None, "a machine is rented")
    assert len(vast.market.alive()) == 1
    vast.faults.arm(Fault("lost", "destroy"))  # and the first try has no answer
    if goes == "it is killed":
        terminal.process.kill()
    else:
        terminal.close()
    assert terminal.process.wait() < 0  # by a signal: it ended nothing itself
    until(lambda: "has ended" in log.read_text(), "the watchdog has proven the end")
    assert vast.market.alive() == []
    assert "the command has gone" in log.read_text()
    assert vast.key not in log.read_text()
    terminal.close()


def test_what_a_power_cut_of_command_and_watchdog_left_is_ended_by_the_next_start(
    vast: FakeVast, tmp_path: Path
) -> None:
    log = tmp_path / "vast-1" / "watchdog.log"
    log.parent.mkdir()
    module = "tests.control.smoke.terminal"
    terminal = Terminal(sys.executable, "-m", module, "command", vast.url, str(log))
    until(lambda: vast.market.alive() or terminal.process.poll() is not None, "a machine is rented")
    assert end_left(tmp_path) == []  # its command lives
    (watchdog,) = psutil.Process(terminal.process.pid).children()
    watchdog.kill()
    terminal.process.kill()
    assert terminal.process.wait() < 0 and len(vast.market.alive()) == 1
    until(lambda: not watchdog.is_running(), "the watchdog is gone")
    (said,) = end_left(tmp_path)
    assert f"what it rented is ended, see {log}" in said
    until(lambda: not log.with_name(LEDGER).exists(), "the watchdog has proven the end")
    assert vast.market.alive() == [] and "has ended" in log.read_text()
    assert end_left(tmp_path) == []
    terminal.close()


def test_what_nobody_can_end_is_named_until_its_user_has_seen_to_it(tmp_path: Path) -> None:
    ledger = tmp_path / "vast-1" / LEDGER
    ledger.parent.mkdir()
    ledger.write_bytes(b'{"argv": ["python", "-c", "raise SystemExit(1)"]}\n')
    for _ in range(2):
        (said,) = end_left(tmp_path)
        assert "may have left a machine" in said and f"then delete {ledger}" in said


def _rental(state: str, **more: object) -> Rental:
    told = {
        "label": Label(OWNER, WORKSPACE, "0" * 16),
        "provider": IDENTITY,
        "state": state,
        "created_unix": time.time(),
    }
    return msgspec.convert({**told, **more}, Rental)


class Pipe:
    """What the command says, to a watchdog in this process."""

    def __init__(self, vast: FakeVast, key: KeyPair) -> None:
        self.provider = vast.connect()
        self.source, self._end = os.pipe()
        self._identity = asyncssh.import_private_key(key.private)
        self.said: list[str] = []
        self.napped: list[float] = []

    def tell(self, rental: Rental) -> None:
        os.write(self._end, msgspec.json.encode(rental) + b"\n")

    def close(self) -> None:
        os.close(self._end)

    def rent(self, rental: Rental) -> None:
        offer = make_plan(self.provider, max_usd=10.0).offer
        self.provider.create(order_for(offer, rental.label, self._identity))

    def watch(self, lifetime_s: float = 60.0, nap: Callable[[float], None] | None = None) -> None:
        watch(self.provider, self.source, lifetime_s, self.said.append, nap or self.napped.append)
        os.close(self.source)


@pytest.fixture
def pipe(vast: FakeVast, identity_key: KeyPair) -> Pipe:
    return Pipe(vast, identity_key)


def test_a_machine_whose_time_is_over_is_ended_while_the_command_hangs(
    vast: FakeVast, pipe: Pipe
) -> None:
    rental = _rental("asked")
    pipe.rent(rental)
    pipe.tell(rental)
    with ThreadPoolExecutor() as threads:
        watches = threads.submit(pipe.watch, 0.1)
        until(lambda: not vast.market.alive(), "the machine has ended")
        pipe.close()
        watches.result(PATIENCE_S)
    assert pipe.said[0] == "0 min are over"


def test_a_machine_that_is_asked_for_after_the_time_is_ended_too(
    vast: FakeVast, pipe: Pipe
) -> None:
    early = _rental("asked")
    pipe.tell(early)
    with ThreadPoolExecutor() as threads:
        watches = threads.submit(pipe.watch, 0.0)
        until(lambda: any("has ended" in said for said in pipe.said), "nothing was found")
        for number in (1, 2):
            late = _rental("asked", label=Label(OWNER, WORKSPACE, str(number) * 16))
            pipe.rent(late)
            assert len(vast.market.alive()) == 1
            pipe.tell(late)
            until(lambda: not vast.market.alive(), "the late machine has ended")
        assert not watches.done()
        pipe.close()
        watches.result(PATIENCE_S)


def test_what_the_command_has_ended_is_left_alone(vast: FakeVast, pipe: Pipe) -> None:
    for state in ("asked", "standing", "ended"):
        pipe.tell(_rental(state))
    pipe.close()
    pipe.watch()
    assert pipe.said == ["nothing is left to end"]
    assert vast.calls == []


def test_a_request_that_was_on_its_way_is_waited_for(vast: FakeVast, pipe: Pipe) -> None:
    rental = _rental("asked", created_unix=time.time() - 250)  # its answer took long
    pipe.tell(rental)
    pipe.close()
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:  # the market has settled once
            pipe.rent(rental)

    pipe.watch(nap=nap)
    assert vast.market.alive() == []
    assert len(vast.market.rented) == 1
    settling_s = pipe.provider.abilities.settling_s
    assert naps[:2] == [pytest.approx(settling_s, abs=60.0)] * 2


def test_a_market_that_refuses_for_a_while_is_asked_again(vast: FakeVast, pipe: Pipe) -> None:
    rental = _rental("asked")
    pipe.rent(rental)
    pipe.tell(rental)
    pipe.close()
    vast.faults.arm(Fault("denied", "list", count=30))
    pipe.watch()
    assert vast.market.alive() == []
    assert "not allowed" in pipe.said[1]
    assert "has ended" in pipe.said[-1]


def test_no_fault_of_ours_ends_the_watchdog_while_a_machine_may_live(
    vast: FakeVast, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    rental = _rental("asked")
    pipe.rent(rental)
    pipe.tell(rental)
    pipe.close()
    faults = [RuntimeError("a fault"), OSError("no space left on device")]
    real = pipe.provider.list_own

    def faulty() -> list[Machine]:
        if faults:
            raise faults.pop(0)
        return real()

    monkeypatch.setattr(pipe.provider, "list_own", faulty)
    pipe.watch()
    assert (vast.market.alive(), faults) == ([], [])
    assert "RuntimeError: a fault" in pipe.said[1]
    assert "has ended" in pipe.said[-1]


def test_another_s_machine_is_left_alone(vast: FakeVast, pipe: Pipe) -> None:
    other = _rental("asked", label=Label("torpor", WORKSPACE, "f" * 16))
    pipe.rent(other)
    by_hand = vast.rent_by_hand()
    rental = _rental("asked")
    pipe.rent(rental)
    pipe.tell(rental)
    pipe.close()
    pipe.watch()
    assert len(vast.market.alive()) == 2
    assert by_hand.alive


def test_a_watchdog_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="nothing was rented"):
        Watchdog([sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "log")


def test_a_watchdog_that_has_ended_lets_nothing_be_rented(tmp_path: Path) -> None:
    dog = Watchdog([sys.executable, "-c", "print('ready')"], tmp_path / "log")
    until(lambda: _is_gone(dog.pid), "the watchdog has ended")
    with pytest.raises(ProviderError, match="nothing was rented"):
        dog.tell(_rental("asked"))
    dog.tell(_rental("ended"))
    dog.close()


def _is_gone(pid: int) -> bool:
    return " Z " in Path(f"/proc/{pid}/stat").read_text()


def test_a_watchdog_of_another_account_does_not_start(vast: FakeVast) -> None:
    with pytest.raises(ProviderError, match="nothing is watched"):
        serve(vast.connect(), "vast://another", 60.0, Path("unused"))


def test_no_end_is_proven_at_another_provider(vast: FakeVast) -> None:
    with pytest.raises(InvalidInput, match="nothing proves its end"):
        end(vast.connect(), _rental("standing", provider="vast://another"), nap=lambda s: None)
    assert vast.calls == []
