"""Odd logins and odd machines over a real OpenSSH server: what works there, and what its user reads
where nothing can."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.agent_operations import Echo
from tests.fixtures.sshd import Sshd
from torpor.control.remote import probe, ssh
from torpor.control.remote.session import SshSession
from torpor.shared.errors import (
    AgentLost,
    MachineDenied,
    MachineError,
    MachineUnfit,
    MachineUnreachable,
)

_IMPORTED = ("platform", "json", "tarfile", "socket", "subprocess", "random", "lzma", "torpor")

Opened = Callable[..., SshSession]


@pytest.fixture
def opened(sshd: Sshd, agent_source: Path, bundle_cache: Path) -> Opened:
    def open_one(**options: Any) -> SshSession:
        return SshSession.open(
            sshd.endpoint, sshd.identity, source=agent_source, cache=bundle_cache, **options
        )

    return open_one


def _files(sshd: Sshd, text: str) -> None:
    """What the login runs before each command, in its home as a real login does."""
    (sshd.home / ".bashrc").write_text(f"cd {shlex.quote(str(sshd.home))}\n{text}\n")


def _forced(sshd: Sshd, command: str) -> None:
    """``command`` in the place of each: a forced command, or what a login's shell does."""
    shell = sshd.folder / "shell"
    shell.write_text(f"#!/bin/sh\n{command}\n")
    shell.chmod(0o755)
    keys = sshd.folder / "authorized_keys"
    keys.write_text(f'command="{shell}" {keys.read_text()}')


def _configured(sshd: Sshd, *lines: str) -> None:
    """Lines of its sshd_config that come before the others, of which the first counts."""
    sshd.stop()
    config = sshd.folder / "sshd_config"
    config.write_text("\n".join([*lines, config.read_text()]))
    sshd.start()


def _logins(sshd: Sshd) -> int:
    return sshd.log.read_text().count("Accepted publickey")


def _sessions(sshd: Sshd) -> int:
    return sshd.log.read_text().count("Starting session")


def _works(opened: Opened) -> None:
    with opened() as session:
        assert session.call(Echo("there"), request_id="r").words == "there"
        assert session.execute(["echo", "said"]).stdout == b"said\n"
        assert session.run_script("import sys; print(sys.argv[1:])", "a b").stdout == b"['a b']\n"


def test_nothing_in_a_logins_folder_decides_what_runs(sshd: Sshd, opened: Opened) -> None:
    ran = sshd.folder / "ran"
    for name in _IMPORTED:
        (sshd.home / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})\n")
    for name in ("python3", "uname"):
        (sshd.home / name).write_text(f"#!/bin/sh\necho {name} >>{ran}\n")
        (sshd.home / name).chmod(0o755)
    (sshd.home / "startup").mkdir()
    (sshd.home / "startup/sitecustomize.py").write_text(f"open({str(ran)!r}, 'a').write('site')\n")
    _files(sshd, f"export PYTHONPATH=.:{sshd.home}:{sshd.home}/startup PATH=.:$PATH")
    _works(opened)
    assert not ran.exists(), ran.read_text()


@pytest.mark.parametrize(
    "files",
    [
        "printf 'Welcome to your GPU> '",
        "printf '{\"hi\": 1}'; printf 'no line ends here' >&2",
        "head -c 2000000 /dev/zero | tr '\\0' x; head -c 2000000 /dev/zero | tr '\\0' e >&2",
        'read -r answer; echo "you said $answer"',
        "for each in 1 2 3; do read -r answer; done; read -r -n 1 key",
        "head -c 20 >/dev/null",
        'cat /proc/self/cmdline; echo "$BASH_EXECUTION_STRING"; set -x',
        "alias exec=false; exec() { return 1; }; ls() { return 1; }",
    ],
)
def test_what_a_logins_files_print_and_read_does_not_matter(
    files: str, sshd: Sshd, opened: Opened
) -> None:
    _files(sshd, files)
    _works(opened)


