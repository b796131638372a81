"""``make boot``: a unit of systemd that starts this installation when the host does, or what to add
to cron. A system unit for root, a user unit for everybody else (deployments/unit.py)."""

from __future__ import annotations

import os
import shlex
import sys

from deployments import unit
from deployments.installation import CHECKOUT, Installation
from deployments.server import see_that_none_is_connected, users_own
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.supervision import LOCK, is_held
from torpor.shared.errors import InvalidInput, TorporError


def main() -> int:
    try:
        set_up()
    except TorporError as error:
        print(f"torpor: {error}", file=sys.stderr)
        return 1
    return 0


def set_up() -> None:
    """Write the unit, or print the line for cron, and say what to run next. InvalidInput where the
    server is the user's own or elsewhere; TorporError where the unit cannot be written."""
    installation = Installation.here()
    see_that_none_is_connected(installation)
    if given := users_own(installation):
        raise InvalidInput(
            f"{given.named_by} names {given.api_url}, a server that torpor does not start, so "
            f"nothing is set up to start at boot. Run `PREFECT_API_URL={given.api_url} torpor up` "
            "after that server has started, or unset the variable and run this again"
        )
    root = os.geteuid() == 0
    if not unit.RUNS_SYSTEMD.exists():
        command = [sys.executable, "-m", "deployments.up"]
        folder = shlex.quote(str(installation.folder))
        line = f"cd {shlex.quote(str(CHECKOUT))} && {FOLDER_VARIABLE}={folder} "
        line = (line + shlex.join(command)).replace("%", r"\%")  # cron ends the command at a %
        print(f"This host does not run systemd. Add to your crontab (crontab -e):\n@reboot {line}")
        return
    file = unit.write_unit(installation, unit.unit_folder(root), root)
    print(f"Wrote {file}. Now run:")
    if is_held(installation.folder / LOCK):
        print("  torpor down   # torpor is up: systemd looks after what it starts itself, as below")
    if root:
        print(f"  systemctl daemon-reload && systemctl enable --now {file.name}")
    else:
        print(f"  systemctl --user daemon-reload && systemctl --user enable --now {file.name}")
        print("  loginctl enable-linger   # so that it starts at boot, not when you log in")


if __name__ == "__main__":
    sys.exit(main())
