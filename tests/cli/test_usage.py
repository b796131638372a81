"""What wrong use of the command line says, and that help is quick."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from deployments.installation import CHECKOUT
from tests.fixtures.waiting import PATIENCE_S
from torpor.shared.errors import InvalidInput, RunCancelled
from torpor_cli import setup
from torpor_cli.app import app, main
from torpor_cli.question import ask_to_rent

_COLUMNS = 80
ID = "5f2c4b1e-5d0a-4d3c-8c6a-0a8b2f1c9d7e"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nosuch"], 'Unknown command "nosuch"'),
        (["wake"], "workspace"),
        (["job", "run"], "workspace"),
        (["nosuch", "--help"], 'Unknown command "nosuch"'),
        (["hibernat", "-h"], 'Did you mean "hibernate"?'),
        (["job", "lst", "--help"], 'Did you mean "list"?'),
        (["job", "lst"], "`torpor job --help` lists the commands"),
        (["run", "--max-hours", "5x", "--", "ls"], "'5x' is no time: write 5, 2h or 90m."),
        (["wake", "w", "--sleep-after", "x"], "'x' is no time: write whole minutes"),
        (["wake", "mywork", "--snapshto", "x"], "Did you mean --snapshot? `torpor wake --help`"),
        (["job", "run", "mywork", "--spto", "only", "--", "ls"], "Did you mean --spot?"),
        (["job", "run", "mywork", "python", "train.py", "--resume"], "follow `--`"),
        (["job", "run", "mywork", "ls", "--nodes", "2"], "stand before the command"),
        (["job", "run", "mywork", "ls", "--", "--nodes", "2"], "stand before the command"),
        (["ssh", "mywork", "ls", "-la"], "follow `--`"),
        (["run", "python", "train.py", "--resume"], "follow `--`"),
        (["run", "ls", "--gpu", "L40S"], "`torpor run [OPTIONS] -- ls ...`"),
        (["run", "--max-cost", "5", "--", "ls"], "`torpor run --help`"),
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


def test_a_reader_that_has_gone_makes_no_success_of_a_failure() -> None:
    script = (
        "import sys, torpor_cli.status as s, torpor_cli.app as a\n"
        "from torpor.shared.errors import InvalidInput\n"
        "def refused():\n    print('rows')\n    raise InvalidInput('it is not there')\n"
        "s.connected = refused; sys.argv = ['torpor', 'status']; a.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        said = running.stderr.read()
        assert running.wait(PATIENCE_S) == 2
    assert said == "torpor: it is not there\n"


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


@pytest.mark.parametrize("command", [*app, *(f"job {name}" for name in app["job"])])
def test_help_fills_the_lines_of_a_terminal_and_shows_no_empty_default(command: str) -> None:
    if command.rpartition(" ")[2].startswith("-"):
        return
    written = io.StringIO()
    app.help_print(command.split(), console=Console(width=_COLUMNS, file=written))
    shown = written.getvalue()
    assert not re.search(r"default:\s+(\]|None|False|\"\")", shown)
    paragraphs, _, _ = shown.partition("╭")
    for line, after in itertools.pairwise(paragraphs.splitlines()):
        if line.strip() and after.strip() and command != "completion":
            assert len(f"{line.strip()} {after.split()[0]}") > _COLUMNS, line


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


@pytest.mark.parametrize("named_by", ["PREFECT_API_URL", "a profile"])
def test_a_server_without_torpor_s_deployments_is_named_with_the_command_that_makes_them(
    tmp_path: Path, named_by: str
) -> None:
    with _prefect_answering({"/admin/version": (200, "3.9.1")}) as url:
        env, up = {"PREFECT_API_URL": url}, "`torpor up` makes them"
        if named_by != "PREFECT_API_URL":
            profiles = tmp_path / "profiles.toml"
            profiles.write_text(f'active = "p"\n[profiles.p]\nPREFECT_API_URL = "{url}"\n')
            named_by = f"the active profile p of {profiles}"
            env, up = {"PREFECT_HOME": str(tmp_path)}, f"`PREFECT_API_URL={url} torpor up` makes"
        done = _here("hibernate", "mywork", "--detach", env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"server {url} ({named_by}) has no deployment hibernate/hibernate" in done.stderr
    assert up in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("told", "kept"), [({}, "1"), ({"DO_NOT_TRACK": "0"}, "0")])
def test_prefect_sends_no_usage_data_of_a_command_unless_its_user_says_so(
    told: dict[str, str], kept: str
) -> None:
    script = (
        "import os; from torpor_cli.server import connected\n"
        "with connected(): print(os.environ['DO_NOT_TRACK'])"
    )
    with _prefect_answering({"/admin/version": (200, "3.9.1")}) as url:
        done = _python(script, url, **told)
    assert done.stdout.strip() == kept, done.stderr


def test_a_command_asks_its_server_by_one_client() -> None:
    script = (
        "from torpor_cli.server import connected\n"
        "with connected():\n"
        "    from prefect.client.orchestration import get_client\n"
        "    with get_client(sync_client=True) as one: pass\n"
        "    with get_client(sync_client=True) as other: print(other is one)"
    )
    with _prefect_answering({"/admin/version": (200, "3.9.1")}) as url:
        done = _python(script, url)
    assert done.stdout.strip() == "True", done.stderr


def test_a_server_of_another_prefect_is_named_without_a_traceback() -> None:
    script = "import sys, torpor_cli.app as a; sys.argv = ['torpor', 'status']; a.main()"
    with _prefect_answering({"/admin/version": (200, "2.20.0")}) as url:
        done = _python(script, url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"torpor: the Prefect server at {url} cannot be used: ")
    assert "server: 2.20.0" in done.stderr


def test_nothing_looks_for_garbage_in_what_a_command_imports() -> None:
    script = (
        "import atexit, gc, sys, torpor_cli.server as s, torpor_cli.app as a\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "with s.connected(): print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "gc.unfreeze(); sys.argv = ['torpor', '--version']; a.main()"
    )
    with _prefect_answering({"/admin/version": (200, "3.9.1")}) as url:
        done = _python(script, url)
    whole, version, at_exit = done.stdout.splitlines()
    assert (whole, at_exit) == ("True True", "True"), done.stderr
    assert version.startswith("torpor ")


def test_a_server_that_refuses_a_detached_run_is_quoted() -> None:
    own: dict[str, object] = {"id": ID, "name": "job", "flow_id": ID, "tags": ["torpor"]}
    own["entrypoint"] = "flows/job.py:job"
    refused = {"detail": "deployment is not associated with a work pool"}
    answers = {
        "/admin/version": (200, "3.9.1"),
        "/deployments/name/job/job": (200, own),
        f"/deployments/{ID}/create_flow_run": (400, refused),
    }
    with _prefect_answering(answers) as url:
        done = _here(
            "job", "run", "mywork", "--detach", "--yes", "true", env={"PREFECT_API_URL": url}
        )
    assert (done.returncode, done.stdout) == (1, "")
    assert "refuses a run of job/job (400)" in done.stderr
    assert "not associated with a work pool" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def _prefect_answering(answers: dict[str, tuple[int, object]]) -> Iterator[str]:
    """The API of a Prefect server that answers these paths, and 404 to all others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.removeprefix("/api")
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = answers.get(path, (404, {"detail": "not found"}))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/api"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _python(script: str, url: str, **env: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if name != "DO_NOT_TRACK"}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=plain | {"PREFECT_API_URL": url} | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def _here(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.run(
        [sys.executable, "-m", "torpor_cli", *arguments],
        env=plain | (env or {}),
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
    monkeypatch.setattr("torpor_cli.setup.keep_on_record", lambda name: None)
    monkeypatch.setattr("blocks.reference.saved_names", lambda kind: [])
    monkeypatch.setattr(
        "blocks.reference.load", lambda *_, **of: SimpleNamespace(open=lambda: store)
    )
    monkeypatch.setenv(setup.MARKET_VARIABLE, "secret")
    with pytest.raises(InvalidInput, match="Set TORPOR_MARKET_CLIENT_ID"):
        setup.init("first", store="default", market="verda")


