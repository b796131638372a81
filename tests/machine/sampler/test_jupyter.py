"""Jupyter: its kernels and terminals are asked for, with the token in its file."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from torpor.machine.sampler.jupyter import look
from torpor.shared.wire.activity import NOBODY

NOW = 1_800_000_000.0
_AN_HOUR_AGO = "2027-01-15T07:00:00.000000Z"


class _Server(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "token secret"
        body = json.dumps(self.answers.get(self.path, [])).encode()
        self.send_response(200 if allowed else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody looks."""


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()
    _Server.answers = {}


def _file(folder: Path, port: int, **changes: Any) -> None:
    facts = {"pid": os.getpid(), "port": port, "token": "secret", "secure": False}
    facts["url"] = f"http://localhost:{port}/lab/"
    (folder / "jpserver-1.json").write_text(json.dumps(facts | changes))


def _look(folder: Path) -> tuple[int, bool]:
    return look([folder, folder / "missing"], lambda: NOW)


def test_no_server(tmp_path: Path) -> None:
    assert _look(tmp_path) == (NOBODY, False)
    (tmp_path / "jpserver-9.json").write_text("half a fi")
    _file(tmp_path, 1, pid=2**22 + 1)  # of a server that was killed
    assert _look(tmp_path) == (NOBODY, False)


def test_kernels_and_terminals_count_by_their_last_activity(tmp_path: Path, port: int) -> None:
    _file(tmp_path, port)
    assert _look(tmp_path) == (NOBODY, True)
    rests = {"execution_state": "idle", "last_activity": _AN_HOUR_AGO}
    _Server.answers = {"/lab/api/kernels": [rests]}
    assert _look(tmp_path) == (3600, True)
    _Server.answers["/lab/api/terminals"] = [{"last_activity": "2027-01-15T07:59:00Z"}]
    assert _look(tmp_path) == (60, True)
    for used in (rests | {"execution_state": "busy"}, {"execution_state": "idle"}):
        _Server.answers["/lab/api/kernels"] = [used]
        assert _look(tmp_path) == (0, True)


def test_a_server_that_refuses_has_not_answered(tmp_path: Path, port: int) -> None:
    _file(tmp_path, port, token="wrong")
    assert _look(tmp_path) == (NOBODY, False)
