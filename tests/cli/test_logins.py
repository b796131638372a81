"""OpenSSH's files: what a market or an error says never becomes an option of OpenSSH."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from torpor.shared.errors import InvalidInput, MachineUnreachable, ProviderUnavailable
from torpor.shared.values import Endpoint, Machine, MachineId
from torpor_cli import logins

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
    ],
)
def test_an_address_that_openssh_would_misread_is_refused(
    monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint
) -> None:
    machine = Machine(MachineId("m-1"), "vast://mine", None, "running", endpoint)
    monkeypatch.setattr("flows.procedures.listing.list_logins", lambda workspace: [machine])
    with pytest.raises(MachineUnreachable, match="OpenSSH would misread"):
        logins.endpoint_of("mywork")


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
