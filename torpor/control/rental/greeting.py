"""Whether a machine that boots answers as itself: SSH, with the host key of its rental."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import asyncssh

from torpor.control.remote.ssh import connect_jump
from torpor.control.rental.waiting import ssh_banner_fault
from torpor.shared.errors import TorporError
from torpor.shared.values import Endpoint

_KEY_S = 10.0


def greeting_fault(
    endpoint: Endpoint, host_key: str | None, identity: asyncssh.SSHKey
) -> str | None:
    """None when an SSH server with ``host_key`` answers, otherwise what is wrong. Until a machine
    has booted, its address may be another's, or its server may have a key of the image.
    ``identity`` logs in to the jump host."""
    if endpoint.jump is None:
        fault = ssh_banner_fault(endpoint)
        if fault is not None or host_key is None:
            return fault
    where = f"{endpoint.host} port {endpoint.port}"
    try:
        # the caller's thread may have an event loop, as in a notebook
        with ThreadPoolExecutor(1) as thread:
            shown = thread.submit(asyncio.run, _shown(endpoint, identity)).result()
    except (OSError, TimeoutError, asyncssh.Error, TorporError) as error:
        return f"{where}: {error}"
    if host_key is None:
        return None
    if shown is None or shown.public_data != asyncssh.import_public_key(host_key).public_data:
        return f"{where} shows another host key than the one of this rental"
    return None


def jump_fault(endpoint: Endpoint, identity: asyncssh.SSHKey) -> str | None:
    """Why the jump host of ``endpoint`` cannot be reached; None where it can, or there is none."""
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, _jumped(endpoint, identity)).result()
    except (OSError, TimeoutError, asyncssh.Error, TorporError) as error:
        return str(error)
    return None


async def _jumped(endpoint: Endpoint, identity: asyncssh.SSHKey) -> None:
    async with asyncio.timeout(_KEY_S):
        jump = await connect_jump(endpoint, identity)
        async with jump or nullcontext():
            pass


async def _shown(endpoint: Endpoint, identity: asyncssh.SSHKey) -> asyncssh.SSHKey | None:
    async with asyncio.timeout(_KEY_S):
        jump = await connect_jump(endpoint, identity)
        async with jump or nullcontext():
            return await asyncssh.get_server_host_key(
                endpoint.host,
                endpoint.port,
                tunnel=jump,
                config=None,
                server_host_key_algs=["ssh-ed25519"],
            )
