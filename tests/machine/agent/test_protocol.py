"""Messages: what is refused, what is never shown, how often progress goes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torpor.machine.agent.call import Call
from torpor.machine.agent.log import MAX_LOG_BYTES, Log, scrub
from torpor.machine.agent.machine import machine_id
from torpor.shared.errors import InvalidInput
from torpor.shared.wire.protocol import (
    MAX_VALUES,
    Envelope,
    Said,
    encode_line,
    parse_line,
    parse_said,
)
from torpor.shared.wire.request import Event, parse_request
from torpor.shared.wire.snapshot import StorePasses

_GRANT = {
    "key": "packs/1",
    "verb": "PUT",
    "url": "https://s3.example/b/packs/1?X-Amz-Signature=abc",
    "expires_unix": 1,
}

_STORE = {
    "run": "r",
    "passes": 2,
    "packs": [],
    "resumed": [],
    "lost": ["packs/0"],
    "accepted": [],
    "accept_lost": [],
}


def test_a_request_parses_and_hides_its_arguments() -> None:
    args = _STORE | {"packs": [_GRANT], "of a later version": 3}
    envelope = parse_line(json.dumps({"id": "r1", "op": "snapshot.store", "args": args}).encode())
    assert isinstance(envelope, Envelope)
    assert (envelope.id, envelope.op, envelope.args) == ("r1", "snapshot.store", args)
    request = parse_request(StorePasses, envelope.args)
    assert (request.run, request.passes, request.unusable) == ("r", 2, ["packs/0"])
    assert request.packs[0].url == _GRANT["url"]
    for shown in (repr(envelope), repr(request), repr(request.packs)):
        assert "s3.example" not in shown


@pytest.mark.parametrize(
    "args",
    [
        {"run": "r", "passes": 2},
        _STORE | {"passes": "2"},
        _STORE | {"packs": [_GRANT | {"key": "../etc/passwd"}]},
        _STORE | {"packs": [_GRANT | {"verb": "DELETE"}]},
    ],
)
def test_arguments_that_do_not_fit_are_refused(args: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        parse_request(StorePasses, args)


def test_a_name_of_any_bytes_survives_the_wire() -> None:
    name = b"caf\xe9".decode(errors="surrogateescape")
    said = parse_said(encode_line(Said(id="r", result={"roots": [name]})))
    assert said is not None and said.result == {"roots": [name]}


def test_a_line_of_many_values_is_no_message() -> None:
    """16 MiB of empty objects would take half a GiB of the control side's memory."""
    for value in (b"{}", b"[]", b"0"):
        many = b",".join([value] * (MAX_VALUES + 1))
        assert parse_said(b'{"id":"r","result":{"a":[' + many + b"]}}") is None


@pytest.mark.parametrize(
    "line",
    [b"", b"Welcome!", b"[1]", b'{"id": 1}', b'{"hello": {"protocol": 1}}', b"[" * 100_000],
)
def test_what_a_login_shell_prints_is_no_message(line: bytes) -> None:
    assert parse_said(line) is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"secret not json",
        b"[1]",
        b'{"id":"a"}',
        b'{"id":"","op":"x","args":{}}',
        b'{"id":7,"op":"x","args":{}}',
        b'{"id":"a","op":"x","args":[]}',
        b'{"cancel":null}',
        b"[" * 100_000,
        json.dumps({"id": "x" * 201, "op": "x", "args": {}}).encode(),
    ],
)
def test_a_line_that_is_no_message_is_refused_without_being_repeated(line: bytes) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_line(line)
    assert "secret" not in str(refused.value)


def test_progress_is_limited_to_four_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Event] = []
    clock = [100.0]
    monkeypatch.setattr("torpor.machine.agent.call.time.monotonic", lambda: clock[0])
    call = Call("r", Path("/"), sent.append)
    for _ in range(1000):  # ten seconds
        call.emit(Event(0))
        clock[0] += 0.01
    assert 35 <= len(sent) <= 41


def test_scrub_takes_grants_keys_and_signatures_out() -> None:
    args = {"key": "00ff" * 16, "packs": [_GRANT], "run": "r1"}
    text = f"PUT {_GRANT['url']} failed with {args['key']}; x-amz-signature=abc key packs/1 r1"
    clean = scrub(text, args)
    assert "abc" not in clean and "00ff" not in clean
    assert "packs/1 r1" in clean
    assert "sig" not in scrub("GET https://host/x?sig=1 done") and "done" in scrub("x?y=1 done")


def test_the_log_never_grows_past_its_bound(tmp_path: Path) -> None:
    log = Log(tmp_path / "agent.log")
    for number in range(50):
        log.write(f"{number} " + "x" * 100_000)
        assert (tmp_path / "agent.log").stat().st_size <= MAX_LOG_BYTES
    assert "\n" + "49 " in (tmp_path / "agent.log").read_text().replace("Z ", "Z\n")


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    Log(tmp_path / "missing" / "agent.log").write("words")


def test_the_machine_keeps_its_id(tmp_path: Path) -> None:
    first = machine_id(tmp_path)
    assert machine_id(tmp_path) == first and len(first) == 32
    (tmp_path / "machine-id").write_text("damaged")
    assert machine_id(tmp_path) not in (first, "damaged")
