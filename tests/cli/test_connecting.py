"""`torpor connect`: what it refuses and keeps, and the command line of a host without a worker."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate

from blocks import LocalProvider, ObjectStore, VastProvider, Workspace
from blocks.access_keys import AccessKeys
from blocks.workspace import open_all_providers
from deployments import idle, up
from deployments.installation import CHECKOUT, Installation, code_digest, code_version
from deployments.schedules import WATCH
from deployments.server import Server
from tests.fixtures.deployed import Deployed
from tests.fixtures.tls_front import TlsFront
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.own_server import (
    FOLDER_VARIABLE,
    choose_server,
    connection,
    how_to_hibernate,
    how_to_start,
)
from torpor.control.rental.markets import Markets
from torpor.control.supervision import LOCK, Supervision
from torpor.shared.errors import InvalidInput, TorporError
from torpor_cli.app import app

# Of these, tests/deployments/test_queues.py kills the worker.
pytestmark = pytest.mark.together("automations and make up")

LOGIN = "torpor:a-secret"
DOWN: Mapping[str, object] = {}
"""What Caddy answers while the server behind it is down."""
THERE = "deployments/name/hibernate/hibernate"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of a host that no server is known on, whose user types the login."""
    for name in [*os.environ]:
        if name.startswith("PREFECT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "state"))
    _types(monkeypatch, LOGIN)
    return tmp_path / "state"


def _types(monkeypatch: pytest.MonkeyPatch, login: str) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: bool(login))
    monkeypatch.setattr("getpass.getpass", lambda question: login)


BY_FLOW = """
import blocks
from blocks.reference import saved_names
assert saved_names(blocks.Workspace) == []
"""
BY_COMMAND = f"""
from torpor_cli.server import connected
with connected():{BY_FLOW.replace(chr(10), chr(10) + "    ")}
"""
VERIFIES = """
from prefect.settings import get_current_settings, temporary_settings
assert get_current_settings().api.tls_insecure_skip_verify is False
with temporary_settings():
    assert get_current_settings().client.custom_headers == {}
"""
"""A request to the server that is meant, by a command, and by a flow that Python calls."""
TYPES_LOGIN = f"""
import getpass, sys
sys.stdin.isatty = lambda: True
getpass.getpass = lambda question: {LOGIN!r}
"""
"""A user at the terminal, who answers with the login."""


def _python(folder: Path, asks: str) -> None:
    """Run it in a new process, in a folder of a user's project."""
    (project := folder.with_name("project")).mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", asks],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def _answering(
    answers: Mapping[str, object],
    login: str = "",
    leads_to: str = "",
    asked: list[Message] | None = None,
) -> Iterator[str]:
    """A server that has these answers below /api, for whoever has the login; its address. ``asked``
    gets the headers of each request."""
    wanted = f"Basic {base64.b64encode(login.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.removeprefix("/api/")
            if asked is not None:
                asked.append(self.headers)
            if answers is DOWN:
                self.send_response(502)
            elif leads_to:
                self.send_response(308)
                self.send_header("Location", leads_to)
            elif login and self.headers.get("Authorization") != wanted:
                self.send_response(401)
            else:
                self.send_response(200 if path in answers else 404)
            self.end_headers()
            self.wfile.write(str(answers.get(path, "")).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def _installed(folder: Path, port: int) -> None:
    """What the first start of an installation leaves."""
    folder.mkdir(exist_ok=True)
    (folder / "login").write_text("torpor:own\n")
    (folder / "server.port").write_text(f"{port}\n")


def _torpor(*arguments: str) -> None:
    app([*arguments], exit_on_error=False, print_error=False)


def _healthy() -> dict[str, object]:
    there = json.dumps({"version": code_version()})
    return {"admin/version": json.dumps(version("prefect")), THERE: there}


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("https://me:hunter2@vps.example.org", "has a login in it"),
        ("http://vps.example.org:4300", "ssh -N -L 14200:127.0.0.1:4300 vps.example.org"),
        ("vps.example.org", "write it as https://"),
        ("ftp://vps.example.org", "write it as https://"),
        ("https://vps.example.org:what", "cannot be read"),
        ("https://vps..example.org", "cannot be read"),
        ("https://vps\x01.example.org", "cannot be read"),
    ],
)
def test_an_address_that_would_show_the_login_or_is_none_is_refused(
    folder: Path, address: str, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says) as refused:
        _torpor("connect", address)
    assert "hunter2" not in str(refused.value) and not folder.exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.1", "[::ffff:127.0.0.1]"])
