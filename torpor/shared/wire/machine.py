"""The requests that belong to no run, and their answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from torpor.shared.values import Coded, GpuUse, Grant, ObjectKey
from torpor.shared.wire.request import Count, Nothing, Request

Fault = Literal["", "missing", "cut short", "damaged"]


class PackChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk to examine; ``name`` in hex."""

    name: str
    plain: int
    encoding: int
    offset: int
    stored: int


class PackToExamine(msgspec.Struct, frozen=True):
    """``md5`` in hex."""

    grant: Grant
    bytes: int
    md5: str
    chunks: list[PackChunk]


class PackFault(msgspec.Struct, frozen=True):
    """What is wrong with one pack; ``damaged``: positions in the ``chunks`` that were asked for."""

    key: ObjectKey
    fault: Fault
    damaged: list[Count]


class Examined(msgspec.Struct, frozen=True):
    bytes: Count
    packs: list[PackFault]


class ExaminePacks(Request[Examined], frozen=True):
    """Read whole packs and check every hash. Holds no workspace and writes nothing. ``authority``
    as in BeginsRun."""

    op = "verify.packs"
    key: str | None
    packs: list[PackToExamine]
    authority: str


class Throughput(msgspec.Struct, frozen=True):
    """Wall seconds for the whole batch, in each direction."""

    up_s: float
    down_s: float


class MeasureThroughput(Request[Throughput], frozen=True):
    """Move random bytes to each of ``puts`` and back from ``gets``, and compare; at most
    256 MiB. ``authority`` as in BeginsRun."""

    op = "line"
    puts: list[Grant]
    gets: list[Grant]
    object_bytes: int
    connections: int
    authority: str


class Encodings(msgspec.Struct, frozen=True):
    """``cores``: how many of them encode at once. ``digest_s``: seconds of a core for the MD5 of a
    stored byte. ``gpu``: the GPU's name, or why it was not measured."""

    coded: list[Coded]
    cores: int
    digest_s: float
    gpu: str


class MeasureEncodings(Request[Encodings], frozen=True):
    """Encode and decode ``content_bytes`` of each built-in kind of content ``rounds`` times, on one
    core and on the GPU."""

    op = "encodings"
    content_bytes: int
    rounds: int
    seed: int
    gpu: GpuUse


class Bye(Request[Nothing], frozen=True):
    """Ask the agent to exit as soon as no run is active."""

    op = "bye"


class Forget(Request[Nothing], frozen=True):
    """Ask the agent to exit and to remove its folder HOME; WorkspaceBusy while a run is active or a
    job's command runs."""

    op = "forget"
