"""The host of the flow as a machine: a restore of a path writes files here without a rental."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.machines import endpoint_of
from tasks.workspace import OpenWorkspace
from torpor.control.own_server import state_folder
from torpor.control.processes import ProcessRecord, identify
from torpor.control.providers.local.provider import LocalProvider
from torpor.control.remote.agent import Session
from torpor.control.rental.order import order_for
from torpor.control.safety import never_handed_over
from torpor.shared.values import Label, Want

HERE = "here"


@contextmanager
def session_here(opened: OpenWorkspace) -> Iterator[Session]:
    """A session at an SSH server on loopback, which sees this host's files. The server ends with
    the context, or, if this process is killed, when the next one begins. The server's keys are in
    the folder of the user's installation: whoever can write beside them could log in as this
    user."""
    folder = state_folder() / "here"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    provider = LocalProvider(folder)
    for left in provider.list_own():
        if left.label is not None and not _lives(left.label):
            provider.destroy(left, never_handed_over(left, left.label))
    (offer, *_) = provider.offers(Want())
    label = Label(opened.owner, opened.spec.name, _rental())
    machine = provider.create(order_for(offer, label, opened.identity.load()))
    try:
        with opened.log_in(endpoint_of(machine), opened.identity) as session:
            yield session
    finally:
        provider.destroy(machine, never_handed_over(machine, label))


def _rental() -> str:
    me = identify(os.getpid()) or ProcessRecord(os.getpid(), 0)
    return f"{me.pid}-{me.start_ticks}-{secrets.token_hex(4)}"


def _lives(label: Label) -> bool:
    pid, ticks, _ = label.rental.split("-")
    return identify(int(pid)) == ProcessRecord(int(pid), int(ticks))