def test_the_address_of_this_hosts_own_server_is_refused_with_another_port(
    folder: Path, host: str
) -> None:
    _installed(folder, 4200)
    says = "own server.*ssh -N -L 14200:127.0.0.1:4200 .*connect http://127.0.0.1:14200"
    with pytest.raises(InvalidInput, match=says):
        _torpor("connect", f"http://{host}:4200")
    assert connection() is None


@pytest.mark.rule(9)
def test_a_server_elsewhere_never_gets_the_password_of_the_installation(folder: Path) -> None:
    """An installation may come to have the address that `ssh -L` listens at."""
    with _answering(_healthy(), LOGIN) as address:
        _torpor("connect", address)
        _installed(folder, int(address.rpartition(":")[2]))
        choice = choose_server()
    assert choice is not None
    assert (choice.taken.source, choice.taken.login) == ("connection", LOGIN)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"admin/version": '"3.4.1"'}, r"runs Prefect 3\.4\.1, and torpor here 3\."),
        ({"admin/version": "<html>"}, "not as a Prefect server does"),
        ({THERE: None}, "without torpor's deployments"),
        ({THERE: "<html>"}, "does not answer as a Prefect server does"),
        ({THERE: "[]"}, "does not answer as a Prefect server does"),
    ],
)
def test_a_server_that_torpor_cannot_use_is_refused(
    folder: Path, changes: dict[str, object], says: str
) -> None:
    answers = {path: said for path, said in (_healthy() | changes).items() if said is not None}
    with _answering(answers, LOGIN) as address, pytest.raises(InvalidInput, match=says) as refused:
        _torpor("connect", address)
    assert address in str(refused.value) and connection() is None


def test_the_login_goes_to_no_other_server_than_the_one_that_was_named(folder: Path) -> None:
    with (
        _answering({}, leads_to="https://elsewhere.example.org") as address,
        pytest.raises(InvalidInput, match=r"leads to https://elsewhere\.example\.org"),
    ):
        _torpor("connect", address)
    with _answering({}) as there, _answering({}, leads_to=f"{there}/api") as address:
        folder.mkdir()
        kept = {"api_url": f"{address}/api", "login": LOGIN}  # since it was connected
        (folder / "connection").write_text(json.dumps(kept))
        with pytest.raises(AssertionError, match=f"leads to {there}/api: connect to that server"):
            _python(folder, BY_COMMAND)


@pytest.mark.rule(9)
@pytest.mark.parametrize("excepted", [{}, {"no_proxy": "other.example.org"}, {"NO_PROXY": "*"}])
def test_a_proxy_gets_nothing_of_a_server_behind_ssh(
    folder: Path, monkeypatch: pytest.MonkeyPatch, excepted: dict[str, str]
) -> None:
    """What comes to 127.0.0.1 is not encrypted: a proxy would read the login."""
    asked: list[Message] = []
    with _answering({}, asked=asked) as proxy, _answering(_healthy(), LOGIN) as address:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in excepted.items():
            monkeypatch.setenv(name, value)
        _torpor("connect", address)
        for asks in (BY_COMMAND, BY_FLOW):
            _python(folder, asks)
    assert asked == []


