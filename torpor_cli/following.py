"""What a person reads while a run goes on: a line for each action that begins, and its progress.

On a terminal the line of what goes on now is rewritten in place. A pipe, and a terminal that cannot
rewrite a line, get plain lines: at most one each REPEAT_S for what takes long.

Nothing here waits for a reader: a terminal that was stopped with Ctrl-S, or a pager that nobody
scrolls, would keep a job from storing its work. A thread writes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Queue
from typing import Final, TextIO

from deployments.terminal import CLEARED, NOTED_S, TICK_S, columns, cut, folded, rewrites
from torpor.shared.plain_text import plain, short

REPEAT_S: Final = 10.0
"""Seconds between two lines about the same action in a pipe, and seconds over which a rate is
measured."""
MOST_WAITING: Final = 32 * 1024 * 1024
"""Characters that wait for a reader at most. Further output is left out, and its size is named."""
_UNITS: Final = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))


class Follower:
    """Writes a run's progress to ``stream`` while this context lasts. Any thread may call it."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._rewrites = rewrites(self._stream)
        self._lock = threading.RLock()
        # what is being done, in words, and since when
        self._things: dict[str, tuple[str, float]] = {}
        self._written_s = 0.0
        self._bars: dict[str, _Bar] = {}
        self._open = False  # whether the terminal shows a line that will be rewritten
        self.read_enough = False  # nobody reads standard output any more
        self._asking = False
        # whether a command's output ended in the middle of a line on the terminal
        self._partial = False
        self._over = threading.Event()
        self._ticks = threading.Thread(target=self._tick, name="follower", daemon=True)
        self._queue: Queue[tuple[Callable[[str], None], str] | None] = Queue()
        self._writer = threading.Thread(target=self._write_queued, name="writer", daemon=True)
        self._waiting = 0  # characters in the queue
        self._left_out = 0

    def __enter__(self) -> Follower:
        self._writer.start()
        self._ticks.start()
        return self

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        self._over.set()
        self._ticks.join()
        with self._lock:
            self._close()
            if words := self._name_left_out():
                self._send(self._to_output, words)
            self._queue.put(None)
        self._writer.join()

    def flush(self) -> None:
        """Wait until everything is written. For a caller with nothing else to do."""
        if self._writer.is_alive():
            self._queue.join()

    def begins(self, thing: str, words: str) -> None:
        with self._lock:
            if self._things.get(thing, ("",))[0] == words:
                return
            self._close()
            self._things.pop(thing, None)  # so that the newest comes last
            # a text between two actions is shown until the next one begins
            self._things.pop("", None)
            self._things[thing] = (words, self._clock())
            self._write(words)

    def ends(self, thing: str) -> None:
        with self._lock:
            if thing in self._things or thing in self._bars:
                self._close()
                self._things.pop(thing, None)
                self._bars.pop(thing, None)

    def moves(self, what: str, done_bytes: int, total_bytes: int) -> None:
        with self._lock:
            bar = self._bars.get(what)
            if bar is None or (not done_bytes and bar.began):
                self._close()
                bar = self._bars[what] = _Bar(what, total_bytes)
                bar.moved(done_bytes, self._clock())
                self._write(bar.line())
                return
            bar.moved(done_bytes, self._clock())
            if self._rewrites:
                self._write(self._line())
            if done_bytes >= total_bytes:
                self._close()
                del self._bars[what]

    def look(self) -> None:
        """Show the progress of what goes on now, if a line is due."""
        with self._lock:
            due = self._rewrites or self._clock() - self._written_s >= REPEAT_S
            if due and (line := self._line()):
                self._write(line)

    def says(self, line: str) -> None:
        """Write a line that stays, above the line that is rewritten."""
        with self._lock:
            if self._open:
                self._put(CLEARED)
                self._open = False
            self._end_output()
            self._put(f"{folded(line, self._stream)}\n")

    def prints(self, text: str) -> None:
        """Write the output of a command on a machine to standard output: raw into a pipe. For a
        terminal, control characters are escaped. No progress line is shown until another action
        begins. Output is left out while MOST_WAITING characters wait for a reader."""
        with self._lock:
            self._close()
            self._things.clear()
            if not text:
                return
            terminal = sys.stdout.isatty()
            shown = "\r".join(map(plain, text.split("\r"))) if terminal else text
            if self._waiting and self._waiting + len(shown) > MOST_WAITING:
                self._left_out += len(shown)
                return
            shown = self._name_left_out() + shown
            codec = getattr(sys.stdout, "encoding", None) or "utf-8"
            self._send(self._to_output, shown.encode(codec, "backslashreplace").decode(codec))
            self._partial = terminal and not text.endswith("\n")

    def _name_left_out(self) -> str:
        left_out, self._left_out = self._left_out, 0
        return f"\n... {left_out:,} characters that nobody read in time\n" if left_out else ""

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Show no progress line within this context, in which a person answers a question."""
        with self._lock:
            self._close()
            self._asking = True
        self.flush()
        try:
            yield
        finally:
            with self._lock:
                self._asking = False

    def _tick(self) -> None:
        while not self._over.wait(TICK_S):
            self.look()

    def _line(self) -> str:
        """What is done now, the newest first; bytes before words."""
        now_s = self._clock()
        lines = [bar.line() for bar in reversed(self._bars.values())]
        for words, since_s in reversed(self._things.values()):
            took_s = now_s - since_s
            lines.append(words + (f", {_time(took_s)}" if took_s >= NOTED_S else ""))
        return "; ".join(lines)

    def _write(self, line: str) -> None:
        if self._asking:
            return
        self._end_output()
        line = short(line).replace("\n", " ")
        self._written_s = self._clock()
        if not self._rewrites:
            self._put(f"{line}\n")
            return
        self._put(CLEARED + cut(line, columns(self._stream) - 1))
        self._open = True

    def _put(self, text: str) -> None:
        if self._waiting <= MOST_WAITING:
            self._send(self._to_stream, text)

    def _end_output(self) -> None:
        if self._partial:
            self._partial = False
            self._send(self._to_output, "\n")

    def _send(self, write: Callable[[str], None], text: str) -> None:
        """Have the thread write the text, or write it at once before the thread exists."""
        if not self._writer.is_alive():
            write(text)
            return
        self._waiting += len(text)
        self._queue.put((write, text))

    def _write_queued(self) -> None:
        while (item := self._queue.get()) is not None:
            write, text = item
            write(text)
            with self._lock:
                self._waiting -= len(text)
            self._queue.task_done()

    def _to_stream(self, text: str) -> None:
        """Write to the stream. Errors are ignored: nobody may read any more, such as after a
        hang-up, and no run fails for that."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def _to_output(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except (OSError, ValueError):  # the run goes on
            self.read_enough = True

    def _close(self) -> None:
        """Leave the line that was rewritten as it is now."""
        if self._open:
            if line := self._line():
                self._write(line)
            self._put("\n")
            self._open = False


