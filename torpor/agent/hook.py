"""A command of the user's, run on the machine within a run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Final

from torpor.errors import HookFailed, InvalidInput

_TAIL_BYTES: Final = 4096
_READ_BYTES: Final = 65_536
_POLL_S: Final = 0.2
_LAST_WORDS_S: Final = 1.0  # for what the hook had still in the pipe when it ended


def run_hook(argv: list[str], timeout_s: float, check: Callable[[], None]) -> dict[str, Any]:
    """Run the quiesce hook and wait for it; what it leaves in the background may go on.

    Its exit status (0), its seconds and the end of what it said. HookFailed where it cannot start,
    fails or takes too long; one that takes too long, or that runs when ``check`` raises, is ended
    with its whole process group.
    """
    if not argv:
        raise InvalidInput("the quiesce hook is an empty list: give a program and its arguments")
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=os.path.expanduser("~"),
            start_new_session=True,
        )
    except OSError as exc:
        raise HookFailed(
            f"the quiesce hook {argv[0]!r} cannot be started on the machine: {exc.strerror}. "
            "Mend `quiesce` in the workspace block: a program there, and its arguments"
        ) from None
    words = _Tail(process.stdout)
    try:
        while process.poll() is None:
            check()
            if time.monotonic() - started > timeout_s:
                raise HookFailed(
                    f"the quiesce hook {argv[0]!r} took longer than {timeout_s:.0f} s and was "
                    "ended: raise its time limit, or make it finish"
                )
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds, tail = time.monotonic() - started, words.so_far()
    if process.returncode != 0:
        raise HookFailed(
            f"the quiesce hook {argv[0]!r} ended with status {process.returncode}, having said: "
            f"{tail.strip() or 'nothing'}. Mend it, or take it out of the workspace block"
        )
    return {"exit": process.returncode, "seconds": seconds, "tail": tail}


class _Tail:
    """The end of what comes through a pipe, however much that is; no disk is needed for it.

    A server that the hook has started holds the pipe as well. It is read from as long as the agent
    lives, so that the server may go on talking.
    """

    def __init__(self, pipe: IO[bytes] | None) -> None:
        self._held = b""
        self._thread = threading.Thread(
            target=self._read, args=(pipe,), name="torpor-hook", daemon=True
        )
        self._thread.start()

    def so_far(self) -> str:
        self._thread.join(_LAST_WORDS_S)
        return self._held.decode(errors="replace")

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while more := os.read(pipe.fileno(), _READ_BYTES):
                self._held = (self._held + more)[-_TAIL_BYTES:]
