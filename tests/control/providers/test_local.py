"""The local provider beyond the contract: real sessions, real processes, faults."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncssh
import msgspec
import psutil
import pytest

from tests.fixtures.kill_points import killed_at
from tests.fixtures.machines import KeyPair, destroy_all, new_key_pair
from tests.fixtures.ssh_client import Client
from tests.fixtures.waiting import PATIENCE_S, until
from torpor.control.processes import ProcessRecord, boot_id, identify, is_alive, is_running
from torpor.control.providers.gpus import GpuModel
from torpor.control.providers.local import provider as local
from torpor.control.providers.local import server as local_server
from torpor.control.providers.local.folder import MARK, MachineFolder, ServerRecord, folder_of
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.providers.local.server import machine_processes
from torpor.control.providers.provider import Absent, Order
from torpor.control.rental.order import order_for
from torpor.control.safety import never_handed_over
from torpor.machine.sampler.sessions import look
from torpor.machine.supervisor.folder import JobFolder
from torpor.shared.errors import CreateFailed, InvalidInput, NotOurs, ProviderError, UnsafeDestroy
from torpor.shared.values import Label, Machine, Want, workspace_name
from torpor.shared.wire.activity import NOBODY

LABEL = Label("tests", workspace_name("sessions"), "lease-1")
OTHER = Label("tests", workspace_name("sessions"), "lease-2")
_SLEEP = "sleep 600 </dev/null >/dev/null 2>&1"


@pytest.fixture
def provider(machines_folder: Path) -> Iterator[LocalProvider]:
    # As in a home directory of a person, and what shells and SSH servers might read wrong.
    folder = machines_folder / "machines of Zoë's \"%h\\"
    provider = LocalProvider(folder, price_usd_h=1.25)
    yield provider
    destroy_all(provider)


@pytest.fixture
def machine(provider: LocalProvider, identity_key: KeyPair) -> Machine:
    return _create(provider, LABEL, identity_key)


@pytest.fixture
def client(machine: Machine, identity_key: KeyPair, tmp_path: Path) -> Client:
    return Client(tmp_path / "client", machine, identity_key.private)


def test_a_session_is_at_home_on_the_machine(
    client: Client, machine: Machine, provider: LocalProvider, tmp_path: Path
) -> None:
    home = _place(provider, LABEL).home
    told = client.say('pwd; printf "%s\n" "$HOME" ~ "$TORPOR_MACHINE"').splitlines()
    assert told == [*[str(home)] * 3, machine.id]
    assert "SSH_ORIGINAL_COMMAND" not in client.say("env")
    client.say("mkdir ~/workspace && echo kept > workspace/file")
    assert (home / "workspace" / "file").read_text() == "kept\n"
    (tmp_path / "sent").write_bytes(b"over sftp")
    done = client.sftp(f"put {tmp_path / 'sent'} arrived\n")
    assert done.returncode == 0, done.stderr
    assert (home / "arrived").read_bytes() == b"over sftp"


def test_any_argv_arrives_unchanged_and_so_do_bytes_and_the_exit(client: Client) -> None:
    argv = ["a  b", "", "$HOME `id` $(id)", "'\"\\", "-n", "line\nline\r\n", "Zoë", "*", "x" * 9000]
    told = client.say(shlex.join(["printf", "[%s]", *argv]))
    assert told == "".join(f"[{word}]" for word in argv)
    body = os.urandom(4 << 20)
    echoed = client.run("cat; echo apart >&2; exit 7", body)
    assert (echoed.stdout == body, echoed.stderr, echoed.returncode) == (True, b"apart\n", 7)
    assert client.run("kill -9 $$").returncode == 255
    assert client.run("no-such-program-here").returncode == 127


def test_a_program_outlives_a_client_that_is_killed(
    client: Client, provider: LocalProvider, machine: Machine
) -> None:
    place = _place(provider, LABEL)
    program = "echo $$ >pid.new; mv pid.new pid; cat >/dev/null; echo ended >mark"
    writer = "echo $$ >chatty.new; mv chatty.new chatty; exec yes"
    for command, named in ((program, "pid"), (writer, "chatty")):
        with subprocess.Popen(
            client.argv(command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        ) as session:
            until((place.home / named).exists, f"{named} was written")
            session.kill()
    until((place.home / "mark").exists, "the command went on")
    # What it writes goes nowhere, and it is told so: nothing spins on for a client that is gone.
    chatty = int((place.home / "chatty").read_text())
    until(lambda: identify(chatty) is None, "what wrote has ended")
    assert _state(provider, machine) == "running"


def test_a_terminal_is_one(client: Client) -> None:
    argv = client.argv("tty; stty -echo; read word; printf '%s\\n' \"$word $TERM\"; exit 5")
    done = subprocess.run(
        [argv[0], "-tt", *argv[1:]],
        input=b"typed\n",
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "TERM": "xterm"},
    )
    assert b"/dev/pts/" in done.stdout
    assert done.stdout.endswith(b"typed xterm\r\n")
    assert done.returncode == 5


def test_only_the_one_key_of_the_one_account_enters(
    client: Client, machine: Machine, tmp_path: Path
) -> None:
    stranger = Client(tmp_path / "stranger", machine, new_key_pair().private)
    assert b"Permission denied" in stranger.run("true").stderr
    assert b"Permission denied" in client.run("true", user="daemon").stderr
    assert client.run("true").returncode == 0


def test_a_session_is_seen_by_its_own_machine_only(
    client: Client, machine: Machine, provider: LocalProvider, identity_key: KeyPair
) -> None:
    """One login would else keep every machine of the host from being idle."""
    other = _create(provider, OTHER, identity_key)
    assert look(machine=machine.id).ssh_s == NOBODY
    argv = client.argv("echo ready; sleep 600")
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as session:
        try:
            assert session.stdout is not None and session.stdout.readline() == b"ready\n"
            assert look(machine=machine.id).ssh_s == 0
            assert look(machine=other.id).ssh_s == NOBODY
        finally:
            session.terminate()


def test_a_detached_process_lives_on_until_destroy_and_nothing_else_dies(
    client: Client,
    machine: Machine,
    provider: LocalProvider,
    identity_key: KeyPair,
    tmp_path: Path,
) -> None:
    stubborn = int(
        client.say(
            f"setsid sh -c 'trap \"\" TERM HUP; {_SLEEP}' </dev/null >/dev/null 2>&1 & echo $!"
        )
    )
    other = _create(provider, OTHER, identity_key)
    neighbour_client = Client(tmp_path / "other", other, identity_key.private)
    neighbour = int(neighbour_client.say(f"setsid {_SLEEP} & echo $!"))
    # An open session whose program has cleaned its environment.
    with subprocess.Popen(
        client.argv("env -i sleep 600"), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as session:
        processes = until(
            lambda: [
                p
                for p in _machine(provider, machine)
                if _is(p, b"sleep\x00600") and MARK not in _environ(p)
            ],
            "a process has left its environment",
        )
        outsider = subprocess.Popen(["sleep", "600"])
        try:
            assert identify(stubborn) is not None
            before = _machine(provider, machine)
            assert len(before) >= 4
            provider.destroy(machine, never_handed_over(machine, LABEL))
            assert [p for p in {*before, *processes} if is_running(p)] == []
            assert isinstance(provider.find(machine.id), Absent)
            assert identify(neighbour) is not None
            assert outsider.poll() is None
            assert session.wait(PATIENCE_S) == 255
        finally:
            outsider.kill()
            outsider.wait()
    assert provider.list_own() == [other]
    assert neighbour_client.run("true").returncode == 0
    assert [path.name for path in _place(provider, LABEL).root.parent.iterdir()] == [
        _place(provider, OTHER).root.name
    ]


_STARTS_A_JOB = """
import os, sys
from pathlib import Path
from torpor.machine.agent.home import enter_home
from torpor.machine.agent.jobs import start_job
from torpor.machine.agent.call import Call
from torpor.shared.wire.job import StartJob
home = enter_home(Path.home() / ".torpor")
command = ["sh", "-c", "trap '' TERM; setsid sleep 600 & while :; do sleep 1; done"]
asked = StartJob("0123456789ab", 1, command, "~/", "~/job.log", [])
agent = [sys.executable, "-m", "torpor.machine.agent", "supervise", "--home", str(home)]
print(start_job(asked, Call("r", home, lambda event: None), agent, []).state)
"""


def test_a_job_and_its_supervisor_end_with_their_machine(
    client: Client, machine: Machine, provider: LocalProvider
) -> None:
    argv = [sys.executable, "-c", _STARTS_A_JOB]
    assert client.say(shlex.join(argv)) == "running\n"
    kept = JobFolder(provider.home(LABEL) / ".torpor", "0123456789ab").read()
    job = {kept.supervisor.pid, kept.command.pid}

    def of_job() -> list[psutil.Process]:
        """Supervisor, command and the child that it left, once all three run."""
        all_of_it = [
            p for p in _machine(provider, machine) if p.pid in job or _is(p, b"sleep\x00600")
        ]
        return all_of_it if {p.pid for p in all_of_it} > job else []

    processes = until(of_job, "the job and the child of its command run")
    provider.destroy(machine, never_handed_over(machine, LABEL))
    assert [p for p in processes if is_running(p)] == []


def test_a_machine_whose_server_died_is_stopped_and_create_starts_it_again(
    client: Client, machine: Machine, provider: LocalProvider, identity_key: KeyPair
) -> None:
    detached = int(client.say(f"setsid {_SLEEP} & echo $!"))
    client.say("echo precious > file")
    server = _place(provider, LABEL).read_server().process
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not is_alive(server), "the server is gone")
    stopped = provider.find(machine.id)
    assert (stopped.state, stopped.endpoint, stopped.label) == ("stopped", None, LABEL)
    assert "SSH server died" in stopped.note
    assert provider.list_own() == [stopped]
    again = _create(provider, LABEL, identity_key)
    assert again == machine
    assert client.say("cat file") == "precious\n"
    assert identify(detached) is not None


def test_a_reused_pid_is_not_the_server_and_is_left_alone(
    machine: Machine, provider: LocalProvider
) -> None:
    place = _place(provider, LABEL)
    record = place.read_server()
    innocent = subprocess.Popen(["sleep", "600"])
    try:
        process = identify(innocent.pid)
        stale = ProcessRecord(innocent.pid, process.start_ticks - 1)
        place.write_server(ServerRecord(record.port, boot_id(), stale))
        assert _state(provider, machine) == "stopped"
        place.write_server(ServerRecord(record.port, "another-boot", process))
        assert _state(provider, machine) == "stopped"
        provider.destroy(machine, never_handed_over(machine, LABEL))
        assert innocent.poll() is None
        # The real server was found without its record.
        assert not is_alive(record.process)
    finally:
        innocent.kill()
        innocent.wait()


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "missing", "unknown version", "another label", "symlink", "extra"]
)
def test_a_damaged_record_makes_a_machine_that_is_not_ours(
    damage: str,
    local_provider: LocalProvider,
    identity_key: KeyPair,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = _create(local_provider, LABEL, identity_key)
    place = _place(local_provider, LABEL)
    whole = place.machine_json.read_bytes()
    _damage(place, whole, damage, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert local_provider.list_own() == []
    assert str(place.machine_json) in caplog.text
    live = local_provider.find(machine.id)
    assert live.label is None
    assert str(place.machine_json) in live.note
    with pytest.raises(CreateFailed, match="machine\\.json"):
        _create(local_provider, LABEL, identity_key)
    with pytest.raises(NotOurs):
        local_provider.destroy(machine, never_handed_over(machine, LABEL))
    place.machine_json.unlink(missing_ok=True)
    place.machine_json.write_bytes(whole)
    assert local_provider.find(machine.id) == machine


@pytest.mark.rule(2)
def test_what_else_lies_in_the_folder_is_never_touched(
    local_provider: LocalProvider, identity_key: KeyPair, tmp_path: Path
) -> None:
    machine = _create(local_provider, LABEL, identity_key)
    folder = _place(local_provider, LABEL).root.parent
    (folder / "thesis").mkdir()
    (folder / "thesis" / "only copy").write_text("years")
    (folder / "m-fedcba987654").symlink_to(tmp_path)
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (_place(local_provider, LABEL).home / "link").symlink_to(tmp_path)
    assert local_provider.list_own() == [machine]
    local_provider.destroy(machine, never_handed_over(machine, LABEL))
    assert (folder / "thesis" / "only copy").read_text() == "years"
    assert outside.read_text() == "kept"
    assert (folder / "m-fedcba987654").is_symlink()


def test_a_destroy_killed_at_any_step_is_continued(
    local_provider: LocalProvider, identity_key: KeyPair
) -> None:
    killed = True
    step = 0
    while killed:
        step += 1
        machine = _create(local_provider, LABEL, identity_key)
        place = _place(local_provider, LABEL)
        for path in ("a/b/c", "a/d", "e"):
            (place.home / path).mkdir(parents=True)
            (place.home / path / "file").write_text(path)
        processes = _machine(local_provider, machine)
        warrant = never_handed_over(machine, LABEL)

        def destroy(machine: Machine = machine) -> None:
            local_provider.destroy(machine, never_handed_over(machine, LABEL))

        killed = killed_at(step, destroy)
        if place.destroying.exists():
            going = local_provider.find(machine.id)
            assert (going.label, going.state) == (LABEL, "stopping")
            with pytest.raises(CreateFailed, match="being destroyed"):
                _create(local_provider, LABEL, identity_key)
            if step % 2:  # as at a rented machine, the end goes on without its destroyer
                assert local_provider.list_own() == []
        local_provider.destroy(machine, warrant)
        assert local_provider.list_own() == []
        assert [p for p in processes if is_running(p)] == []
        assert list(place.root.parent.iterdir()) == []
    assert step > 15


@pytest.mark.rule(10)
def test_a_warrant_for_a_machine_does_not_fit_its_successor(
    local_provider: LocalProvider, identity_key: KeyPair
) -> None:
    machine = _create(local_provider, LABEL, identity_key)
    warrant = never_handed_over(machine, LABEL)
    local_provider.destroy(machine, warrant)
    successor = _create(local_provider, LABEL, identity_key)
    assert successor.id != machine.id
    local_provider.destroy(machine, warrant)
    with pytest.raises(UnsafeDestroy):
        local_provider.destroy(successor, warrant)
    assert local_provider.find(successor.id) == successor


def test_a_process_on_the_machine_cannot_destroy_it(
    local_provider: LocalProvider, identity_key: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = _create(local_provider, LABEL, identity_key)
    monkeypatch.setenv(MARK, machine.id)
    with pytest.raises(UnsafeDestroy, match="from outside"):
        local_provider.destroy(machine, never_handed_over(machine, LABEL))
    monkeypatch.delenv(MARK)
    assert local_provider.find(machine.id) == machine


def test_a_port_that_was_taken_meanwhile_is_passed_over(
    provider: LocalProvider, identity_key: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = local_server.free_ports
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1]]
        monkeypatch.setattr(local_server, "free_ports", lambda count: [ports.pop(), *free(count)])
        machine = _create(provider, LABEL, identity_key)
        assert machine.state == "running"
        assert ports == []
        assert machine.endpoint.port != taken.getsockname()[1]


def test_where_no_port_is_free_create_says_so_and_leaves_nothing(
    provider: LocalProvider, identity_key: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(local_server, "free_ports", lambda count: [taken.getsockname()[1]])
        with pytest.raises(CreateFailed, match="ddress already in use"):
            _create(provider, LABEL, identity_key)
    assert provider.list_own() == []
    assert list(_place(provider, LABEL).root.parent.iterdir()) == []


KEY = new_key_pair().public


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"public_key": ""}, InvalidInput, "not an OpenSSH public key"),
        ({"public_key": "ssh-ed25519"}, InvalidInput, "not an OpenSSH public key"),
        ({"public_key": "ssh-ed25519 AAAA"}, InvalidInput, "not an OpenSSH public key"),
        ({"public_key": 'command="x" ssh-rsa A'}, InvalidInput, "not an OpenSSH public key"),
        ({"public_key": f"{KEY}\n{KEY}"}, InvalidInput, "one line"),
        ({"host_key": "secret?"}, InvalidInput, "no OpenSSH private key"),
        ({"provider": "local:/elsewhere"}, CreateFailed, "local:/elsewhere"),
    ],
)
def test_what_cannot_be_ordered_makes_no_machine(
    changes: dict[str, str],
    error: type[Exception],
    words: str,
    local_provider: LocalProvider,
    identity_key: KeyPair,
) -> None:
    order = _order(local_provider, LABEL, identity_key)
    offer = msgspec.structs.replace(
        order.offer, provider=changes.pop("provider", order.offer.provider)
    )
    with pytest.raises(error, match=words):
        local_provider.create(msgspec.structs.replace(order, offer=offer, **changes))
    assert local_provider.list_own() == []
    with pytest.raises(InvalidInput, match="leave the image empty"):
        local_provider.check("ubuntu:24.04")


def test_one_lease_has_one_key(local_provider: LocalProvider, identity_key: KeyPair) -> None:
    machine = _create(local_provider, LABEL, identity_key)
    with pytest.raises(CreateFailed, match="another SSH key"):
        _create(local_provider, LABEL, new_key_pair())
    assert local_provider.find(machine.id) == machine


def test_a_folder_that_cannot_be_written_is_a_failed_create(
    machines_folder: Path, identity_key: KeyPair
) -> None:
    (machines_folder / "file").write_text("")
    provider = LocalProvider(machines_folder / "file")
    with pytest.raises(CreateFailed, match="file"):
        provider.create(_order(provider, LABEL, identity_key))
    # What cannot be read is not empty.
    with pytest.raises(ProviderError, match="cannot be read"):
        provider.list_own()


def test_offers_name_gpus_that_are_here(
    machines_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "gpus_here", lambda: (("NVIDIA H200", 2),))
    provider = LocalProvider(machines_folder, price_usd_h=2.5)
    assert [(o.id, o.gpu, o.gpu_count, o.price_usd_h) for o in provider.offers(Want())] == [
        ("local-cpu", None, 0, 2.5),
        ("local-nvidia-h200", GpuModel("H200"), 2, 2.5),
    ]


def test_a_folder_that_is_missing_as_a_whole_proves_no_end(
    provider: LocalProvider, machine: Machine
) -> None:
    """Its disk may not be mounted now."""
    folder = _place(provider, LABEL).root.parent
    away = folder.rename(folder.with_name("away"))
    assert provider.find(machine.id) == Absent("")
    away.rename(folder)
    assert provider.find(machine.id) == machine


def test_a_folder_of_the_same_path_on_another_host_is_another(
    machines_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may keep their leases in one bucket, and each ends what it left itself."""
    here = LocalProvider(machines_folder).identity
    link = machines_folder / "link"
    link.symlink_to(machines_folder)
    assert (
        LocalProvider(link).identity == here == f"local://{socket.gethostname()}{machines_folder}"
    )
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert LocalProvider(machines_folder).identity == f"local://elsewhere{machines_folder}" != here


