from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from tests.fixtures.waiting import PATIENCE_S
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.providers.provider import Absent
from torpor.control.rental.waiting import ssh_banner_fault, wait_until_reachable
from torpor.shared.errors import (
    CreateFailed,
    MachineUnreachable,
    ProviderDenied,
    ProviderError,
)
from torpor.shared.values import Endpoint, Label, Machine, MachineId, workspace_name

AT = Endpoint("127.0.0.1", 22, "me")
LABEL = Label("me", workspace_name("w"), "1")
ID = MachineId("m-1")


class Scripted(LocalProvider):
    """A provider whose ``find`` says one thing after the other, then the last one for ever."""

    identity = "scripted:1"
    abilities = msgspec.structs.replace(LocalProvider.abilities, settling_s=10)

    def __init__(self, *says: Machine | Absent | Exception) -> None:
        self._says = list(says)

    def find(self, machine: MachineId) -> Machine | Absent:
        said = self._says.pop(0) if len(self._says) > 1 else self._says[0]
        if isinstance(said, Exception):
            raise said
        return said


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def __call__(self) -> float:
        return self.now


STARTING = Machine(ID, "scripted:1", LABEL, "starting", None, note="pulling the image")
QUEUED = Machine(ID, "scripted:1", LABEL, "queued", None, note="queued in gpus")
RUNNING = Machine(ID, "scripted:1", LABEL, "running", AT)


def _wait(
    provider: Scripted,
    clock: Clock,
    greets: Callable[[Endpoint], str | None] = lambda _: None,
    **more: Any,
) -> Machine:
    how = {"timeout_s": 60, "sleep": clock.sleep, "clock": clock, "greets": greets, **more}
    return wait_until_reachable(provider, ID, **how)


def test_it_waits_through_a_start_a_silent_provider_and_a_silent_ssh() -> None:
    clock = Clock()
    answers = iter(["connection refused", None])
    provider = Scripted(
        STARTING, MachineUnreachable("api down"), ProviderError("500"), STARTING, RUNNING
    )
    assert _wait(provider, clock, lambda _: next(answers)) == RUNNING
    assert len(clock.slept) == 5
    assert clock.slept[-1] > clock.slept[0]


def test_ssh_is_tried_between_two_questions_to_the_provider() -> None:
    """Markets count questions. A machine that boots for a minute is seen within half a second."""
    clock, asked = Clock(), list[float]()

    class Counted(Scripted):
        def find(self, machine: MachineId) -> Machine | Absent:
            asked.append(clock.now)
            return RUNNING

    _wait(Counted(RUNNING), clock, lambda _: "refused" if clock.now < 50 else None)
    assert 50 <= clock.now <= 50.5
    assert 10 < len(asked) < 30
    assert max(later - earlier for earlier, later in pairwise(asked)) <= 5.01


@pytest.mark.parametrize("state", ["stopped", "stopping"])
def test_a_machine_that_dies_is_a_failed_create(state: Any) -> None:
    dead = Machine(ID, "scripted:1", LABEL, state, None, 0, "no image")
    with pytest.raises(CreateFailed, match=f"{state}.*no image"):
        _wait(Scripted(STARTING, dead), Clock())


def test_absent_is_not_gone() -> None:
    """A market may show a machine minutes after it was created."""
    assert _wait(Scripted(Absent(), Absent(), RUNNING), Clock()) == RUNNING
    with pytest.raises(MachineUnreachable, match="does not show it"):
        _wait(Scripted(Absent()), Clock())


def test_a_proof_of_its_end_counts_once_the_provider_has_settled() -> None:
    ended = Absent("404, and no page of the list has it")
    assert _wait(Scripted(ended, ended, RUNNING), Clock()) == RUNNING
    clock = Clock()
    with pytest.raises(CreateFailed, match="ended before SSH answered: 404"):
        _wait(Scripted(ended), clock)
    assert 10 <= clock.now < 60


def test_time_is_over_with_the_last_words() -> None:
    clock = Clock()
    with pytest.raises(MachineUnreachable, match="within 60 s: it is starting pulling the image"):
        _wait(Scripted(STARTING), clock)
    assert clock.now == pytest.approx(60)
    assert max(clock.slept) <= 5
    with pytest.raises(MachineUnreachable, match="refused"):
        _wait(Scripted(RUNNING), Clock(), lambda _: "connection refused")


BARE = msgspec.structs.replace(RUNNING, endpoint=None, note="RUNNING")


