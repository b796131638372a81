"""Asking a server over HTTP whether it works."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from typing import Any, Final, NamedTuple

from torpor.control.deploy.stack import Proof
from torpor.control.variables import Secrets
from torpor.shared.errors import DeployFailed, InvalidInput
from torpor.shared.values import MIB

MOST_BYTES: Final = 4 * MIB
"""The most bytes of an answer that are read."""
_SHOWN: Final = 300
"""Characters of a wrong answer that the error shows."""
_NOTHING: Final = (None, "", 0, False)


class HttpAnswer(NamedTuple):
    status: int
    text: str


def ask(
    port: int, method: str, path: str, body: Any, timeout_s: float, token: str = ""
) -> HttpAnswer | None:
    """The answer of the server behind a local port; None if it does not answer. ``token``: a bearer
    token."""
    sent = None if body is None else json.dumps(body).encode()
    headers = {} if sent is None else {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)) as connection:
        try:
            connection.request(method, path, sent, headers)
            answer = connection.getresponse()
            text = answer.read(MOST_BYTES).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            return None
        except ValueError:  # the error's message contains the token
            raise InvalidInput(f"{method} {path} or its token cannot be sent to a server") from None
    return HttpAnswer(answer.status, text)


def check(proof: Proof, answer: HttpAnswer | None, secrets: Secrets) -> None:
    """DeployFailed unless the answer holds what the stack says. ``secrets`` are not shown."""
    what = f"{proof.method} {proof.path}"
    if answer is None:
        raise DeployFailed(f"the server did not answer {what}")
    shown = secrets.hidden_in(answer.text)[:_SHOWN]
    if not 200 <= answer.status < 300:
        raise DeployFailed(f"the server answered {what} with status {answer.status}: {shown}")
    try:
        found = json.loads(answer.text)
        for step in proof.answer.split("."):
            found = found[int(step)] if isinstance(found, list) else found[step]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        found = None
    if found in _NOTHING or found in ([], {}):
        raise DeployFailed(f"the answer to {what} holds nothing at {proof.answer}: {shown}")