@pytest.mark.rule(9)
@pytest.mark.parametrize("asks", [BY_COMMAND, BY_FLOW], ids=["command", "flow"])
@pytest.mark.parametrize("login", [LOGIN, ""], ids=["login", "no login"])
def test_no_secret_of_the_users_own_prefect_goes_to_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, login: str, asks: str
) -> None:
    """Each place that Prefect takes settings from holds what is for another server."""
    asked: list[Message] = []
    settings = {
        "PREFECT_API_AUTH_STRING": "me:hunter2",
        "PREFECT_API_KEY": "pnu_hunter2",
        "PREFECT_API_TLS_INSECURE_SKIP_VERIFY": "true",
        "PREFECT_CLIENT_CUSTOM_HEADERS": '{"X-Access": "hunter2"}',
    }
    home, project = folder.with_name("prefect"), folder.with_name("project")
    home.mkdir(exist_ok=True)
    profile = "".join(f"{name} = '{value}'\n" for name, value in settings.items())
    (home / "profiles.toml").write_text(f"active = 'cloud'\n[profiles.cloud]\n{profile}")
    project.mkdir()
    kept = "".join(f"{name}={value}\n" for name, value in settings.items() if "_API_" in name)
    (project / ".env").write_text(kept)
    (project / "prefect.toml").write_text(
        "[api]\nkey = 'hunter2'\nauth_string = 'me:hunter2'\ntls_insecure_skip_verify = true\n"
    )
    with _answering(_healthy(), login, asked=asked) as address:
        _torpor("connect", address)
        _python(folder, asks + VERIFIES)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PREFECT_PROFILE", "cloud")
        _python(folder, asks + VERIFIES)
        # Prefect adds the headers of these files to those of the variable, in each child as well.
        for name, headers in (
            ("prefect.toml", "[client.custom_headers]\nX-Access = 'hunter2'\n"),
            (".env", """PREFECT_CLIENT_CUSTOM_HEADERS={"X-Access": "hunter2"}\n"""),
        ):
            (project / name).write_text(headers)
            with pytest.raises(AssertionError, match=f"{project / name}.* sets headers"):
                _python(folder, asks)
            (project / name).unlink()
    sent = {headers.get("Authorization") for headers in asked}
    right = f"Basic {base64.b64encode(login.encode()).decode()}"
    assert sent == ({None, right} if login else {None})  # without it, `connect` sees if it is asked
    assert "X-Access" not in {name for headers in asked for name in headers}
    _torpor("disconnect")
    assert [*folder.iterdir()] == []


def test_a_certificate_of_an_authority_of_ones_own_is_taken_by_the_file_that_prefect_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        _answering(_healthy(), LOGIN) as behind,
        closing(TlsFront(behind, tmp_path)) as front,
    ):
        address = front.endpoint_url
        with pytest.raises(TorporError, match=r"PREFECT_API_SSL_CERT_FILE.* SSL_CERT_FILE"):
            _torpor("connect", address)
        monkeypatch.setenv("PREFECT_API_SSL_CERT_FILE", str(tmp_path / "none.crt"))
        with pytest.raises(InvalidInput, match=r"none\.crt.* has no certificates"):
            _torpor("connect", address)
        monkeypatch.setenv("PREFECT_API_SSL_CERT_FILE", str(front.authority))
        _torpor("connect", address)
        _python(folder, BY_COMMAND)
        monkeypatch.delenv("PREFECT_API_SSL_CERT_FILE")
        with pytest.raises(AssertionError, match="does not trust"):
            _python(folder, BY_COMMAND)


def test_a_wrong_login_and_a_server_that_is_away_change_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with _answering(_healthy(), LOGIN) as address:
        _torpor("connect", address)
        before = (folder / "connection").read_bytes()
        _types(monkeypatch, "torpor:wrong")
        with pytest.raises(InvalidInput, match="refuses the login"):
            _torpor("connect", address)
        _types(monkeypatch, "")
        with pytest.raises(InvalidInput, match="nobody is at the terminal"):
            _torpor("connect", address)
    with pytest.raises(TorporError, match="does not answer"):
        _torpor("connect", address)
    assert (folder / "connection").read_bytes() == before
    assert LOGIN.partition(":")[2] not in "".join(capsys.readouterr())


def test_a_server_that_is_down_behind_its_proxy_is_said_to_be(folder: Path) -> None:
    """Prefect's client would ask again and again."""
    with _answering(DOWN) as address:
        with pytest.raises(InvalidInput, match="502 to admin/version"):
            _torpor("connect", address)
        folder.mkdir()
        kept = {"api_url": f"{address}/api", "login": LOGIN}
        (folder / "connection").write_text(json.dumps(kept))
        says = f"{address}/api answers with 502: `torpor connect` chose it: see that it runs"
        with pytest.raises(AssertionError, match=says):
            _python(folder, BY_COMMAND)


def test_the_login_is_asked_and_kept_for_this_user_alone(folder: Path) -> None:
    with _answering(_healthy(), LOGIN) as address:
        _torpor("connect", f"{address}/")
    choice = choose_server()
    assert choice is not None
    assert (choice.taken.api_url, choice.taken.login) == (f"{address}/api", LOGIN)
    assert (folder / "connection").stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0


