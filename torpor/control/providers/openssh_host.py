"""OpenSSH's sshd as the server of one local machine."""

from __future__ import annotations

import functools
import os
import pwd
import re
import shutil
import subprocess

from torpor.control.providers.local_place import MachineRecord, Place, write_whole
from torpor.control.providers.local_processes import MARK
from torpor.shared.errors import CreateFailed

_LAUNCH_S = 20
_SFTP_SERVERS = (
    "/usr/lib/openssh/sftp-server",
    "/usr/libexec/openssh/sftp-server",
    "/usr/lib/ssh/sftp-server",
    "/usr/libexec/sftp-server",
)
# Where sshd, started by root, keeps its unprivileged half; made at boot where an init runs.
_PRIVILEGE_SEPARATION = "/run/sshd"
_NO_LOGIN = ("nologin", "false")

# A session begins in the machine's home, as on a rented machine; sshd alone would begin it in the
# account's. The command arrives whole in one variable, so that any argv passes unchanged.
_SESSION = b"""\
cd "$HOME" || exit 1
if [ -n "${SSH_ORIGINAL_COMMAND+set}" ]; then
    set -- "$SSH_ORIGINAL_COMMAND"
    unset SSH_ORIGINAL_COMMAND
    exec "$SHELL" -c "$1"
fi
exec "$SHELL" -l
"""

_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey "{host_key}"
PidFile "{pid_file}"
AuthorizedKeysFile "{authorized_keys}"
AllowUsers {user}
PermitRootLogin prohibit-password
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PermitUserRC no
DisableForwarding yes
PrintMotd no
PrintLastLog no
MaxStartups 200:30:400
MaxSessions 200
LoginGraceTime 30
SetEnv "HOME={home}" "{mark}={machine}"
ForceCommand exec /bin/sh '{session}'
"""


def unfit() -> str | None:
    """Why sshd cannot serve machines for this account here; None where it can."""
    if _sshd() is None:
        return "no sshd in PATH or /usr/sbin (on Debian: apt install openssh-server)"
    try:
        account = pwd.getpwuid(os.geteuid())
    except KeyError:
        return f"uid {os.geteuid()} has no account in /etc/passwd, and sshd serves accounts only"
    shell = account.pw_shell or "/bin/sh"
    if os.path.basename(shell) in _NO_LOGIN or not os.access(shell, os.X_OK):
        return f"the shell of {account.pw_name} is {shell}, which runs no commands"
    return None


def launch(place: Place, record: MachineRecord, port: int) -> None:
    """Start sshd, which leaves our process tree by itself and writes its pid file once it listens.

    CreateFailed with sshd's own words where it refuses at once.
    """
    sshd = _sshd()
    if sshd is None:
        raise CreateFailed(f"machine {record.id} was made with sshd, and there is none here now")
    write_whole(place.session, _SESSION)
    write_whole(place.config, _config(place, record, port).encode())
    if os.geteuid() == 0:
        os.makedirs(_PRIVILEGE_SEPARATION, mode=0o755, exist_ok=True)
    argv = [sshd, "-f", str(place.config), "-E", str(place.log)]
    if _version(sshd) >= (9, 8):
        # Every machine and every client is 127.0.0.1: one bad client would shut out the good ones.
        argv += ["-o", "PerSourcePenalties=no"]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), MARK: record.id},
            start_new_session=True,
            umask=0o022,
            timeout=_LAUNCH_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise CreateFailed(f"{sshd} did not start for machine {record.id}: {cause}") from cause
    if done.returncode != 0:
        words = (done.stdout + done.stderr).decode(errors="replace").strip()
        raise CreateFailed(
            f"{sshd} refused to start for machine {record.id} (exit {done.returncode}): "
            f"{words or _tail(place)}"
        )


def _config(place: Place, record: MachineRecord, port: int) -> str:
    told = _CONFIG.format(
        port=port,
        host_key=place.host_key,
        pid_file=place.pid_file,
        authorized_keys=place.authorized_keys,
        user=record.user,
        home=place.home,
        mark=MARK,
        machine=record.id,
        session=place.session,
    )
    sftp = next((path for path in _SFTP_SERVERS if os.access(path, os.X_OK)), None)
    return told if sftp is None else f"{told}Subsystem sftp {sftp}\n"


def _tail(place: Place) -> str:
    try:
        return place.log.read_text(errors="replace")[-500:].strip()
    except OSError:
        return "it left no log"


def _sshd() -> str | None:
    # sshd insists on an absolute path, to start itself again for each connection.
    found = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")
    return None if found is None else os.path.abspath(found)


@functools.cache
def _version(sshd: str) -> tuple[int, int]:
    """``(9, 2)``; older ones do not know -V and tell their version along with their usage."""
    try:
        done = subprocess.run(
            [sshd, "-V"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    match = re.search(rb"OpenSSH_(\d+)\.(\d+)", done.stdout + done.stderr)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)