def _create(provider: LocalProvider, label: Label, key: KeyPair) -> Machine:
    return provider.create(_order(provider, label, key))


def _order(provider: LocalProvider, label: Label, key: KeyPair) -> Order:
    offer = next(offer for offer in provider.offers(Want()) if offer.gpu is None)
    return order_for(offer, label, asyncssh.import_private_key(key.private))


def _place(provider: LocalProvider, label: Label) -> MachineFolder:
    return folder_of(Path(urlsplit(provider.identity).path), label)


def _state(provider: LocalProvider, machine: Machine) -> str:
    return provider.find(machine.id).state


def _machine(provider: LocalProvider, machine: Machine) -> list[psutil.Process]:
    return machine_processes(_place(provider, machine.label), machine.id)


def _damage(place: MachineFolder, whole: bytes, damage: str, tmp_path: Path) -> None:
    path, told = place.machine_json, msgspec.json.decode(whole)
    damaged = {
        "cut": whole[:50],
        "empty": b"",
        "unknown version": msgspec.json.encode({**told, "version": 2}),
        "another label": msgspec.json.encode({**told, "label": msgspec.to_builtins(OTHER)}),
        "extra": msgspec.json.encode({**told, "unknown": True}),
    }
    if damage in damaged:
        path.write_bytes(damaged[damage])
        return
    path.unlink()
    if damage == "symlink":
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")


def _is(process: psutil.Process, cmdline: bytes) -> bool:
    return Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(cmdline)


def _environ(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/environ").read_text()
