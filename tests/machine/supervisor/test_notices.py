"""Notices of markets, from real HTTP servers that answer well, badly, or not at all."""

from __future__ import annotations

import socket

import pytest

from tests.fixtures.metadata import ACTION, EVENTS, PREEMPTED, REBALANCE, TOKEN, Metadata
from tests.fixtures.waiting import PATIENCE_S
from torpor.machine.supervisor.notices import (
    ANSWER_BYTES,
    MOST_NOTICES,
    MetadataAnswer,
    NoticeListener,
    ask_service,
)
from torpor.shared.wire.job import Notice, NoticeSource

NOW = 1_800_000_000.0
TERMINATES = {"action": "terminate", "time": "2027-01-15T08:02:00Z"}


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def notices(clock: Clock, *sources: NoticeSource) -> NoticeListener:
    return NoticeListener(sources, patiently, clock=clock, now=lambda: NOW)


def patiently(verb: str, url: str, headers: dict[str, str]) -> MetadataAnswer | None:
    """A service on a busy host is no silent one."""
    return ask_service(verb, url, headers, PATIENCE_S)


def quickly(verb: str, url: str, headers: dict[str, str]) -> MetadataAnswer | None:
    return ask_service(verb, url, headers, 0.2)


def test_aws_gives_two_minutes(metadata: Metadata, clock: Clock) -> None:
    aws = notices(clock, metadata.source("aws"))
    assert aws.poll() == []
    assert metadata.asked == [f"PUT {TOKEN}", f"GET {ACTION}", f"GET {REBALANCE}"]
    metadata.say(ACTION, TERMINATES)
    assert aws.poll() == []  # not due yet
    assert aws.wait_s == 5
    clock.s += 5
    words = "AWS will terminate the machine at 2027-01-15T08:02:00Z"
    assert aws.poll() == [Notice("aws-spot", words, NOW, NOW + 120)]
    assert metadata.asked[3:] == [f"GET {ACTION}"]  # the token is kept
    clock.s += 5
    assert aws.poll() == []  # said once


def test_a_recommendation_is_followed_by_the_notice(metadata: Metadata, clock: Clock) -> None:
    aws = notices(clock, metadata.source("aws"))
    metadata.say(REBALANCE, {"noticeTime": "2027-01-15T07:00:00Z"})
    (first,) = aws.poll()
    assert (first.kind, first.until_unix) == ("aws-rebalance", None)
    clock.s += 5
    metadata.say(ACTION, TERMINATES)
    assert [notice.kind for notice in aws.poll()] == ["aws-spot"]
    clock.s += 5
    metadata.say(ACTION, {**TERMINATES, "time": "soon"})  # another one; the time is not known
    assert [notice.until_unix for notice in aws.poll()] == [None]


def test_a_token_that_has_ended_is_replaced_at_once(metadata: Metadata, clock: Clock) -> None:
    aws = notices(clock, metadata.source("aws"))
    aws.poll()
    metadata.token = "second-token"
    metadata.say(ACTION, TERMINATES)
    clock.s += 5
    assert [notice.kind for notice in aws.poll()] == ["aws-spot"]
    assert metadata.asked[-3:] == [f"GET {ACTION}", f"PUT {TOKEN}", f"GET {ACTION}"]


def test_google_says_true(metadata: Metadata, clock: Clock) -> None:
    gcp = notices(clock, metadata.source("gcp"))
    metadata.says[PREEMPTED] = b"FALSE\n"
    assert gcp.poll() == []
    metadata.says[PREEMPTED] = b"TRUE\n"
    clock.s += 2
    (notice,) = gcp.poll()
    assert (notice.kind, notice.until_unix) == ("gcp", NOW + 30)
    clock.s += 2
    assert gcp.poll() == []


def test_azure_lists_events(metadata: Metadata, clock: Clock) -> None:
    azure = notices(clock, metadata.source("azure"))
    reboot = {"EventId": "1", "EventType": "Reboot", "NotBefore": ""}
    taken = {"EventId": "2", "EventType": "Preempt", "NotBefore": "Fri, 15 Jan 2027 08:00:30 GMT"}
    metadata.say(EVENTS, {"DocumentIncarnation": 1, "Events": [reboot]})
    assert azure.poll() == []
    metadata.say(EVENTS, {"DocumentIncarnation": 2, "Events": [reboot, taken]})
    clock.s += 2
    (notice,) = azure.poll()
    assert (notice.kind, notice.until_unix) == ("azure", NOW + 30)
    started = {"EventId": "3", "EventType": "Preempt", "NotBefore": ""}
    metadata.say(EVENTS, {"Events": [taken, started]})
    clock.s += 2
    assert [notice.until_unix for notice in azure.poll()] == [None]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{not ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{}",  # cut short
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 50_000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b'{"action": "terminate", "pad": "' + b"x" * ANSWER_BYTES,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
        b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
    ],
)
def test_nonsense_is_no_notice(metadata: Metadata, clock: Clock, raw: bytes) -> None:
    for path in (ACTION, REBALANCE, PREEMPTED, EVENTS):
        metadata.says[path] = lambda out: out.write(raw)
    every = notices(clock, *(metadata.source(kind) for kind in ("aws", "gcp", "azure")))
    assert every.poll() == []
    for path in (ACTION, PREEMPTED, EVENTS):
        del metadata.says[path]
    metadata.says[PREEMPTED] = b"TRUE"
    clock.s += 5
    assert [notice.kind for notice in every.poll()] == ["gcp"]  # and it asks on


@pytest.mark.parametrize("status", [301, 302, 307])
def test_a_redirect_is_not_followed(metadata: Metadata, clock: Clock, status: int) -> None:
    metadata.say(EVENTS, {"Events": [{"EventId": "1", "EventType": "Preempt"}]})
    metadata.says[PREEMPTED] = lambda out: out.write(
        f"HTTP/1.1 {status} Moved\r\nLocation: {metadata.url}{EVENTS}\r\n"
        "Content-Length: 4\r\n\r\nTRUE".encode()
    )
    assert notices(clock, metadata.source("gcp")).poll() == []
    assert metadata.asked == [f"GET {PREEMPTED}"]


def test_no_proxy_is_asked(
    metadata: Metadata, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    metadata.says[PREEMPTED] = b"TRUE"
    assert len(notices(clock, metadata.source("gcp")).poll()) == 1


@pytest.mark.parametrize("bad", ["drip", "hang"])
def test_a_slow_service_is_not_waited_for(metadata: Metadata, bad: str) -> None:
    metadata.says[PREEMPTED] = getattr(metadata, bad)
    headers = {"Metadata-Flavor": "Google"}
    assert quickly("GET", metadata.url + PREEMPTED, headers) is None


def test_nobody_there_is_no_error(clock: Clock) -> None:
    with socket.socket() as listens:  # accepts, and never answers
        listens.bind(("127.0.0.1", 0))
        listens.listen(1)
        silent = f"http://127.0.0.1:{listens.getsockname()[1]}"
        assert quickly("GET", silent + PREEMPTED, {}) is None
    closed = NoticeSource("aws", silent)
    wrong = NoticeSource("gcp", "http://127.0.0.1:none")
    assert notices(clock, closed, wrong).poll() == []


def test_a_service_that_never_ends_is_heard_for_a_while(metadata: Metadata, clock: Clock) -> None:
    azure = notices(clock, metadata.source("azure"))
    heard = 0
    for number in range(2 * MOST_NOTICES):
        metadata.say(EVENTS, {"Events": [{"EventId": number, "EventType": "Preempt"}]})
        clock.s += 2
        heard += len(azure.poll())
    assert heard == MOST_NOTICES
