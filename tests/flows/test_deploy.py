"""Deploys on real machines: a server answers, or nothing is handed over."""

from __future__ import annotations

import os
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prefect.blocks.system import Secret

from blocks import Stack
from flows import deploy
from flows.procedures import restore as restoring
from flows.procedures.deploy import deployment, server
from flows.procedures.deploy.server import Serving
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from tests.fixtures.engine import MACHINE
from tests.fixtures.fault_proxy import gets
from tests.fixtures.machines import destroy_all
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, shown, wake_plainly
from tests.fixtures.rentals import standing
from tests.fixtures.small_stack import small_stack
from tests.fixtures.waiting import until
from tests.fixtures.world import World
from torpor.control.deploy.http_check import ask
from torpor.control.deploy.report import DeployReport
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.remote.restore import RemoteRestore
from torpor.control.remote.session import SshSession
from torpor.control.rental.records import Rentals
from torpor.control.store.manifests import list_snapshots, snapshot_ids
from torpor.control.upkeep.pins import pin_times
from torpor.shared.errors import (
    DeployFailed,
    HandedOver,
    InvalidInput,
    RestoreUnfinished,
    SnapshotDamaged,
    StoreUnavailable,
    TorporError,
)
from torpor.shared.values import BASE, MachineId, WorkspaceName


@pytest.fixture
def asleep(world: World) -> World:
    """The workspace has a snapshot with a model, and no machine."""
    place = world.workspace(world.rent().id)
    place.mkdir()
    (place / "model").write_text("a word")
    hibernate_plainly(world.opened)
    return world


def _deploy(
    world: World, stack: Stack, *, on: OpenWorkspace | None = None, **options: Any
) -> DeployReport:
    report: DeployReport = run_plainly(on or world.opened, deploy, stack, **options)
    return report


def _bases(world: World) -> list[WorkspaceName]:
    found = {one.key.split("/")[1] for one in world.direct.list(f"workspaces/{BASE}")}
    return [WorkspaceName(name) for name in sorted(found)]


def _kept(world: World) -> list[str]:
    """The environments in use."""
    return [one for name in _bases(world) for one in pin_times(world.direct, name)]


def _answers(stack: Stack) -> bool:
    """On this host, where a local machine's ports are."""
    return ask(stack.port, "GET", stack.health, None, 5.0) is not None


def test_the_first_deploy_makes_the_environment_and_the_next_restores_it(asleep: World) -> None:
    stack = small_stack()
    first = _deploy(asleep, stack)
    assert first.environment.startswith("made by the setup command, stored as ")
    assert _answers(stack) and first.from_rental_s is not None
    assert 0 < first.from_ssh_s < first.from_rental_s
    assert {"machine", "connect", "restore", "server", "health", "completion"} <= set(first.seconds)
    assert {"environment: setup", "workspace: restore"} <= set(first.within)
    key, rows = shown[-1]
    assert key == "deploy-demo" and len(rows) <= 10
    said = {row["what"]: row["value"] for row in rows}
    forward = f"ssh -N -L {stack.port}:127.0.0.1:{stack.port} demo"
    assert said["forward"] == f"{forward} (after `torpor ssh --setup`, once)"
    assert said["log in"] == "torpor ssh demo"
    made = (asleep.home(first.machine) / "small-stack" / "made").read_text()
    (kept,) = _kept(asleep)

    hibernate_plainly(asleep.opened)
    until(lambda: not _answers(stack), "the server went with its machine")
    again = _deploy(asleep, stack)
    assert again.machine != first.machine
    assert again.environment == f"restored from {kept} of {_bases(asleep)[0]}"
    assert "environment: setup" not in again.within and "environment: check" in again.within
    assert _kept(asleep) == [kept] and _answers(stack)
    home = asleep.home(again.machine)
    assert (home / "small-stack" / "made").read_text() == made
    assert (home / "workspace" / "model").read_text() == "a word"


@pytest.mark.rule(17)
def test_an_environment_runs_on_no_machine_of_another_account(asleep: World) -> None:
    """A hostile host would give its server the secrets of all that deploy the same stack."""
    stack = small_stack()
    _deploy(asleep, stack)
    hibernate_plainly(asleep.opened)
    until(lambda: not _answers(stack), "the server went with its machine")
    elsewhere = LocalProvider(asleep.folder / "e")
    try:
        moved = _deploy(asleep, stack, on=replace(asleep.opened, providers=(elsewhere,)))
    finally:
        destroy_all(elsewhere)
    assert moved.environment.startswith("made by the setup command, stored as ")
    assert len(_bases(asleep)) == len(_kept(asleep)) == 2


