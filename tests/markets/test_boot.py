"""A fake machine is what its start command made of it."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path

import asyncssh
import pytest

from tests.fixtures.machines import KeyPair
from tests.fixtures.market import H100
from tests.fixtures.waiting import until
from tests.markets.boot import BootedMachine, Kind, Machines
from torpor.control.providers.start_script import start_command, start_script
from torpor.control.rental.order import host_key_of, order_for
from torpor.shared.values import Label, workspace_name

SCRIPT = """set -eu
command -v python3 >/dev/null || need="${need-} python3"
[ -x /usr/sbin/sshd ] || need="${need-} openssh-server"
[ -z "${need-}" ] || apt-get install -y $need
mkdir -p /root/.ssh /run/sshd
echo 'AUTHORIZED' >/root/.ssh/authorized_keys
umask 077
cat >/etc/ssh/ssh_host_ed25519_key <<'KEY'
HOSTKEYKEY
echo 'HostKey /etc/ssh/ssh_host_ed25519_key' >/etc/ssh/sshd_config.d/1.conf
if [ -d /run/systemd/system ]; then systemctl restart ssh; else exec /usr/sbin/sshd -D -e; fi
"""


def run(machine: BootedMachine, key: KeyPair, host_key: str, command: str) -> str:
    async def ask() -> str:
        known = asyncssh.import_known_hosts(f"[{machine.address}]:{machine.port} {host_key}\n")
        async with asyncssh.connect(
            machine.address,
            machine.port,
            username="root",
            client_keys=[asyncssh.import_private_key(key.private)],
            known_hosts=known,
            config=None,
        ) as link:
            done = await link.run(command, check=True)
            return str(done.stdout)

    return asyncio.run(ask())


def test_a_program_that_is_missing_is_named_before_any_machine_boots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(RuntimeError, match=r"sshd and unshare .* openssh-server util-linux"):
        Machines(tmp_path)


@pytest.mark.parametrize("kind", ["container", "bare", "vm"])
def test_a_machine_has_the_keys_that_its_start_script_installed(
    booted_machines: Machines, identity_key: KeyPair, kind: Kind, tmp_path: Path
) -> None:
    host = asyncssh.generate_private_key("ssh-ed25519")
    script = SCRIPT.replace("AUTHORIZED", identity_key.public)
    script = script.replace("HOSTKEY", host.export_private_key().decode(), 1)
    machine = booted_machines.boot(["/bin/sh", "-c", script], kind)
    host_key = host.export_public_key().decode().strip()

    def greets() -> str | None:
        try:
            return run(machine, identity_key, host_key, "ls / /root; python3 -V; cat /etc/shadow")
        except (OSError, asyncssh.Error):
            return None

    said: list[str] = []
    try:
        until(lambda: said.append(greets() or "") or said[-1], "the machine lets its owner in")
    except AssertionError:
        raise AssertionError(machine.log.read_text()) from None
    assert "Python 3." in said[-1]
    assert "root:*:" in said[-1]
    assert not {"work", "project"} & set(said[-1].split())
    run(machine, identity_key, host_key, "echo kept >/root/file; touch /usr/bin/mine /etc/mine")
    assert (machine.root / "root/file").read_text() == "kept\n"
    assert not Path("/usr/bin/mine").exists()
    machine.end()
    with pytest.raises(OSError):
        run(machine, identity_key, host_key, "true")


@pytest.mark.parametrize("kind", ["container", "bare", "stale", "conda", "libraries"])
def test_the_start_script_makes_a_machine_of_every_kind_of_image(
    booted_machines: Machines, identity_key: KeyPair, kind: Kind
) -> None:
    """Sessions have the container's environment, and no other user can read it."""
    identity = asyncssh.import_private_key(identity_key.private)
    label = Label("boot", workspace_name("boot"), "0123456789abcdef")
    machine = booted_machines.boot(start_command(order_for(H100, label, identity)), kind)
    host_key = host_key_of(identity, label).public
    look = """
import glob, json, os
key = b"-".join((b"of", b"the", b"container"))  # this program's own command line does not have it
files = [path for path in glob.glob("/etc/ssh/**", recursive=True) if os.path.isfile(path)]
open_to_all = [path for path in files if os.stat(path).st_mode & 0o077]
told = [path for path in open_to_all if key in open(path, "rb").read()]
shown = [path for path in glob.glob("/proc/[0-9]*/cmdline")
         if key in open(path, "rb").read()]
mask = os.umask(0)
print(json.dumps({"environment": dict(os.environ), "told": told, "shown": shown, "umask": mask}))
"""
    command = (
        'echo "$LD_LIBRARY_PATH"; unset LD_LIBRARY_PATH; '
        f"python3 -c pass || PATH=${{PATH#*:}}; python3 -c {shlex.quote(look)}"
    )
    said: list[str] = []

    def greets() -> bool:
        try:
            said.append(run(machine, identity_key, host_key, command))
        except (OSError, asyncssh.Error):
            return False
        return True

    try:
        until(greets, "the machine lets its owner in")
    except AssertionError:
        raise AssertionError(machine.log.read_text()) from None
    libraries, told = said[-1].split("\n", 1)
    seen = json.loads(told)
    assert libraries == ("/opt/image/lib" if kind == "libraries" else "")
    assert seen["environment"]["CONTAINER_API_KEY"] == "of-the-container"
    assert seen["environment"]["QUOTED"] == "a \"b\" 'c' \\d #e $f"
    assert not {"LINES", "2"} & seen["environment"].keys()
    assert (seen["told"], seen["shown"], seen["umask"]) == ([], [], 0o022)


