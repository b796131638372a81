"""Steps under a plain runner, and outside of any run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Crashed, Failed, Pending

from flows import hibernate, job
from tasks import plain_runner, prefect_runner, progress
from tasks.phases import phase, phases_told_to
from tasks.plain_runner import PlainRunner
from tasks.prefect_runner import PrefectRunner
from tasks.progress import Progress
from tasks.retries import FIRST_OF_STORE, ONCE, USUAL, WHILE_BUSY
from tasks.runner import runner
from tasks.step import step
from tasks.workspace_blocks import probe_store
from torpor.shared.errors import (
    InvalidInput,
    StoreUnavailable,
    StoreUnreachable,
    TorporError,
    WorkspaceBusy,
)
from torpor.shared.wire.request import Event

seen: ContextVar[str] = ContextVar("seen", default="nothing")
Faults = Iterator[TorporError | None]


def _fault(faults: Faults) -> str:
    """What each try meets, until there is nothing."""
    fault = next(faults)
    if fault is not None:
        raise fault
    return "done"


usual = step("usual")(_fault)
once = step("once", retries=ONCE)(_fault)
first = step("first", retries=FIRST_OF_STORE)(_fault)
waiting = step("waiting", run_name="waiting for {faults}", retries=WHILE_BUSY)(_fault)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    # Not in the module `time`: a thread that Prefect's client left in the process may sleep, too.
    monkeypatch.setattr(plain_runner, "time", SimpleNamespace(sleep=found.append))
    return found


def test_a_step_outside_of_a_run_says_what_to_do() -> None:
    with pytest.raises(
        RuntimeError, match=r"step 'usual' was called outside of a run.*PlainRunner"
    ):
        usual(iter([None]))
    with pytest.raises(RuntimeError, match="outside of a run"):
        usual.submit(iter([None]))


def test_what_may_pass_is_tried_again_after_the_step_s_own_waits(naps: list[float]) -> None:
    away = StoreUnavailable("away")
    with PlainRunner(wait_factor=0.1):
        assert usual(iter([away, away, away, None])) == "done"
        assert naps == pytest.approx([wait_s / 10 for wait_s in USUAL.waits_s])
        with pytest.raises(StoreUnavailable):
            usual(iter([away] * 4 + [None]))
        naps.clear()
        with pytest.raises(StoreUnavailable):
            once(iter([away, None]))
        with pytest.raises(InvalidInput):
            usual(iter([InvalidInput("never"), None]))
    with PlainRunner(retries=0), pytest.raises(StoreUnavailable):
        usual(iter([away, None]))
    assert naps == []


def test_a_run_does_not_begin_with_long_waits_for_a_store_that_is_not_there(
    naps: list[float],
) -> None:
    away = StoreUnavailable("503")
    with PlainRunner():
        assert first(iter([away, away, away, None])) == "done"
        naps.clear()
        with pytest.raises(StoreUnreachable):
            first(iter([StoreUnreachable("refused"), None]))
        assert naps == []
        assert usual(iter([StoreUnreachable("refused"), None])) == "done"
    assert probe_store.retries is FIRST_OF_STORE


def test_only_some_steps_wait_for_a_workspace_that_another_run_holds(naps: list[float]) -> None:
    busy = WorkspaceBusy("held")
    with PlainRunner():
        assert waiting(iter([busy] * 6 + [None])) == "done"
        assert sum(naps) > 60  # longer than the agent waits for a run without its control side
        with pytest.raises(WorkspaceBusy):
            usual(iter([busy, None]))


@step("look", run_name="look {number}")
def look(number: int) -> tuple[str, str, bool]:
    return seen.get(), runner().run, threading.current_thread() is threading.main_thread()


def test_a_submitted_step_runs_on_another_thread_in_the_context_of_its_run() -> None:
    with PlainRunner() as plain:
        token = seen.set("the flow's")
        assert look(1) == ("the flow's", plain.run, True)
        pending = [look.submit(number) for number in range(20)]
        assert {submitted.result() for submitted in pending} == {("the flow's", plain.run, False)}
        seen.reset(token)
    with PlainRunner() as other:
        assert look(1) == ("nothing", other.run, True)
    assert plain.run != other.run


def test_listeners_are_called_before_each_step_and_phase_begins() -> None:
    heard: list[str] = []

    def before(label: str) -> None:
        heard.append(label)
        if label == "look 2":
            raise KeyError("stop here")

    with PlainRunner(before=before), phases_told_to(heard.append):
        with phase("first"):
            look(1)
        with pytest.raises(KeyError):
            look(2)
    assert heard == ["first", "look 1", "look 2"]


def test_a_plain_runner_opens_what_it_was_given_and_nothing_else() -> None:
    with PlainRunner(), pytest.raises(InvalidInput, match="'demo'"):
        runner().open("demo")


def test_a_prefect_server_that_fails_to_show_something_fails_no_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **_how: object) -> None:
        raise OSError("the server is away")

    monkeypatch.setattr(prefect_runner, "create_progress_artifact", lambda **_: "an id")
    monkeypatch.setattr(prefect_runner, "update_progress_artifact", fails)
    monkeypatch.setattr(progress, "UPDATE_S", 0.0)
    monkeypatch.setattr(logging.getLogger("prefect"), "propagate", True)
    caplog.set_level(logging.WARNING)
    bar = Progress("a-bar", "parts", 100)
    bar.event("part 1", Event(50))
    bar.done()
    assert caplog.messages == [
        f"{percent} % on the progress bar a-bar is not shown in the UI; the run goes on: "
        "the server is away"
        for percent in (50, 100)
    ]
    for name in ("create_progress_artifact", "create_table_artifact", "create_markdown_artifact"):
        monkeypatch.setattr(prefect_runner, name, fails)
    Progress("no-bar", "parts", 100).done()
    PrefectRunner().table("a-table", [], "rows")
    PrefectRunner().page("a-page", "text", "words")
    for name, text in zip(("no-bar", "a-table", "a-page"), caplog.messages[2:], strict=True):
        assert name in text


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The deployments that were started, from a run of a deployment."""
    ended = {"idle": Crashed(), "idle-1": Crashed(), "failed": Failed()}
    runs: list[tuple[str, dict[str, Any]]] = []

    def run_deployment(name: str, **options: Any) -> SimpleNamespace:
        runs.append((name, options))
        return SimpleNamespace(name="one", state=ended.get(options["idempotency_key"], Pending()))

    monkeypatch.setattr(prefect_runner, "run_deployment", run_deployment)
    monkeypatch.setattr(prefect_runner, "check_own", lambda name: None)
    monkeypatch.setattr(prefect_runner, "deployment", SimpleNamespace(id="of a deployment"))
    return runs


