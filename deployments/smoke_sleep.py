"""The second half of ``torpor smoke --full``: a workspace is hibernated and woken at the market.

The flows themselves rent two machines, one after the other, for files that only this test needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from flows import create, hibernate, wake
from tasks.machines import chosen_machine, open_session
from tasks.plain_runner import PlainRunner
from tasks.workspace import OpenWorkspace
from torpor.control.measure.scratch import clear
from torpor.control.providers.provider import Order, Provider
from torpor.control.rental.records import Rental
from torpor.control.smoke.trial import AdapterCheck, asked
from torpor.shared.errors import MachineError
from torpor.shared.values import Machine

PATH: Final = "~/torpor-smoke"
BYTES: Final = 100_000_000
_PROGRAM_S: Final = 300.0
_WRITE: Final = f"""
import os, pathlib
top = pathlib.Path("{PATH}").expanduser()
(top / "folder").mkdir(parents=True)
for number in range(10):  # half of it is random, half compresses
    (top / "folder" / str(number)).write_bytes(os.urandom({BYTES // 20}) + bytes({BYTES // 20}))
(top / "link").symlink_to("folder/0")
os.link(top / "folder/1", top / "name")
os.chmod(top / "folder/2", 0o640)
"""
_READ: Final = f"""
import hashlib, os, pathlib
top, seen = pathlib.Path("{PATH}").expanduser(), hashlib.sha256()
for path in sorted(top.rglob("*")):
    st = path.lstat()
    content = os.readlink(path).encode() if path.is_symlink() else b""
    if path.is_file():
        content = path.read_bytes()
    of = [str(path.relative_to(top)), st.st_mode, st.st_mtime_ns, st.st_nlink]
    seen.update(repr(of).encode() + content)
print(seen.hexdigest())
"""


class ToldProvider:
    """A provider whose machines live for at most ``lifetime_s``, where something on them can end
    them. ``tell`` is called for each rental before the market is asked."""

    def __init__(
        self, provider: Provider, tell: Callable[[Rental], None], lifetime_s: float | None
    ) -> None:
        self._provider = provider
        self._tell = tell
        self._lifetime_s = lifetime_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def create(self, order: Order) -> Machine:
        rental = asked(self._provider, order)
        self._tell(rental)
        ending = msgspec.structs.replace(order, lifetime_s=self._lifetime_s)
        machine = self._provider.create(ending)
        self._tell(msgspec.structs.replace(rental, state="standing", machine=machine.id))
        return machine


def sleep_and_wake(opened: OpenWorkspace, note: Callable[[AdapterCheck], None]) -> None:
    """Create, write, hibernate, wake, compare, hibernate, and clear the store. ``note`` gets each
    outcome at once. Raises what the flows raise; the objects then stay in the store."""
    name = opened.spec.name
    with PlainRunner(opened):
        began = time.monotonic()

        def noted(what: str, assumed: str, seen: str, *, differs: bool = False) -> None:
            nonlocal began
            note(AdapterCheck(what, assumed, f"{seen}, {time.monotonic() - began:.0f} s", differs))
            began = time.monotonic()

        create.fn(name)
        _run(opened, _WRITE)
        before = _run(opened, _READ)
        noted("create", "a machine", f"{BYTES / 1e6:.0f} MB written on it")
        slept = hibernate.fn(name)
        noted("hibernate", "verified and destroyed", slept.title())
        woken = wake.fn(name)
        noted("wake", "another machine", woken.title())
        is_same = _run(opened, _READ) == before
        noted(
            "files after the wake", "identical", "identical" * is_same or "NOT", differs=not is_same
        )
        hibernate.fn(name)
        noted("hibernate again", "verified and destroyed", "the machine was destroyed")
    clear(opened.store, name)


def _run(opened: OpenWorkspace, program: str) -> str:
    machine = chosen_machine(opened, "")
    with open_session(opened, machine) as session:
        done = session.run_script(program, timeout_s=_PROGRAM_S)
    if done.exit != 0:
        raise MachineError(
            f"a program that {machine.id} ran for the test ended with {done.exit}: "
            f"{done.stderr.decode(errors='replace')[-500:]}"
        )
    return done.stdout.decode()
