"""The local provider needs no root: its contract again, as ``nobody``."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.waiting import PATIENCE_S

_PROJECT = Path(__file__).resolve().parents[3]
_TESTS = "tests/control/providers/test_local_contract.py"


@pytest.fixture
def nobodys(needs_server: None) -> Iterator[Path]:
    nobody = pwd.getpwnam("nobody")
    folder = Path(tempfile.mkdtemp(prefix="torpor-"))
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    yield folder
    shutil.rmtree(folder)


def test_the_contract_holds_for_an_ordinary_user(nobodys: Path) -> None:
    if os.geteuid() != 0:
        return  # then test_local_contract.py has run as an ordinary user already
    nobody = pwd.getpwnam("nobody")
    argv = _as_user(nobody)
    argv += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    argv += [
        "-p",
        "tests.fixtures.servers",
        "-p",
        "tests.fixtures.machines",
        "--noconftest",
        f"--basetemp={nobodys / 'pytest'}",
    ]
    argv += ["-k", "not killed", _TESTS]
    environ = {
        "HOME": str(nobodys),
        "PATH": os.environ["PATH"],
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(nobodys),
    }
    done = subprocess.run(
        argv,
        cwd=_PROJECT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def _as_user(user: pwd.struct_passwd) -> list[str]:
    argv = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    seen = subprocess.run(
        # By way of sh: setpriv itself may still look up a program with root's leave.
        [*argv, "sh", "-c", 'exec "$0" -c "import torpor, pytest"', sys.executable],
        cwd=_PROJECT,
        capture_output=True,
        check=False,
    )
    if seen.returncode != 0:
        # The project or its Python lies in root's home: nobody may read it, and nothing more.
        argv += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return argv
