"""The unit of systemd that starts an installation with its host: its file, and what systemd does.

Its process is the supervisor itself: systemd starts it again where it ends by itself. Once it
lives, an `up` beside it registers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from deployments.installation import CHECKOUT, Installation, write_whole
from torpor.control.own_server import FOLDER_VARIABLE

RUNS_SYSTEMD: Final = Path("/run/systemd/system")
NAME: Final = "torpor.service"
SUPERVISOR: Final = "deployments.supervisor"
REFUSED: Final = 3
"""The exit status of a supervisor that systemd must not start again, because another one lives or
`down` has asked. A supervisor that a stray SIGTERM has ended is started again."""
PAUSE_S: Final = 10
MOST_PAUSE_S: Final = 60
"""Seconds that systemd 254 or later waits before it starts a supervisor again: at first, and after
five restarts. Older versions know no longer pause and ignore those two lines."""
_STOP_S: Final = 60.0
_NOT_LOADED: Final = 5
_UNIT: Final = """\
# Written by `make boot` of {checkout}
[Unit]
Description=torpor in {folder}
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart="{python}" -m {supervisor}
ExecStartPost=-"{python}" -m deployments.up
WorkingDirectory={checkout}
Environment="{variable}={folder}" "PATH={path}"
# Its process ends server, store and workers. Flow runs and local machines go on; `torpor down` ends
# flow runs in order. A flow run that the kernel kills for memory ends nothing else.
KillMode=process
OOMPolicy=continue
Restart=always
RestartPreventExitStatus={refused}
SuccessExitStatus={refused}
RestartSec={pause}
RestartSteps=5
RestartMaxDelaySec={most_pause}
TimeoutStartSec=1800
TimeoutStopSec=180

[Install]
WantedBy={target}
"""


def unit_folder(root: bool) -> Path:
    """Where systemd looks for units that an administrator or a user writes."""
    if root:
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def write_unit(installation: Installation, folder: Path, root: bool) -> Path:
    """Write the unit; returns its file. TorporError where it cannot be written."""
    file, path = folder / NAME, os.environ.get("PATH", os.defpath)
    text = _text(installation, _literal(sys.executable), _literal(path), root)
    write_whole(file, text, mode=0o644)
    return file


def start_command(installation: Installation) -> str:
    """The command by which systemd starts this installation; empty where it has no unit."""
    return f"{' '.join(_systemctl())} start torpor" if _read(installation) else ""


def outdated(installation: Installation) -> str:
    """The message that the unit lacks a line which this version writes, and what to do; empty where
    no line is missing, or where there is no unit. Its PATH may differ, and its user may have added
    lines."""
    text = _read(installation)
    if not text:
        return ""
    python = re.search(r'^ExecStart="(.+)" -m ', text, re.MULTILINE)
    path = re.search(r'^Environment=".+" "PATH=(.*)"$', text, re.MULTILINE)
    if python and path and _is_this_python(python[1]):
        wanted = _text(installation, python[1], path[1], root=_is_root())
        lines = {line for line in wanted.splitlines() if not line.startswith("#")}
        if lines <= {*text.splitlines()}:
            return ""
    return (
        f"{unit_folder(_is_root()) / NAME} is not as this version writes it, so systemd may start "
        "torpor in another way than it should: run `torpor boot`, and the commands that it prints"
    )


def stop(installation: Installation) -> str:
    """Let systemd end the installation's unit, and no longer wait to start it again. It starts with
    the host as before. Returns why systemd could not be asked; empty where it was, or need not
    be."""
    if not RUNS_SYSTEMD.exists() or not _read(installation):
        return ""
    env = {"XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}", **os.environ}  # `su` does not set it
    argv = [*_systemctl(), "--no-ask-password", "stop", NAME]
    try:
        done = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=_STOP_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode in (0, _NOT_LOADED):
        return ""
    return done.stderr.strip() or f"{' '.join(argv)} ended with {done.returncode}"


def stop_command() -> str:
    """The command that a person runs in place of stop()."""
    return f"{' '.join(_systemctl())} stop torpor"


def _systemctl() -> list[str]:
    return ["systemctl"] if _is_root() else ["systemctl", "--user"]


def _is_root() -> bool:
    return os.geteuid() == 0


def _read(installation: Installation) -> str:
    """The text of the unit of this installation; empty without one."""
    try:
        text = (unit_folder(_is_root()) / NAME).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
    return text if f'"{FOLDER_VARIABLE}={_literal(installation.folder)}"' in text else ""


def _text(installation: Installation, python: str, path: str, root: bool) -> str:
    """The unit. ``python`` and ``path`` are as they stand in a unit."""
    return _UNIT.format(
        checkout=_literal(CHECKOUT),
        folder=_literal(installation.folder),
        python=python,
        path=path,
        variable=FOLDER_VARIABLE,
        supervisor=SUPERVISOR,
        refused=REFUSED,
        pause=PAUSE_S,
        most_pause=MOST_PAUSE_S,
        target="multi-user.target" if root else "default.target",
    )


def _is_this_python(literal: str) -> bool:
    """Whether a unit names an interpreter of this environment: `python`, or `python3` beside it."""
    there = Path(literal.replace("%%", "%"))
    return there.exists() and there.parent == Path(sys.executable).parent


def _literal(value: object) -> str:
    """Text escaped for a unit file, in which % begins a specifier."""
    return str(value).replace("%", "%%")
