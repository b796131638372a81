"""Encodings as a machine measured them, and which is the fastest over which line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from torpor.control.measure.figures import MB, Figure
from torpor.shared.codecs.stock import RAW
from torpor.shared.values import Coded
from torpor.shared.wire.machine import Encodings

ONE_CORE: Final = "the machine, one core"
GPU: Final = "the machine's GPU"
LINES_MBIT_S: Final = (200, 1_000, 5_000, 10_000, 25_000)
_GB: Final = 1e9


def figures_of(coded: Coded) -> Iterator[Figure]:
    """One measurement as figures: the share that is stored, and both rates ("up": encoding)."""
    share = coded.stored_bytes / coded.plain_bytes
    measured_from = GPU if coded.by == "GPU" else ONE_CORE
    whole = Figure("codec", coded.codec, "ratio", (share,), phase="stored", data=coded.data,
                   measured_from=measured_from)  # fmt: skip
    yield whole
    if coded.codec == RAW.name:
        return  # the encoding copies nothing, so its rate would mean nothing
    up, down = _rates(coded, coded.encode_s), _rates(coded, coded.decode_s)
    yield replace(whole, phase="", unit="MB/s", values=up, direction="up")
    if down:
        yield replace(whole, phase="", unit="MB/s", values=down, direction="down")


def fastest_by_line(measured: Encodings) -> Iterator[dict[str, str]]:
    """For each kind of content the encoding that takes the least time, by line.

    Computed: the longer of two times, that of the line for the stored bytes, and that of all cores
    to encode a chunk, to decode it again for the check, and to hash what is stored. Of a GPU it is
    the time that was measured, which has the check.
    """
    for data in dict.fromkeys(coded.data for coded in measured.coded):
        some = [coded for coded in measured.coded if coded.data == data]
        row = {"content": data}
        for mbit_s in LINES_MBIT_S:
            took = {_name(coded): _seconds(coded, mbit_s, measured) for coded in some}
            best = min(took, key=lambda name: took[name])
            row[f"{mbit_s / 1000:g} Gbit/s"] = f"{best}, {took[best]:.2f} s"
        yield row


def _seconds(coded: Coded, mbit_s: float, measured: Encodings) -> float:
    """For 1 GB."""
    share = coded.stored_bytes / coded.plain_bytes
    on_line = share * _GB / (mbit_s * 1e6 / 8)
    on_cores = share * _GB * measured.digest_s / measured.cores
    if coded.codec == RAW.name:
        return max(on_line, on_cores)
    coding_s = _median(coded.encode_s) + (0.0 if coded.by == "GPU" else _median(coded.decode_s))
    by_s = coding_s * _GB / coded.plain_bytes
    if coded.by == "GPU":
        return max(on_line, on_cores, by_s)
    return max(on_line, on_cores + by_s / measured.cores)


def _median(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 2] if seconds else 0.0


def _name(coded: Coded) -> str:
    return f"{coded.codec} on the GPU" if coded.by == "GPU" else coded.codec


def _rates(coded: Coded, seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(coded.plain_bytes / max(s, 1e-9) / MB for s in seconds)