@pytest.mark.rule(17)
def test_an_environment_is_sealed_like_the_workspace(sealed_world: World) -> None:
    place = sealed_world.workspace(sealed_world.rent().id)
    place.mkdir()
    (place / "model").write_text("a word")
    hibernate_plainly(sealed_world.opened)
    _deploy(sealed_world, small_stack())
    (name,) = _bases(sealed_world)
    stored = list_snapshots(sealed_world.direct, name)
    assert len(stored) == 1
    for one in sealed_world.direct.list(f"workspaces/{name}/packs/"):
        assert b"HTTPServer" not in sealed_world.direct.get(one.key, max_bytes=1 << 24)


def test_a_workspace_without_a_snapshot_gets_an_empty_directory(world: World) -> None:
    stack = small_stack(fetch=["sh", "-euc", 'echo fetched > "$1"', "sh", "{model_path}"])
    report = _deploy(world, stack)
    assert report.snapshot is None and report.seconds["fetch"] >= 0
    assert (world.workspace(report.machine) / "model").read_text() == "fetched\n"
    hibernate_plainly(world.opened)
    again = _deploy(world, stack)
    assert "fetch" not in again.seconds, "the workspace says that it holds the model"


@pytest.mark.rule(17)
def test_a_machine_in_use_is_deployed_on_and_kept(asleep: World) -> None:
    stack = small_stack()
    first = _deploy(asleep, stack)
    (asleep.workspace(first.machine) / "mine").write_text("work")
    again = _deploy(asleep, stack)
    assert (again.machine, again.from_rental_s, again.snapshot) == (first.machine, None, None)
    assert again.environment.startswith("restored from ") and _answers(stack)
    wrong = small_stack(server=["false"])
    with pytest.raises(
        DeployFailed, match=r"(?s)phase health.*server command.*ended with status 1"
    ):
        _deploy(asleep, wrong)
    assert [one.id for one in asleep.machines()] == [first.machine]
    assert (asleep.workspace(first.machine) / "mine").read_text() == "work"
    assert not _answers(wrong)


@pytest.mark.rule(17)
def test_a_machine_with_another_environment_keeps_its_server(asleep: World) -> None:
    """The store has an environment whose directories hold something else here."""
    stack = small_stack()
    first = _deploy(asleep, stack)
    home = asleep.home(first.machine)
    (home / "small-stack" / "serve.log").write_text("mine")  # its own additions are no hindrance
    assert _deploy(asleep, stack).environment.startswith("restored from ")
    name = _bases(asleep)[0]
    shutil.rmtree(home / ".torpor" / "workspaces" / name)  # as if the files were another's
    with pytest.raises(InvalidInput, match=r"(?s)small-stack on .*Nothing was stopped\. Move it"):
        _deploy(asleep, stack)
    assert _answers(stack)
    (home / "small-stack").rename(home / "elsewhere")
    assert _deploy(asleep, stack).environment.startswith("restored from ")
    assert _answers(stack)


@pytest.mark.rule(17)
def test_a_machine_in_use_keeps_its_server_where_another_program_has_the_port(
    asleep: World,
) -> None:
    stack = small_stack()
    _deploy(asleep, stack)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = small_stack(port=other.getsockname()[1])
        with pytest.raises(DeployFailed, match="another program on the machine listens on port"):
            _deploy(asleep, taken)
    assert _answers(stack)


