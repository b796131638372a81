"""A jump pod really runs, and a workspace lives behind it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import asyncssh
import pytest

from flows import create
from tasks.workspace import OpenWorkspace
from tests.fixtures.plain_flows import hibernate_plainly, run_plainly, wake_plainly
from tests.fixtures.trees import differences, kept, let_settle, plant_every_kind
from tests.markets.boot import BootedMachine, Machines
from tests.markets.kubernetes import FakeKubernetes
from torpor.control.remote.ssh import connect, connect_jump
from torpor.shared.errors import MachineUnreachable


def test_a_workspace_wakes_behind_a_jump_pod_that_only_forwards_to_ssh(
    booted_machines: Machines, rented_workspace: OpenWorkspace
) -> None:
    with FakeKubernetes() as fake:
        fake.market.boot = booted_machines.boot
        provider = fake.connect(ssh_port=booted_machines.port, address="jump pod")
        opened = replace(rented_workspace, providers=(provider,))
        run_plainly(opened, create)
        (rented,) = fake.market.alive()
        assert isinstance(rented.body, BootedMachine)
        plant_every_kind(rented.body.root / "root/workspace")
        (rented.body.root / "root/workspace/sparse/vast").unlink()  # of a TiB: on sale is less
        truth = kept(rented.body.root / "root/workspace")
        let_settle()
        assert hibernate_plainly(opened).destroyed
        assert provider.residue() == []
        assert (fake.objects, fake.jumps) == ({}, {})
        wake_plainly(opened)
        (rented,) = fake.market.alive()
        assert isinstance(rented.body, BootedMachine)
        assert not differences(truth, kept(rented.body.root / "root/workspace"))
        (live,) = provider.list_own()
        (jump,) = fake.jumps.values()
        assert isinstance(jump, BootedMachine)
        assert (live.endpoint.jump.host, live.endpoint.host) == (jump.address, rented.body.address)
        log = jump.log.read_text()
        assert "Accepted publickey for jump" in log

        async def abuse() -> None:
            way = await connect_jump(live.endpoint, opened.identity.load())
            assert way is not None
            async with way:
                with pytest.raises(asyncssh.ChannelOpenError):
                    await way.run("true")
                with pytest.raises(asyncssh.ChannelOpenError) as refused:
                    await way.open_connection(jump.address, 1)
                assert refused.value.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED

        asyncio.run(abuse())
        jump.end()
        with pytest.raises(MachineUnreachable, match="the jump host jump@"):
            asyncio.run(connect(live.endpoint, opened.identity))
        fake.market.end(rented)
