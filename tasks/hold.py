"""Holding a workspace's lock on a machine, as a snapshot and a restore do, for a flow that does
neither."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from tasks.retries import WHILE_BUSY
from tasks.runner import runner
from tasks.step import step
from tasks.workspace import OpenWorkspace
from torpor.control.remote.agent import Session
from torpor.shared.errors import TorporError
from torpor.shared.wire.hold import EndHold, Held, Hold

_ANSWER_S: Final = 60.0


@contextmanager
def workspace_held(opened: OpenWorkspace, session: Session) -> Iterator[Held]:
    """Hold the workspace on the session's machine, and give it back at the end. Waits while another
    run holds it, and raises WorkspaceBusy after that."""
    run = f"{runner().run}-{secrets.token_hex(4)}"
    held = _hold(opened, session, run)
    try:
        yield held
    finally:
        with suppress(TorporError):  # an agent that cannot be reached ends the run itself
            session.call(EndHold(run), request_id=_request(run), within_s=_ANSWER_S)


@step("hold workspace", retries=WHILE_BUSY)
def _hold(opened: OpenWorkspace, session: Session, run: str) -> Held:
    asked = Hold(run, opened.spec.name, opened.store.authority)
    return session.call(asked, request_id=_request(run), within_s=_ANSWER_S)


def _request(run: str) -> str:
    return f"{run}:{secrets.token_hex(8)}"
