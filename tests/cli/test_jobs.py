"""`torpor job run` asks before it rents, and takes no option of its own for the command's."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cyclopts import CycloptsError

import flows
from flows.procedures import listing
from torpor.control.jobs.records import Approval, Job, new_job_id
from torpor.control.jobs.report import JobCost
from torpor.shared.errors import InvalidInput, NoOffer, RunCancelled
from torpor.shared.values import WantChange, WorkspaceName
from torpor_cli.app import app

JOB = "3f2a9c81d04e"
SPOT = ["job", "run", "mywork", "--spot", "allowed"]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The parameters of each job that was begun. The workspace is asleep, and one offer fits."""
    jobs: list[dict[str, Any]] = []
    offer = SimpleNamespace(bound_usd_h=0.5)
    found = SimpleNamespace(
        max_price_usd_h=0.6,
        rows=lambda: [{"market": "vast", "$/h": "0.500"}],
        fitting=[SimpleNamespace(offer=offer)],
    )
    monkeypatch.setattr(flows, "job", lambda **given: jobs.append(given))
    monkeypatch.setattr(listing, "needs_machine", lambda workspace: True)
    monkeypatch.setattr(listing, "list_offers", lambda *given, **more: found)
    monkeypatch.setattr("torpor_cli.flow_runs.connected", lambda: nullcontext("http://ui"))
    monkeypatch.setattr("torpor_cli.jobs.connected", nullcontext)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    return jobs


