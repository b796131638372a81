"""What the start script makes of real distributions, and how long it takes until SSH answers.

    python -m tests.markets.roots [--times 3] >benchmarks/results/time_to_ssh.json

Part of `make oracles`: debootstrap makes the roots, and each distribution's own archive has the
packages. Root only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import asyncssh
import pytest

from tests.fixtures.market import H100
from tests.fixtures.roots import Bases, made_bases
from tests.fixtures.waiting import until
from tests.markets.boot import BootedMachine, Machines
from torpor.control.measure.host import host_facts
from torpor.control.providers.start_script import start_command
from torpor.control.rental.order import host_key_of, order_for
from torpor.shared.values import Label, workspace_name

pytestmark = pytest.mark.together("other roots")

_IMAGE: Final = Path(__file__).with_name("root.sh")
_LOOK: Final = (
    "LD_LIBRARY_PATH= python3 -c 'import sys; print(sys.version_info[:2] >= (3, 10))' || "
    "LD_LIBRARY_PATH= /usr/bin/python3 -c 'import sys; print(sys.version_info[:2] >= (3, 10))'; "
    "unset LD_LIBRARY_PATH; id -u; echo $HOME $CONTAINER_API_KEY; cat /etc/os-release"
)


class Root(NamedTuple):
    """``kind``: as root.sh has it."""

    suite: str
    kind: str = "bare"

    def __str__(self) -> str:
        return f"{self.suite} {self.kind}"


ROOTS: Final = (
    Root("bookworm"),
    Root("trixie"),
    Root("jammy"),
    Root("noble"),
    Root("jammy", "ready"),
    Root("bookworm", "ready"),
    Root("jammy", "conda"),
    Root("bookworm", "broken"),
    Root("noble", "foreign"),
)


class Answer(NamedTuple):
    """``seconds``: from the start command to the first login."""

    seconds: float
    said: list[str]


def ask(machines: Machines, base: Path, kind: str) -> Answer:
    """Start a machine and log in. AssertionError with its log if that does not work."""
    identity = asyncssh.generate_private_key("ssh-ed25519")
    label = Label("roots", workspace_name("roots"), "0123456789abcdef")
    image = [str(_IMAGE), str(base), kind]
    machine = machines.boot_image(image, start_command(order_for(H100, label, identity)))
    known = f"[{machine.address}]:{machine.port} {host_key_of(identity, label).public}\n"
    try:
        until(lambda: machine.begun or not machine.running, "the image is there")
        began = time.monotonic()
        said: list[str] = []

        def greets() -> bool:
            try:
                said.append(asyncio.run(_run(machine, identity, known)))
            except (OSError, asyncssh.Error):
                assert machine.running, machine.log.read_text()
                return False
            return True

        until(greets, f"{base.name} {kind} lets its owner in", 0.1)
        return Answer(time.monotonic() - began, said[-1].splitlines())
    except AssertionError as error:
        raise AssertionError(f"{error}: {machine.log.read_text()[-3000:]}") from None
    finally:
        machine.end()


async def _run(machine: BootedMachine, identity: asyncssh.SSHKey, known: str) -> str:
    async with asyncssh.connect(
        machine.address,
        machine.port,
        username="root",
        client_keys=[identity],
        known_hosts=asyncssh.import_known_hosts(known),
        config=None,
    ) as link:
        return str((await link.run(_LOOK, check=True)).stdout)


@pytest.mark.parametrize("root", ROOTS, ids=str)
def test_the_start_script_makes_a_machine_of_a_real_root(
    root: Root, bases: Bases, booted_machines: Machines
) -> None:
    fits, user, home, *system = ask(booted_machines, bases.of(root.suite), root.kind).said
    assert (fits, user, home) == ("True", "0", "/root of-the-container")
    assert f"VERSION_CODENAME={root.suite}" in system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with made_bases() as bases, tempfile.TemporaryDirectory(prefix="torpor-machines-") as folder:
        machines = Machines(Path(folder))
        for root in ROOTS:
            base = bases.of(root.suite)
            times = [ask(machines, base, root.kind).seconds for _ in range(options.times)]
            found[str(root)] = {
                "n": len(times),
                "least_s": min(times),
                "median_s": statistics.median(times),
                "most_s": max(times),
            }
            print(root, found[str(root)], file=sys.stderr)
    result = {"benchmark": "time_to_ssh", "host": host_facts(), "roots": found}
    print(json.dumps(result, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
