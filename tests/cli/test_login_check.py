"""`ssh mywork` asks no market where the last look still holds, and looks anew where it may not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import msgspec
import pytest

from tests.fixtures.sshd import Sshd
from torpor.control.ports import free_ports
from torpor.control.rental.records import Rental, Rentals
from torpor.control.store.memory import MemoryStore
from torpor.shared.values import (
    Endpoint,
    Label,
    Machine,
    MachineId,
    SnapshotId,
    Want,
    WorkspaceName,
)
from torpor_cli import logins
from torpor_cli.login_check import MET

pytestmark = pytest.mark.rule(8)

LOOKED_ANEW = 7
NAME = WorkspaceName("mywork")
SERVER = "http://127.0.0.1:4299/api"


class Desk:
    """The host of a person who works on one machine: what `ssh --setup` and a look have written."""

    def __init__(self, patch: pytest.MonkeyPatch, state: Path, sshd: Sshd) -> None:
        self._patch, self._identity = patch, sshd.identity
        self.hosts = state / "ssh" / "hosts"
        self.store = MemoryStore()
        self.rentals = Rentals(self.store, NAME)
        self.endpoint = sshd.endpoint

    def rent(self, number: int, endpoint: Endpoint) -> Rental:
        """A rental that is handed over, which is what the market and a look find from now on."""
        label = Label("me", NAME, f"{number:016x}")
        machine = Machine(MachineId(f"m-{number}"), "vast://mine", label, "running", endpoint)
        rental = self.rentals.adopt(label, machine, endpoint.host_key or "", 0.1, "", Want())
        self.find([machine])
        return rental

    def find(self, machines: list[Machine]) -> None:
        opened = SimpleNamespace(identity=self._identity, rentals=self.rentals, store=self.store)
        self._patch.setattr("tasks.workspace_blocks.open_workspace", lambda workspace: opened)
        self._patch.setattr("flows.procedures.listing.list_logins", lambda workspace: machines)

    @property
    def check(self) -> list[str]:
        return [sys.executable, "-I", "-S", logins.login_check.__file__]

    def looks_anew(self) -> bool:
        refresh = ["-c", f"raise SystemExit({LOOKED_ANEW})"]
        argv = [*self.check, str(self.hosts / NAME), *refresh]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) in [(0, ""), (LOOKED_ANEW, "")]
        return done.returncode == LOOKED_ANEW

    def ssh(self, *options: str) -> subprocess.CompletedProcess[str]:
        argv = ["ssh", "-F", str(self.hosts / NAME), *options, NAME, "echo there"]
        return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch, sshd: Sshd) -> Iterator[Desk]:
    with TemporaryDirectory(prefix="t") as folder:  # a name that a socket has room for
        yield from _desk(monkeypatch, Path(folder).resolve(), sshd)


def _desk(monkeypatch: pytest.MonkeyPatch, state: Path, sshd: Sshd) -> Iterator[Desk]:
    monkeypatch.setenv("TORPOR_STATE", str(state))
    monkeypatch.setenv("PREFECT_API_URL", SERVER)
    desk = Desk(monkeypatch, state, sshd)
    yield desk
    desk.store.close()


def test_a_machine_that_is_still_handed_over_is_not_looked_for_again(desk: Desk) -> None:
    desk.rent(1, desk.endpoint)
    assert logins.current(NAME) is None
    logins.refresh(NAME)
    assert not desk.looks_anew()
    assert logins.current(NAME) == desk.hosts / NAME


def test_a_machine_that_has_ended_is_looked_for_again(desk: Desk) -> None:
    rental = desk.rent(1, desk.endpoint)
    logins.refresh(NAME)
    stored = desk.rentals.change(rental, snapshot=SnapshotId("20261129T105639.000000Z-aaaaaaaa"))
    assert desk.looks_anew(), "it is being ended"
    desk.rentals.change(stored, state="ended", why="its market shows no such machine")
    assert desk.looks_anew()


def test_a_workspace_of_another_prefect_server_is_looked_for(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.rent(1, desk.endpoint)
    logins.refresh(NAME)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4300/api")
    assert desk.looks_anew()


def test_where_the_server_of_torpor_connect_cannot_be_read_it_is_looked_for(desk: Desk) -> None:
    desk.rent(1, desk.endpoint)
    logins.refresh(NAME)
    (desk.hosts.parents[1] / "connection").write_text("{")
    assert desk.looks_anew()


def test_an_address_where_nothing_answers_is_looked_for_again(desk: Desk) -> None:
    desk.rent(1, msgspec.structs.replace(desk.endpoint, port=free_ports(1)[0]))
    logins.refresh(NAME)
    assert desk.looks_anew()


def test_a_store_that_does_not_answer_makes_it_look_again(desk: Desk) -> None:
    desk.rent(1, desk.endpoint)
    logins.refresh(NAME)
    desk.store.close()
    assert desk.looks_anew()


def test_another_machine_at_the_address_gets_no_login_and_is_named(desk: Desk, jump: Sshd) -> None:
    """A market gives an address to its next customer while the rental's record is still open."""
    desk.rent(1, msgspec.structs.replace(desk.endpoint, host_key=jump.host_key))
    logins.refresh(NAME)
    assert not desk.looks_anew()
    refused = desk.ssh()
    assert refused.returncode and not refused.stdout
    said = f"port {desk.endpoint.port} shows another host key than the machine of workspace mywork"
    assert said in refused.stderr
    assert desk.looks_anew()


