"""OpenSSH's files: what a market or an error says never becomes an option of OpenSSH."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.fixtures.sshd import Sshd
from torpor.shared.errors import InvalidInput, MachineUnreachable, ProviderUnavailable
from torpor.shared.values import Endpoint, Machine, MachineId
from torpor_cli import logins
from torpor_cli.app import app

KEY = "ssh-ed25519 AAAA"
HOSTILE = "x\n    ProxyCommand touch /tmp/owned"


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TORPOR_STATE", str(tmp_path))
    return tmp_path.resolve()


@pytest.mark.parametrize(
    "endpoint",
    [
        Endpoint(HOSTILE, 22, "root", "ssh-ed25519 AAAA"),
        Endpoint("203.0.113.7", 22, HOSTILE, "ssh-ed25519 AAAA"),
        Endpoint("203.0.113.7", 22, "root", f"ssh-ed25519 AAAA\n{HOSTILE}"),
        Endpoint("203.0.113.7", 22, "root", KEY, Endpoint(HOSTILE, 22, "jump", KEY)),
        Endpoint("203.0.113.7", 22, "root", KEY, Endpoint("203.0.113.8", 22, "jump")),
    ],
)
def test_an_address_that_openssh_would_misread_is_refused(
    monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint
) -> None:
    machine = Machine(MachineId("m-1"), "vast://mine", None, "running", endpoint)
    monkeypatch.setattr("flows.procedures.listing.list_logins", lambda workspace: [machine])
    with pytest.raises(MachineUnreachable, match="OpenSSH would misread"):
        logins.machine_of("mywork")


@pytest.mark.rule("H14")
def test_ssh_goes_through_the_jump_host_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, state: Path, sshd: Sshd, jump: Sshd
) -> None:
    endpoint = msgspec.structs.replace(sshd.endpoint, jump=jump.endpoint)
    opened = SimpleNamespace(identity=sshd.identity)
    monkeypatch.setattr("tasks.workspace_blocks.open_workspace", lambda workspace: opened)

    def said(endpoint: Endpoint) -> subprocess.CompletedProcess[str]:
        machine = Machine(MachineId("m-1"), "kubernetes://a/b", None, "running", endpoint)
        monkeypatch.setattr("flows.procedures.listing.list_logins", lambda workspace: [machine])
        file = logins.refresh("mywork")
        argv = ["ssh", "-F", str(file), "mywork", "echo there"]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    assert said(endpoint).stdout == "there\n"
    users = state / "users"
    wishes = "Host *\n    ForwardAgent yes\n    ForwardX11 yes\n"
    users.write_text(f'Include "{logins.refresh("mywork")}"\n\n{wishes}')
    for name in ("mywork", "mywork.jump"):  # neither gets the user's keys or windows
        argv = ["ssh", "-G", "-F", str(users), name]
        taken = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        assert "forwardagent no\n" in taken and "forwardx11 no\n" in taken
    assert "Accepted publickey" in jump.log.read_text()
    false_jump = msgspec.structs.replace(jump.endpoint, host_key=sshd.host_key)
    refused = said(msgspec.structs.replace(endpoint, jump=false_jump))
    # OpenSSH says why, but for a connection that it shares: then the jump's words go nowhere.
    assert refused.returncode and not refused.stdout
    assert "Host key verification failed" in refused.stderr or "closed" in refused.stderr


def test_a_chosen_machine_has_a_name_of_its_own_which_editors_use(
    monkeypatch: pytest.MonkeyPatch, sshd: Sshd, jump: Sshd, state: Path
) -> None:
    through = msgspec.structs.replace(sshd.endpoint, jump=jump.endpoint)
    machines = [
        Machine(MachineId("m-1"), "kubernetes://a/b", None, "running", through),
        Machine(MachineId("m-2"), "kubernetes://a/b", None, "running", jump.endpoint),
    ]
    opened = SimpleNamespace(identity=sshd.identity)
    monkeypatch.setattr("tasks.workspace_blocks.open_workspace", lambda workspace: opened)
    monkeypatch.setattr("flows.procedures.listing.list_logins", lambda workspace: machines)
    monkeypatch.setattr("blocks.reference.saved_names", lambda kind: ["mywork"])
    file = logins.refresh("mywork", "m-1")
    config = logins.write_config()
    for argv in (["-F", str(config), file.name], ["-F", str(file), "mywork"]):
        done = subprocess.run(["ssh", *argv, "echo there"], capture_output=True, check=False)
        assert done.stdout == b"there\n"


def test_an_openssh_before_8_5_shares_no_connection_and_gets_no_option_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, sshd: Sshd, tmp_path: Path
) -> None:
    machine = Machine(MachineId("m-1"), "kubernetes://a/b", None, "running", sshd.endpoint)
    opened = SimpleNamespace(identity=sshd.identity)
    monkeypatch.setattr("tasks.workspace_blocks.open_workspace", lambda workspace: opened)
    monkeypatch.setattr("flows.procedures.listing.list_logins", lambda workspace: [machine])
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a socket's name has a limit
        monkeypatch.setenv("TORPOR_STATE", short)
        assert "ControlPersist" in logins.refresh("mywork").read_text()
        written = _written_for_an_old_openssh(monkeypatch, tmp_path)
    assert "KnownHostsCommand" not in written
    assert "ControlPersist" not in written and "ControlMaster" not in written
    assert "    ControlPath none\n" in written


def _written_for_an_old_openssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    old = tmp_path / "bin" / "ssh"
    old.parent.mkdir()
    old.write_text('#!/bin/sh\ncase "$*" in *KnownHostsCommand*) exit 255;; esac\n')
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(old.parent), prepend=":")
    return logins.refresh("mywork").read_text()


def test_ssh_says_why_there_is_no_machine_and_takes_no_option_from_the_words(
    monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    def fails(workspace: str, machine: str = "") -> Path:
        raise ProviderUnavailable(f"vast://mine says '100 %' and \"{HOSTILE}\" $(touch {state}/a)")

    monkeypatch.setattr(logins, "refresh", fails)
    logins.refresh_quietly("mywork")
    file = state / "ssh" / "hosts" / "mywork"
    assert len(file.read_text().splitlines()) == 2
    done = subprocess.run(
        ["ssh", "-F", str(file), "mywork", "true"], capture_output=True, text=True, check=False
    )
    assert "vast://mine says '100 %' and \"x ProxyCommand touch /tmp/owned\"" in done.stderr
    assert not (state / "a").exists()
    with pytest.raises(InvalidInput, match="not the name of a workspace"):
        logins.refresh_quietly("../mywork")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user's home, and one workspace."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("blocks.reference.saved_names", lambda kind: ["mywork"])
    return home


def test_a_comment_that_is_no_utf_8_stays_in_the_users_configuration(home: Path) -> None:
    users = home / ".ssh" / "config"
    users.parent.mkdir()
    users.write_bytes(b"# Jos\xe9s Rechner\nHost foo\n    HostName bar\n")
    assert logins.command_for("mywork").startswith("torpor ssh mywork")
    logins.set_up()
    assert users.read_bytes().endswith(b"# Jos\xe9s Rechner\nHost foo\n    HostName bar\n")
    assert logins.command_for("mywork") == "ssh mywork"
    done = subprocess.run(
        ["ssh", "-G", "-F", str(users), "foo"], capture_output=True, text=True, check=True
    )
    assert "hostname bar" in done.stdout


def test_a_configuration_that_cannot_be_written_names_the_line_to_add(
    home: Path, state: Path
) -> None:
    (home / ".ssh").write_text("a file in the place of the directory")
    assert logins.command_for("mywork").startswith("torpor ssh mywork")
    with pytest.raises(InvalidInput, match=f'config cannot be changed.*\nInclude "{state}'):
        logins.set_up()


def test_a_rented_machine_s_login_is_said_where_no_file_can_be_written(
    home: Path, state: Path
) -> None:
    logins.set_up()
    (state / "ssh" / "hosts" / "mywork").unlink()
    (state / "ssh" / "hosts").rmdir()
    (state / "ssh" / "hosts").write_text("a file in the place of the directory")
    assert logins.command_for("mywork").startswith("torpor ssh mywork")


def test_a_new_version_of_torpor_renews_its_own_part_of_the_configuration(
    home: Path, state: Path
) -> None:
    config = state / "ssh" / "config"
    logins.keep_current()
    assert not config.exists(), "nobody asked for it"
    logins.set_up()
    config.write_text('Match originalhost mywork exec "/gone/python -m torpor_cli"\n')
    logins.keep_current()
    assert "/gone/python" not in config.read_text() and "login_check.py" in config.read_text()


def test_a_host_without_openssh_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Debian without openssh-client: `torpor ssh` ended with a traceback."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(logins, "write_config", lambda: tmp_path / "config")
    logins.set_up()
    assert "apt-get install openssh-client" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="as root, run `apt-get install openssh-client`"):
        app(["ssh", "mywork"], exit_on_error=False, print_error=False)
