"""What a job's command prints, as people read it: live, from its machine, and from the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows import job
from flows.procedures.job import log as shown_log
from tasks import job_log
from tasks.job_log import JobLogReader
from tasks.plain_runner import PlainRunner
from tasks.progress import followed_by
from tests.fixtures.driver import JOB_FLOW, hurried
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import wake_plainly
from tests.fixtures.waiting import background, until
from torpor.control.jobs.records import Job
from torpor.shared.errors import JobFailed

pytestmark = pytest.mark.usefixtures("needs_server")


class Reader:
    """Follows a run, and keeps what it hears."""

    def __init__(self) -> None:
        self.printed = ""
        self.begun: list[str] = []

    def begins(self, thing: str, words: str) -> None:
        self.begun.append(words)

    def ends(self, thing: str) -> None:
        pass

    def moves(self, what: str, done_bytes: int, total_bytes: int) -> None:
        pass

    def prints(self, text: str) -> None:
        self.printed += text


@pytest.fixture(autouse=True)
def _hurried(short_agent: None) -> Iterator[None]:
    with hurried():
        yield


@pytest.fixture
def place(lab: Lab) -> Path:
    place = lab.workspace(lab.rent().id)
    place.mkdir()
    return place


def _job(lab: Lab) -> Job:
    return next(iter([*lab.opened.jobs.open(), *lab.opened.jobs.ended(1)]))


def test_whoever_follows_a_job_reads_every_line_in_its_order(
    lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_log, "MOST_LOG_BYTES", 4096)  # what the run's own log gets of a look
    reader = Reader()
    script = "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done; printf end; exit 3"
    with (
        PlainRunner(lab.opened),
        followed_by(reader),
        pytest.raises(JobFailed) as caught,
    ):
        job.fn(DEMO, ["sh", "-c", script])
    lines = [line for line in reader.printed.splitlines() if not line.startswith("torpor: ")]
    assert lines == [*(f"line {number}" for number in range(3000)), "end"]
    assert "last lines" not in str(caught.value)  # they were read
    began = next(i for i, words in enumerate(reader.begun) if words.startswith("attempt 1 of job"))
    assert any(words.startswith("ending machine") for words in reader.begun[began:])


def test_the_last_lines_of_a_long_log_cost_a_bounded_read(
    lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "TAIL_BYTES", 1000)
    monkeypatch.setattr(job_log, "MOST_TAIL_BYTES", 4000)
    hibernating = JOB_FLOW.hibernate_machine
    read: list[str] = []

    def look(*given: object) -> object:
        reader = JobLogReader(lab.opened, _job(lab))
        read.extend("".join(reader.read(tail)) for tail in (3, 10_000))
        return hibernating(*given)

    monkeypatch.setattr(JOB_FLOW, "hibernate_machine", look)
    with PlainRunner(lab.opened):
        job.fn(DEMO, ["seq", "20000"])
        read += ["".join(JobLogReader(lab.opened, _job(lab)).read(tail)) for tail in (3, 10_000)]
    for last, bounded in (read[:2], read[2:]):
        assert last.splitlines()[:2] == ["19999", "20000"] and len(last.splitlines()) == 3
        first, *_, end = bounded.splitlines()
        assert first.isdigit() and len(first) == 5 and "ended with status 0" in end
        assert 3000 < len(bounded) < 4000


def test_a_log_is_read_and_followed_on_the_machine_and_from_the_store_after_it(
    lab: Lab, place: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = f"seq 500; until test -e {go}; do sleep 0.1; done; echo 501; echo 502"

    def run() -> None:
        with PlainRunner(lab.opened):
            job.fn(DEMO, ["sh", "-c", script])

    naps: list[float] = []
    with background(run) as ended:
        until(lambda: lab.opened.jobs.open() and _job(lab).log_offset > 1000, "it has printed")
        with PlainRunner(lab.opened):
            reader = JobLogReader(lab.opened, _job(lab))
            assert "".join(reader.read(3)) == "498\n499\n500\n"
            assert reader.source == f"machine {_job(lab).attempts[-1].machine}"
            follows = JobLogReader(lab.opened, _job(lab)).follow(1, nap=naps.append)
            read = next(follows)
            go.touch()
            read += "".join(follows)
        ended()
    assert read.splitlines()[:3] == ["500", "501", "502"]
    assert "ended with status 0" in read.splitlines()[3] and len(read.splitlines()) == 4
    assert naps
    over = _job(lab)
    assert over.state == "succeeded" and lab.machines() == []
    with PlainRunner(lab.opened):
        stored = JobLogReader(lab.opened, over)
        whole = "".join(stored.read())
        assert stored.source == f"snapshot {over.newest}"
        assert [line for line in whole.splitlines() if line.isdigit()] == [
            str(number) for number in range(1, 503)
        ]
        assert "".join(JobLogReader(lab.opened, over).follow(2)) == "".join(
            whole.splitlines(keepends=True)[-2:]
        )
    assert wake_plainly(lab.opened).machine