@pytest.mark.parametrize("kind", ["container", "vm"])
@pytest.mark.parametrize("users_keys", ["", "/etc/ssh/users.keys"])
def test_what_a_user_does_to_the_home_locks_torpor_out_of_no_machine(
    booted_machines: Machines, identity_key: KeyPair, kind: Kind, users_keys: str
) -> None:
    identity = asyncssh.import_private_key(identity_key.private)
    label = Label("boot", workspace_name("boot"), "0123456789abcdef")
    order = order_for(H100, label, identity)
    image = f"echo AuthorizedKeysFile {users_keys} >>/etc/ssh/sshd_config\n"
    script = start_script(order, first=image if users_keys else "")
    machine = booted_machines.boot(["/bin/sh", "-c", script], kind)
    host_key = host_key_of(identity, label).public
    new = asyncssh.generate_private_key("ssh-ed25519")
    users = KeyPair(new.export_private_key().decode(), new.export_public_key().decode().strip())

    def ran(command: str, key: KeyPair = identity_key) -> bool:
        try:
            return run(machine, key, host_key, f"{command} && echo done") == "done\n"
        except (OSError, asyncssh.Error):
            return False

    # Each waits: an sshd that ran before the start script knows the new keys already, and the
    # script ends it while somebody is in.
    until(lambda: ran("true"), "the machine lets its owner in")
    keys = users_keys or "~/.ssh/authorized_keys"
    until(lambda: ran(f"echo '{users.public}' >{keys}"), "the user's key is written")
    until(lambda: ran("true"), "the key file of torpor counts")
    until(lambda: ran("true", users), "where the image looks for keys, they count as before")
    until(lambda: ran("chmod -R a+wx ~"), "everybody may write in the home")
    until(lambda: ran("true"), "the key file of torpor counts in spite of the home")


def test_machines_are_apart_and_end_with_all_their_processes(
    booted_machines: Machines, identity_key: KeyPair
) -> None:
    command = ["/bin/sh", "-c", "touch /root/up; sleep 1000 & wait"]
    machines = [booted_machines.boot(command) for _ in range(2)]
    assert len({machine.address for machine in machines}) == 2
    until(lambda: all((machine.root / "root/up").exists() for machine in machines), "both are up")
    machines[0].end()
    assert not machines[0].running
    assert machines[1].running


def test_a_container_whose_command_ends_is_over(booted_machines: Machines) -> None:
    machine = booted_machines.boot(["/bin/sh", "-c", "echo last words; exit 3"])
    until(lambda: not machine.running, "the container ended")
    assert "last words" in machine.log.read_text()
