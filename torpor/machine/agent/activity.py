"""What the sampler wrote, and whether a job or a server runs. The control side decides what follows
(torpor/control/idleness.py)."""

from __future__ import annotations

from torpor.machine.agent.call import Call
from torpor.machine.agent.runs import RunRegistry
from torpor.machine.sampler import ring
from torpor.machine.sampler.gpu_table import read_gpu_table
from torpor.machine.supervisor.folder import all_kept
from torpor.shared.wire.activity import Activity, ReadActivity


def read_activity(request: ReadActivity, call: Call, runs: RunRegistry) -> Activity:
    """The sampler's records that the request asks for; none where no sampler has written any."""
    samples = ring.read(call.home / ring.RING)
    boot, now_s = ring.boot_id(), ring.boot_clock_s()
    asked = [
        sample
        for sample in samples
        if sample is samples[-1] or (sample.boot == boot and sample.at_s >= now_s - request.seconds)
    ]
    at_work = [kept for _, kept in all_kept(call.home) if kept.at_work]

    def newest_s(serves: bool) -> float | None:
        began_s = [kept.command.began_s for kept in at_work if kept.serves == serves]
        return max(0.0, now_s - max(began_s)) if began_s else None

    return Activity(
        now_s,
        boot,
        runs.active(),
        asked,
        newest_s(False),
        newest_s(True),
        read_gpu_table(call.home),
    )
