"""What jobs measured of their GPUs, and the advice that follows."""

from __future__ import annotations

from typing import Any

import pytest

from torpor.control.jobs.gpu_advice import Used, used
from torpor.control.jobs.records import Attempt, Job
from torpor.control.rental.records import Rental
from torpor.shared.values import Label, MachineId, WorkspaceName
from torpor.shared.wire.activity import UNKNOWN

_HOUR = 3600
_DEMO = WorkspaceName("demo")


def _rental(number: int, **changes: Any) -> Rental:
    label = Label("me", _DEMO, f"{number:016x}")
    facts: dict[str, Any] = {"gpu": "H100 SXM", "gpu_count": 1, "vram_gib": 80.0} | changes
    return Rental(label=label, provider="vast:1", state="ended", created_unix=0.0, **facts)


def _attempt(number: int, **changes: Any) -> Attempt:
    facts: dict[str, Any] = {"seen_unix": 2.0 * _HOUR, "gpu_s": 2 * _HOUR, "gpu_percent": 50.0}
    return Attempt(
        number=1, machine=MachineId("m"), provider="vast:1", rental=f"{number:016x}", spot=False,
        price_usd_h=4.0, began_unix=0.0, **facts | {"gpu_mib": 9 * 1024} | changes,
    )  # fmt: skip


def _job(*attempts: Attempt, **changes: Any) -> Job:
    facts: dict[str, Any] = {"command": ["python", "train.py"]} | changes
    return Job(
        id="3f2a9c81d04e", workspace=_DEMO, block="demo", created_unix=0.0,
        attempts=list(attempts), **facts,
    )  # fmt: skip


def _used(**changes: Any) -> Used:
    (found,) = used([_job(_attempt(1, **changes))], [_rental(1)])
    return found


def test_attempts_of_a_command_on_a_kind_of_gpu_are_added_up() -> None:
    short = _attempt(2, seen_unix=1800.0, gpu_s=1800, gpu_percent=100.0, gpu_mib=20 * 1024)
    never = _attempt(1, gpu_s=0, gpu_percent=0.0, gpu_mib=UNKNOWN)  # an older version's
    other = _job(_attempt(3), command=["python", "a|b.py"])
    found = used([_job(_attempt(1), never), _job(short), other], map(_rental, (1, 2, 3)))
    assert [(its.command, its.attempts, its.gpu_s) for its in found] == [
        ("python train.py", 2, 9000),
        ("python a|b.py", 1, 7200),
    ]
    assert found[0].row() == {
        "GPU": "1 x H100 SXM",
        "command": "python train.py",
        "measured": "2.5 of 2.5 h, n = 2 attempts",
        "busy": "60 %",
        "memory": "20.0 of 80 GiB",
        "advice": "32 GiB would do, as RTX 5090 have",
    }
    assert "|" not in found[1].row()["command"]


@pytest.mark.parametrize(
    ("jobs", "rentals"),
    [
        ([_job(_attempt(1, gpu_s=_HOUR - 1))], [_rental(1)]),
        ([_job(_attempt(1))], []),
        ([_job(_attempt(1))], [_rental(1, gpu="")]),
        ([_job(_attempt(1), nodes=2)], [_rental(1)]),
    ],
    ids=["under an hour", "rental unknown", "no GPU", "several machines, one of them measured"],
)
def test_what_was_not_measured_gives_no_advice(jobs: list[Job], rentals: list[Rental]) -> None:
    assert used(jobs, rentals) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_mib": 12 * 1024}, "16 GiB would do"),
        ({"gpu_mib": 12 * 1024 + 1}, "24 GiB would do"),  # with headroom
        ({"gpu_mib": 9 * 1024, "gpu_percent": 95.0}, "a slower one takes longer"),
        ({"gpu_mib": 70 * 1024, "gpu_percent": 95.0}, "a faster one may pay"),
        ({"gpu_mib": 70 * 1024, "gpu_percent": 5.0}, "a slower one may do"),
        ({"gpu_mib": 70 * 1024}, "none"),
        ({"gpu_mib": UNKNOWN}, "none"),
        ({"gpu_s": _HOUR}, "none"),  # the other hour may have used more
    ],
)
def test_the_advice(changes: dict[str, Any], words: str) -> None:
    assert words in _used(**changes).row()["advice"]


def test_a_gpu_of_unknown_memory_is_not_called_too_large() -> None:
    (found,) = used([_job(_attempt(1))], [_rental(1, vram_gib=0.0)])
    assert (found.smaller_gib, found.row()["memory"]) == (None, "9.0 GiB")