class _Bar:
    """The bytes of one transfer, and its rate over the last REPEAT_S."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total = total_bytes
        self.began = False  # whether any byte was moved
        self._moved: deque[tuple[float, int]] = deque()

    def moved(self, done_bytes: int, now_s: float) -> None:
        self.began = self.began or done_bytes > 0
        self._moved.append((now_s, done_bytes))
        while len(self._moved) > 2 and now_s - self._moved[1][0] >= REPEAT_S:
            self._moved.popleft()

    def line(self) -> str:
        """``storing mywork, pass 1: 1.2 of 1.9 GB, 85 MB/s, 8 s left``"""
        (began_s, began), (now_s, done) = self._moved[0], self._moved[-1]
        size, unit = next(one for one in _UNITS if self._total >= one[0])
        digits = 0 if size == 1 else 1
        total = f"{self._total / size:.{digits}f} {unit}"
        if not done:
            return f"{self._what}: {total}"
        words = f"{self._what}: {done / size:.{digits}f} of {total}"
        if done >= self._total:
            words = f"{self._what}: {total}"
        if now_s <= began_s:
            return words
        rate = (done - began) / (now_s - began_s)
        words += f", {_rate(rate)}"
        left = self._total - done
        return f"{words}, {_time(left / rate)} left" if left and rate > 0 else words


def _rate(bytes_s: float) -> str:
    size, unit = next((one for one in _UNITS if bytes_s >= one[0]), _UNITS[-1])
    return f"{bytes_s / size:.0f} {unit}/s"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
