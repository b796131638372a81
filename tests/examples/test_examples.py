"""The examples do what their pages say: each command of a page is run as it stands there, against
machines of this host and the session's installation."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from blocks import Workspace
from deployments.installation import CHECKOUT, Installation, cache_folder
from deployments.server import Server
from deployments.stacks import ready_made
from flows import list_entries, list_machines, list_snapshots
from tests.fixtures.deployed import Deployed, place_of
from tests.fixtures.waiting import PATIENCE_S, background, until
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.ports import free_ports
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.safety import never_handed_over
from torpor_cli.app import app
from torpor_cli.folder_workspace import name_for

# Of these, tests/deployments/test_queues.py kills the worker.
pytestmark = pytest.mark.together("automations and make up")

EXAMPLES = CHECKOUT / "examples"
LLAMA = CHECKOUT / ".venv" / "llama"
LIKE = "examples"
"""The workspace whose store and market the folders of `torpor run` take."""


@dataclass
class Example:
    """A copy of an example's folder, in which somebody is who answers yes."""

    folder: Path
    installation: Installation
    capture: pytest.CaptureFixture[str]

    def changed(self, file: str, was: str, now: str) -> None:
        """Put a value in a file of the copy that suits a test."""
        text = (self.folder / file).read_text()
        assert was in text
        (self.folder / file).write_text(text.replace(was, now))

    def commands(self) -> list[str]:
        """What the page says to type, in its order."""
        return re.findall(r"^\$ (.+)$", (self.folder / "README.md").read_text(), re.MULTILINE)

    def type(self, command: str) -> str:
        """Run a command of torpor here, or another program in a process; returns what it prints."""
        self.capture.readouterr()
        argv = shlex.split(command)
        if argv[0] != "torpor" or argv[1] == "ssh":  # which becomes OpenSSH
            return self.in_a_process(*argv)
        app(argv[1:], exit_on_error=False, print_error=False)
        return "".join(self.capture.readouterr())

    def in_a_process(self, *argv: str) -> str:
        """Run a program, which must succeed; returns what it prints."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [sys.executable if argv[0] == "python" else argv[0], *argv[1:]],
            cwd=self.folder,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(CHECKOUT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


Opening = Callable[[str], Example]


@pytest.fixture
def opening(
    torpor_up: Server,
    installation: Installation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Opening:
    monkeypatch.setenv(FOLDER_VARIABLE, str(installation.folder))
    # What a command sets where it is not set: it ends with the test.
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder(installation.folder / "cache")))
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda asked: "y")
    Workspace(name=LIKE).save(LIKE, overwrite=True, _sync=True)

    def opening(name: str) -> Example:
        folder = tmp_path / "examples" / name  # with what lies beside it
        shutil.copytree(EXAMPLES, folder.parent)
        monkeypatch.chdir(folder)
        if (folder / "torpor.yaml").exists():
            with (folder / "torpor.yaml").open("a") as file:
                file.write(f"like: {LIKE}\n")
        return Example(folder, installation, capsys)

    return opening


def test_a_training_goes_on_at_its_checkpoint_after_its_machine_was_taken(opening: Opening) -> None:
    here = opening("finetune")
    here.changed("torpor.yaml", "save_minutes: 10", "save_minutes: 0.02")
    (command,) = here.commands()
    name = name_for(here.folder)
    typed = partial(here.in_a_process, *shlex.split(command), "--yes")
    with background(typed) as ended:
        _take_in_the_middle(here.installation, name)
        said = ended()
    begun = re.findall(r"^(begins|goes on at step \d+)$", said, re.MULTILINE)
    assert len(begun) == 2 and begun[0] == "begins" and begun[1] != "goes on at step 0"
    assert "succeeded" in said and list_machines(name) == []
    undisturbed = here.folder.with_name("undisturbed")
    shutil.copytree(EXAMPLES / "finetune", undisturbed)
    subprocess.run([sys.executable, "train.py"], cwd=undisturbed, check=True, capture_output=True)
    kept = Path("outputs", "checkpoint.json")
    assert (here.folder / kept).read_text() == (undisturbed / kept).read_text()


def _take_in_the_middle(installation: Installation, name: str) -> None:
    """As a market takes a spot machine, once a save has a checkpoint."""

    def training() -> psutil.Process | None:
        for process in psutil.process_iter(["cmdline", "cwd"]):
            argv, at = process.info["cmdline"] or [""], process.info["cwd"] or ""
            if argv[-1] == "train.py" and at.startswith(str(installation.machines)):
                return process
        return None

    process = until(training, "the training runs", every_s=0.1)
    assert process is not None
    checkpoint = place_of(installation, name) / "outputs" / "checkpoint.json"
    until(checkpoint.exists, "there is a checkpoint")
    process.send_signal(signal.SIGSTOP)  # so that it does not end before the save

    def saved() -> bool:
        return any(entry.path.endswith("checkpoint.json") for entry in list_entries(name))

    until(saved, "a save has the checkpoint", every_s=0.5)
    provider = LocalProvider(installation.machines)
    (machine,) = list_machines(name)
    assert machine.label is not None
    provider.destroy(machine, never_handed_over(machine, machine.label))


def test_each_file_of_the_queue_gets_its_result_once(opening: Opening) -> None:
    here = opening("batch")
    first, second = here.commands()
    assert "3 files to do" in here.type(first)
    names = {f"{file.name}.json" for file in (here.folder / "inbox").iterdir()}
    assert {file.name for file in (here.folder / "results").iterdir()} == names
    (here.folder / "inbox" / "summer.txt").write_text("Heat, and dust.\n")
    said = here.type(second)
    assert "1 files to do" in said and "summer.txt: done" in said
    results = here.folder / "results"
    assert {file.name for file in results.iterdir()} == {*names, "summer.txt.json"}
    assert json.loads((results / "summer.txt.json").read_text())["words"] == 3


def test_a_drill_finds_the_nightly_backup_equal_to_the_machine(
    opening: Opening, deployed: Deployed
) -> None:
    here = opening("nightly-backup")
    init, create, copy, backup, nightly, weekly, drill = here.commands()
    for command in (init, create, copy, backup):
        here.type(command)
    (first,) = list_snapshots("notes")
    for command in (nightly, weekly):
        assert "runs at" in here.type(command)
    assert _runs_now(deployed, "notes-nightly")["state_type"] == "COMPLETED"
    stored = list_snapshots("notes")
    assert stored[0].snapshot > first.snapshot
    assert re.search(r"^equal: [1-9]\d* files", here.type(drill), re.MULTILINE)
    restored = _runs_now(deployed, "notes-drill")
    assert restored["state_type"] == "COMPLETED", restored["state"]["message"]
    assert list_snapshots("notes") == stored and len(list_machines("notes")) == 1
    changed = place_of(here.installation, "notes") / "notes" / "monday.txt"
    changed.write_text("changed since the backup")
    with pytest.raises(AssertionError, match="differ"):
        here.type(drill)
    here.type("torpor hibernate notes")
    deployed.delete("backup/notes-nightly", "verify/notes-drill")


def test_a_server_sleeps_and_wakes_by_its_schedules(opening: Opening, deployed: Deployed) -> None:
    here = opening("llm-at-night")
    init, create, copy, deploy, ask, evening, morning = here.commands()
    (port,) = free_ports(1)
    stack = ready_made()["llama-cpp"]
    stack.port = port
    wheels = ["--no-index", "--find-links", str(LLAMA / "wheels")]
    stack.setup = [*stack.setup[:-1], *wheels, stack.setup[-1]]
    stack.server = [*stack.server[:-1], "256"]  # tokens of context, which the model has
    stack.save("llama-cpp-here", overwrite=True, _sync=True)
    make = [LLAMA / "bin" / "python", CHECKOUT / "benchmarks" / "random_gguf.py"]
    subprocess.run([*make, here.folder / "model.gguf", "4", "F16"], check=True)
    on_this_host = partial(re.sub, r"\bllama-cpp\b", "llama-cpp-here")

    for command in (init, create, copy):
        here.type(command)
    assert "ssh -N -L" in here.type(on_this_host(deploy))
    assert " tokens: " in here.type(ask.replace("8080", str(port)))
    assert "runs at" in here.type(evening)
    assert "runs at" in here.type(on_this_host(morning))
    slept = _runs_now(deployed, "chat-evening")
    assert slept["state_type"] == "COMPLETED", slept["state"]["message"]
    assert list_machines("chat") == []
    woken = _runs_now(deployed, "chat-morning")
    assert woken["state_type"] == "COMPLETED", woken["state"]["message"]
    assert " tokens: " in here.type(ask.replace("8080", str(port)))
    here.type("torpor hibernate chat")
    deployed.delete("hibernate/chat-evening", "deploy/chat-morning")


def test_a_kernel_keeps_its_variables_while_its_machine_is_another_one(
    opening: Opening, tmp_path: Path
) -> None:
    here = opening("notebook")
    place = tmp_path / "workspace"
    init, create, copy, setup, programs, *asleep, ask, hibernate, gone, wake, again = (
        command.replace("/srv/notebook", str(place)) for command in here.commands()
    )
    for command in (init, create, copy):
        here.type(command)
    assert "pip install" in setup  # this host has ipykernel
    python = place / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for command in (programs, *asleep):
        here.type(command)
    kernel = place / "kernel.json"
    until(lambda: kernel.exists() and kernel.read_text().endswith("}"), "the kernel is there")
    here.type(ask)
    here.type(hibernate)
    assert list_machines("notebook") == []
    here.type(gone)
    here.type(wake)
    assert "42" in here.type(again).splitlines()
    here.type("torpor hibernate notebook")


def _runs_now(deployed: Deployed, name: str) -> dict[str, Any]:
    """The next run that a schedule has planned, taken at once by the worker; as it has ended."""
    wanted = {"deployments": {"name": {"any_": [name]}}, "sort": "EXPECTED_START_TIME_ASC"}
    planned = until(
        lambda: deployed.ask("flow_runs/filter", wanted), f"a run of {name} is planned", 0.5
    )
    assert planned[0]["auto_scheduled"]
    deployed.advance(planned[0]["id"])
    return deployed.end(planned[0]["id"])
