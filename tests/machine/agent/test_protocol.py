"""Messages: what is refused, what is never shown, how often progress goes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torpor.machine.agent.log import MAX_LOG_BYTES, Log, scrub
from torpor.machine.agent.machine import cpu_count, machine_id, memory_bytes
from torpor.shared.errors import InvalidInput, RunCancelled
from torpor.shared.wire.protocol import (
    MAX_LINE_BYTES,
    Call,
    Cancel,
    Hello,
    Ping,
    Request,
    encode_line,
    parse_line,
)

_GRANT = {
    "key": "packs/1",
    "verb": "PUT",
    "url": "https://s3.example/b/packs/1?X-Amz-Signature=abc",
}


def test_a_request_parses_and_hides_its_arguments() -> None:
    line = json.dumps({"id": "r1", "op": "snapshot.part", "args": {"packs": [_GRANT]}}).encode()
    request = parse_line(line)
    assert isinstance(request, Request)
    assert (request.id, request.op, request.args) == ("r1", "snapshot.part", {"packs": [_GRANT]})
    assert "s3.example" not in repr(request)


def test_cancel_and_ping_parse() -> None:
    assert parse_line(b'{"cancel":"r1"}') == Cancel("r1")
    assert parse_line(b'{"ping":true}') == Ping()


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


def test_a_message_over_the_limit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="over the limit"):
        encode_line({"text": "x" * MAX_LINE_BYTES})


def test_a_hello_survives_the_wire() -> None:
    hello = Hello(1, "abc", "m", "3.11.2", "linux-x86_64", 2, 4, 1.5, True)
    assert Hello.from_wire(json.loads(encode_line(hello.to_wire()))) == hello
    with pytest.raises(InvalidInput):
        Hello.from_wire({"hello": {"protocol": 1}})


def test_progress_is_limited_to_four_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, object]] = []
    clock = [100.0]
    monkeypatch.setattr("torpor.shared.wire.protocol.time.monotonic", lambda: clock[0])
    call = Call(Request("r", "op", {}, ""), Path("/"), sent.append)
    for _ in range(1000):  # ten seconds
        call.emit({})
        clock[0] += 0.01
    assert 35 <= len(sent) <= 41


def test_a_cancelled_call_raises_at_its_next_check() -> None:
    call = Call(Request("r", "op", {}, ""), Path("/"), lambda event: None)
    call.check()
    call.cancel()
    assert call.cancelled()
    with pytest.raises(RunCancelled):
        call.check()


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


def test_a_containers_limits_count(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert cpu_count(tmp_path) == 1
    assert memory_bytes(tmp_path) == 1048576
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cpu_count(tmp_path) == cpu_count(tmp_path / "missing") >= 1
    assert memory_bytes(tmp_path) == memory_bytes(tmp_path / "missing") > 1048576
