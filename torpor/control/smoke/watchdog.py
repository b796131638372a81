"""A process of its own that ends a smoke test's machine when the command that rented it cannot.

The command tells it of each rental through a pipe, before the market is asked. When the pipe
closes, or the time is over, it ends every rental that the command has not called ended. The pipe
closes however the command goes: killed, crashed, or with its terminal. Until then it listens.
"""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from torpor.control.providers.provider import Provider
from torpor.control.rental.records import Rental
from torpor.control.reports import exact_moment
from torpor.control.smoke.ending import end
from torpor.shared.errors import ProviderError, TorporError
from torpor.shared.values import Label, learned

READY: Final = b"ready\n"
TRIES_S: Final = 24 * 3600.0
"""Seconds for which the end of a machine is tried."""
LEDGER: Final = "unended"
"""The file beside the watchdog's log: a line with its arguments, and one for each rental that it
was told of. It is locked while the command or the watchdog lives, and removed once nothing is left
to end."""
_PAUSE_S: Final = 30.0
_MOST_BYTES: Final = 64 * 1024  # most bytes read from the pipe at once
_ENDS_S: Final = 10.0


class _Command(msgspec.Struct, frozen=True):
    """How the watchdog of a ledger is started. It holds no secret."""

    argv: list[str]


class Watchdog:
    """The command's side. ``argv`` begins the process, which calls ``serve``; the path of its
    ledger is added. ``env``: of the process, if not this one's."""

    def __init__(
        self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Returns once it watches; ProviderError where it does not, and BlockingIOError where
        another process has the ledger."""
        self.log = log
        ledger = log.with_name(LEDGER)
        self._ledger = os.open(ledger, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_new = not os.fstat(self._ledger).st_size
            if is_new:
                self._keep(msgspec.json.encode(_Command([*argv])))
                _sync(ledger.parent)
            with log.open("ab") as written:
                self._process = subprocess.Popen(
                    [*argv, str(ledger)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=written,
                    env=env,
                    pass_fds=[self._ledger],  # the watchdog holds the lock as long as either lives
                    # so that no hangup and no Ctrl-C of the terminal reaches it
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._ledger)
            raise
        if self._process.stdout is None or self._process.stdout.readline() != READY:
            self._process.kill()
            self.close()
            if is_new:
                ledger.unlink(missing_ok=True)
            raise ProviderError(f"the watchdog did not start, so nothing was rented: see {log}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, rental: Rental) -> None:
        """Tell the watchdog how far a rental is. ProviderError where the watchdog is gone and the
        rental has not ended."""
        line = msgspec.json.encode(rental)
        try:
            self._keep(line)
            os.write(self._process.stdin.fileno(), line + b"\n")  # type: ignore[union-attr]
        except OSError as error:
            if rental.state == "asked":
                raise ProviderError(
                    f"the watchdog could not be told ({error}), so nothing was rented: see "
                    f"{self.log}"
                ) from error

    def close(self) -> None:
        """Close the pipe, because no rental follows. A watchdog with nothing to end exits;
        otherwise it goes on by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        os.close(self._ledger)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_S)

    def _keep(self, line: bytes) -> None:
        os.write(self._ledger, line + b"\n")
        os.fsync(self._ledger)


