"""Install a bundle on a machine: send it as one stream, check it, unpack it whole or not at all."""

from __future__ import annotations

from typing import Final

import asyncssh
import msgspec

from torpor.control.remote.bundle import Bundle
from torpor.control.remote.probe import Probed
from torpor.control.remote.ssh import execute, last_words, scripted
from torpor.shared.errors import AgentLost, MachineUnfit, from_wire
from torpor.shared.values import learned
from torpor.shared.wire.protocol import parse_json

INSTALL_S: Final = 600.0  # seconds; 10 MB over the worst link that is worth using
_MARK: Final = b"torpor-install "

# A constant, so no text is ever formatted into it: argv is HOME, the content hash, the archive's
# SHA-256 and length.
_SCRIPT: Final = r"""
import errno, hashlib, json, os, shutil, sys, tarfile, tempfile
home, name, sha256, length = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

def say(**answer):
    sys.stdout.write("\ntorpor-install " + json.dumps(answer) + "\n")
    sys.stdout.flush()

def install():
    os.makedirs(home, mode=0o700, exist_ok=True)
    marker = os.path.join(home, ".torpor-home")
    if not os.path.lexists(marker):
        if set(os.listdir(home)) - {"bundles"}:
            return say(error={"type": "MachineUnfit", "message": "the agent's folder %s holds "
                              "files that are not torpor's: name another one" % home})
        os.close(os.open(marker, os.O_WRONLY | os.O_CREAT, 0o600))
    os.chmod(home, 0o700)
    bundles = os.path.join(home, "bundles")
    os.makedirs(bundles, mode=0o700, exist_ok=True)
    scratch = tempfile.mkdtemp(dir=bundles, prefix=".install-")
    try:
        archive, total = os.path.join(scratch, "archive"), hashlib.sha256()
        with open(archive, "wb") as out:
            left = length
            while left:
                data = sys.stdin.buffer.read(min(left, 1 << 18))
                if not data:
                    break
                left -= len(data)
                total.update(data)
                out.write(data)
        if total.hexdigest() != sha256:
            return say(error={"type": "AgentLost", "message": "the bundle arrived damaged"})
        fresh = os.path.join(scratch, "bundle")
        os.mkdir(fresh, 0o700)
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                parts = member.name.split("/")
                if not member.isfile() or "" in parts or "." in parts or ".." in parts:
                    return say(error={"type": "MachineUnfit", "message": "an unsafe bundle"})
                path = os.path.join(fresh, *parts)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "xb") as out:
                    shutil.copyfileobj(tar.extractfile(member), out, 1 << 20)
        with open(os.path.join(fresh, ".complete"), "x") as out:
            out.write(name + "\n")
        final = os.path.join(bundles, name)
        try:
            os.rename(fresh, final)
        except OSError:
            if not os.path.isfile(os.path.join(final, ".complete")):
                shutil.rmtree(final)
                os.rename(fresh, final)
        say(ok=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

try:
    install()
except OSError as error:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    say(error={"type": "DiskFull" if full else "MachineUnfit",
               "message": "the agent cannot be installed in %s: %s" % (home, error)})
"""


class _Answer(msgspec.Struct, frozen=True):
    error: dict[str, str] | None = None


async def install(
    connection: asyncssh.SSHClientConnection, where: str, machine: Probed, bundle: Bundle
) -> str:
    """Install ``bundle`` unless it is there; returns its folder on the machine."""
    folder = f"{machine.home}/bundles/{bundle.hash}"
    if bundle.hash in machine.bundles:
        return folder
    what = (bundle.hash, bundle.sha256, str(bundle.archive.stat().st_size))
    done = await execute(
        connection,
        where,
        scripted(machine.python, machine.home, *what),
        timeout_s=INSTALL_S,
        script=_SCRIPT,
        stdin=bundle.archive,
    )
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            answer = _answer(line[len(_MARK) :])
            if answer is None:
                raise MachineUnfit(f"{where} answers what torpor's installation does not say")
            if answer.error is None:
                return folder
            error = from_wire(answer.error)
            raise type(error)(f"{where}: {error}")
    if done.exit == -1:
        raise AgentLost(
            f"{where}: the agent was not installed: the connection was lost, or the installation "
            "was killed there, as for want of memory"
        )
    words = last_words(done.stdout + b"\n" + done.stderr)
    raise MachineUnfit(f"{where}: installing the agent failed (exit {done.exit}): {words}")


def _answer(text: bytes) -> _Answer | None:
    try:
        return msgspec.convert(parse_json(text), learned(_Answer))
    except ValueError:
        return None
