"""A command of the user's, run on the machine within a run."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Final

from torpor.errors import HookFailed, InvalidInput

_TAIL_BYTES: Final = 4096
_POLL_S: Final = 0.2


def run_hook(argv: list[str], timeout_s: float, check: Callable[[], None]) -> dict[str, Any]:
    """Run the quiesce hook and wait for it; what it leaves in the background may go on.

    Its exit status (0), its seconds and the end of what it said. HookFailed where it cannot start,
    fails or takes too long; one that takes too long, or that runs when ``check`` raises, is ended
    with its whole process group.
    """
    if not argv:
        raise InvalidInput("the quiesce hook is an empty list: give a program and its arguments")
    started = time.monotonic()
    # A file, not a pipe: a hook that says much costs no memory, and one that starts a server is
    # not waited for until that lets go of its output.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=os.path.expanduser("~"),
                start_new_session=True,
            )
        except OSError as exc:
            raise HookFailed(
                f"the quiesce hook {argv[0]!r} cannot be started on the machine: {exc.strerror}. "
                "Mend `quiesce` in the workspace block: a program there, and its arguments"
            ) from None
        try:
            _wait(process, argv[0], started + timeout_s, timeout_s, check)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        tail = _tail(output)
    if process.returncode != 0:
        raise HookFailed(
            f"the quiesce hook {argv[0]!r} ended with status {process.returncode}, having said: "
            f"{tail.strip() or 'nothing'}. Mend it, or take it out of the workspace block"
        )
    return {"exit": process.returncode, "seconds": time.monotonic() - started, "tail": tail}


def _wait(
    process: subprocess.Popen[bytes],
    name: str,
    give_up: float,
    timeout_s: float,
    check: Callable[[], None],
) -> None:
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            break
        check()
        if time.monotonic() > give_up:
            raise HookFailed(
                f"the quiesce hook {name!r} took longer than {timeout_s:.0f} s and was ended: "
                "raise its time limit, or make it finish"
            )


def _tail(output: IO[bytes]) -> str:
    end = output.seek(0, os.SEEK_END)
    output.seek(max(0, end - _TAIL_BYTES))
    return output.read(_TAIL_BYTES).decode(errors="replace")
