"""What a user sees of an error: one message for ours, the traceback for all others."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from prefect import flow, task

from deployments.installation import CHECKOUT
from deployments.server import Server
from tasks import error_output
from tasks.flow import flow as own_flow
from tasks.step import step
from tests.fixtures.deployed import Deployed
from tests.fixtures.waiting import PATIENCE_S
from torpor.shared.errors import StoreDenied

NO_BLOCK = "there is no block workspace/nosuch"


class Kept(logging.Handler):
    """Every record of a run, as a handler of Prefect's formats it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelno, self.format(record)))


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What is logged while everything is."""
    handler = Kept()
    loggers = [logging.getLogger(name) for name in error_output.LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield handler
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


@task(persist_result=False)
def denied() -> None:
    raise StoreDenied("bucket b refuses the key k: allow it to write")


@flow
def asks() -> None:
    denied()


@step("store", says="storing the files")
def stores() -> None:
    """Goes well."""


@own_flow("goes well")
def goes_well() -> None:
    stores()


@flow
def breaks() -> None:
    raise ValueError("a fault in the code")


@pytest.mark.usefixtures("prefect_server")
def test_an_error_of_ours_is_logged_once_and_its_traceback_at_debug_level(kept: Kept) -> None:
    with pytest.raises(StoreDenied):
        asks()
    above = [text for level, text in kept.records if level > logging.DEBUG]
    assert [text for text in above if "refuses the key" in text] == [
        "StoreDenied: bucket b refuses the key k: allow it to write"
    ]
    assert "exception: StoreDenied" in above[-1]
    assert not [text for text in above if "Traceback" in text]
    below = [text for level, text in kept.records if level == logging.DEBUG]
    assert [text for text in below if "Traceback" in text and "refuses the key" in text]


@pytest.mark.usefixtures("prefect_server")
def test_any_other_error_keeps_its_traceback(kept: Kept) -> None:
    with pytest.raises(ValueError, match="fault"):
        breaks()
    errors = [text for level, text in kept.records if level >= logging.ERROR]
    assert any("Traceback" in text and "a fault in the code" in text for text in errors)


@pytest.mark.usefixtures("prefect_server")
def test_a_run_logs_its_phases_and_not_the_end_of_each_step(kept: Kept) -> None:
    goes_well()
    texts = [text for level, text in kept.records if level >= logging.INFO]
    assert "storing the files" in texts
    assert len([text for text in texts if "Finished in state Completed" in text]) == 1  # the run's


def test_a_run_by_a_worker_stores_the_message_once(deployed: Deployed) -> None:
    run = deployed.start("hibernate", {"workspace": "nosuch"})
    ended = deployed.end(run)
    assert ended["state_type"] == "FAILED"
    assert NO_BLOCK in ended["state"]["message"]
    logged: list[str] = []
    while not any("exception: InvalidInput" in text for text in logged):
        # logs come late; pytest's time limit ends this
        logs = deployed.ask("logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}})
        logged = [line["message"] for line in logs]
        time.sleep(0.5)
    (message,) = [text for text in logged if NO_BLOCK in text]
    assert message.startswith("InvalidInput: ")
    assert "Traceback" not in "".join(logged)


def test_a_script_ends_with_the_message_and_without_a_traceback(prefect_server: Server) -> None:
    script = "from flows import hibernate; hibernate('nosuch')"
    code, output = _script(script)
    assert code == 1
    assert "Traceback" not in output
    # Prefect may write a line of its own after it, as it sends its last events
    (message,) = [line for line in output.splitlines() if line.startswith("torpor: InvalidInput: ")]
    assert NO_BLOCK in message


def test_a_script_that_breaks_keeps_its_traceback() -> None:
    code, output = _script("import flows; raise KeyError('a fault')")
    assert code == 1
    assert "Traceback" in output


def _script(text: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=CHECKOUT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
