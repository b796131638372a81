"""The log of a job's command: read from its machine while that is there, else from the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from tasks.jobs import look_at_command, secrets_to_hide, without_nuls
from tasks.machines import machines_of, session_with
from tasks.progress import now
from tasks.runner import runner
from tasks.workspace import OpenWorkspace
from torpor.control.jobs.log_lines import Text
from torpor.control.jobs.records import Job, log_path
from torpor.control.remote.agent import Agent
from torpor.control.store.files import find_file, read_end
from torpor.control.store.manifests import find_snapshot, read_manifest
from torpor.shared.errors import MachineError, TorporError
from torpor.shared.values import MIB, Machine, SnapshotId

NOWHERE = "nowhere: the job is on no machine and has no snapshot"
_PIECE_BYTES = 1 * MIB
TAIL_BYTES = 64 * 1024  # bytes read first for a tail; four times as many if they hold too few lines
MOST_TAIL_BYTES = 4 * MIB
_POLL_S = 1.0  # between two looks at a log that is followed
_IDLE_POLL_S = 5.0  # between two looks at a job whose command runs nowhere


class JobLogReader:
    """Reads the log of one job. ``source``: where it was read last, in words."""

    def __init__(self, opened: OpenWorkspace, job: Job) -> None:
        self._opened = opened
        self._job = job
        self._path = log_path(opened.spec, job.id)
        self._text = Text(self._path, secrets_to_hide(job))
        self._offset = 0  # the log was read up to this offset
        self._over = 0  # the newest attempt that was seen to have ended
        self.source = NOWHERE

    def read(self, tail: int | None = None) -> Iterator[str]:
        """The whole log as it is now, or its last ``tail`` lines."""
        try:
            machine = self._machine()
            if machine is not None:
                with session_with(self._opened, machine) as session:
                    yield from self._from_machine(session, tail)
                    yield self._text.feed("", end=True)
                self.source = f"machine {machine.id}"
                return
        except TorporError as error:
            runner().log.warning("the log cannot be read on the job's machine: %s", error)
        yield from self._from_store(tail)

    def follow(
        self, tail: int | None = None, nap: Callable[[float], None] = time.sleep
    ) -> Iterator[str]:
        """Yield the log as ``read`` does, and then what is written to it until the job has
        ended."""
        while True:
            try:
                job = self._job = self._opened.jobs.of(self._job.id) or self._job
                if job.ended:
                    break
                attempt = job.attempt
                machine = None if attempt is None else self._machine()
                if attempt is None or machine is None or attempt.number <= self._over:
                    now(f"job {job.id} is {job.outcome}")
                    nap(_IDLE_POLL_S)
                    continue
                with session_with(self._opened, machine) as session:
                    for text in self._from_machine(session, tail, nap):
                        tail = None
                        yield text
            except TorporError as error:
                if not (error.retryable or isinstance(error, MachineError)):
                    raise
                runner().log.warning("the log cannot be read for now: %s", error)
                nap(_IDLE_POLL_S)
        yield from self._from_store(tail)
        now(f"job {self._job.id} is {self._job.outcome}")

    def _from_machine(
        self, session: Agent, tail: int | None, nap: Callable[[float], None] | None = None
    ) -> Iterator[str]:
        """New text of the log on the machine; with ``nap``, until the command has ended."""
        if tail is not None:
            yield self._text.feed(self._tail_there(session, tail))
        while True:
            look = look_at_command(session, self._job.id, self._offset, _PIECE_BYTES)
            if look.unread:
                raise MachineError(f"{self._path}: {look.unread}")
            moved, self._offset = look.offset != self._offset, look.offset
            yield self._text.feed(look.text)
            if moved and look.offset < look.bytes:
                continue
            if nap is None or look.state.state != "running":
                self._over = look.state.attempt
                return
            nap(_POLL_S)

    def _tail_there(self, session: Agent, lines: int) -> str:
        end = look_at_command(session, self._job.id, 0, 0).bytes
        want = TAIL_BYTES
        while True:
            begin = at = max(0, end - want)
            text = ""
            while at < end:
                look = look_at_command(session, self._job.id, at, _PIECE_BYTES)
                if look.unread or look.offset <= at:
                    break
                text, at = text + look.text, look.offset
            if begin:
                # drop the first line, which may be cut in the middle of a secret
                text = text.partition("\n")[2]
            if not begin or want >= MOST_TAIL_BYTES or text.count("\n") > lines:
                self._offset = at
                return _last(text, lines)
            want *= 4

    def _from_store(self, tail: int | None) -> Iterator[str]:
        """Text of the log in the job's newest snapshot, behind what was read on the machine."""
        if self._job.newest is None:
            yield self._text.feed("", end=True)
            return
        self.source = f"snapshot {self._job.newest}"
        text = self._stored(self._job.newest, tail is None)
        yield self._text.feed(text if tail is None else _last(text, tail), end=True)

    def _stored(self, snapshot: SnapshotId, whole: bool) -> str:
        store, seal = self._opened.store, self._opened.seal
        found = find_snapshot(store, self._opened.spec.name, snapshot)
        manifest = read_manifest(store, found, seal)
        entry = find_file(manifest, self._path)
        if entry is None:
            return ""
        new = entry.size - self._offset if self._offset <= entry.size else entry.size
        most_bytes = new if whole else min(new, MOST_TAIL_BYTES)
        text = read_end(store, manifest, entry, seal, most_bytes).decode(errors="replace")
        cut = most_bytes < new  # the text then begins within a line, perhaps within a secret
        return without_nuls(text.partition("\n")[2] if cut else text)

    def _machine(self) -> Machine | None:
        wanted = self._job.attempts[-1].machine if self._job.attempts else None
        mine = [one for one, _ in machines_of(self._opened).machines if one.id == wanted]
        return mine[0] if mine and mine[0].state == "running" else None


def _last(text: str, lines: int) -> str:
    return "".join(text.splitlines(keepends=True)[-lines:]) if lines else ""