@pytest.mark.rule(17)
@pytest.mark.parametrize("moment", ["it connects", "it has ended what ran"])
def test_a_machine_that_another_deploy_hands_over_meanwhile_keeps_its_server(
    asleep: World, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Both took up the same machine that a killed run left."""
    left, _ = standing(asleep.opened)
    stack = small_stack()
    others: list[DeployReport] = []
    before: list[tuple[set[int], int]] = []

    def stands() -> tuple[set[int], int]:
        """The processes of the server, and the environment."""
        servers = {p.pid for p in asleep.processes(left.id) if "serve.py" in " ".join(p.cmdline())}
        return servers, (asleep.home(left.id) / "small-stack" / "made").stat().st_ino

    def late(real: Any) -> Any:
        def first_the_other(*args: Any) -> Any:
            done = real(*args)
            monkeypatch.undo()
            others.append(_deploy(asleep, stack))
            before.append(stands())
            return done

        return first_the_other

    if moment == "it connects":
        monkeypatch.setattr(deployment, "open_session", late(deployment.open_session))
    else:
        monkeypatch.setattr(Serving, "stop", late(Serving.stop))
    with pytest.raises(HandedOver):
        _deploy(asleep, stack)
    assert [one.machine for one in others] == [one.id for one in asleep.machines()] == [left.id]
    assert before == [stands()] and before[0][0] and _answers(stack)


def test_two_servers_that_begin_at_once_do_not_wait_for_each_other(
    asleep: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two stacks, whose ports differ: both take up a machine and begin the first attempt."""
    standing(asleep.opened)
    other, real = small_stack(), server.start_command

    def first_the_other(session: Any, request: Any) -> Any:
        if request.serves:
            monkeypatch.undo()
            _deploy(asleep, other)
        return real(session, request)

    monkeypatch.setattr(server, "start_command", first_the_other)
    with pytest.raises(HandedOver):
        _deploy(asleep, small_stack())
    assert _answers(other)


def test_a_server_is_not_waited_for_where_another_deploy_s_runs(
    asleep: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began after this one had looked. Of two servers the agent runs the first."""
    other = small_stack()
    _deploy(asleep, other)
    monkeypatch.setattr(Serving, "stop", lambda _: None)
    with pytest.raises(DeployFailed, match="another deploy of workspace demo runs its server"):
        _deploy(asleep, small_stack())
    assert _answers(other)


@pytest.mark.rule(17)
def test_a_whole_environment_is_not_recorded_as_unfinished(asleep: World) -> None:
    """Else a deploy that has taken up the same machine could delete it."""
    report = _deploy(asleep, small_stack())
    assert not list((asleep.home(report.machine) / ".torpor" / "deploy").glob(f"{BASE}*"))


@pytest.mark.rule(17)
def test_a_machine_whose_rental_cannot_be_read_is_left_alone(
    asleep: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing(asleep.opened)
    stopped: list[str] = []

    def unread(*_: object) -> None:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(Rentals, "check_unclaimed", unread)
    monkeypatch.setattr(Serving, "stop", lambda _: stopped.append("server"))
    with pytest.raises(StoreUnavailable):
        _deploy(asleep, small_stack())
    assert stopped == [] and len(asleep.machines()) == 1


@pytest.mark.rule(17)
def test_a_left_machine_with_another_snapshot_is_replaced(asleep: World) -> None:
    """An earlier run of another snapshot was killed while it restored."""
    (older,) = asleep.snapshots()
    woken = wake_plainly(asleep.opened)
    (asleep.workspace(MachineId(woken.machine)) / "model").write_text("another word")
    hibernate_plainly(asleep.opened)
    left, _ = standing(asleep.opened)
    assert left.endpoint is not None
    with SshSession.open(left.endpoint, asleep.opened.identity) as session:
        opened = asleep.opened
        restore = RemoteRestore(
            session, asleep.direct, older, opened.key, "killed", paths=opened.spec.paths
        )
        for part in restore.begin().parts:
            restore.restore_part(part)
        restore.end()
    stack = small_stack()
    report = _deploy(asleep, stack)
    assert [one.id for one in asleep.machines()] == [report.machine]
    assert report.machine != left.id and asleep.leaks() == []
    assert (asleep.workspace(report.machine) / "model").read_text() == "another word"


@pytest.mark.parametrize("kind", [RestoreUnfinished, InvalidInput])
def test_an_environment_without_room_is_no_reason_for_another_machine(
    asleep: World, monkeypatch: pytest.MonkeyPatch, kind: type[TorporError]
) -> None:
    """What the agent says of the environment's directories says nothing of the workspace's."""
    stack = small_stack()
    _deploy(asleep, stack)
    hibernate_plainly(asleep.opened)
    tried: list[str] = []

    def refused(*_: Any, **__: Any) -> Any:
        tried.append("environment")
        raise kind("made up")

    monkeypatch.setattr(deployment, "restore_run", refused)
    with pytest.raises(DeployFailed, match=r"made up\. Move it away, .* no wake takes"):
        _deploy(asleep, stack)
    assert len(tried) == 1 and asleep.machines() == []


_TOKEN = "hf_0123456789abcdef"
_WITH_TOKEN = """\
import os, sys
token = os.environ["HF_TOKEN"]
print("the token is", token, flush=True)
open(sys.argv[1], "w").write(str(len(token)))
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(kind: Any, name: str, *, of: str) -> Secret[str]:
        assert (kind, name) == (Secret, "hugging-face")
        return Secret(value=_TOKEN)

    monkeypatch.setattr("blocks.secret_variables.load_named", load)


@pytest.mark.rule(9)
def test_secrets_reach_the_commands_and_nothing_else(
    asleep: World, secret: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The commands print theirs here: what torpor shows of their output hides it."""
    caplog.set_level("DEBUG")
    fetch = ["python3", "-c", _WITH_TOKEN, "{workspace}/fetched", "0"]
    serve = Path(__file__).parents[1] / "fixtures" / "fake_server.py"
    given = {"secrets": ["HF_TOKEN=hugging-face"], "bearer": "HF_TOKEN", "fetch": fetch}
    server = ["python3", str(serve), "{port}", "{model_path}", "HF_TOKEN"]
    stack = small_stack(**given, server=server)
    report = _deploy(asleep, stack)
    home = asleep.home(report.machine)
    assert (home / "workspace" / "fetched").read_text() == str(len(_TOKEN))
    denied = ask(stack.port, "GET", stack.health, None, 5.0)
    served = ask(stack.port, "GET", stack.health, None, 5.0, _TOKEN)
    assert denied is not None and served is not None
    assert (denied.status, served.status) == (401, 200)
    held = [
        path
        for path in home.rglob("*")
        if path.is_file() and not path.is_symlink() and _TOKEN.encode() in path.read_bytes()
    ]
    assert [path.name for path in held] == ["demo-fetch.log"], "which the command wrote itself"
    for process in asleep.processes(report.machine):
        assert _TOKEN not in " ".join(process.cmdline())
    assert _TOKEN not in repr(stack.value()) + repr(report) + repr(shown)
    with pytest.raises(DeployFailed, match=r"(?s)status 1.*\nthe token is \*\*\*") as failed:
        _deploy(asleep, small_stack(**given, server=["python3", "-c", _WITH_TOKEN, "out", "1"]))
    assert _TOKEN not in str(failed.value) + caplog.text
    hibernate_plainly(asleep.opened)
    for one in asleep.direct.list(""):
        assert _TOKEN.encode() not in asleep.direct.get(one.key, max_bytes=1 << 26)


def test_a_server_that_writes_to_what_is_restored_later_is_named(
    asleep: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = asleep.workspace(MachineId(wake_plainly(asleep.opened).machine))
    (place / "rest.bin").write_bytes(os.urandom(1 << 20))
    hibernate_plainly(asleep.opened)
    check = restoring.check_restore

    def late(remote: RemoteRestore, full: bool) -> Any:
        if remote.first:
            (machine,) = asleep.machines()
            with open(asleep.workspace(machine.id) / "rest.bin", "ab") as file:
                file.write(b"the server's")
        return check(remote, full)

    monkeypatch.setattr(restoring, "check_restore", late)
    with pytest.raises(SnapshotDamaged, match=r"rest\.bin.*name them in `first` too"):
        _deploy(asleep, small_stack(), on=asleep.wanting(first=["model"]))
    assert asleep.machines() == []


@pytest.mark.rule(17)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"setup": ["sh", "-c", "echo one; echo two; exit 3"]},
         "phase restore: the setup command .* ended with status 3.*one\ntwo"),
        ({"setup": ["no-such-program"]}, "phase restore: the setup command .* not be started"),
        ({"setup": ["sleep", "600"], "setup_minutes": 0.01},
         "phase restore: .* not end within 0.01 minutes, the limit in `setup_minutes`"),
        ({"fetch": ["sh", "-c", "echo lost >&2; exit 5"]}, "phase fetch: .*status 5.*lost"),
        ({"server": ["sh", "-c", "echo broken; exit 1"]}, "phase health: .*status 1.*broken"),
        ({"health": "/nowhere", "ready_minutes": 0.25},
         "phase health: .*/nowhere gave status 404 for 0.25 minutes, the limit in `ready_minutes`"),
        ({"proof_path": "/nowhere"}, "phase completion: .*with status 404"),
        ({"proof_answer": "choices.1.text"}, "phase completion: .*holds nothing at choices.1.text"),
        ({"environment": ["~/workspace/env"]}, "phase connect: .*overlap"),
        ({"environment": ["~/small-stack", "~/never-made"]},
         None),
    ],
)  # fmt: skip
def test_what_fails_is_named_and_its_machine_destroyed(
    asleep: World, changes: dict[str, Any], words: str | None
) -> None:
    stack = small_stack(**changes)
    if words is None:  # the server works, and its environment cannot be stored
        assert "not stored: " in _deploy(asleep, stack).environment
        assert _kept(asleep) == []
        return
    with pytest.raises(TorporError, match=f"(?s){words}"):
        _deploy(asleep, stack)
    assert asleep.machines() == [] and asleep.leaks() == [] and _kept(asleep) == []
    assert len(asleep.snapshots()) == 1


def test_a_port_that_another_program_has_is_refused(asleep: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        stack = small_stack(port=other.getsockname()[1])
        with pytest.raises(DeployFailed, match="another program on the machine listens on port"):
            _deploy(asleep, stack)
    assert asleep.machines() == []


def test_each_strategy_takes_its_steps(asleep: World, monkeypatch: pytest.MonkeyPatch) -> None:
    images: list[str] = []
    rents = deployment.rented_machine

    def without_image(opened: OpenWorkspace) -> Any:
        """Local machines have no images."""
        images.append(opened.spec.want.image)
        want = msgspec.structs.replace(opened.spec.want, image="")
        return rents(replace(opened, spec=msgspec.structs.replace(opened.spec, want=want)))

    monkeypatch.setattr(deployment, "rented_machine", without_image)
    image = small_stack(
        image="official", own_image="mine",
        server=["python3", str(Path(__file__).parents[1] / "fixtures" / "fake_server.py"),
                "{port}", "{model_path}"],
    )  # fmt: skip
    for name in ("official", "own"):
        report = _deploy(asleep, image, strategy=name)
        assert report.environment == "of the image" and report.strategy.startswith(name)
        hibernate_plainly(asleep.opened)
    assert _bases(asleep) == []
    stack = small_stack(image="official")
    for _ in range(2):
        assert _deploy(asleep, stack, strategy="setup").environment == "made by the setup command"
        hibernate_plainly(asleep.opened)
    assert _bases(asleep) == []
    assert images == ["official", "mine", "official", "official"]
    for name, words in (("D", "phase prepare: 'D' is not a"), ("own", "has no own image")):
        with pytest.raises(InvalidInput, match=words):
            _deploy(asleep, stack, strategy=name)
    assert asleep.machines() == []


def test_a_stack_without_software_serves_on_a_machine_that_runs(asleep: World) -> None:
    server = Path(__file__).parents[1] / "fixtures" / "fake_server.py"
    bare = small_stack(
        setup=[], environment=[], server=["python3", str(server), "{port}", "{model_path}"]
    )
    with pytest.raises(
        InvalidInput, match=r"the machine, its image or the workspace has .* use `official`"
    ):
        _deploy(asleep, bare)
    with pytest.raises(InvalidInput, match="`wake` the workspace, then deploy it again"):
        _deploy(asleep, bare, strategy="official")
    assert asleep.machines() == []
    wake_plainly(asleep.opened)
    assert _deploy(asleep, bare, strategy="official").environment == "of the image"


@pytest.mark.rule(17)
def test_two_deploys_that_make_one_environment_do_not_both_keep_it(
    asleep: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one stores and keeps it between this one's snapshot and its pin."""
    stack = small_stack()
    real = deployment.keep_base
    others: list[str] = []

    def late(base: Any, verified: Any, reason: str) -> bool:
        monkeypatch.setattr(deployment, "keep_base", real)
        other = deployment.take_snapshot
        _, theirs = other(base, session[0], MACHINE)
        others.append(theirs.snapshot)
        assert real(base, theirs, "the other one")
        return real(base, verified, reason)

    session: list[Any] = []
    opens = deployment.open_session

    def opened(*args: Any) -> Any:
        session.append(opens(*args))
        return session[-1]

    monkeypatch.setattr(deployment, "open_session", opened)
    monkeypatch.setattr(deployment, "keep_base", late)
    _deploy(asleep, stack)
    kept = _kept(asleep)
    (name,) = _bases(asleep)
    assert len(kept) == 1 and snapshot_ids(asleep.direct, name) == kept


def test_the_environment_is_fetched_before_the_workspace(asleep: World) -> None:
    """The server needs all of it; of the workspace, it may need little."""
    place = asleep.workspace(MachineId(wake_plainly(asleep.opened).machine))
    (place / "rest.bin").write_bytes(os.urandom(8 << 20))
    hibernate_plainly(asleep.opened)
    _deploy(asleep, small_stack())
    hibernate_plainly(asleep.opened)
    asleep.proxy.clear()

    steps: list[str] = []

    def slow(step: str) -> None:
        steps.append(step)
        if step == "find environment":  # the workspace's plan is made long before
            until(lambda: "begin restore" in steps, "the workspace's plan is asked for")
            time.sleep(2)

    with PlainRunner(asleep.wanting(first=["model"]), wait_factor=0.1, at_once=1, before=slow):
        deploy.fn("demo", small_stack())
    fetched = [path for method, path in asleep.proxy.requests if gets("/packs/")(method, path)]
    of_environment = [f"/{BASE}" in path for path in fetched]
    assert True in of_environment and False in of_environment
    assert of_environment == sorted(of_environment, reverse=True)


def test_the_server_starts_when_what_the_workspace_wants_first_is_there(asleep: World) -> None:
    place = asleep.workspace(MachineId(wake_plainly(asleep.opened).machine))
    (place / "rest.bin").write_bytes(os.urandom(8 << 20))
    hibernate_plainly(asleep.opened)
    steps: list[str] = []
    opened = asleep.wanting(first=["model"])
    with PlainRunner(opened, wait_factor=0.1, before=steps.append):
        report: DeployReport = deploy.fn("demo", small_stack())
    started = [number for number, step in enumerate(steps) if step.startswith("start attempt")]
    assert len(started) == 2, "the setup command and the server"
    assert steps.index("finish what comes first") < started[1] < steps.index("finish restore")
    assert report.from_ssh_s < sum(report.seconds.values())
    restored = asleep.workspace(report.machine)
    assert (restored / "rest.bin").stat().st_size == 8 << 20


def test_a_deploy_learns_what_its_server_needs(asleep: World) -> None:
    place = asleep.workspace(MachineId(wake_plainly(asleep.opened).machine))
    (place / "rest.bin").write_bytes(os.urandom(8 << 20))
    hibernate_plainly(asleep.opened)
    _deploy(asleep, small_stack())
    hibernate_plainly(asleep.opened)
    steps: list[str] = []
    with PlainRunner(asleep.opened, wait_factor=0.1, before=steps.append):
        deploy.fn("demo", small_stack())
    first = steps.index("finish what comes first")
    of_workspace = max(n for n, step in enumerate(steps) if step == "finish restore")
    assert "note what was used" in steps[first:of_workspace]

    hibernate_plainly(asleep.opened)
    command = 'test -f rest.bin; exec python3 "$@"'
    serve = ["sh", "-euc", command, "sh", "{bin}serve.py", "{port}", "{model_path}"]
    more = small_stack(server=serve)
    report = _deploy(asleep, more)
    assert _answers(more)
    (warning,) = (words for words in report.warnings if "is started again" in words)
    assert "ended with status 1" in warning

    for then in (":", "exit 1"):
        hibernate_plainly(asleep.opened)
        writes = f'test -f rest.bin || {{ echo new >rest.bin; {then}; }}; exec python3 "$@"'
        more = small_stack(server=["sh", "-euc", writes, *serve[3:]])
        steps.clear()
        with PlainRunner(asleep.opened, wait_factor=0.1, before=steps.append):
            report = deploy.fn("demo", more)
        assert steps.count("finish restore") > 2, "another machine was rented; its server waited"
        assert (asleep.workspace(report.machine) / "rest.bin").stat().st_size == 8 << 20
        assert _answers(more)
