"""The ring file: what was written is read, and what was torn never is."""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.activity import sample
from torpor.machine.sampler.ring import RECORD_BYTES, RECORDS, RING, Ring, pack, read, unpack
from torpor.shared.wire.activity import Sample

_FIGURE = st.integers(-1, 2**31 - 1)
_SAMPLES = st.builds(
    Sample,
    number=st.integers(1, 2**63),
    at_s=st.floats(0, 1e9),
    boot=st.binary(min_size=16, max_size=16).map(bytes.hex),
    gpus=st.integers(0, 255),
    gpu_state=st.integers(0, 3),
    gpu=st.integers(-1, 100),
    cpu=_FIGURE,
    network=_FIGURE,
    disk=_FIGURE,
    ssh_s=_FIGURE,
    jupyter_s=_FIGURE,
    flags=st.integers(0, 7),
    gpu_peak=st.integers(0, 100),
    cpu_peak=_FIGURE,
)


@given(_SAMPLES)
def test_a_sample_is_read_as_it_was_written(written: Sample) -> None:
    record = pack(written)
    assert len(record) == RECORD_BYTES
    assert unpack(record) == written


def test_a_record_of_a_version_with_memory_is_read() -> None:
    whole = sample(7)
    record = pack(whole)[:-8] + (901).to_bytes(4, "little")
    assert unpack(record + zlib.crc32(record).to_bytes(4, "little")) == whole


@pytest.mark.rule(3)
@given(_SAMPLES, _SAMPLES, st.integers(1, RECORD_BYTES - 1))
def test_a_torn_record_is_never_read(old: Sample, new: Sample, written: int) -> None:
    torn = pack(new)[:written] + pack(old)[written:]
    assert unpack(torn) in (None, old, new)
    assert unpack(bytes(RECORD_BYTES)) is None


@given(_SAMPLES, st.integers(0, 8 * RECORD_BYTES - 1))
def test_a_flipped_bit_is_noticed(whole: Sample, bit: int) -> None:
    record = bytearray(pack(whole))
    record[bit // 8] ^= 1 << bit % 8
    assert unpack(bytes(record)) is None


def test_the_ring_keeps_the_newest_and_its_size(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    assert ring.newest is None
    size = (tmp_path / RING).stat().st_size
    for number in range(1, RECORDS + 4):
        ring.append(sample(number))
    ring.close()
    assert (tmp_path / RING).stat().st_size == size < 2 << 20
    found = read(tmp_path / RING)
    assert [kept.number for kept in found] == list(range(4, RECORDS + 4))
    assert msgspec.convert(msgspec.to_builtins(found), list[Sample]) == found  # over the wire
    again = Ring(tmp_path)
    assert again.newest == found[-1]
    again.close()


def test_a_crash_in_a_write_costs_one_sample(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    for number in (1, 2, 3):
        ring.append(sample(number))
    ring.close()
    with open(tmp_path / RING, "r+b") as file:
        file.seek(RECORD_BYTES * 3)
        file.write(b"half a record")
    assert [kept.number for kept in read(tmp_path / RING)] == [1, 3]


def test_a_ring_of_another_version_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / RING
    assert read(path) == []
    for foreign in (b"", b"something else", bytes(RECORD_BYTES * (1 + RECORDS))):
        path.write_bytes(foreign)
        assert read(path) == []
        Ring(tmp_path).close()
        assert path.stat().st_size == RECORD_BYTES * (1 + RECORDS)
        assert read(path) == []
    assert [found.name for found in tmp_path.iterdir()] == [RING]
