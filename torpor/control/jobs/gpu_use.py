"""What an attempt used of its machine's GPUs, as that machine's sampler saw it."""

from __future__ import annotations

import msgspec

from torpor.control.jobs.records import Attempt
from torpor.shared.wire.activity import UNKNOWN, Activity


def with_samples(attempt: Attempt, activity: Activity, seconds: float) -> Attempt:
    """The attempt with the samples of the last ``seconds`` in which the GPUs could be read."""
    seen = [
        sample
        for sample in activity.samples
        if sample.boot == activity.boot
        and 0 <= activity.now_s - sample.at_s < seconds
        and sample.gpu != UNKNOWN
    ]
    if not seen:
        return attempt
    gpu_s = attempt.gpu_s + len(seen)
    before = attempt.gpu_percent * attempt.gpu_s
    return msgspec.structs.replace(
        attempt,
        gpu_s=gpu_s,
        gpu_percent=(before + sum(sample.gpu for sample in seen)) / gpu_s,
        gpu_mib=max(attempt.gpu_mib, *(sample.gpu_mib for sample in seen)),
    )
