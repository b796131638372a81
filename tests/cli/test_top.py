"""`torpor top` on a terminal of 80 columns, in a pipe, and after Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from tasks.top import MachineNow, Top
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.jobs.listing import JobList
from torpor.control.overview import Overview, Overviews
from torpor_cli.top import top

SEEN = Top(
    at_unix=1.0,
    overviews=Overviews(
        [
            Overview(
                block="mywork", state="awake", machines=["m-1f1c7c032efe at vast:1"], usd_h=0.4,
                month_usd=1.86, newest_age_s=300.0, jobs=1, sleeps="30 min idle, 16:42 UTC",
            ),
            Overview(block="asleep", state="asleep", month_usd=0.2, newest_age_s=86400.0),
        ]
    ),
    machines=[
        MachineNow(
            workspace="mywork", machine="m-1f1c7c032efe-a3e4504d", provider="vast:1", usd_h=0.4,
            gpus=2, gpu_name="RTX 4090", gpu=88, cpu=310, network=2000, disk=10,
        )
    ],
    jobs=JobList([], [], [], {}),
)  # fmt: skip
SHOWS = """
import sys
from contextlib import nullcontext
from torpor_cli import top
from tests.cli.test_top import SEEN
looks = []
def look(*_):
    looks.append(1)
    if len(looks) == 2:
        raise OSError("the server is away")
    return SEEN
import tasks.top, blocks.reference
tasks.top.look_at_top = look
blocks.reference.saved_names = lambda kind: ["mywork"]
top.connected = nullcontext
top.top(every=float(sys.argv[1]))
"""


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor_cli.top.connected", nullcontext)
    monkeypatch.setattr("blocks.reference.saved_names", lambda kind: ["mywork"])
    monkeypatch.setattr("tasks.top.look_at_top", lambda *_: SEEN)


def test_a_pipe_gets_one_picture_with_all_columns(
    known: None, capsys: pytest.CaptureFixture[str]
) -> None:
    top()
    said = capsys.readouterr().out
    assert "\x1b" not in said
    for words in ("30 min idle, 16:42 UTC", "m-1f1c7c032efe-a3e4504d", "88 %", "2x RTX 4090"):
        assert words in said


@pytest.mark.parametrize("colour", [{}, {"NO_COLOR": "1"}], ids=["colours", "no colours"])
def test_ctrl_c_leaves_the_terminal_as_it_was(colour: dict[str, str]) -> None:
    said, code = _on_a_terminal(colour, "3600", b"88 %")
    assert code == 0
    begins, ends = said.index(b"\x1b[?1049h"), said.rindex(b"\x1b[?1049l")
    assert begins < said.index(b"mywork") < ends
    assert said.rindex(b"\x1b[?25h") > said.rindex(b"\x1b[?25l")  # the cursor is shown
    assert b"Traceback" not in said
    assert bool(re.search(rb"\x1b\[[0-9;]*1m|\x1b\[3\dm", said)) is not bool(colour)
    lines = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"\n", said[begins:ends]).decode().splitlines()
    assert [line for line in lines if len(line.rstrip()) > 80] == []


def test_a_look_that_fails_is_said_and_the_next_one_goes_on() -> None:
    said, code = _on_a_terminal({}, "0.1", b"The last look failed: the server is away")
    assert code == 0 and b"88 %" in said


def _on_a_terminal(colour: dict[str, str], every: str, until: bytes) -> tuple[bytes, int]:
    """What is written on a terminal of 80 columns, until Ctrl-C after these words."""
    ours, theirs = pty.openpty()
    env: dict[str, Any] = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    env |= {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", **colour}
    shown = subprocess.Popen(
        [sys.executable, "-c", SHOWS, every], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    said = b""
    sent = False
    try:
        while True:
            assert select.select([ours], [], [], PATIENCE_S)[0], said
            try:
                said += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if until in said and not sent:
                shown.send_signal(signal.SIGINT)
                sent = True
        return said, shown.wait(60)
    finally:
        shown.kill()
        os.close(ours)
