"""Programs of a workspace: frozen by a hibernate, and going on after a wake on another machine."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq
from jupyter_client import BlockingKernelClient
from zmq.utils.monitor import recv_monitor_message

from deployments.stacks import ready_made
from flows import create, hibernate, job, wake
from tasks.guards import NothingLost
from tasks.machines import endpoint_of
from tasks.plain_runner import PlainRunner
from tasks.programs import NEVER, check_frozen
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.waiting import PATIENCE_S, until
from tests.fixtures.world import World, kill
from torpor.control.ports import free_ports
from torpor.control.remote import criu as criu_packages
from torpor.control.reports import HibernatePreview, HibernateReport, WakeReport
from torpor.control.safety import Verified
from torpor.shared.errors import MachineUnfit, StillChanging, UnsavedWork

CHAIN = """
import hashlib, os, time
link = os.urandom(8).hex()  # in memory alone
with open("chain", "a") as chain:
    while True:
        print(link, file=chain, flush=True)
        link = hashlib.sha256(link.encode()).hexdigest()[:16]
        time.sleep(0.2)
"""
LINE = "exec python3 chain.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def world(sealed_world: World, tmp_path: Path) -> World:
    """One workspace at the same path of each machine, as on real ones."""
    was = sealed_world.access
    paths = [str(tmp_path / "workspace")]
    spec = msgspec.structs.replace(was.spec, paths=paths, programs=[LINE], process="try")
    return replace(sealed_world, access=msgspec.structs.replace(was, spec=spec))


def _place(world: World) -> Path:
    return Path(world.access.spec.paths[0])


def _lines(world: World) -> list[str]:
    chain = _place(world) / "chain"
    return chain.read_text().split() if chain.exists() else []


def _changed(world: World, **settings: object) -> World:
    spec = msgspec.structs.replace(world.access.spec, **settings)
    return replace(world, access=msgspec.structs.replace(world.access, spec=spec))


def _grows(world: World) -> None:
    seen = len(_lines(world))
    until(lambda: len(_lines(world)) > seen, "the program works")


def _breaks(lines: list[str]) -> int:
    """How often a line is not the hash of the line before."""
    made = [hashlib.sha256(line.encode()).hexdigest()[:16] for line in lines[:-1]]
    return sum(was != now for was, now in zip(made, lines[1:], strict=True))


def _begin(world: World) -> None:
    _place(world).mkdir()
    (_place(world) / "chain.py").write_text(CHAIN)
    made = run_plainly(world.opened, create)
    assert made.rows()[-1] == {"what": "program", "value": f"{LINE}: started"}
    _grows(world)


def _move(world: World) -> tuple[HibernateReport, WakeReport]:
    slept = hibernate_plainly(world.opened)
    assert slept.destroyed
    shutil.rmtree(_place(world))  # as a machine that is gone
    return slept, wake_plainly(world.opened)


class Watch(PlainRunner):
    """Keeps when programs began to be started."""

    began_s = 0.0

    def __init__(self, world: World) -> None:
        super().__init__(world.opened, wait_factor=0.1, before=self._see)

    def _see(self, step: str) -> None:
        if step == "start programs":
            self.began_s = time.monotonic()

    def prints(self, what: str) -> None:
        print(f"{what} in {time.monotonic() - self.began_s:.2f} s")

    def hibernates(self, world: World) -> None:
        slept = hibernate.fn("demo")
        assert isinstance(slept, HibernateReport)
        assert slept.destroyed
        shutil.rmtree(_place(world))  # as a machine that is gone
        words = slept.programs[0].rpartition(": ")[2]
        assert words.startswith("frozen")
        print(words)

    def wakes(self) -> None:
        woken = wake.fn("demo")
        assert isinstance(woken, WakeReport)
        assert woken.programs[0].endswith(": went on where it was frozen")


def test_a_program_goes_on_after_each_wake_where_it_was(world: World) -> None:
    _begin(world)
    for _ in range(2):
        slept, woken = _move(world)
        assert [words.split(",")[0] for words in slept.programs] == [f"{LINE}: frozen"]
        assert woken.programs == [f"{LINE}: went on where it was frozen"]
        assert woken.chosen.startswith("processes went on there on 2")  # create flew the first
        _grows(world)
    assert _breaks(_lines(world)) == 0


def test_an_agent_that_is_killed_after_that_leaves_them_frozen_for_the_next_round(
    world: World,
) -> None:
    _begin(world)
    machine = world.machines()[0]
    killed: list[str] = []

    def strike(step: str) -> None:
        if step == "commit" and not killed:
            killed.append(step)
            kill(world.agents(machine.id))

    with PlainRunner(world.opened, wait_factor=0.1, before=strike):
        slept = hibernate.fn("demo")
    assert isinstance(slept, HibernateReport)
    assert killed
    shutil.rmtree(_place(world))
    assert wake_plainly(world.opened).programs == [f"{LINE}: went on where it was frozen"]
    _grows(world)
    assert _breaks(_lines(world)) == 0


def test_a_program_that_was_frozen_in_vain_goes_on_where_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _begin(world)

    def refuse(guard: object, ending: object) -> None:
        if getattr(ending, "verified", None) is not None:
            raise UnsavedWork("there is more on it")

    monkeypatch.setattr(NothingLost, "check", refuse)
    with pytest.raises(UnsavedWork):
        hibernate_plainly(world.opened)
    _grows(world)
    assert _breaks(_lines(world)) == 0
    assert not [path for path in (_place(world) / ".torpor-process").iterdir() if path.is_dir()]


def test_memory_that_is_older_than_the_files_never_goes_on(world: World) -> None:
    """Nor what was frozen of a program that the workspace has no more."""
    _begin(world)
    hibernate_plainly(world.opened)
    shutil.rmtree(_place(world))
    wake_plainly(_changed(world, programs=["exec sleep 600"]).opened)
    hibernate_plainly(_changed(world, programs=[]).opened)
    shutil.rmtree(_place(world))
    assert wake_plainly(world.opened).programs == [f"{LINE}: started"]


def test_on_a_machine_of_the_user_s_own_they_start_afresh(world: World) -> None:
    """Nobody knows whether they run on another one."""
    _begin(world)
    hibernate_plainly(world.opened)
    shutil.rmtree(_place(world))
    at = endpoint_of(world.rent())
    woken = wake_plainly(world.opened, machine=f"{at.user}@{at.host}:{at.port}")
    assert woken.programs[0].startswith(f"{LINE}: started afresh: this is a machine of your own")


def test_a_first_directory_that_is_a_link_holds_what_is_frozen(world: World) -> None:
    real = _place(world).with_name("real")
    real.mkdir()
    _place(world).symlink_to(real)
    (real / "chain.py").write_text(CHAIN)
    run_plainly(world.opened, create)
    _grows(world)
    slept = hibernate_plainly(world.opened)
    assert slept.programs[0].startswith(f"{LINE}: frozen")


def test_a_job_on_the_machine_freezes_its_programs(world: World) -> None:
    _begin(world)
    run_plainly(world.opened, job, "echo done")
    assert world.machines() == []
    shutil.rmtree(_place(world))
    assert wake_plainly(world.opened).programs == [f"{LINE}: went on where it was frozen"]


def test_a_dry_run_says_what_would_be_frozen_and_stops_nothing(world: World) -> None:
    _begin(world)
    said = run_plainly(world.opened, hibernate, dry_run=True)
    assert isinstance(said, HibernatePreview)
    assert said.programs[0].startswith(f"{LINE}: would be frozen, with ")
    _grows(world)
    said = run_plainly(_changed(world, process="never").opened, hibernate, dry_run=True)
    assert isinstance(said, HibernatePreview)
    assert said.programs == [f"{LINE}: would not be frozen: {NEVER.why_not}"]
    other = _changed(world, programs=["exec sleep 600"]).opened
    said = run_plainly(other, hibernate, dry_run=True)
    assert isinstance(said, HibernatePreview)
    assert said.programs == ["exec sleep 600: does not run here, a wake starts it afresh"]
    assert len(world.machines()) == 1
    assert _breaks(_lines(world)) == 0


def test_a_program_that_prints_keeps_no_machine(world: World) -> None:
    world = _changed(world, programs=["while sleep 0.05; do echo $RANDOM; done"], process="never")
    _place(world).mkdir()
    run_plainly(world.opened, create)
    assert hibernate_plainly(world.opened).destroyed


def test_one_that_cannot_go_on_starts_afresh_with_all_its_files(world: World) -> None:
    _begin(world)
    (_place(world) / "kept").write_text("work")
    hibernate_plainly(world.opened)
    shutil.rmtree(_place(world))
    woken = wake_plainly(_changed(world, process="never").opened)
    assert woken.programs == [f"{LINE}: started afresh: they cannot go on here"]
    assert (_place(world) / "kept").read_text() == "work"
    _grows(world)
    assert _breaks(_lines(world)) == 1


def test_where_it_is_required_a_machine_that_cannot_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _begin(world)
    wanting = _changed(world, process="require")
    monkeypatch.setattr(criu_packages, "PINS", world.folder / "other")
    (world.folder / "other").write_text(f"{'0' * 64} pool/main/c/criu/none.deb\n")
    with pytest.raises(MachineUnfit, match=r"(?s)cannot be had .* The machine was kept"):
        hibernate_plainly(wanting.opened)
    _grows(world)
    monkeypatch.undo()
    hibernate_plainly(wanting.opened)
    monkeypatch.setattr(criu_packages, "PINS", world.folder / "other")
    shutil.rmtree(_place(world))
    with pytest.raises(MachineUnfit, match="requires a machine that can freeze its programs"):
        wake_plainly(wanting.opened)
    assert world.machines() == []


@pytest.mark.parametrize("name", ["tree.json", "complete"])
def test_no_machine_is_believed_that_something_is_frozen(name: str) -> None:
    names = {"tree.json", "complete"} - {name}
    entries = [SimpleNamespace(root=0, path=f".torpor-process/1/{kept}".encode()) for kept in names]
    entries.append(SimpleNamespace(root=1, path=f".torpor-process/1/{name}".encode()))
    verified = SimpleNamespace(snapshot="it", manifest=SimpleNamespace(entries=entries))
    with pytest.raises(StillChanging, match=f"it lacks .torpor-process/1/{name}"):
        check_frozen([".torpor-process/1"], cast("Verified", verified))
    entries[-1].root = 0
    check_frozen([".torpor-process/1"], cast("Verified", verified))


def test_a_jupyter_kernel_goes_on_in_the_middle_of_a_cell(world: World) -> None:
    """With its variables, and the cell's reply comes to the client that has asked before."""
    file = _place(world) / "kernel.json"
    line = f"IPYTHONDIR=$PWD/.ipython exec {sys.executable} -m ipykernel_launcher -f {file}"
    world = _changed(world, programs=[line])
    _place(world).mkdir()
    with Watch(world) as watch:
        create.fn("demo")
        until(lambda: file.exists() and file.read_text().endswith("}"), "the kernel is there")
        with _connected(file) as (client, connects):
            watch.prints("a fresh start")
            client.execute("import os, time; steps = []", reply=True, timeout=PATIENCE_S)
            for number in (1, 2):
                asked = client.execute(
                    f"while not os.path.exists('stop-{number}'):\n"
                    f"    steps.append(1); time.sleep(.05)\n"
                    f"    len(steps) > 3 and open('begun-{number}', 'w').close()",
                    user_expressions={"steps": "len(steps)"},
                )
                until((_place(world) / f"begun-{number}").exists, "the cell is at work")
                watch.hibernates(world)
                watch.wakes()
                recv_monitor_message(connects)  # ZeroMQ drops what is sent to a client not there
                (_place(world) / f"stop-{number}").touch()
                said = client.get_shell_msg(timeout=PATIENCE_S)
                watch.prints("the kernel's reply")
                assert said["parent_header"]["msg_id"] == asked
                assert int(said["content"]["user_expressions"]["steps"]["data"]["text/plain"]) > 3


