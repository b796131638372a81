"""Record sessions with torpor: type commands into a terminal, keep what it shows.

    python3 evening.py WHEEL [RECORDING [SESSION]]    # on a host where torpor never was

SESSION is `evening`, README's commands and the default, `upkeep`, or `folder`. WHEEL is
installed with uv; `-` takes the torpor that is on the PATH. It needs Python alone. It prints a
table: seconds of each command, its exit code, the longest time without a new word on the screen,
and the lines that 80 columns fold. It ends with status 1 where a command fails. RECORDING gets what
the screen showed, for `draw.py` and for the pages, which quote it. What is made stays in the home,
but for the local machines, which `torpor down --machines` ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import struct
import sys
import termios
import time
from collections.abc import Sequence
from typing import Final

COLUMNS: Final = 80
ROWS: Final = 24
PATIENCE_S: Final = 1800.0
_DONE: Final = re.compile(r"\x1b\]133;D;(\d+)\x07")
"""What the shell writes before each prompt, which no terminal shows: the last exit code."""
_OBEYED: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>]")

Step = tuple[str, Sequence[tuple[str, str]]]
"""A command, and the answers to what it asks: the end of the question, and what is typed."""

YES: Final = (r"\[y/N\] $", "y")
ANSWERS: Final = [(r"Kind of store .*: $", "default"), (r"Market .*: $", "local")]
ANSWERS += [(r"Directories .*: $", ""), (r"GPUs, .*: $", "")]
PROMPT: Final = r"workspace[$#] $"
WORK: Final = [(PROMPT, "head -c 20M /dev/urandom > model.bin"), (PROMPT, "seq 3 > notes.txt")]
WORK += [(PROMPT, "sha256sum model.bin notes.txt > sums"), (PROMPT, "exit")]
JOB: Final = re.compile(r"^job +([0-9a-f]{12})", re.MULTILINE)
"""The id of the job that a command has named, for ``{job}`` in the next ones."""
COUNT: Final = "bash -c 'for i in 1 2 3; do echo $i; sleep 1; done'"

EVENING: Final[Sequence[Step]] = [
    ("torpor demo", []),
    ("torpor up", [(r"\[report\]: $", "")]),
    ("torpor init mywork", ANSWERS),
    ("torpor offers mywork", []),
    ("torpor create mywork", [YES]),
    ("torpor ssh --setup", []),
    ("ssh mywork", WORK),
    ("torpor hibernate mywork", []),
    ("torpor status", []),
    ("torpor wake mywork", [YES]),
    ("ssh mywork 'cd workspace && sha256sum -c sums'", []),
    (f"torpor job run mywork -- {COUNT}", [YES]),
    ("torpor job run mywork --yes --detach -- sha256sum -c sums", []),
    ("torpor job log mywork {job} -f", []),
    ("torpor job list", []),
    ("torpor status", []),
    ("torpor down --machines", [YES]),
]

PRICED: Final = (
    '"$(head -1 "$(command -v torpor)" | cut -c3-)" -c \'from blocks import LocalProvider; '
    'LocalProvider(price_usd_h=0.36).save("default", overwrite=True)\''
)
"""Machines on this host pretend to cost money, so that the session shows what things cost."""

UPKEEP: Final[Sequence[Step]] = [
    ("torpor up", [(r"\[report\]: $", "hibernate")]),
    ("torpor init mywork", ANSWERS),
    (PRICED, []),
    ("torpor offers mywork", []),
    ("torpor create mywork --sleep-after 30m", [YES]),
    ("torpor ssh --setup", []),
    ("ssh mywork", WORK),
    ("torpor status", []),
    ("torpor backup mywork", []),
    ("ssh mywork 'cd workspace && seq 4 > notes.txt && rm sums'", []),
    ("torpor backup mywork --keep-daily 7 --keep-weekly 5", []),
    ("torpor snapshots mywork", []),
    ("torpor snapshots mywork newest", []),
    ("torpor restore mywork notes.txt ~/recovered", []),
    ("torpor verify mywork all", []),
    ("ssh mywork 'echo \"print(1)\" > ~/train.py'", []),
    ("torpor hibernate mywork --dry-run", []),
    ("torpor top --once", []),
    ("torpor reconcile mywork", []),
    ("torpor spend mywork", []),
    ("ssh mywork 'rm ~/train.py'", []),
    ("torpor edit mywork 'programs=python3 -m http.server 8123' process=try", []),
    ("torpor hibernate mywork --dry-run", []),
    ("torpor hibernate mywork", []),
    ("torpor wake mywork", [YES]),
    (f"torpor job run mywork --max-usd 5 -- {COUNT}", [YES]),
    ("torpor wake mywork --count 2", [YES]),
    ("torpor status", []),
    ("torpor prune mywork", []),
    ("torpor spend mywork", []),
    ("torpor down --machines", [YES]),
]
TRAIN: Final = r"""printf '%s\n' 'import os' 'os.makedirs("outputs", exist_ok=True)' \
    'for step in (1, 2, 3):' '    print(f"step {step}: loss {1 / step:.2f}", flush=True)' \
    'open("outputs/loss.txt", "w").write("0.33\n")' > train.py"""
HELLO: Final = (
    '"$(head -1 "$(command -v torpor)" | cut -c3-)" -c \'from blocks import Stack; '
    'Stack(server=["python3", "-m", "http.server", "8123", "--bind", "127.0.0.1"], port=8123, '
    'health="/", proof_method="GET", proof_path="/hello.json", proof_answer="says")'
    '.save("hello", overwrite=True)\''
)
"""A stack whose server every machine has."""

FOLDER: Final[Sequence[Step]] = [
    ("torpor up", [(r"\[report\]: $", "")]),
    ("torpor init mywork", ANSWERS),
    ("mkdir train && cd train", []),
    (TRAIN, []),
    ("torpor run --bring outputs/ -- python3 train.py", [YES]),
    ("cat outputs/loss.txt", []),
    ("torpor create mywork", [YES]),
    ("""echo '{"says": "hello"}' > hello.json""", []),
    ("torpor cp hello.json mywork:", []),
    ("torpor push mywork", []),
    ("torpor push mywork", []),
    ("torpor cp mywork:train/outputs best", []),
    (HELLO, []),
    ("torpor deploy mywork hello --strategy official", [YES]),
    ("torpor hibernate mywork", []),
    ("torpor down --machines", [YES]),
]
SESSIONS: Final = {"evening": EVENING, "upkeep": UPKEEP, "folder": FOLDER}


class Terminal:
    """A login shell on a terminal of its own."""

    def __init__(self) -> None:
        self.shown: list[tuple[float, str]] = []
        self.began = time.monotonic()
        self._pid, self._file = pty.fork()
        if self._pid == 0:
            os.environ["TERM"] = "xterm-256color"
            os.execvp("bash", ["bash", "-l"])  # noqa: S606 - the shell that a person has
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        quiet = "bind 'set enable-bracketed-paste off'; PS1='$ '"
        self.type(f"{quiet}; PROMPT_COMMAND='printf \"\\033]133;D;$?\\007\"'", [])
        self.shown.clear()
        self.type("", [])

    def type(self, command: str, answers: Sequence[tuple[str, str]]) -> tuple[int, float, float]:
        """Run a command; returns its exit code, its seconds, and the longest silence."""
        os.write(self._file, f"{command}\n".encode())
        left, text = [*answers], ""
        began = moved = time.monotonic()
        silent = 0.0
        while time.monotonic() - began < PATIENCE_S:
            ready, _, _ = select.select([self._file], [], [], 1.0)
            if not ready:
                continue
            now = time.monotonic()
            got = os.read(self._file, 65536).decode(errors="replace")
            self.shown.append((now - self.began, got))
            silent, moved = max(silent, now - moved), now
            text += got
            if done := _DONE.search(text):
                return int(done[1]), now - began, silent
            if left and re.search(left[0][0], _OBEYED.sub("", text)):
                text = ""
                os.write(self._file, f"{left.pop(0)[1]}\n".encode())
        raise SystemExit(f"{command} did not end within {PATIENCE_S:.0f} s")


def screen(shown: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Each line as the terminal leaves it, with the second at which it began to stand there."""
    lines: list[tuple[float, str]] = []
    line, at, second = "", 0, 0.0
    for now, text in shown:
        for mark in re.findall(r"\x1b\[K|\r|\n|\x08|[^\r\n\x1b\x08]+", _cleared(text)):
            if mark == "\n":
                lines.append((round(second or now, 1), line.rstrip()))
                line, at, second = "", 0, 0.0
            elif mark == "\r":
                at = 0
            elif mark == "\x08":
                at = max(0, at - 1)
            elif mark == "\x1b[K":
                line = line[:at]
                second = second if at else 0.0
            else:
                second = second or now
                line = line[:at] + mark + line[at + len(mark) :]
                at += len(mark)
    return [*lines, (round(second, 1), line.rstrip())]


