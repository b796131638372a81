"""``torpor demo``: a machine hibernates, is destroyed, and wakes elsewhere, on this host alone.

``make demo`` runs the same from a clone.

The demo itself runs in a child process. However that ends, this process ends everything that it
started and removes its folder.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from deployments.installation import CHECKOUT, Installation, cache_folder
from deployments.local_machines import stop_machines
from deployments.processes import end, mark
from deployments.terminal import Waiting
from torpor.control.own_server import FOLDER_VARIABLE
from torpor.control.providers.removal import remove_tree
from torpor.shared.errors import TorporError
from torpor.shared.values import GIB

NEEDED_BYTES: Final = 2 * GIB
"""Free bytes that the demo needs. The workspace, its snapshot and the woken workspace are 0.8 GB
together."""
STOP_S: Final = 5.0
_POLL_S: Final = 0.1
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_INTRODUCTION: Final = """\
A machine is hibernated into an object store, destroyed, and woken on a new one.
Nothing is rented: all of it runs on this host, in a folder that is removed at
the end, {folder}
"""


class _Stopped(Exception):
    """A signal asked the demo to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="torpor demo", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--verbose", action="store_true", help="show the logs of the flows too")
    options = parser.parse_args(arguments)
    for number in SIGNALS:
        signal.signal(number, _stop)
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="torpor-demo-"))
        code = _tell(Installation(folder), options.verbose)
    except _Stopped as stopped:
        print(f"\nThe demo was stopped by {stopped}.", file=sys.stderr)
        code = 130
    except TorporError as error:
        print(f"The demo cannot run: {error}", file=sys.stderr)
        code = 1
    finally:
        for number in SIGNALS:  # the clean-up takes a second or two and must not be interrupted
            signal.signal(number, signal.SIG_IGN)
        if folder is not None:
            with Waiting("removing what the demo made"):
                clear_up(Installation(folder))
    return code


def clear_up(installation: Installation) -> None:
    """End every process that the demo has started, and remove its folder."""
    end(installation, "demo", polite_s=STOP_S)  # its store, too; nothing new is started
    stop_machines(installation)
    remove_tree(installation.folder)


def begun_in(installation: Installation) -> Path:
    """The file that the child makes when its output begins, after it has loaded Prefect."""
    return installation.folder / "begun"


def told_in(installation: Installation) -> Path:
    """The file that the child makes when its output is complete, before its servers end."""
    return installation.folder / "told"


def _wait_for(child: subprocess.Popen[bytes], made: Path) -> None:
    """Wait until the child has made that file, or has ended."""
    while child.poll() is None and not made.exists():
        time.sleep(_POLL_S)


def _tell(installation: Installation, verbose: bool) -> int:
    free = shutil.disk_usage(installation.folder).free
    if free < NEEDED_BYTES:
        raise TorporError(
            f"{installation.folder.parent} has {free / GIB:.1f} GiB free, but the demo needs "
            f"{NEEDED_BYTES / GIB:.0f}: make room, or set TMPDIR to a folder on a bigger disk"
        )
    print(_INTRODUCTION.format(folder=installation.folder), flush=True)
    scratch = installation.folder / "tmp"
    scratch.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-m", "deployments.demo_story", str(installation.folder)],
        cwd=CHECKOUT,
        env=environment(installation, scratch, verbose) | mark(installation, "demo"),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # only this process gets Ctrl-C, and ends the others
    )
    try:
        with Waiting("loading Prefect"):
            _wait_for(child, begun_in(installation))
        _wait_for(child, told_in(installation))
        with Waiting("ending the server and the store of the demo"):
            code = child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    return code if code >= 0 else 1


def environment(installation: Installation, scratch: Path, verbose: bool) -> dict[str, str]:
    """An environment without the user's own Prefect settings, with all folders inside the demo's
    folder and a login that ends with the demo."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    login = f"demo:{secrets.token_urlsafe(24)}"
    return env | {
        # a folder apart from the user's installation, which may be up
        FOLDER_VARIABLE: str(installation.folder),
        "PREFECT_HOME": str(installation.prefect_home),
        "PREFECT_PROFILES_PATH": str(installation.prefect_home / "profiles.toml"),
        "PREFECT_API_AUTH_STRING": login,
        "PREFECT_SERVER_API_AUTH_STRING": login,
        "PREFECT_LOGGING_LEVEL": "INFO" if verbose else "WARNING",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # the default is 8 s; a busy machine needs 60 s
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "DO_NOT_TRACK": "1",
        "TMPDIR": str(scratch),
        "XDG_CACHE_HOME": str(cache_folder(scratch)),
        "PYTHONUNBUFFERED": "1",
    }


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


if __name__ == "__main__":
    sys.exit(main())