def test_it_warns_of_another_version_of_torpor_with_both(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _answering({**_healthy(), THERE: '{"version": "9.8.7"}'}, LOGIN) as address:
        _torpor("connect", address)
        said = capsys.readouterr().err
    assert f"torpor is 9.8.7 at {address}/api and {code_version()} here" in said
    assert code_digest(CHECKOUT)[:12] in said
    other = f"{version('torpor')} (code 0123456789ab)"  # the number stays from commit to commit
    with _answering({**_healthy(), THERE: json.dumps({"version": other})}, LOGIN) as address:
        _torpor("connect", address)
    assert f"torpor is {other} at {address}/api" in capsys.readouterr().err
    with _answering(_healthy(), LOGIN) as address:
        _torpor("connect", address)
    assert "torpor is " not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("paused", "active", "warns"), [(False, True, False), (True, True, True), (False, False, True)]
)
def test_it_warns_where_nobody_looks_after_machines_there(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    paused: bool,
    active: bool,
    warns: bool,
) -> None:
    watch = json.dumps({"paused": paused, "schedules": [{"active": active}]})
    with _answering({**_healthy(), "deployments/name/watch/watch": watch}, LOGIN) as address:
        _torpor("connect", address)
    said = capsys.readouterr().err
    assert (f"`torpor connect {address} --idle hibernate`" in said) == warns


def test_watch_is_switched_at_the_connected_server_whatever_the_shell_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[Message]] = {"here": [], "other": []}
    with (
        _answering(_healthy(), LOGIN, asked=asked["here"]) as address,
        _answering(_healthy(), asked=asked["other"]) as other,
    ):
        monkeypatch.setenv("PREFECT_API_URL", f"{other}/api")
        connects = (
            f"{TYPES_LOGIN}\nfrom torpor_cli.app import app\n"
            f"words = ['connect', '{address}', '--idle', 'off']\n"
            "app(words, exit_on_error=False, print_error=False)"
        )
        says = (
            f"{address}/api.* has no deployment watch/watch.*`torpor up`.* on the host of {address}"
        )
        with pytest.raises(AssertionError, match=says):
            _python(folder, connects)
    assert asked["here"] and asked["other"] == []


@pytest.mark.rule(9)
@pytest.mark.parametrize(
    "named", ["PREFECT_API_URL", "PREFECT_PROFILE", "active profile", "installation", "no server"]
)
def test_the_login_that_the_shell_has_for_another_server_stays_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    other = "https://other.example.org/api"
    home = folder.with_name("prefect")
    home.mkdir()
    profile = f"[profiles.other]\nPREFECT_API_URL = '{other}'\n"
    active = "active = 'other'\n" if named == "active profile" else ""
    (home / "profiles.toml").write_text(active + profile)
    if named.startswith("PREFECT_"):
        monkeypatch.setenv(named, other if named == "PREFECT_API_URL" else "other")
    if named == "installation":
        _installed(folder, 4321)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:hunter2")
    asked: list[Message] = []
    _types(monkeypatch, "")
    with _answering(_healthy(), LOGIN, asked=asked) as address:
        with pytest.raises(InvalidInput, match="set PREFECT_API_URL to that address"):
            _torpor("connect", address)
        assert [headers.get("Authorization") for headers in asked] == [None]
        _types(monkeypatch, LOGIN)
        _torpor("connect", address)
        kept = connection()
        assert kept is not None and kept.login == LOGIN
        _types(monkeypatch, "")
        # The shell names the same server, whose login it has.
        monkeypatch.setenv("PREFECT_API_URL", f"{address}/api/")
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", LOGIN)
        _torpor("connect", address)


def test_the_server_that_this_hosts_workers_serve_is_refused(folder: Path) -> None:
    """Their runs would take this host's store and machines for those of another host."""
    folder.mkdir()
    asked: list[Message] = []
    with (
        _answering(_healthy(), LOGIN, asked=asked) as address,
        Installation(folder).locked(LOCK),
    ):
        Supervision(os.getpid(), f"{address}/api", own=False).write(folder)
        with pytest.raises(InvalidInput, match=f"workers of this host serve {address}/api"):
            _torpor("connect", address.replace("http://127.0.0.1", "HTTP://LOCALHOST"))
    assert asked == [] and connection() is None


