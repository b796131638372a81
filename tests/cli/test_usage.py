"""What wrong use of the command line says, and that help is quick."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.installation import CHECKOUT
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.jobs.listing import JobAnswer, JobLog
from torpor.shared.errors import InvalidInput
from torpor.shared.values import WorkspaceName
from torpor_cli import setup
from torpor_cli.app import app


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], 'Unknown command "nosuch"'),
        (["wake"], "workspace"),
        (["job", "run"], "workspace"),
    ],
)
def test_wrong_use_ends_with_2_and_one_message(arguments: list[str], says: str) -> None:
    done = _here(*arguments)
    assert done.returncode == 2
    assert says in done.stderr.lower() or says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_argument_that_is_no_utf_8_ends_with_2_and_one_message() -> None:
    done = subprocess.run(
        [sys.executable.encode(), b"-m", b"torpor_cli", b"status", b"caf\xe9"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(r"torpor: the argument caf\xe9 is no UTF-8")
    assert done.stderr.count("\n") == 1


def test_the_log_of_a_job_is_what_its_status_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(workspace: str, job: str, lines: int) -> JobAnswer:
        log = JobLog(job, WorkspaceName(workspace), f"{lines} lines", "machine m", "its.log")
        return JobAnswer(job, WorkspaceName(workspace), {}, log)

    monkeypatch.setattr("torpor_cli.flow_runs.connected", lambda: nullcontext("http://ui"))
    monkeypatch.setattr("flows.job_status", status)
    app(["job", "log", "demo", "a", "--lines", "3", "--json"], exit_on_error=False)
    assert json.loads(capsys.readouterr().out)["text"] == "3 lines"


def test_ctrl_c_ends_with_130_and_one_line_that_says_what_to_do() -> None:
    script = (
        "import sys, torpor_cli.status as s, torpor_cli.app as a;"
        "s.connected = lambda: (_ for _ in ()).throw(KeyboardInterrupt());"
        "sys.argv = ['torpor', 'status']; a.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 130
    assert done.stderr == "torpor: interrupted. `torpor status` shows what is awake\n"


def test_help_imports_nothing_that_is_slow() -> None:
    script = (
        "import sys; from torpor_cli.app import app; app(['--help'], exit_on_error=False);"
        "sys.exit(bool({'prefect', 'pandas', 'boto3', 'asyncssh', 'httpx'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "hibernate" in done.stdout


def test_a_folder_with_a_package_of_the_same_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import flows"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert f"torpor needs its own package 'tasks' in {CHECKOUT}" in done.stderr
    assert f"Python found {tmp_path / 'tasks'}" in done.stderr
    assert "run_deployment" in done.stderr


def _here(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torpor_cli", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=PATIENCE_S,
    )


def test_init_names_the_variable_of_whatever_a_market_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SimpleNamespace(address="s3://first", probe=lambda: None)
    monkeypatch.setattr("torpor_cli.setup.connected", nullcontext)
    monkeypatch.setattr("blocks.reference.saved_names", lambda kind: [])
    monkeypatch.setattr(
        "blocks.reference.load", lambda *_, **of: SimpleNamespace(open=lambda: store)
    )
    monkeypatch.setenv(setup.MARKET_VARIABLE, "secret")
    with pytest.raises(InvalidInput, match="Set TORPOR_MARKET_CLIENT_ID"):
        setup.init("first", store="default", market="verda")
