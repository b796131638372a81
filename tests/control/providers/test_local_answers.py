"""What cannot be looked at now is neither gone nor idle, and what is going is not at work."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncssh
import pytest

from tests.fixtures.machines import KeyPair
from torpor.control.processes import (
    ProcessRecord,
    all_processes,
    identify,
    is_alive,
    is_at_work,
)
from torpor.control.providers.local.folder import MARK, MachineFolder, folder_of
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.rental.order import order_for
from torpor.control.safety import never_handed_over
from torpor.shared.errors import CreateFailed, ProviderError
from torpor.shared.values import Label, Machine, Want, workspace_name

LABEL = Label("tests", workspace_name("answers"), "lease-1")


@pytest.fixture
def machine(local_provider: LocalProvider, identity_key: KeyPair) -> Machine:
    return _create(local_provider, identity_key)


@pytest.fixture
def place(local_provider: LocalProvider, machine: Machine) -> MachineFolder:
    return folder_of(Path(urlsplit(local_provider.identity).path), LABEL)


@pytest.fixture
def server(place: MachineFolder) -> ProcessRecord:
    return place.read_server().process


@pytest.fixture
def detached(machine: Machine) -> Iterator[ProcessRecord]:
    """A process of the machine that descends from nothing of it."""
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: machine.id})
    yield identify(child.pid)
    child.kill()
    child.wait()


@pytest.mark.rule(3)
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("record", ["machine.json", "server.json"])
def test_a_record_that_cannot_be_read_now_is_an_error_and_no_missing_machine(
    number: int,
    record: str,
    machine: Machine,
    server: ProcessRecord,
    local_provider: LocalProvider,
    identity_key: KeyPair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening = os.open

    def failing(path: Path, *how: Any, **named: Any) -> int:
        if os.fspath(path).endswith(record):
            raise OSError(number, os.strerror(number), str(path))
        return opening(path, *how, **named)

    with monkeypatch.context() as now:
        now.setattr(os, "open", failing)
        with pytest.raises(ProviderError, match=rf"cannot be read: .*{record}"):
            local_provider.list_own()
        with pytest.raises(ProviderError, match="cannot be read"):
            local_provider.find(machine.id)
        with pytest.raises(CreateFailed, match=record):
            _create(local_provider, identity_key)
        with pytest.raises(ProviderError):
            local_provider.destroy(machine, never_handed_over(machine, LABEL))
    assert is_alive(server), "a server was ended that could not be looked at"
    assert local_provider.list_own() == [machine]


@pytest.mark.rule(3)
def test_a_process_that_cannot_be_looked_at_is_not_left_behind(
    machine: Machine,
    place: MachineFolder,
    detached: ProcessRecord,
    local_provider: LocalProvider,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path == Path(f"/proc/{detached.pid}/environ"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return read(path)

    with monkeypatch.context() as now:
        now.setattr(Path, "read_bytes", failing)
        with pytest.raises(ProviderError, match="not removed yet"):
            local_provider.destroy(machine, never_handed_over(machine, LABEL))
    assert place.home.is_dir()
    local_provider.destroy(machine, never_handed_over(machine, LABEL))
    assert not is_alive(detached)


def test_a_process_that_has_ended_is_not_at_work() -> None:
    assert is_at_work(identify(os.getpid()))
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    ended = identify(child.pid)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert not is_at_work(ended)
        assert Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[20] == "0"
    finally:
        child.wait()


def test_a_process_that_starts_a_program_is_at_work() -> None:
    """The kernel shows no arguments meanwhile. A machine's SSH server begins so, and in that moment
    its machine was said to be stopped."""
    again = 'exec sh -c "$0" "$0"'
    with subprocess.Popen(["sh", "-c", again, again]) as child:
        try:
            process, bare = identify(child.pid), 0
            while bare < 50:
                bare += Path(f"/proc/{child.pid}/cmdline").read_bytes() == b""
                assert is_at_work(process)
        finally:
            child.kill()


@pytest.mark.parametrize("began", ["before the look", "within the look"])
def test_a_process_that_starts_a_program_is_not_left_behind(
    began: str,
    machine: Machine,
    detached: ProcessRecord,
    local_provider: LocalProvider,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel shows no environment either, and so no mark of the machine."""
    read = Path.read_bytes
    bare = {f"/proc/{detached.pid}/environ": 1}
    if began == "before the look":
        bare = {f"/proc/{detached.pid}/environ": 3, f"/proc/{detached.pid}/cmdline": 3}

    def starting(path: Path) -> bytes:
        shown = read(path)
        if not bare.get(os.fspath(path)):
            return shown
        bare[os.fspath(path)] -= 1
        return b""

    monkeypatch.setattr("torpor.control.processes.Path.read_bytes", starting)
    (found,) = [words for process, words in all_processes().items() if process.pid == detached.pid]
    assert f"{MARK}={machine.id}".encode() in found
    local_provider.destroy(machine, never_handed_over(machine, LABEL))
    assert not is_alive(detached)


def test_a_server_on_its_way_out_is_started_again_on_its_port(
    machine: Machine,
    server: ProcessRecord,
    local_provider: LocalProvider,
    identity_key: KeyPair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it has no memory any more it still has its port, until it is a zombie."""
    read, looks = Path.read_bytes, 0

    def exiting(path: Path) -> bytes:
        nonlocal looks
        shown = read(path)
        if path != Path(f"/proc/{server.pid}/stat"):
            return shown
        looks += 1
        if looks == 5:  # the port is waited for
            os.kill(server.pid, signal.SIGKILL)
        name, _, facts = shown.rpartition(b")")
        words = facts.split()
        words[20] = b"0"
        return name + b") " + b" ".join(words)

    monkeypatch.setattr(Path, "read_bytes", exiting)
    assert local_provider.find(machine.id).state == "stopped"
    again = _create(local_provider, identity_key)
    assert looks >= 5
    assert not is_alive(server)
    assert again == machine


def _create(provider: LocalProvider, key: KeyPair) -> Machine:
    identity = asyncssh.import_private_key(key.private)
    return provider.create(order_for(provider.offers(Want())[0], LABEL, identity))