def test_another_connection_is_replaced_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with _answering(_healthy(), LOGIN) as first, _answering(_healthy(), LOGIN) as second:
        for address in (first, first, second):
            _torpor("connect", address)
        assert capsys.readouterr().out.count(f"not {first}/api, as before") == 1
        kept = connection()
        assert kept is not None and kept.api_url == f"{second}/api"


def test_a_connection_comes_before_this_hosts_installation_and_goes_without_a_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _installed(folder, 4321)
    own = "http://127.0.0.1:4321/api"
    with _answering(_healthy(), LOGIN) as address:
        _torpor("connect", address)
    assert how_to_hibernate() == f"`torpor connect {address} --idle hibernate`"
    assert how_to_start().endswith(f"on the host of {address}/api")
    with pytest.raises(InvalidInput, match="run `torpor smoke` on the host of that server"):
        _torpor("smoke", "vast-provider/default")
    choice = choose_server()
    assert choice is not None and choice.taken.api_url == f"{address}/api"
    assert f"not {own} " in choice.words and "torpor disconnect" in choice.words
    for starts in ("up", "boot"):  # what it starts is not what commands use
        with pytest.raises(InvalidInput, match="`torpor disconnect` first"):
            _torpor(starts)
    (by_make,) = re.findall(r"deployments\.up (\S+) \$", (CHECKOUT / "Makefile").read_text())
    assert up.main([by_make]) == 1
    assert "`torpor disconnect` first" in capsys.readouterr().err
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    other = choose_server()
    assert other is not None and other.taken.source == "environment"
    monkeypatch.delenv("PREFECT_API_URL")
    (folder / "connection").write_text("{")
    with pytest.raises(InvalidInput, match="cannot be read"):
        choose_server()  # no other server is taken in its place
    started = choose_server(connected=False)  # as the supervisor's children
    assert started is not None and started.taken.api_url == own
    (folder / "connection.new").write_text(LOGIN)  # of a `connect` that was killed
    _torpor("disconnect")
    assert how_to_hibernate() == "`torpor up --idle hibernate`"
    assert f"commands use {own}" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["login", "server.port"]
    with pytest.raises(InvalidInput, match="not connected"):
        _torpor("disconnect")


def test_what_becomes_of_idle_machines_elsewhere_is_not_this_installations_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = SimpleNamespace(id=1, parameters={}, paused=False, schedules=[])
    client = nullcontext(SimpleNamespace(update_deployment=lambda *_: None))
    monkeypatch.setattr(idle, "get_client", lambda sync_client: client)
    monkeypatch.setattr(idle, "read_own", lambda client, name: watch)
    with _answering(_healthy(), LOGIN) as address:
        _torpor("connect", address)
    idle.choose(Installation(folder), "hibernate")
    assert idle.chosen(Installation(folder)) is None
    _torpor("disconnect")
    idle.choose(Installation(folder), "hibernate")
    assert idle.chosen(Installation(folder)) == "hibernate"


@pytest.mark.parametrize(
    ("endpoint", "there"),
    [
        ("http://127.0.0.1:8333", True),
        ("http://localhost:8333", True),
        ("http://[::1]:8333", True),
        ("https://s3.example.org", False),
    ],
)
def test_what_is_on_the_servers_host_is_refused_here_and_what_both_reach_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, there: bool
) -> None:
    """The path of the machines and the store's address are others on this host."""
    keys = AccessKeys("id", "secret", None, "", None, False)
    monkeypatch.setattr("blocks.object_store.access_keys", lambda reference, of: keys)
    store = ObjectStore(
        flavour="other",
        bucket="torpor",
        endpoint_url=endpoint,
        encryption_key=ObjectStore.new_encryption_key(),
    )
    machines = LocalProvider(folder=str(folder.with_name("machines")))
    store.open()
    machines.open()
    with _answering(_healthy(), LOGIN) as address:
        _torpor("connect", address.replace("127.0.0.1", "localhost"))
    refused = pytest.raises(InvalidInput, match=rf"{address}/api.*`torpor connect`.*add --detach")
    # As a command has it, once it has chosen the server.
    monkeypatch.setenv("PREFECT_API_URL", address.replace("127.0.0.1", "localhost") + "/api")
    with refused if there else nullcontext():
        store.open()
    with refused:
        machines.open()