def _cleared(text: str) -> str:
    """Without what a terminal obeys, but for the end of a line that is cleared."""
    return _OBEYED.sub(lambda found: "\x1b[K" if found[0] == "\x1b[K" else "", text)


def main() -> int:
    wheel, *recording = sys.argv[1:3]
    session = SESSIONS[sys.argv[3] if len(sys.argv) > 3 else "evening"]
    kept: list[tuple[str, list[tuple[float, str]]]] = []
    failed, job = 0, ""
    print(f"{'seconds':>7}  {'exit':>4}  {'silent':>6}  {'folded':>6}  command", flush=True)
    install = [] if wheel == "-" else [(f"uv tool install {shlex.quote(wheel)}", [])]
    steps: list[Step] = [*install, *session]
    terminal = Terminal()
    for command, answers in steps:
        command = command.replace("{job}", job)
        terminal.shown.clear()
        began = time.monotonic() - terminal.began
        code, seconds, silent = terminal.type(command, answers)
        lines = screen(terminal.shown)
        if named := JOB.search("\n".join(line for _, line in lines)):
            job = named[1]
        folded = sum(len(line) > COLUMNS for _, line in lines)
        print(f"{seconds:7.1f}  {code:4}  {silent:6.1f}  {folded:6}  {command}", flush=True)
        printed = [(at, line) for at, line in lines[:-1] if not line.endswith(command)]
        kept.append((command, [(round(at - began, 1), line) for at, line in printed]))
        failed += code != 0
        if command.startswith("uv "):
            terminal = Terminal()  # a new login finds what uv has installed
    if recording:
        with open(recording[0], "w") as file:
            file.write(json.dumps(kept, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