@contextmanager
def _connected(file: Path) -> Iterator[tuple[BlockingKernelClient, zmq.Socket[bytes]]]:
    """A client of the kernel, and a message for each time that it connects again."""
    client = BlockingKernelClient(connection_file=str(file))
    client.load_connection_file()
    client.start_channels()
    channel = cast("zmq.Socket[bytes]", client.shell_channel.socket)
    try:
        client.wait_for_ready(timeout=PATIENCE_S)
        connects = channel.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        connects.rcvtimeo = int(PATIENCE_S * 1000)
        yield client, connects
    finally:
        channel.disable_monitor()
        client.stop_channels()


def test_a_llama_cpp_server_answers_with_its_prompt_cache(world: World) -> None:
    tools = ROOT / ".venv" / "llama"
    assert (tools / "ready").exists(), "python -m benchmarks.deploy --prepare installs it"
    (wheel,) = (tools / "wheels").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(world.folder / "site")
    (port,) = free_ports(1)
    line = f"PYTHONPATH={world.folder}/site exec python3 server.py model.gguf {port} 256"
    world = _changed(world, programs=[line])
    _place(world).mkdir()
    (_place(world) / "server.py").write_text(ready_made()["llama-cpp"].server[2])
    make = [tools / "bin" / "python", ROOT / "benchmarks" / "random_gguf.py"]
    subprocess.run([*make, _place(world) / "model.gguf", "4", "F16"], check=True)

    def answers() -> dict[str, Any]:
        asked = {"prompt": "how much of this is known?", "max_tokens": 4, "temperature": 0}
        with suppress(OSError):
            request = f"http://127.0.0.1:{port}/v1/completions"
            with urllib.request.urlopen(request, json.dumps(asked).encode()) as said:
                return cast("dict[str, Any]", json.load(said))
        return {}

    with Watch(world) as watch:
        create.fn("demo")
        first = until(answers, "the server answers")
        watch.prints("a fresh start")
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for _ in range(2):
            watch.hibernates(world)
            watch.wakes()
            again = until(answers, "the server answers")
            watch.prints("the server's answer")
            usage = again["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
            assert again["choices"] == first["choices"]