@pytest.mark.parametrize(
    ("answers", "limit"),
    [([""], 0.6), (["none"], None), (["0.75"], 0.75), (["cheap", "0.75"], 0.75)],
)
def test_init_asks_for_the_highest_price_and_suggests_one_from_the_offers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: list[str],
    limit: float | None,
) -> None:
    offers = [SimpleNamespace(bound_usd_h=price) for price in (0.4, 2.0)]
    saved = _saved_by_init(monkeypatch, offers)
    left = [*answers]
    monkeypatch.setattr("builtins.input", lambda question: left.pop(0))
    _init()
    assert saved == [limit]
    assert ("'cheap' is no price" in capsys.readouterr().err) == ("cheap" in answers)


def test_init_asks_for_no_price_where_machines_cost_nothing_or_an_option_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = _saved_by_init(monkeypatch, [SimpleNamespace(bound_usd_h=0.0)])
    _init()
    _init(max_price=2.5)
    _init(max_price=0.0)
    assert saved == [None, 2.5, None]


def test_an_unattended_init_names_the_option_of_the_highest_price(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = _saved_by_init(monkeypatch, [SimpleNamespace(bound_usd_h=0.4)])
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(InvalidInput, match="Highest price"):
        _init()
    assert saved == []


def test_the_question_names_what_a_dearer_offer_would_cost_and_a_yes_holds_for_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wish of several GPUs ranks by preference first."""
    sold = [
        SimpleNamespace(offer=SimpleNamespace(bound_usd_h=price)) for price in (0.4, 0.5, 29.9996)
    ]
    found = SimpleNamespace(fitting=sold, rows=list)
    monkeypatch.setattr("torpor_cli.question.offers_of", lambda *_, **__: found)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "no")
    with pytest.raises(RunCancelled):
        ask_to_rent("mywork", "newest", 2, starts=True)
    assert "at 0.800 $/h, 19.20 $ a day (up to 59.999 $/h where the first offers fail)?" in asked[0]
    monkeypatch.setattr("builtins.input", lambda question: "yes")
    assert ask_to_rent("mywork", "newest", 2, starts=True) == 30.0


def _saved_by_init(
    monkeypatch: pytest.MonkeyPatch, offers: list[SimpleNamespace]
) -> list[float | None]:
    """The price limits of the workspaces that are saved; ``offers`` fit."""
    saved: list[float | None] = []
    account = SimpleNamespace(name="a", balance_usd=None, notes=[])
    opened = SimpleNamespace(
        address="s3://first", identity="m://a", probe=lambda: None, check=lambda image: account
    )
    found = SimpleNamespace(fitting=offers)
    monkeypatch.setattr("torpor_cli.setup.connected", nullcontext)
    monkeypatch.setattr("torpor_cli.setup.keep_on_record", lambda name: None)
    monkeypatch.setattr("torpor.control.rental.search.find_offers", lambda providers, want: found)
    monkeypatch.setattr("blocks.reference.saved_names", lambda kind: [])
    monkeypatch.setattr(
        "blocks.reference.load", lambda *_, **of: SimpleNamespace(open=lambda: opened)
    )
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr(
        "blocks.Workspace.save", lambda block, name: saved.append(block.max_price_usd_h)
    )
    return saved


def _init(max_price: float | None = None) -> None:
    given = {"store": "default", "provider": "vast-provider/default", "path": ["~/w"]}
    setup.init("first", gpu="", max_price=max_price, **given)  # type: ignore[arg-type]


def test_the_demo_s_exit_code_is_the_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def stopped(arguments: list[str]) -> int:
        told.append(arguments)
        return 130

    monkeypatch.setattr("deployments.demo.main", stopped)
    assert app(["demo", "--verbose"], exit_on_error=False) == 130
    assert told == [["--verbose"]]


def test_help_without_colours_has_no_escape_codes_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.argv", ["torpor", "create", "--help"])
    monkeypatch.setattr(app, "console", app.console)  # put back
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().out
    assert "Usage: torpor create" in said
    assert "\x1b" not in said
