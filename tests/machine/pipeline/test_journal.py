"""The journal survives a kill at any byte."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.machine.pipeline.chunks import ChunkPlace, Located
from torpor.machine.pipeline.journal import MAX_AGE_S, Journal, Record
from torpor.shared.format.manifest import Pack


def _record(number: int) -> tuple[Pack, list[Located]]:
    pack = Pack(bytes([number]) * 16, 100 + number, b"m" * 16)
    return pack, [Located(bytes([number]) * 32, 50, ChunkPlace(pack.id, 2, 0, 40))]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "journal")
    for number in range(3):
        journal.append(*_record(number))
    return journal


def test_what_was_appended_is_read(journal: Journal, tmp_path: Path) -> None:
    assert [(r.pack, r.located) for r in journal.read()] == [_record(n) for n in range(3)]
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600
    journal.clear()
    assert journal.read() == []
    journal.clear()


def test_a_tail_torn_at_any_byte_costs_the_last_record_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(*_record(0))
    whole = (tmp_path / "journal").stat().st_size
    journal.append(*_record(1))
    data = (tmp_path / "journal").read_bytes()
    for length in range(whole, len(data)):
        (tmp_path / "journal").write_bytes(data[:length])
        assert [r.pack for r in journal.read()] == [_record(0)[0]]
        assert (tmp_path / "journal").stat().st_size == whole  # the torn tail is gone
        journal.append(*_record(2))
        assert [r.pack for r in journal.read()] == [_record(n)[0] for n in (0, 2)]


@settings(max_examples=100)
@given(data=st.data())
def test_a_damaged_record_is_never_believed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal", numbered=True) / "journal"
    journal = Journal(path)
    for number in range(3):
        journal.append(*_record(number))
    blob = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(blob) - 1))
    blob[bit // 8] ^= 1 << bit % 8
    path.write_bytes(blob)
    found = [(r.pack, r.located) for r in journal.read()]
    assert found == [_record(n) for n in range(3)][: len(found)]
    assert len(found) < 3


def test_old_records_are_not_referred_to(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for age in (MAX_AGE_S + 60, 60):
        body = msgspec.msgpack.encode(Record(*_record(1), time.time() - age))
        frame = len(body).to_bytes(4, "little") + blake3(body).digest(length=16) + body
        with (tmp_path / "journal").open("ab") as file:
            file.write(frame)
    assert len(journal.read()) == 1
    assert os.path.getsize(tmp_path / "journal") == 2 * len(frame)  # being old is no damage


def test_threads_append_whole_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: journal.append(*_record(number)), range(200)))
    assert sorted(r.pack.id[0] for r in journal.read()) == list(range(200))
