"""``make boot``: a unit of systemd that starts this installation when the host does.

A system unit for root, a user unit for everybody else. Its process is the supervisor itself:
systemd starts it again where it is killed. Once it lives, an `up` beside it registers.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Final

from deployments.installation import CHECKOUT, Installation
from deployments.parent import REFUSED, SUPERVISOR
from deployments.server import users_own
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.supervision import LOCK, is_held
from torpor.shared.errors import InvalidInput

RUNS_SYSTEMD: Final = Path("/run/systemd/system")
_NAME: Final = "torpor.service"
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
RestartSec=2
TimeoutStartSec=1800
TimeoutStopSec=180

[Install]
WantedBy={target}
"""


def main() -> int:
    try:
        set_up()
    except InvalidInput as error:
        print(f"torpor: {error}", file=sys.stderr)
        return 1
    return 0


def set_up() -> None:
    """Write the unit, or print the line for cron, and say what to run next. InvalidInput where the
    server is the user's own."""
    installation = Installation.here()
    if given := users_own(installation):
        raise InvalidInput(
            f"{given.named_by} names {given.api_url}, a server that torpor does not start, so "
            f"nothing is set up to start at boot. Run `PREFECT_API_URL={given.api_url} torpor up` "
            "after that server has started, or unset the variable and run this again"
        )
    root = os.geteuid() == 0
    command = [sys.executable, "-m", "deployments.up"]
    if not RUNS_SYSTEMD.exists():
        folder = shlex.quote(str(installation.folder))
        line = f"cd {shlex.quote(str(CHECKOUT))} && {FOLDER_VARIABLE}={folder} "
        line = (line + shlex.join(command)).replace("%", r"\%")  # cron ends the command at a %
        print(f"This host does not run systemd. Add to your crontab (crontab -e):\n@reboot {line}")
        return
    file = write_unit(installation, unit_folder(root), root)
    print(f"Wrote {file}. Now run:")
    if is_held(installation.folder / LOCK):
        print("  torpor down   # torpor is up, and not by systemd, which looks after its own alone")
    if root:
        print(f"  systemctl daemon-reload && systemctl enable --now {file.name}")
    else:
        print(f"  systemctl --user daemon-reload && systemctl --user enable --now {file.name}")
        print("  loginctl enable-linger   # so that it starts at boot, not when you log in")


def unit_folder(root: bool) -> Path:
    """Where systemd looks for units that an administrator or a user writes."""
    if root:
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def starts(installation: Installation) -> str:
    """The command by which systemd starts this installation; empty where it has no unit."""
    root = os.geteuid() == 0
    try:
        text = (unit_folder(root) / _NAME).read_text()
    except OSError:
        return ""
    ours = f'"{FOLDER_VARIABLE}={_literal(installation.folder)}"' in text
    return f"systemctl {'' if root else '--user '}start torpor" if ours else ""


def write_unit(installation: Installation, folder: Path, root: bool) -> Path:
    """Write the unit; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _NAME
    text = _UNIT.format(
        checkout=_literal(CHECKOUT),
        folder=_literal(installation.folder),
        python=_literal(sys.executable),
        path=_literal(os.environ.get("PATH", os.defpath)),
        variable=FOLDER_VARIABLE,
        supervisor=SUPERVISOR,
        refused=REFUSED,
        target="multi-user.target" if root else "default.target",
    )
    file.write_text(text)
    return file


def _literal(value: object) -> str:
    """For a unit, where % begins a specifier."""
    return str(value).replace("%", "%%")


if __name__ == "__main__":
    sys.exit(main())