def test_a_job_begins_after_a_yes_to_the_price_with_its_options(
    begun: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("builtins.input", lambda asked: print(asked) or "y")
    given = [
        "--gpu",
        "H100:8",
        "--save-minutes",
        "5",
        "--save",
        "sync.sh now",
        "--nodes",
        "2",
        "--on-cancel",
        "keep",
        "--max-hours",
        "1h30m",
        "--max-usd",
        "5",
    ]
    _run([*SPOT, *given, "--", "echo", "--spot", "never"])
    said = "".join(capsys.readouterr())
    assert "Rent 2 machines for mywork at 1.000 $/h, 24.00 $ a day" in said
    assert "another one whenever one is lost, for at most 0.600 $/h?" in said
    (job,) = begun
    assert job["command"] == ["echo", "--spot", "never"]
    assert (job["spot"], job["save_minutes"], job["nodes"]) == ("allowed", 5.0, 2)
    assert (job["max_hours"], job["max_usd"]) == (1.5, 5.0)
    assert job["save"] == ["bash", "-lc", "sync.sh now"]
    assert (job["on_cancel"], job["gpu"], job["image"]) == ("keep", "H100:8", "")


@pytest.mark.parametrize(("given", "hours"), [("5", 5.0), ("0.5", 0.5), ("90m", 1.5), ("1d", 24.0)])
def test_a_job_has_limits_of_hours_and_dollars(
    begun: list[dict[str, Any]], given: str, hours: float
) -> None:
    _run([*SPOT, "--yes", "--max-hours", given, "--max-usd", "20", "--", "true"])
    (job,) = begun
    assert (job["max_hours"], job["max_usd"]) == (hours, 20.0)


@pytest.mark.parametrize("given", ["nan", "inf", "soon"])
def test_a_time_that_is_none_is_a_mistake(begun: list[dict[str, Any]], given: str) -> None:
    with pytest.raises(CycloptsError):
        _run([*SPOT, "--yes", "--max-hours", given, "--", "true"])
    assert begun == []


@pytest.mark.parametrize(
    "limit",
    [("--max-hours", "0s"), ("--max-hours", "0"), ("--max-usd", "0"), ("--max-usd", "-1")],
)
def test_a_limit_of_nothing_is_a_mistake(
    begun: list[dict[str, Any]], limit: tuple[str, str]
) -> None:
    with pytest.raises(InvalidInput, match=f"^{limit[0]} .*more than 0"):
        _run([*SPOT, "--yes", *limit, "--", "true"])
    assert begun == []


def test_the_offers_in_the_question_are_those_that_the_job_would_rent(
    begun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        listing,
        "list_offers",
        lambda *given, **more: asked.append((*given, more)) or _no_offer("none"),
    )
    with pytest.raises(NoOffer, match="--yes the job begins all the same, and waits"):
        given = ["--gpu", "L40S, 24GB+", "--image", "ours:1", "--nodes", "2", "--max-usd", "5"]
        _run([*SPOT, *given, "--", "true"])
    assert asked == [
        (
            "mywork",
            "newest",
            False,
            WantChange("L40S, 24GB+", [], "allowed", "ours:1"),
            {"nodes": 2, "max_usd": 5.0},
        )
    ]
    assert begun == []


def test_a_no_begins_nothing(begun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda asked: "")
    with pytest.raises(RunCancelled, match="nothing was rented"):
        _run([*SPOT, "--", "true"])
    assert begun == []


def test_an_unattended_job_wants_a_yes(
    begun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(InvalidInput, match="add --yes"):
        _run([*SPOT, "--", "true"])
    assert begun == []
    _run([*SPOT, "--yes", "--", "true"])
    assert len(begun) == 1


def test_no_machine_is_needed_where_the_workspace_is_awake_and_no_other_job_ends_it(
    begun: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[str] = []
    opened = SimpleNamespace(jobs=SimpleNamespace(open=lambda: jobs))
    monkeypatch.undo()
    monkeypatch.setattr(listing, "open_workspace", lambda workspace: opened)
    monkeypatch.setattr(listing, "list_logins", lambda workspace: ["machine"])
    assert not listing.needs_machine("mywork")
    jobs.append("another one")
    assert listing.needs_machine("mywork")
    jobs.clear()
    monkeypatch.setattr(listing, "list_logins", lambda workspace: [])
    assert listing.needs_machine("mywork")


def test_a_job_for_the_worker_says_its_id_and_how_to_follow_and_to_end_it(
    begun: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = SimpleNamespace(id="0f8fad5b-d9cb-469f-a165-70867728950e", name="eager-owl")
    monkeypatch.setattr(flows, "job", SimpleNamespace(name="job"))
    monkeypatch.setattr("prefect.deployments.run_deployment", lambda *given, **more: run)
    monkeypatch.setattr("tasks.own_deployments.check_own", lambda name: None)
    job = new_job_id(run.id)
    detached = ["job", "run", "mywork", "--yes", "--detach"]
    _run([*detached, "--", "true"])
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines() == [
        f"run eager-owl begins: http://ui/runs/flow-run/{run.id}",
        f"job     {job}",
        f"log     torpor job log mywork {job} -f",
        f"cancel  torpor job cancel mywork {job}",
    ]
    _run([*detached, "--json", "--", "true"])
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert printed.err == ""
    assert (said["run"], said["job"]) == (run.id, job)


@pytest.mark.parametrize("named", [["mywork", JOB], [JOB]], ids=["with its workspace", "alone"])
def test_the_log_of_a_job_is_printed_raw_into_a_pipe_and_obeyed_by_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: list[str]
) -> None:
    asked: list[Any] = []

    class Reader:
        def __init__(self, opened: Any, record: Any) -> None:
            asked.append((opened, record))

        def read(self, tail: int | None) -> Any:
            asked.append(tail)
            yield "50 %\r100 %\n"
            yield "\x1b[2J no end"

        def follow(self, tail: int | None) -> Any:
            yield "followed"

    monkeypatch.setattr("torpor_cli.jobs.connected", nullcontext)
    monkeypatch.setattr("tasks.job_listing.workspace_of", lambda job: "mywork")
    monkeypatch.setattr("tasks.job_listing.found_job", lambda opened, *named: (named, None))
    monkeypatch.setattr("tasks.workspace_blocks.open_workspace", lambda name: f"opened {name}")
    monkeypatch.setattr("tasks.job_log.JobLogReader", Reader)
    _run(["job", "log", *named, "--tail", "7"])
    assert asked == [("opened mywork", ("mywork", JOB)), 7]
    assert capsys.readouterr().out == "50 %\r100 %\n\x1b[2J no end"
    monkeypatch.setattr("tasks.job_listing.wait_for_record", lambda opened, *named: named)
    _run(["job", "log", *named, "-f"])
    assert capsys.readouterr().out == "followed"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _run(["job", "log", *named])
    assert capsys.readouterr().out == "50 %\r100 %\n\\x1b[2J no end"


def test_the_log_of_a_job_that_waits_says_how_to_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torpor_cli.jobs.connected", nullcontext)
    monkeypatch.setattr("tasks.job_listing.found_job", lambda opened, *named: (None, "queued"))
    monkeypatch.setattr("tasks.workspace_blocks.open_workspace", lambda name: name)
    with pytest.raises(InvalidInput, match=f"`torpor job log {JOB} -f` waits for it"):
        _run(["job", "log", "mywork", JOB])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "the job rents another one, for at most"),
        (["--gpu", "H100"], "the job rents another one by --gpu, for at most"),
        (["--spot", "only", "--image", "cuda"], "another one by --image and --spot, for at most"),
    ],
    ids=["none", "gpu", "two"],
)
def test_on_the_machine_that_is_there_a_job_names_the_options_of_another_one_that_were_given(
    begun: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(listing, "needs_machine", lambda workspace: False)
    monkeypatch.setattr("builtins.input", lambda asked: "y")
    _run(["job", "run", "mywork", *options, "--", "true"])
    assert said in capsys.readouterr().err
    assert len(begun) == 1


def test_a_job_asks_before_it_ends_a_machine_that_is_awake(
    begun: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(listing, "needs_machine", lambda workspace: False)
    monkeypatch.setattr("builtins.input", lambda asked: print(asked) or "")
    with pytest.raises(RunCancelled, match="no job was begun"):
        _run(["job", "run", "mywork", "--", "true"])
    said = "".join(capsys.readouterr())
    assert "all that runs there ends then, such as kernels and tmux" in said
    assert "Run the job on the machine of mywork, and hibernate that afterwards?" in said
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(InvalidInput, match="add --yes"):
        _run(["job", "run", "mywork", "--", "true"])
    assert begun == []
    _run(["job", "run", "mywork", "--yes", "--", "true"])
    assert len(begun) == 1


@pytest.fixture
def approvals(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was approved of a job that may cost 20 $ and has cost 18."""
    let: list[Any] = []
    record = Job(
        id=JOB, workspace=WorkspaceName("mywork"), block="mywork", command=["a"], created_unix=1.0,
        max_usd=20.0,
    )  # fmt: skip

    def approve(opened: Any, job: Job, approval: Approval) -> Job:
        let.append((opened, approval.max_hours, approval.max_usd, approval.past_budgets))
        return msgspec.structs.replace(job, **approval.changes(job))

    monkeypatch.setattr("torpor_cli.jobs.connected", nullcontext)
    monkeypatch.setattr("tasks.job_listing.workspace_of", lambda job: "mywork")
    monkeypatch.setattr("tasks.workspace_blocks.open_workspace", lambda name: name)
    monkeypatch.setattr("tasks.job_listing.found_job", lambda *_: (record, None))
    monkeypatch.setattr("tasks.jobs.cost_of", lambda *_: JobCost("18.00 $", 18.0))
    monkeypatch.setattr("tasks.job_limits.approve", approve)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    return let


def test_a_job_may_use_more_after_a_yes_that_says_what_it_has_cost(
    approvals: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda asked: print(asked) or "y")
    _run(["job", "approve", JOB, "--max-usd", "40", "--max-hours", "8", "--past-budgets"])
    said = " ".join("".join(capsys.readouterr()).split())
    assert f"Job {JOB} may use 20.00 $, and has cost 18.00 $" in said
    assert "Let it use 8 h, 40.00 $, whatever the budgets say?" in said
    assert approvals == [("mywork", 8.0, 40.0, True)]


@pytest.mark.parametrize(
    ("answer", "at_terminal", "error"),
    [("n", True, RunCancelled), ("y", False, InvalidInput)],
    ids=["no", "nobody there"],
)
def test_without_a_yes_a_job_may_use_what_it_might_before(
    approvals: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    at_terminal: bool,
    error: type[Exception],
) -> None:
    monkeypatch.setattr("builtins.input", lambda asked: answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: at_terminal)
    with pytest.raises(error):
        _run(["job", "approve", "mywork", JOB, "--max-usd", "40"])
    assert approvals == []
    _run(["job", "approve", "mywork", JOB, "--max-usd", "40", "--yes"])
    assert approvals == [("mywork", 0.0, 40.0, False)]
    with pytest.raises(InvalidInput, match="name what the job may use"):
        _run(["job", "approve", "mywork", JOB, "--yes"])


def test_the_log_of_a_job_is_followed_no_longer_than_somebody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(text: str) -> int:
        raise BrokenPipeError

    def endless(tail: int | None) -> Any:
        while True:
            yield "step\n"

    monkeypatch.setattr("torpor_cli.jobs.connected", nullcontext)
    monkeypatch.setattr("tasks.job_listing.wait_for_record", lambda opened, *named: named)
    monkeypatch.setattr("tasks.workspace_blocks.open_workspace", lambda name: name)
    monkeypatch.setattr("tasks.job_log.JobLogReader", lambda *_: SimpleNamespace(follow=endless))
    monkeypatch.setattr("sys.stdout.write", gone)
    _run(["job", "log", "mywork", JOB, "-f"])


def _run(arguments: list[str]) -> None:
    app(arguments, exit_on_error=False, print_error=False)


def _no_offer(why: str) -> None:
    raise NoOffer(why)
