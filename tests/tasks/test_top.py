"""One picture of `torpor top`: the reading of `torpor status`, and what machines do now."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tasks import top
from tasks.plain_runner import PlainRunner
from tests.fixtures.activity import activity, quiet
from tests.fixtures.alert_server import AlertMemory
from tests.fixtures.driver import JOB, attempt_on, left_job
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.rentals import handed_over, standing
from torpor.shared.errors import MachineUnreachable
from torpor.shared.values import Machine
from torpor.shared.wire.activity import GPU_LOST, NO_GPU, UNKNOWN, Sample


class _Session:
    """Of a machine whose sampler has seen this."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def call(self, *_: Any, **__: Any) -> Any:
        return activity(self._samples)


@pytest.fixture
def picture(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is shown, where the machines' samplers have seen this; None: they do not answer."""

    def look(samples: list[Sample] | None, last: top.Top | None = None) -> top.Top:
        def session(opened: Any, machine: Machine, within_s: float) -> _Session:
            if samples is None:
                raise MachineUnreachable(f"machine {machine.id} does not answer")
            return _Session(samples)

        monkeypatch.setattr(top, "session_with", session)
        monkeypatch.setattr(top, "open_all", lambda names: ({"demo": lab.opened}, {}))
        with PlainRunner(lab.opened):
            return top.look_at_top(["demo"], AlertMemory(), last)

    return look


def test_a_picture_shows_what_each_machine_does_and_costs_and_the_jobs(
    lab: Lab, picture: Any
) -> None:
    machine, rental = handed_over(lab.opened)
    other, _ = standing(lab.opened)
    left_job(lab, attempts=[attempt_on(machine, rental)], max_usd=9e9)
    works = quiet(10, gpus=2, gpu=88, cpu=310, network=2000, disk=UNKNOWN)
    seen = picture(works)
    rows = {row["machine"]: row for row in seen.tables()[1]}
    assert {name: rows[machine.id][name] for name in ("workspace", "$/h", "GPU", "CPU")} == {
        "workspace": "demo", "$/h": "4.000", "GPU": "88 %", "CPU": "310 %",
    }  # fmt: skip
    assert (rows[machine.id]["net MB/s"], rows[machine.id]["disk MB/s"]) == ("2.0", "")
    assert rows[machine.id]["GPUs"].startswith("2x H100")
    assert rows[other.id]["note"] == "it is running, standing"
    assert seen.tables()[0][0]["workspace"] == "demo" and "awake: 1" in seen.title()
    (job,) = seen.tables()[2]
    assert (job["job"], job["workspace"]) == (JOB, DEMO)
    assert job["used"].endswith(" of 9000000000.00 $")


@pytest.mark.parametrize(
    ("changes", "shown", "note"),
    [
        ({"gpu": UNKNOWN, "gpu_state": GPU_LOST}, "?", "a GPU is lost"),
        ({"gpu": UNKNOWN, "gpus": 0, "gpu_state": NO_GPU}, "?", ""),  # two were rented
        ({"gpu": 0}, "0 %", ""),
    ],
)
def test_a_figure_that_is_not_known_is_never_shown_as_nothing(
    lab: Lab, picture: Any, changes: dict[str, int], shown: str, note: str
) -> None:
    handed_over(lab.opened)
    (row,) = picture(quiet(10, **changes)).tables()[1]
    assert (row["GPU"], row["note"]) == (shown, note)


def test_a_machine_that_does_not_answer_is_a_row_with_its_reason(lab: Lab, picture: Any) -> None:
    machine, _ = handed_over(lab.opened)
    (row,) = picture(None).tables()[1]
    assert row["machine"] == machine.id and "does not answer" in row["note"]
    assert (row["GPU"], row["CPU"], row["$/h"]) == ("?", "", "4.000")
    (silent,) = picture([]).tables()[1]
    assert silent["note"] == "no sampler has written anything"


def test_without_machines_and_jobs_there_is_one_table(picture: Any) -> None:
    seen = picture([])
    assert len(seen.tables()) == 1
    assert msgspec.json.decode(msgspec.json.encode(seen))["machines"] == []


def test_a_machine_is_asked_once_a_minute_so_that_the_screen_keeps_it_from_no_sleep(
    lab: Lab, picture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each login is a second of its CPU."""
    handed_over(lab.opened)
    first = picture(quiet(10, gpu=88))
    assert [one.gpu for one in picture(quiet(10, gpu=1), first).machines] == [88]
    monkeypatch.setattr(top, "AGAIN_S", 0.0)
    assert [one.gpu for one in picture(quiet(10, gpu=1), first).machines] == [1]