def test_a_run_of_a_deployment_starts_a_deployment_once_for_each_key(
    started: list[tuple[str, dict[str, Any]]],
) -> None:
    said = PrefectRunner().start(hibernate, "key", workspace="mywork", only_if_idle=True)
    assert said == "run one"
    options = {
        "parameters": {"workspace": "mywork", "only_if_idle": True},
        "timeout": 0,
        "as_subflow": False,
        "work_queue_name": None,
        "idempotency_key": "key",
    }
    assert started == [("hibernate/hibernate", options)]


def test_a_call_from_python_runs_the_flow_at_once(
    started: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefect_runner, "deployment", SimpleNamespace(id=None))
    called: list[dict[str, Any]] = []

    def flow(**parameters: Any) -> None:
        called.append(parameters)

    assert PrefectRunner().start(flow, "key", workspace="mywork") == ""  # type: ignore[arg-type]
    assert (called, started) == ([{"workspace": "mywork"}], [])


def test_a_run_that_was_killed_is_followed_by_another_at_once(
    started: list[tuple[str, dict[str, Any]]],
) -> None:
    """Else an idle machine would cost money until the next key, up to 15 minutes."""
    for flow, queue, key, keys in (
        (hibernate, "", "idle", ["idle", "idle-1", "idle-2"]),
        (hibernate, "", "failed", ["failed"]),
        (job, "normal", "idle", ["idle"]),  # continued by recovery
    ):
        started.clear()
        PrefectRunner().start(flow, key, queue=queue)
        assert [options["idempotency_key"] for _, options in started] == keys
        assert {(name, options["work_queue_name"] or "") for name, options in started} == {
            (f"{flow.name}/{flow.name}", queue)
        }
