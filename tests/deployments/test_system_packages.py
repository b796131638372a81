"""What an ordinary user reads on a host that lacks every package."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.installation import CHECKOUT
from tests.fixtures.waiting import PATIENCE_S

SCRIPT = CHECKOUT / "deployments" / "system_packages.sh"
COMMAND = "    apt-get update && apt-get install --no-install-recommends "
LACKED_BY_ALL = {"python3", "python3-venv", "gcc", "libc6-dev"}
LACKED_BY_TESTS = {"restic", "lz4", "chromium", "g++", "hledger", "prometheus", "git", "acl"}
LACKED_BY_TESTS |= {"rsync", "postgresql"}


@pytest.fixture
def programs() -> Iterator[Path]:
    """A folder that every account can enter; a test's usual one is closed to all but its owner."""
    with tempfile.TemporaryDirectory(prefix="torpor-") as folder:
        made = Path(folder)
        made.chmod(0o755)
        yield made


@pytest.mark.parametrize("target", ["demo", "test", "bench", "campaign"])
def test_one_message_names_all_that_root_must_install(target: str, programs: Path) -> None:
    code, printed = _run(target, programs, "id")
    (command,) = [line for line in printed.splitlines() if line.startswith(COMMAND)]
    named = set(command.removeprefix(COMMAND).split())
    # The script also looks for sshd and setcap in /usr/sbin, which a test cannot take away.
    assert named - {"openssh-server", "libcap2-bin"} == LACKED_BY_ALL | LACKED_BY_TESTS
    assert code == 1


def test_the_demo_goes_on_without_a_compiler_and_the_tests_do_not(programs: Path) -> None:
    there = ("id", "python3.11")
    code, printed = _run("demo", programs, *there)
    assert code == 0
    assert "`make demo` and `make up` run without them" in printed
    assert "python3" not in printed
    assert _run("test", programs, *there)[0] == 1


def test_a_campaign_needs_no_more_than_an_ssh_server(programs: Path) -> None:
    every = ("id", "python3.11", "gcc", "sshd")
    assert _run("campaign", programs, *every) == (0, "")


def test_nothing_is_said_where_nothing_is_missing(programs: Path) -> None:
    every = ("id", "python3.11", "gcc", "g++", "restic", "lz4", "chromium", "sshd", "hledger")
    every += ("promtool", "git", "setfacl", "setcap", "rsync", "pg_ctlcluster")
    assert _run("test", programs, *every) == (0, "")


@pytest.mark.parametrize("name", ["python3.11", "python3.12", "python3.13", "python3"])
def test_whatever_a_distribution_calls_its_python_it_is_found(name: str, programs: Path) -> None:
    assert _run("python", programs, "id", name) == (0, f"{name}\n")
    assert "python" not in _run("demo", programs, "id", name)[1]


def test_a_python_that_is_too_old_counts_as_missing(programs: Path) -> None:
    (programs / "python3").symlink_to("/bin/false")  # what 3.10 answers
    _, printed = _run("demo", programs, "id")
    assert "Nothing runs without: python3 python3-venv." in printed


def _run(target: str, folder: Path, *programs: str) -> tuple[int, str]:
    """The script's exit status and message where only these programs are on PATH."""
    for name in programs:
        program = folder / name
        if not program.exists():
            program.symlink_to("/usr/bin/id" if name == "id" else "/bin/true")
    argv = [shutil.which("sh") or "/bin/sh", "-s", target]
    if os.geteuid() == 0:  # as root it would install
        user = ["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
        argv = [shutil.which("setpriv") or "/usr/bin/setpriv", *user, *argv]
    done = subprocess.run(
        argv,
        input=SCRIPT.read_text(),
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
