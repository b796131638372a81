"""Whether a machine that boots answers as itself: SSH, with the host key of its rental."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import asyncssh

from torpor.control.rental.waiting import ssh_banner_fault
from torpor.shared.values import Endpoint

_KEY_S = 10.0


def greeting_fault(endpoint: Endpoint, host_key: str | None) -> str | None:
    """None when an SSH server with ``host_key`` answers, else what is wrong: until a machine has
    booted, its address may be another's, or its server may have a key of the image."""
    fault = ssh_banner_fault(endpoint)
    if fault is not None or host_key is None:
        return fault
    where = f"{endpoint.host} port {endpoint.port}"
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller's may have a loop: a notebook's has
            shown = thread.submit(asyncio.run, _shown(endpoint)).result()
    except (OSError, TimeoutError, asyncssh.Error) as error:
        return f"{where}: {error}"
    if shown is None or shown.public_data != asyncssh.import_public_key(host_key).public_data:
        return f"{where} shows another host key than the one of this rental"
    return None


async def _shown(endpoint: Endpoint) -> asyncssh.SSHKey | None:
    return await asyncio.wait_for(
        asyncssh.get_server_host_key(
            endpoint.host,
            endpoint.port,
            config=None,
            server_host_key_algs=["ssh-ed25519"],
        ),
        _KEY_S,
    )
