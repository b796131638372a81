"""The ring file: the samples of the last hours, each in a checksummed record of fixed size.

``HOME/activity.ring`` is a header and then RECORDS records of 72 bytes. Sample N is in record
N % RECORDS. All numbers are little-endian.

    header   magic 16 s, version u32, record bytes u32, records u32, CRC-32 of these; then zeros
    record   number u64, at_s f64, boot 16 s, gpus u8, gpu_state u8, gpu i16, cpu i32, network i32,
             disk i32, ssh_s i32, jupyter_s i32, flags u8, a zero, gpu_peak i16, cpu_peak i32,
             4 bytes that a reader skips, CRC-32 of the 68 bytes before

A record whose checksum does not fit was never written, or was cut short by a crash: a reader skips
it. A file with another header is replaced; its samples are lost, which makes the machine Unknown.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path
from typing import Final

from torpor.shared.wire.activity import Sample

RING: Final = "activity.ring"
RECORDS: Final = 16384
"""Records in the ring: 4.5 hours at one sample a second, in 1.2 MiB."""
VERSION: Final = 1

_MAGIC: Final = b"torpor activity\n"
_HEADER: Final = struct.Struct("<16sIII")
_BODY: Final = struct.Struct("<Qd16sBBhiiiiiBxhi4x")
_CRC: Final = struct.Struct("<I")
RECORD_BYTES: Final = _BODY.size + _CRC.size
_NUMBER: Final = struct.Struct(f"<Q{RECORD_BYTES - 8}x")


def boot_id() -> str:
    """The kernel's random id of this boot, in hex; zeros where it cannot be read."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    except OSError:
        text = ""
    return text.strip().replace("-", "").ljust(32, "0")[:32]


def boot_clock_s() -> float:
    """Seconds since the boot; sleep counts, and no one can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Ring:
    """The ring file, opened to append. Only one sampler may hold it."""

    def __init__(self, folder: Path) -> None:
        path = folder / RING
        whole = _is_ring(path)
        if not whole:
            _create(path)
        known = read(path) if whole else []
        self.newest = known[-1] if known else None
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def append(self, sample: Sample) -> None:
        """Write the sample over the oldest one."""
        record = pack(sample)
        os.pwrite(self._fd, record, RECORD_BYTES * (1 + sample.number % RECORDS))

    def close(self) -> None:
        os.close(self._fd)


def read(path: Path) -> list[Sample]:
    """Every whole sample, oldest first; none if there is no ring of this version."""
    if not _is_ring(path):
        return []
    data = memoryview(path.read_bytes())[RECORD_BYTES:]
    found = [
        unpack(data[RECORD_BYTES * record : RECORD_BYTES * (record + 1)])
        for record, (number,) in enumerate(_NUMBER.iter_unpack(data))
        if number  # on a young machine, most records were never written
    ]
    return sorted(
        (sample for sample in found if sample is not None), key=lambda sample: sample.number
    )


def newest_sample(path: Path) -> Sample | None:
    """The newest whole sample; None without any."""
    samples = read(path)
    return samples[-1] if samples else None


def pack(sample: Sample) -> bytes:
    body = _BODY.pack(
        sample.number,
        sample.at_s,
        bytes.fromhex(sample.boot),
        sample.gpus,
        sample.gpu_state,
        sample.gpu,
        sample.cpu,
        sample.network,
        sample.disk,
        sample.ssh_s,
        sample.jupyter_s,
        sample.flags,
        sample.gpu_peak,
        sample.cpu_peak,
    )
    return body + _CRC.pack(zlib.crc32(body))


def unpack(record: memoryview | bytes) -> Sample | None:
    """The sample of a record; None if the record is empty or torn."""
    body = record[: _BODY.size]
    number, at_s, boot, *rest = _BODY.unpack(body)
    if not number or _CRC.unpack(record[_BODY.size :])[0] != zlib.crc32(body):
        return None
    return Sample(number, at_s, boot.hex(), *rest)


def _header() -> bytes:
    facts = _HEADER.pack(_MAGIC, VERSION, RECORD_BYTES, RECORDS)
    return (facts + _CRC.pack(zlib.crc32(facts))).ljust(RECORD_BYTES, b"\0")


def _is_ring(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            whole = os.fstat(file.fileno()).st_size == RECORD_BYTES * (1 + RECORDS)
            return whole and file.read(RECORD_BYTES) == _header()
    except FileNotFoundError:
        return False


def _create(path: Path) -> None:
    """An empty ring under another name, then renamed: it appears whole, with all its blocks."""
    fresh = path.with_name(f".{RING}-{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, RECORD_BYTES * (1 + RECORDS))
        os.pwrite(fd, _header(), 0)
    finally:
        os.close(fd)
    os.replace(fresh, path)