def test_a_workspace_with_a_market_is_looked_after_beside_the_machines_of_the_servers_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `torpor up` saves a block of the machines on its own host."""
    there = {LocalProvider: [LocalProvider()], VastProvider: [VastProvider(api_key="x")]}
    monkeypatch.setattr(
        "blocks.workspace.load_all_of",
        lambda kinds: [one for kind in kinds for one in there.get(kind, [])],
    )
    market = VastProvider(api_key="x").open()
    assert len(Markets([market], open_all_providers).every()) == 2
    with _answering(_healthy(), LOGIN) as address:
        _torpor("connect", address)
    reached = Markets([market], open_all_providers).every()
    assert [one.identity for one in reached] == [market.identity]


def test_the_page_says_of_each_command_what_it_does_with_a_server_elsewhere() -> None:
    page = (CHECKOUT / "docs" / "guide" / "where-it-runs.md").read_text()
    (table,) = re.findall(r"^\| command \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = " ".join(row.split("|")[1] for row in table.splitlines())
    said = {words.split()[0] for words in re.findall(r"`([^`]+)`", cells)}
    own = {"connect", "disconnect", "completion"}
    commands = {name for name in app if not name.startswith("-")}
    assert said - {"make", "--detach"} == commands - own


def test_another_home_without_a_worker_starts_and_follows_what_the_worker_runs(
    torpor_up: Server, deployed: Deployed, tmp_path: Path
) -> None:
    name = "connected"
    Workspace(name=name).save(name, overwrite=True, _sync=True)
    home = tmp_path / "home"
    home.mkdir()
    ours = ("PREFECT_", "TORPOR_", "XDG_")
    env = {word: value for word, value in os.environ.items() if not word.startswith(ours)}
    env["HOME"] = str(home)

    def ended(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "torpor_cli", *arguments],
            cwd=CHECKOUT,
            env=env | more,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert torpor_up.login.partition(":")[2] not in done.stdout + done.stderr
        return done

    def torpor(*arguments: str, **more: str) -> str:
        done = ended(*arguments, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    login = {"PREFECT_API_AUTH_STRING": torpor_up.login}
    with get_client(sync_client=True) as client:
        watch = client.read_deployment_by_name(WATCH)
        try:
            there = {**login, "PREFECT_API_URL": torpor_up.api_url}
            connecting = ended("connect", torpor_up.ui_url, "--idle=off", **there)
            assert not client.read_deployment_by_name(WATCH).parameters["only_report"]
        finally:  # other tests see what `up` has made
            as_before = DeploymentUpdate(parameters=watch.parameters, paused=watch.paused)
            client.update_deployment(watch.id, as_before)
    assert ("nobody looks" in connecting.stdout, connecting.stderr) == (True, "")  # one version
    assert deployed.end(deployed.start("create", {"workspace": name}))["state_type"] == "COMPLETED"
    # The store and the machines are those of the worker's host: here, others have their addresses.
    for refused in (["snapshots", name], ["offers", name], ["wake", name]):
        assert "add --detach" in ended(*refused).stderr, refused
    (seen,) = json.loads(torpor("status", name, "--json"))["workspaces"]
    assert "add --detach" in seen["trouble"]
    backup = json.loads(torpor("backup", name, "--detach", "--json"))
    assert deployed.end(backup["run"])["state_type"] == "COMPLETED"

    word = secrets.token_hex(4)
    begun = torpor("job", "run", name, "--yes", "--detach", "--", "echo", word)
    (job,) = re.findall(r"^job +(\w+)$", begun, re.MULTILINE)
    assert {path.name for path in (home / ".local/state/torpor").iterdir()} >= {"connection"}
    torpor("disconnect")
    # Whoever names the server says that this is the host of its store, as here.
    assert word in torpor("job", "log", name, job, "-f", **there).splitlines()  # until it has ended
    (listed,) = json.loads(torpor("status", name, "--json", **there))["workspaces"]
    assert (listed["state"], bool(listed["newest"])) == ("asleep", True)