def test_the_pinned_host_key_is_met_without_a_word(desk: Desk) -> None:
    desk.rent(1, desk.endpoint)
    file = logins.refresh(NAME)
    key = (desk.endpoint.host_key or "").split()[1]
    for why, met in (("HOSTNAME", key), ("ORDER", "NONE")):
        argv = [*desk.check, MET, str(file), why, met]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not desk.looks_anew()


def test_logins_to_one_rental_share_a_connection_and_the_next_rental_has_its_own(
    desk: Desk, sshd: Sshd
) -> None:
    desk.rent(1, desk.endpoint)
    logins.refresh(NAME)
    assert [desk.ssh().stdout, desk.ssh().stdout] == ["there\n", "there\n"]
    assert sshd.log.read_text().count("Accepted publickey") == 1
    desk.rent(2, desk.endpoint)
    logins.refresh(NAME)
    assert desk.ssh().stdout == "there\n"
    assert sshd.log.read_text().count("Accepted publickey") == 2


def test_a_machine_that_was_chosen_by_its_id_does_not_become_the_workspace_s(desk: Desk) -> None:
    rentals = [desk.rent(number, desk.endpoint) for number in (1, 2)]
    logins.refresh(NAME)
    before = (desk.hosts / NAME).read_text()
    machines = [
        Machine(MachineId(f"m-{number}"), "vast://mine", rental.label, "running", desk.endpoint)
        for number, rental in enumerate(rentals, 1)
    ]
    desk.find(machines)
    first, second = logins.refresh(NAME, "m-1"), logins.refresh(NAME, "m-2")
    assert len({first, second, desk.hosts / NAME}) == 3
    assert (desk.hosts / NAME).read_text() == before


def test_what_the_user_turned_off_for_all_hosts_is_on_for_a_workspace(desk: Desk) -> None:
    desk.rent(1, desk.endpoint)
    users = desk.hosts / "users"
    users.write_text(
        f'Include "{logins.refresh(NAME)}"\n\nHost *\n    PubkeyAuthentication no\n'
        "    PreferredAuthentications password\n    HostKeyAlgorithms rsa-sha2-512\n"
        "    ControlPath ~/.ssh/%h\n    UpdateHostKeys yes\n    VerifyHostKeyDNS yes\n"
    )
    argv = ["ssh", "-G", "-F", str(users), NAME]
    taken = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    kind = (desk.endpoint.host_key or "").partition(" ")[0]
    assert {
        "pubkeyauthentication true",
        "preferredauthentications publickey",
        f"hostkeyalgorithms {kind}",
        "updatehostkeys false",
        "verifyhostkeydns false",
    } <= {*taken}
    assert f"controlpath {desk.hosts.parent}" in " ".join(taken)


def test_a_host_key_of_an_unknown_type_leaves_ssh_to_other_hosts_as_it_was(desk: Desk) -> None:
    desk.rent(1, msgspec.structs.replace(desk.endpoint, host_key="a-new-type AAAA"))
    argv = ["ssh", "-G", "-F", str(logins.refresh(NAME)), "elsewhere"]
    subprocess.run(argv, capture_output=True, check=True)


def test_the_check_imports_nothing_but_python_s_own_library(desk: Desk) -> None:
    desk.rent(1, desk.endpoint)
    logins.refresh(NAME)
    argv = [sys.executable, "-X", "importtime", *desk.check[1:], str(desk.hosts / NAME), "-c", ""]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"torpor.control.own_server"} == {
        name for name in loaded if name.startswith("torpor.") and name.count(".") > 1
    }
    assert not loaded & {"site", "msgspec", "psutil", "prefect", "cyclopts", "tomllib"}


def test_a_state_folder_with_a_long_name_has_no_shared_connection(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The path of a Unix socket has 107 bytes at most: `ssh` would end at a longer one."""
    long = tmp_path / ("x" * 80)
    monkeypatch.setenv("TORPOR_STATE", str(long))
    desk.rent(1, desk.endpoint)
    assert "ControlPath none" in logins.refresh(NAME).read_text()
    assert os.listdir(long / "ssh" / "c") == []
