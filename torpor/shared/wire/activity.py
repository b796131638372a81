"""What a machine's sampler saw, as the agent reads it from the ring file."""

from __future__ import annotations

from typing import Final

import msgspec

from torpor.shared.wire.request import Request

NO_GPU, GPUS_FINE, GPUS_UNREADABLE, GPU_LOST = range(4)
"""States of a machine's GPUs: no driver; all read; one or all cannot be read; one is lost."""
UNKNOWN: Final = -1
"""A figure that could not be read. It is not 0."""
NOBODY: Final = -1
"""No session of that kind is open."""
OWN_RUN, JUPYTER_SILENT, PERSON = 1, 2, 4
"""Flags of a sample: a run of torpor was active; a Jupyter server does not answer; someone has used
SSH or Jupyter since the ring began."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One second of a machine."""

    number: int
    at_s: float  # the machine's CLOCK_BOOTTIME
    boot: str  # hex; changes when the machine starts again
    gpus: int
    gpu_state: int
    gpu: int  # percent, of the busiest GPU
    cpu: int  # percent of one core
    network: int  # KiB/s, both directions, without loopback
    disk: int  # KiB/s, both directions
    ssh_s: int  # since the last input in an SSH session that is not torpor's
    jupyter_s: int  # since the last activity of a Jupyter kernel or terminal
    flags: int
    gpu_peak: int  # percent: the highest mean of a minute since the ring began
    cpu_peak: int  # the same for the CPU, without the minutes in which torpor worked


class Activity(msgspec.Struct, frozen=True):
    """``samples``, oldest first. ``now_s`` and ``boot`` are the machine's, as in a sample.
    ``runs``: the agent works on a workspace now. ``job_s`` and ``served_s``: how long ago torpor
    started the newest command of a job that runs, and the newest server; None where none runs."""

    now_s: float
    boot: str
    runs: bool
    samples: list[Sample]
    job_s: float | None = None
    served_s: float | None = None


class ReadActivity(Request[Activity], frozen=True):
    """Read the sampler's ring: the samples of this boot that are at most ``seconds`` old, and the
    newest one whatever its age. Holds no workspace and changes nothing."""

    op = "activity"
    seconds: float
