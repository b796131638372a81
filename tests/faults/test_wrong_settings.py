"""Wrong key, bucket, host, port or path: said at once, with nothing touched."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import Any

import asyncssh
import msgspec
import pytest

from tasks.workspace import OpenWorkspace
from tests.fixtures.engine import Engine
from tests.fixtures.machines import new_key_pair
from tests.fixtures.plain_flows import hibernate_plainly, wake_plainly
from tests.fixtures.standing import QUICK, Asleep, Awake, raises
from tests.fixtures.world import World, kill, until_gone
from torpor.control.ports import free_ports
from torpor.control.remote.ssh import Identity
from torpor.shared.errors import (
    HookFailed,
    HostKeyChanged,
    InvalidInput,
    MachineDenied,
    MachineUnreachable,
    StoreDenied,
    StoreMissing,
    StoreUnavailable,
    TorporError,
    WorkspaceInvalid,
    WrongKey,
)
from torpor.shared.format.keys import workspace_key
from torpor.shared.values import MachineId, WorkspaceName


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"secret_key": "0" * 40}, StoreDenied, ("secret key",)),
        ({"access_key": "AKNOBODY"}, StoreDenied, ("access key",)),
        ({"bucket": "no-such-bucket"}, StoreMissing, ("no-such-bucket", "check its name")),
        (
            {"endpoint_url": "http://no-such-host.invalid"},
            StoreUnavailable,
            ("no-such-host.invalid", "check the endpoint"),
        ),
        (
            {"endpoint_url": f"http://127.0.0.1:{free_ports(1)[0]}"},
            StoreUnavailable,
            ("127.0.0.1", "check the endpoint"),
        ),
    ],
    ids=["secret", "access key", "bucket", "host", "port"],
)
def test_a_store_that_is_named_wrongly_is_said_before_anything_else(
    awake: Awake,
    short_agent: None,
    settings: dict[str, Any],
    kind: type[TorporError],
    words: tuple[str, ...],
) -> None:
    opened = awake.world.access.opened(**{**QUICK, **settings})
    for flow in (hibernate_plainly, wake_plainly):
        with raises(kind, *words):
            flow(opened, retries=0)
    awake.unharmed()


def test_an_endpoint_that_is_no_store_is_said(awake: Awake, short_agent: None) -> None:
    assert awake.machine.endpoint is not None
    ssh = f"http://127.0.0.1:{awake.machine.endpoint.port}"
    opened = awake.world.access.opened(**{**QUICK, "endpoint_url": ssh})
    with pytest.raises(TorporError, match=r"check the endpoint|does not speak S3"):
        hibernate_plainly(opened, retries=0)
    awake.unharmed()


def test_an_ssh_identity_that_the_machine_does_not_know(awake: Awake, short_agent: None) -> None:
    opened = replace(awake.world.opened, identity=Identity(new_key_pair().private))
    with raises(MachineDenied, "127.0.0.1", "authorized_keys"):
        hibernate_plainly(opened, retries=0)
    awake.unharmed()
    awake.recovers()


def test_an_ssh_identity_that_is_no_key(awake: Awake, short_agent: None) -> None:
    opened = replace(awake.world.opened, identity=Identity("hunter2"))
    with raises(InvalidInput, "private key"):
        hibernate_plainly(opened, retries=0)
    awake.unharmed()


@pytest.mark.parametrize("host", ["root@no-such-host.invalid", "root@127.0.0.1:{port}"])
def test_a_machine_that_is_named_wrongly(awake: Awake, short_agent: None, host: str) -> None:
    named = host.format(port=free_ports(1)[0])
    with raises(MachineUnreachable, "no-such-host.invalid|127.0.0.1", "check"):
        awake.hibernate(machine=named)
    awake.unharmed()


def test_a_user_that_is_not_there(awake: Awake, short_agent: None) -> None:
    assert awake.machine.endpoint is not None
    with raises(MachineDenied, "nobody-here@127.0.0.1", "user"):
        awake.hibernate(machine=f"nobody-here@127.0.0.1:{awake.machine.endpoint.port}")
    awake.unharmed()


def test_a_host_key_that_changed_is_met_with_silence(world: World) -> None:
    """Somebody else's server at the machine's address: nothing is sent, nothing destroyed."""
    machine = world.rent()
    (world.workspace(machine.id)).mkdir()
    (world.workspace(machine.id) / "work").write_text("mine")
    opened = world.machine_folder(machine.id)
    stranger = asyncssh.generate_private_key("ssh-ed25519")
    opened.host_key.write_bytes(stranger.export_private_key())
    _restart_server(world, machine.id)
    with raises(HostKeyChanged, "127.0.0.1", "pinned", "Nothing was sent", "provider's console"):
        hibernate_plainly(world.opened, retries=0)
    assert not (world.home(machine.id) / ".torpor").exists()
    assert [m.id for m in world.machines()] == [machine.id]
    assert world.snapshots() == []


def test_a_host_key_pinned_at_first_use_is_the_only_one_from_then_on(world: World) -> None:
    machine = world.rent()
    (world.workspace(machine.id)).mkdir()
    (world.workspace(machine.id) / "work").write_text("mine")
    assert machine.endpoint is not None
    own = f"{machine.endpoint.user}@127.0.0.1:{machine.endpoint.port}"
    hibernate_plainly(world.opened, machine=own, destroy=False)
    opened = world.machine_folder(machine.id)
    opened.host_key.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    _restart_server(world, machine.id)
    with raises(HostKeyChanged, "127.0.0.1", "pinned", "recorded key"):
        hibernate_plainly(world.opened, machine=own, destroy=False, retries=0)
    assert world.verify_listed() == 1


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("~/nowhere", ("does not exist",)),
        ("~/empty", ("empty", "nothing to keep")),
        ("~/file", ("is a file", "directory")),
        ("~", ("inside it",)),
    ],
)
def test_an_impossible_workspace_path_is_refused(
    awake: Awake, short_agent: None, path: str, words: tuple[str, ...]
) -> None:
    home = awake.world.home(awake.machine.id)
    (home / "empty").mkdir(exist_ok=True)
    (home / "file").write_text("a file")
    wrong = awake.world.wanting(paths=[path])
    before = len(awake.world.snapshots())
    with raises(WorkspaceInvalid, path, *words):
        hibernate_plainly(wrong, retries=0)
    assert len(awake.world.snapshots()) == before
    awake.unharmed()
    awake.recovers()


@pytest.mark.parametrize(
    ("quiesce", "words"),
    [
        (["sh", "-c", "echo the database is busy; exit 4"], ("status 4", "the database is busy")),
        (["no-such-program"], ("no-such-program", "cannot be started", "No such file")),
    ],
)
def test_a_quiesce_hook_that_fails_keeps_the_machine(
    awake: Awake, short_agent: None, quiesce: list[str], words: tuple[str, ...]
) -> None:
    before = len(awake.world.snapshots())
    with raises(HookFailed, *words):
        hibernate_plainly(awake.world.wanting(quiesce=quiesce), retries=0)
    assert len(awake.world.snapshots()) == before
    awake.unharmed()
    awake.recovers()


def test_a_workspace_path_that_the_login_may_not_read(world: World) -> None:
    """Root may read everything, so here the agent runs as the user nobody."""
    shut = world.folder / "shut"
    home = world.folder / "nobody"
    for folder in (shut, home):
        folder.mkdir()
    (shut / "work").write_text("mine")
    shut.chmod(0)
    world.folder.chmod(0o755)
    os.chown(home, 65534, 65534)
    os.seteuid(65534)
    try:
        engine = Engine(world.direct, home)
        with raises(WorkspaceInvalid, str(shut), "cannot be read", "log in as its owner"):
            engine.begin([shut])
        engine.runs.close()
    finally:
        os.seteuid(0)
    assert world.snapshots() == []


def test_a_snapshot_is_not_woken_with_another_key_nor_without_one(
    sealed_world: World, short_agent: None
) -> None:
    machine = sealed_world.rent()
    (sealed_world.workspace(machine.id)).mkdir()
    (sealed_world.workspace(machine.id) / "work").write_text("mine")
    hibernate_plainly(sealed_world.opened)
    right = sealed_world.opened
    for key in (workspace_key(secrets.token_bytes(32), WorkspaceName("demo")), None):
        with raises(WrongKey, "snapshot", "key"):
            wake_plainly(replace(right, key=key), retries=0)
        assert sealed_world.machines() == []
    wake_plainly(right)
    (woken,) = sealed_world.machines()
    assert (sealed_world.workspace(woken.id) / "work").read_text() == "mine"


def test_a_workspace_that_was_never_kept(asleep: Asleep, short_agent: None) -> None:
    opened = asleep.world.opened
    stranger: OpenWorkspace = replace(
        opened, spec=msgspec.structs.replace(opened.spec, name=WorkspaceName("other"))
    )
    with pytest.raises(TorporError, match=r"other has no snapshot.*hibernate it first"):
        wake_plainly(stranger, retries=0)
    asleep.unharmed()


def _restart_server(world: World, machine: MachineId) -> None:
    """Restart it as a stranger who took the machine's address would: with its folder as it is."""
    listeners = world.listener(machine)
    kill(listeners)
    until_gone(listeners)
    assert world.revive_server(machine)
