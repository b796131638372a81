"""What a machine's sampler saw, as the agent reads it from the ring file."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from torpor.shared.wire.request import MOST, Request

NO_GPU, GPUS_FINE, GPUS_UNREADABLE, GPU_LOST = range(4)
"""States of a machine's GPUs: no driver; all read; one or all cannot be read; one is lost."""
MACHINE_VARIABLE: Final = "TORPOR_MACHINE"
"""The environment variable that every process of a local machine has: the machine's id. It tells
apart machines that share a host and an account."""
UNKNOWN: Final = -1
"""A figure that could not be read. Unlike 0, it does not say that the machine is idle."""
NOBODY: Final = -1
"""No session of that kind (SSH or Jupyter) is open."""
OWN_RUN, JUPYTER_SILENT, PERSON, OWN_SAVE = 1, 2, 4, 8
"""Flags of a sample: a run of torpor was active; a Jupyter server does not answer; someone has used
SSH or Jupyter since the ring began; the machine saved its workspace by itself, on its schedule."""

OWN_COPY: Final = "torpor-run-sends"
"""In the command lines of the copy by which `torpor run` sends its folder: no person is there."""
STALE_S: Final = 60.0
"""A sampler that has written nothing for this many seconds is dead, or its machine hangs."""

MOST_GPUS: Final = 64
"""The most GPUs of one machine that are recorded."""

Figure = Annotated[int, msgspec.Meta(ge=UNKNOWN, le=MOST)]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One second of a machine."""

    number: Figure
    at_s: float  # the machine's CLOCK_BOOTTIME
    boot: str  # hex; changes when the machine starts again
    gpus: Figure
    gpu_state: Figure
    gpu: Figure  # percent, of the busiest GPU
    cpu: Figure  # percent of one core
    network: Figure  # KiB/s, both directions, without loopback
    disk: Figure  # KiB/s, both directions
    ssh_s: Figure  # seconds since the last input in an SSH session that is not torpor's
    jupyter_s: Figure  # seconds since the last activity of a Jupyter kernel or terminal
    flags: Figure
    gpu_peak: Figure  # percent: the highest mean of a minute since the ring began
    # percent of one core: the highest mean of a minute, without the minutes in which torpor worked
    cpu_peak: Figure


class GpuFigures(msgspec.Struct, frozen=True, array_like=True):
    """The figures of one GPU; UNKNOWN for those that the driver does not say."""

    percent: Figure  # of the time since the last reading in which some kernel ran
    used_mib: Figure  # memory in use, with what the driver reserves
    free_mib: Figure
    temperature_c: Figure
    power_mw: Figure
    pcie_sent_kb_s: Figure  # KB a second that the GPU sent, measured over 20 ms
    pcie_received_kb_s: Figure


class GpuTable(msgspec.Struct, frozen=True):
    """A machine's GPUs, by their numbers; ``at_s`` and ``boot`` as in a sample."""

    at_s: float
    boot: str
    gpus: Annotated[list[GpuFigures], msgspec.Meta(max_length=MOST_GPUS)]


class Activity(msgspec.Struct, frozen=True):
    """``samples``, oldest first. ``now_s`` and ``boot`` are the machine's, as in a sample.
    ``gpus``: what its sampler last read of each GPU, for metrics alone: no verdict rests on it.
    ``runs``: the agent works on a workspace now. ``job_s`` and ``served_s``: how long ago torpor
    started the newest command of a job that runs, and the newest server; None where none runs."""

    now_s: float
    boot: str
    runs: bool
    samples: list[Sample]
    job_s: float | None = None
    served_s: float | None = None
    gpus: GpuTable | None = None


class ReadActivity(Request[Activity], frozen=True):
    """Read the sampler's ring: the samples of this boot that are at most ``seconds`` old, and the
    newest one whatever its age. Holds no workspace and changes nothing."""

    op = "activity"
    seconds: float
