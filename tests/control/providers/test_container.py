"""What may be added to a container."""

from __future__ import annotations

import pytest

from torpor.control.providers.container import Container, Volume, volume
from torpor.shared.errors import InvalidInput

CANARY = "canary-value"


@pytest.mark.parametrize(
    "name", ["", "A-B", "1A", "TORPOR_X", "PATH", "HOME", "SSH_AUTH_SOCK", "ld_path", "saves"]
)
def test_a_variable_that_breaks_the_start_or_that_no_session_gets_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="env: a container cannot be given") as raised:
        Container(env={name: CANARY})
    assert CANARY not in str(raised.value)


@pytest.mark.parametrize("value", [f"{CANARY}\nnext", f"{CANARY}\0", 1])
def test_a_value_that_no_session_gets_whole_is_refused(value: str) -> None:
    with pytest.raises(InvalidInput, match="the value of TOKEN must be one line") as raised:
        Container(env={"TOKEN": value})
    assert CANARY not in str(raised.value)


@pytest.mark.parametrize("ports", [(22,), (80, 80), (0,), (65536,), tuple(range(100, 140))])
def test_a_port_that_cannot_be_opened_is_refused(ports: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="ports: name"):
        Container(ports=ports)


def test_a_short_value_does_not_garble_messages() -> None:
    secrets = Container(env={"DEBUG": "1", "TOKEN": CANARY}, login="-u me -p pass-word").secrets
    assert secrets.hidden_in(f"401: {CANARY} pass-word") == "401: *** ***"


def test_a_volume_is_a_name_and_a_path() -> None:
    assert volume(" my-data://data/./sets/ ") == Volume("my-data", "/data/sets")


@pytest.mark.parametrize(
    "text", ["my-data", ":/data", "my-data:data", "my-data:~/data", "a:/data/../etc"]
)
def test_a_line_that_names_no_volume_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        volume(text)


@pytest.mark.parametrize(
    "path",
    ["/", "/root", "/home/", "/home/me", "/root/.ssh", "/home/me/.torpor/x", "/etc/torpor",
     "/usr/local", "/lib64"],
)  # fmt: skip
def test_a_volume_does_not_hide_a_folder_of_the_system(path: str) -> None:
    with pytest.raises(InvalidInput, match="mount it elsewhere"):
        volume(f"my-data:{path}")