def test_a_machine_that_runs_without_an_address_is_given_up_after_its_market_s_own_time() -> None:
    provider, clock = Scripted(STARTING, STARTING, BARE), Clock()
    provider.abilities = msgspec.structs.replace(provider.abilities, address_s=20.0)
    with pytest.raises(CreateFailed, match="without an address for SSH: RUNNING"):
        _wait(provider, clock)
    assert 20 <= clock.now <= 27
    provider = Scripted(BARE, BARE, STARTING, BARE, RUNNING)
    provider.abilities = msgspec.structs.replace(provider.abilities, address_s=1.0)
    assert _wait(provider, Clock()) == RUNNING
    for between in (QUEUED, STARTING):  # it was evicted, or is started again
        provider = Scripted(BARE, *[between] * 8, BARE, RUNNING)
        able = provider.abilities
        provider.abilities = msgspec.structs.replace(able, address_s=10.0, queue_s=999.0)
        assert _wait(provider, Clock()) == RUNNING
    with pytest.raises(MachineUnreachable, match="without an address"):
        _wait(Scripted(BARE), Clock())
    provider, clock = Scripted(*[BARE, ProviderError("no answer")] * 60), Clock()
    provider.abilities = msgspec.structs.replace(provider.abilities, address_s=20.0)
    with pytest.raises(CreateFailed, match="without an address"):
        _wait(provider, clock)
    assert 20 <= clock.now <= 31


def test_a_market_that_limits_requests_is_asked_no_more_often() -> None:
    asked: list[float] = []
    clock = Clock()

    class Counted(Scripted):
        def find(self, machine: MachineId) -> Machine | Absent:
            asked.append(clock.now)
            return STARTING

    provider = Counted(STARTING)
    provider.abilities = msgspec.structs.replace(provider.abilities, poll_s=10.0)
    with pytest.raises(MachineUnreachable):
        _wait(provider, clock, timeout_s=300)
    assert min(later - earlier for earlier, later in pairwise(asked[:-1])) >= 7.5
    assert len(asked) <= 40


@contextmanager
def _saying(words: bytes) -> Iterator[Endpoint]:
    """A server that says some bytes to one client and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def say() -> None:
            with listener.accept()[0] as link:
                link.sendall(words)

        thread = threading.Thread(target=say)
        thread.start()
        yield Endpoint("127.0.0.1", listener.getsockname()[1], "me")
        thread.join(PATIENCE_S)


def test_only_an_ssh_server_s_banner_will_do() -> None:
    with _saying(b"welcome\r\nSSH-2.0-OpenSSH_9.2\r\n") as endpoint:
        assert ssh_banner_fault(endpoint) is None
    with _saying(b"HTTP/1.1 400 Bad Request\r\n") as endpoint:
        assert "HTTP/1.1 400" in str(ssh_banner_fault(endpoint))
    assert "refused" in str(ssh_banner_fault(endpoint))  # it has hung up


def test_the_time_in_a_queue_does_not_count_and_is_told_once_for_each_reason() -> None:
    queued = [msgspec.structs.replace(QUEUED, note=f"queued: {n} before it") for n in (2, 2, 1)]
    provider, clock, told = Scripted(*queued * 20, RUNNING), Clock(), list[str]()
    seen: list[float] = []
    provider.abilities = msgspec.structs.replace(provider.abilities, queue_s=3600.0)
    _wait(provider, clock, timeout_s=5, told=told.append, queued=lambda: seen.append(clock.now))
    assert clock.now > 60
    assert len(seen) == len(queued) * 20
    assert told[:2] == [
        "machine m-1 at scripted:1 is queued: 2 before it",
        "machine m-1 at scripted:1 is queued: 1 before it",
    ]
    assert len(told) == 40


def test_a_queue_that_never_ends_is_given_up() -> None:
    provider, clock = Scripted(QUEUED), Clock()
    provider.abilities = msgspec.structs.replace(provider.abilities, queue_s=100.0)
    with pytest.raises(MachineUnreachable, match="queued in gpus"):
        _wait(provider, clock)
    assert 100 <= clock.now <= 120


def test_the_time_to_start_begins_where_the_queue_ends() -> None:
    starting = msgspec.structs.replace(RUNNING, state="starting", endpoint=None)
    provider, clock = Scripted(*[QUEUED] * 40, *[starting] * 4, RUNNING), Clock()
    provider.abilities = msgspec.structs.replace(provider.abilities, queue_s=3600.0)
    assert _wait(provider, clock).state == "running"


@pytest.mark.rule(5)
def test_a_machine_without_our_label_is_not_handed_out() -> None:
    """torpor could never end it. A market may show the label late."""
    bare = msgspec.structs.replace(RUNNING, label=None)
    assert _wait(Scripted(bare, bare, RUNNING), Clock(), label=LABEL) == RUNNING
    with pytest.raises(MachineUnreachable, match=r"torpor\.me\.w\.1.*end it in the provider's"):
        _wait(Scripted(bare), Clock(), label=LABEL)


def test_a_refused_login_ends_the_waiting_at_once() -> None:
    clock = Clock()
    with pytest.raises(ProviderDenied, match=r"m-1 .*not waited for any longer: 401"):
        _wait(Scripted(STARTING, ProviderDenied("401: the key was revoked")), clock)
    assert clock.now < 10, "the login does not come back by itself"