def end_left(state: Path, env: Mapping[str, str] | None = None) -> list[str]:
    """Start a watchdog again for each smoke test below ``state`` whose command and watchdog are
    gone, as after a power cut; it ends what they rented. Returns a sentence for each."""
    said = []
    for ledger in sorted(state.glob(f"*/{LEDGER}")):
        log = ledger.with_name("watchdog.log")
        try:
            first, *lines = ledger.read_bytes().splitlines()
            _, *rest = msgspec.json.decode(first, type=learned(_Command)).argv
            rentals = [msgspec.json.decode(line, type=learned(Rental)) for line in lines]
            watchdog = Watchdog([sys.executable, *rest], log, env)
        except BlockingIOError:
            continue  # its command or its watchdog lives
        except (OSError, ValueError, msgspec.MsgspecError, TorporError) as error:
            said.append(
                f"{ledger.parent} may have left a machine, and its watchdog does not start "
                f"({error}): look for it in the market's console, then delete {ledger}"
            )
            continue
        for rental in rentals:
            watchdog.tell(rental)
        watchdog.close()
        said.append(f"a smoke test was cut off: what it rented is ended, see {log}")
    return said


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def serve(
    provider: Provider,
    identity: str,
    lifetime_s: float,
    ledger: Path,
    nap: Callable[[float], None] = time.sleep,
) -> None:
    """The process's side: watch standard input, and log on standard error. ``identity``: the
    provider's as the command knows it. ProviderError where the block has changed since.
    ``ledger``: removed at the end."""
    if provider.identity != identity:
        raise ProviderError(
            f"the block is of {provider.identity} now, and the command rents at {identity}: "
            "nothing is watched"
        )
    os.write(1, READY)
    watch(provider, 0, lifetime_s, _say, nap)
    ledger.unlink(missing_ok=True)


def _say(words: str) -> None:
    with suppress(OSError):  # a full disk ends no watchdog
        print(f"{exact_moment(time.time())} {words}", file=sys.stderr, flush=True)


def watch(
    provider: Provider,
    source: int,
    lifetime_s: float,
    say: Callable[[str], None],
    nap: Callable[[float], None] = time.sleep,
) -> None:
    """Hear of rentals from the pipe ``source``, and end those that are left.

    Once the time is over, it ends whatever it hears of at once. It returns when the pipe is closed
    and nothing is left, or was given up.
    """
    pipe = _Pipe(source)
    until_s = time.monotonic() + lifetime_s
    while not pipe.is_closed and (left_s := until_s - time.monotonic()) > 0:
        pipe.hear(left_s)
    give_up_s: dict[Label, float] = {}  # when each rental is given up, once its end was tried
    while True:
        pipe.hear(0.0)
        if not (left := [told for told in pipe.rentals.values() if told.state != "ended"]):
            if pipe.is_closed:
                break
            pipe.hear(None)
            continue
        if not give_up_s:
            say("the command has gone" if pipe.is_closed else f"{lifetime_s / 60:.0f} min are over")
        for rental in left:
            if rental.label not in give_up_s:
                give_up_s[rental.label] = time.monotonic() + TRIES_S
                if rental.state == "asked":  # the request may still be on its way
                    rental = msgspec.structs.replace(rental, created_unix=time.time())
            is_over = _end(provider, rental, give_up_s[rental.label], say, nap)
            state = "ended" if is_over else rental.state
            pipe.rentals[rental.label] = msgspec.structs.replace(rental, state=state)
        if any(rental.state != "ended" for rental in pipe.rentals.values()):
            nap(_PAUSE_S)
    if not give_up_s:
        say("nothing is left to end")


class _Pipe:
    """What the command has last told of each rental."""

    def __init__(self, source: int) -> None:
        self.rentals: dict[Label, Rental] = {}
        self.is_closed = False
        self._source = source
        self._rest = b""

    def hear(self, wait_s: float | None) -> None:
        """Read what is in the pipe, or comes first in ``wait_s``; None: wait until something
        comes."""
        if self.is_closed or not select.select([self._source], [], [], wait_s)[0]:
            return
        heard = os.read(self._source, _MOST_BYTES)
        self.is_closed = not heard
        *lines, self._rest = (self._rest + heard).split(b"\n")
        for line in lines:
            rental = msgspec.json.decode(line, type=learned(Rental))
            self.rentals[rental.label] = rental


def _end(
    provider: Provider,
    rental: Rental,
    give_up_s: float,
    say: Callable[[str], None],
    nap: Callable[[float], None],
) -> bool:
    """Whether the rental has ended, or was given up."""
    try:
        proof = end(provider, rental, nap=nap)
    except Exception as error:  # noqa: BLE001 - whatever it is, the machine may be alive
        say(f"rental {rental.label.rental}: {type(error).__name__}: {error}")
    else:
        say(f"rental {rental.label.rental} has ended: {proof}")
        return True
    if time.monotonic() > give_up_s:
        say(f"rental {rental.label.rental} was given up: end it in the market's console")
        return True
    return False
