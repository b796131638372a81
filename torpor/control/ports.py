"""Finds free ports on loopback for torpor's own servers."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path
from typing import Final

import psutil

_LOWEST: Final = 10_240  # most well-known servers use ports below this
_TRIES: Final = 200
RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")

_dice: Final = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """``count`` ports on which nothing listens now.

    They are not of those that the kernel gives to outgoing connections: a server that ends and is
    started again would find its port taken by some program's connection, and clients that know it
    by that port would wait for nothing. Only where there are no others, any will do.
    """
    below = _first_of_connections()
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for attempt in range(_TRIES + count):
            if len(ports) == count:
                break
            listener = held.enter_context(socket.socket())
            wanted = _dice.randrange(_LOWEST, below) if below > _LOWEST and attempt < _TRIES else 0
            with contextlib.suppress(OSError):  # the port is taken
                listener.bind(("127.0.0.1", wanted))
                ports.append(int(listener.getsockname()[1]))
    return ports


def is_free(port: int) -> bool:
    """Whether a server can listen on the port: on loopback, where another server on all addresses
    counts."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers set it
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
        return True


def holder(port: int) -> str:
    """The program that listens on a port: its name and process, where this account may see them."""
    found = [
        connection
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and tuple(connection.laddr)[1:] == (port,)
    ]
    for pid in {connection.pid for connection in found if connection.pid}:
        with contextlib.suppress(psutil.Error):
            return f"{psutil.Process(pid).name()} (process {pid})"
    return "another program"


def _first_of_connections() -> int:
    try:
        return int(RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