def test_a_shell_that_takes_short_single_lines_alone_is_enough(sshd: Sshd, opened: Opened) -> None:
    """As tcsh: a line's end or a `!` ends its quotes, and its words are short."""
    _forced(
        sshd,
        'case "$SSH_ORIGINAL_COMMAND" in *"\n"*|*"!"*) echo "Unmatched" >&2; exit 1;; esac\n'
        '[ "${#SSH_ORIGINAL_COMMAND}" -lt 1024 ] || { echo "Word too long." >&2; exit 1; }\n'
        'exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"',
    )
    _works(opened)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            'echo \'Please login as the user "ubuntu" rather than the user "root".\'; exit 142',
            r'Please login as the user "ubuntu" rather than the user "root"\. \(exit 142\)',
        ),
        ("echo 'This account is currently not available.'; exit 1", "not available"),
        ("exit 0", r"printed: nothing \(exit 0\)"),
        ("echo 'rssh: only scp is allowed' >&2; exit 1", "only scp is allowed"),
        ("echo \"Unmatched '''.\" >&2; exit 1", "Unmatched"),
        ("printf '\\033]52;c;eA==\\007ok'", r"\\x1b\]52"),
    ],
)
def test_a_login_that_runs_no_program_is_shown_and_not_tried_again(
    command: str, words: str, sshd: Sshd, opened: Opened
) -> None:
    _forced(sshd, command)
    with pytest.raises(MachineUnfit, match=words) as unfit:
        opened()
    assert "ForceCommand" in str(unfit.value) and str(sshd.port) in str(unfit.value)
    assert (_logins(sshd), _sessions(sshd)) == (1, 1)


@pytest.mark.parametrize(
    "words",
    [
        "bash: fork: retry: Resource temporarily unavailable",
        "System is booting up. Unprivileged users are not permitted to log in yet.",
    ],
)
def test_a_login_that_fails_in_passing_may_be_tried_again(
    words: str, sshd: Sshd, opened: Opened
) -> None:
    _files(sshd, f"echo {shlex.quote(words)} >&2; exit 254")
    with pytest.raises(AgentLost, match="Try again when that has passed") as lost:
        opened()
    assert words in str(lost.value) and lost.value.retryable


def _named(opened: Opened, words: str) -> bool:
    """Whether a login that waits for ever is named with its words. On a busy host a login may not
    come so far within a short limit: then one with a longer limit is asked."""
    for begin_s in (1.0, 10.0, 60.0):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(AgentLost) as lost:
            patch.setattr(ssh, "BEGIN_S", begin_s)
            patch.setattr(probe, "PROBE_S", begin_s)  # equal: the login's own limit tells more
            opened()
        if re.search(words, str(lost.value)):
            return True
    return False


@pytest.mark.parametrize(
    ("files", "words"),
    [("echo 'type the word:'; cat", "type the word:"), ("exec sleep 100000", "nothing")],
)
def test_a_login_that_waits_is_named_with_its_files(
    files: str, words: str, sshd: Sshd, opened: Opened
) -> None:
    _files(sshd, files)
    assert _named(opened, f"It printed: {words}. Its login may wait for input")


def test_a_login_whose_files_wait_at_the_attach_alone_is_named_too(
    sshd: Sshd, opened: Opened
) -> None:
    opened().close()
    _files(sshd, 'case "$BASH_EXECUTION_STRING" in *attach*) printf Name:; cat >&2;; esac')
    assert _named(opened, r"printed: Name:\. .*\.bashrc")


def test_a_second_factor_is_no_refused_key(sshd: Sshd, opened: Opened) -> None:
    _configured(sshd, "AuthenticationMethods publickey,password", "PasswordAuthentication yes")
    with pytest.raises(
        MachineDenied, match=r"accepts the SSH identity .* asks for a password"
    ) as no:
        opened()
    assert "AuthenticationMethods" in str(no.value) and "authorized_keys" not in str(no.value)


def test_what_the_ssh_server_says_before_it_refuses_is_shown(sshd: Sshd, opened: Opened) -> None:
    banner = sshd.folder / "banner"
    banner.write_text("Only from the bastion.\n")
    (sshd.folder / "authorized_keys").write_text("")
    _configured(sshd, f"Banner {banner}")
    with pytest.raises(MachineDenied, match=r"refuses .* It says: Only from the bastion\.\. If"):
        opened()
    banner.write_text("System is booting up.\n")
    with pytest.raises(MachineUnreachable, match="lets nobody in yet"):
        opened()


def _python(sshd: Sshd, name: str, script: str) -> str:
    path = sshd.folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("echo 'Traceback'; echo 'ImportError: x.so: failed to map segment' >&2; exit 1",
         MachineUnfit, "cannot run there: ImportError: x.so: failed to map segment"),
        ("echo 'MemoryError' >&2; exit 1", AgentLost, "the machine printed: MemoryError"),
    ],
)  # fmt: skip
def test_an_agent_that_cannot_run_is_told_from_one_that_failed_once(
    script: str, error: type[MachineError], words: str, sshd: Sshd, opened: Opened
) -> None:
    rest = f'case "$*" in *attach*) {script};; esac\nexec {sys.executable} "$@"'
    with pytest.raises(error, match=words):
        opened(candidates=[_python(sshd, "python", rest)])


def test_a_python_that_is_killed_may_run_later(sshd: Sshd, opened: Opened) -> None:
    with pytest.raises(AgentLost, match="python: ended by a signal"):
        opened(candidates=[_python(sshd, "python", "kill -9 $$")])
