"""What jobs used of their GPUs, and which others may do: from what their machines measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import msgspec

from torpor.control.jobs.listing import command_line
from torpor.control.jobs.records import Attempt, Job
from torpor.control.rental.records import Rental
from torpor.control.reports import MOST_ROWS, Row
from torpor.shared.wire.activity import UNKNOWN

LEAST_S: Final = 3600
"""Less says little."""
BUSY_PERCENT: Final = 90
WAITS_PERCENT: Final = 30
FILL: Final = 0.75
"""The most of a smaller GPU's memory that the job's highest use may fill."""
COVERED: Final = 0.9
"""The least share of the time that must be measured before its highest memory means anything."""
_SMALLER: Final = 0.9  # a "24 GB" card may count as 22.5 GiB
SIZES: Final = {
    16: "T4, RTX A4000",
    24: "L4, A10, RTX 4090",
    32: "RTX 5090",
    48: "L40S, A40, RTX A6000",
    80: "A100 80 GB, H100",
    96: "RTX PRO 6000",
    141: "H200",
    180: "B200",
}
"""GiB of each GPU, and some that have it."""


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """What the attempts of one command used on one kind of GPU. ``gpu_s`` of their ``ran_s``
    seconds were measured. ``vram_gib`` of 0 and ``mib`` of UNKNOWN are not known."""

    gpu: str
    vram_gib: float
    command: str
    attempts: int
    ran_s: float
    gpu_s: int
    percent: float
    mib: int

    @property
    def smaller_gib(self) -> int | None:
        """The memory of the smallest GPU that would have held it, if that is less than it had."""
        if self.mib == UNKNOWN or self.gpu_s < COVERED * self.ran_s:
            return None
        fitting = (gib for gib in SIZES if self.mib <= FILL * gib * 1024)
        least = next(fitting, None)
        return least if least and least < _SMALLER * self.vram_gib else None

    @property
    def advice(self) -> str:
        """In words; empty where the measured figures call for no other GPU."""
        busy, gib = self.percent > BUSY_PERCENT, self.smaller_gib
        if gib:
            slower = "; it was busy, so a slower one takes longer" if busy else ""
            return f"{gib} GiB would do, as {SIZES[gib]} have{slower}"
        if busy:
            return "a faster one may pay"
        return "it mostly waited: a slower one may do" if self.percent < WAITS_PERCENT else ""

    def row(self) -> Row:
        of = f" of {self.vram_gib:g}" if self.vram_gib else ""
        return {
            "GPU": self.gpu,
            "command": " ".join(self.command.replace("|", "¦").split()),
            "measured": f"{self.gpu_s / 3600:,.1f} of {self.ran_s / 3600:,.1f} h, "
            f"n = {self.attempts} attempt{'s' * (self.attempts > 1)}",
            "busy": f"{self.percent:.0f} %",
            "memory": "unknown" if self.mib == UNKNOWN else f"{self.mib / 1024:.1f}{of} GiB",
            "advice": self.advice or "none",
        }


def used(jobs: Iterable[Job], rentals: Iterable[Rental]) -> list[Used]:
    """Each command that was measured for at least LEAST_S on a kind of GPU, the longest first."""
    of = {rental.label.rental: rental for rental in rentals if rental.gpu}
    groups: dict[tuple[str, float, str], list[Attempt]] = defaultdict(list)
    for job in jobs:
        for attempt in job.attempts if job.nodes == 1 else ():
            rental = of.get(attempt.rental)
            if rental and attempt.gpu_s:
                kind = f"{rental.gpu_count} x {rental.gpu}"
                groups[kind, rental.vram_gib, command_line(job.command)].append(attempt)
    found = []
    for (gpu, vram_gib, command), attempts in groups.items():
        gpu_s = sum(attempt.gpu_s for attempt in attempts)
        found.append(
            Used(
                gpu=gpu,
                vram_gib=vram_gib,
                command=command,
                attempts=len(attempts),
                ran_s=sum(attempt.seen_unix - attempt.began_unix for attempt in attempts),
                gpu_s=gpu_s,
                percent=sum(attempt.gpu_percent * attempt.gpu_s for attempt in attempts) / gpu_s,
                mib=max(attempt.gpu_mib for attempt in attempts),
            )
        )
    long = sorted((its for its in found if its.gpu_s >= LEAST_S), key=lambda its: -its.gpu_s)
    return long[:MOST_ROWS]
