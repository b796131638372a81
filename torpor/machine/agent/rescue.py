"""A save that the machine makes by itself when it will be taken away, or every few minutes, in a
process of its own.

It needs neither the control side nor the agent: its book has the grants, and the packs that a
manifest may not name. The control side verifies the snapshot later. docs/contributing/prune.md says
why prune does it no harm.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from torpor.machine.agent.call import Call
from torpor.machine.agent.environment import record_environment
from torpor.machine.agent.home import LIFE_LOCK, agent_alive
from torpor.machine.agent.hook import SAVE, run_hook
from torpor.machine.agent.log import LOG_FILE, Log, scrub
from torpor.machine.agent.memory import keep_freed_chunks
from torpor.machine.agent.memory_room import room
from torpor.machine.agent.os_trouble import os_trouble
from torpor.machine.agent.passes import Workers
from torpor.machine.agent.resume import watch_owed
from torpor.machine.agent.snapshot import SnapshotRun
from torpor.machine.agent.workers import workers_in
from torpor.machine.checkpoint.criu import CheckpointFailed
from torpor.machine.pipeline.journal import Journal
from torpor.machine.sampler.save_lock import saving
from torpor.machine.supervisor.folder import JobFolder
from torpor.machine.supervisor.freezing import LEAST_BYTES
from torpor.machine.supervisor.saves import Rescued, SaveRequest
from torpor.shared.errors import (
    AgentLost,
    GrantExpired,
    HookFailed,
    InvalidInput,
    RunCancelled,
    StoreCorrupt,
    StoreUnavailable,
    TorporError,
    WorkspaceBusy,
)
from torpor.shared.format.lineage import AUTOSAVE, OWN_SAVE
from torpor.shared.format.names import pack_key
from torpor.shared.values import ObjectKey, learned
from torpor.shared.wire.job import OwnSave
from torpor.shared.wire.protocol import MAX_LINE_BYTES, encode_line
from torpor.shared.wire.request import Event
from torpor.shared.wire.snapshot import (
    BeginSnapshot,
    Commit,
    Program,
    StorePasses,
)

MOST_PASSES: Final = 3
"""Passes of a save at most: as many as the control side makes for a machine that is kept; fewer if
time is short."""
WAIT_S: Final = 600.0
"""Seconds to wait for a run that holds the workspace, if the machine is not about to end. If it is,
a quarter of the time that is left is waited, and then the agent is ended."""
ENDS_S: Final = 3.0
"""Seconds that an agent that was asked to leave gets before SIGKILL, and again after it."""
NICE: Final = 10
"""The nice value of a scheduled save, so that the user's programs run first."""
TRIES_S: Final = 300.0
"""Seconds for which the store is tried at least: a machine may live longer than its market said."""
COMMAND_ENDS_S: Final = 2.0
"""Seconds that a save which gives way waits for the end of its save command."""
_RETRY_S: Final = 1.0
_POLL_S: Final = 0.1


def rescue_by_stdin(home: Path) -> int:
    """Read the request from stdin, save, and print the outcome; returns 0 if a save was made."""
    # a machine that shuts down sends these to other processes
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, _unheard)  # not SIG_IGN, which the user's commands would inherit
    log = Log(home / LOG_FILE)
    try:
        asked = msgspec.convert(
            json.loads(sys.stdin.buffer.read(MAX_LINE_BYTES)), learned(SaveRequest)
        )
    except ValueError:  # its message may hold what it read
        done = Rescued(None, "the request for the machine's own save cannot be read")
    else:
        keep_freed_chunks()
        ends = threading.Event()
        rescue = Rescue(home, asked, log.write, ends.is_set)
        if asked.freeze is not None:
            signal.signal(signal.SIGTERM, lambda _number, _frame: ends.set())
        if asked.scheduled:
            watch_owed(home)  # before this process gets its nice value
            os.nice(NICE)
            signal.signal(signal.SIGTERM, lambda _number, _frame: _give_way(rescue))
        with saving(home, asked.book.workspace) if asked.scheduled else nullcontext():
            done = _scrubbed(rescue, asked, log)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if done.error or not done.unsent:
        log.write(f"own save: {done.saved.snapshot if done.saved else 'none'}. {done.error}")
    sys.stdout.buffer.write(encode_line(msgspec.to_builtins(done)))
    sys.stdout.flush()
    return 0 if done.saved else 1


def _unheard(_number: int, _frame: object) -> None:
    """Ignore the signal."""


def _give_way(rescue: Rescue) -> None:
    """End this process at once, with the save command: what the save has stored is in the
    journal."""
    rescue.end_save_command()
    with suppress(OSError):  # the process that began it may have been killed
        os.write(1, encode_line(msgspec.to_builtins(rescue.so_far())))
    os._exit(1)


def _scrubbed(rescue: Rescue, asked: SaveRequest, log: Log) -> Rescued:
    """The outcome, without the grants and the key."""
    secret = msgspec.to_builtins(asked.book)
    try:
        done = rescue.run()
    except TorporError as error:
        done = Rescued(None, str(error))
    except Exception as error:  # noqa: BLE001  the process's border: its reader gets the cause
        log.write(scrub(traceback.format_exc(), secret))
        words = os_trouble(error) or f"{type(error).__name__}: {error}"
        done = Rescued(None, f"the machine's own save failed: {words}")
    return msgspec.structs.replace(done, error=scrub(done.error, secret))


class Rescue:
    """One save by the machine itself. ``say`` gets messages that the reader needs at once.
    ``ends``: whether the machine shuts down."""

    def __init__(
        self,
        home: Path,
        asked: SaveRequest,
        say: Callable[[str], None],
        ends: Callable[[], bool] = lambda: False,
    ) -> None:
        self._home = home
        self._freeze = asked.freeze
        self._ends = ends
        self._killed = False
        self._stored_s = self._committed_s = 0.0
        self._book = asked.book
        self._given_unix = asked.given_unix
        self._left_s = asked.left_s
        self._made = asked.made
        self._scheduled = asked.scheduled
        self._began, self._began_unix = time.monotonic(), time.time()
        self._say = say
        self._call = Call("rescue", home, _unseen)
        self._passes = 0
        self._unusable = asked.book.unusable
        self._new_bytes = 0
        self._resumed: list[ObjectKey] = []
        self._stores: SnapshotRun | None = None
        self._sends = False  # whether the manifest is being sent
        self._gives_way = threading.Event()
        self._save_command = threading.Lock()  # held while the save command runs

    def so_far(self) -> Rescued:
        """The grants that a save which gives way has used."""
        used = 0 if self._stores is None else self._stores.filled_packs
        return Rescued(None, gave_way=True, packs=used, unsent=not self._sends)

    def end_save_command(self) -> None:
        """End the save command where it runs, and let none begin any more: the command of another
        run would write the same files."""
        self._gives_way.set()
        self._save_command.acquire(timeout=COMMAND_ENDS_S)

    def run(self) -> Rescued:
        """Save the workspace. Raises TorporError where nothing could be saved."""
        if not self._book.saves:
            raise InvalidInput("a save needs a grant for its manifest")
        with ThreadPoolExecutor(2, "rescue") as threads:
            if not self._scheduled:  # a scheduled save most often needs no manifest
                threads.submit(record_environment)  # nvidia-smi may take seconds
            try:
                run = self._take_workspace()
            except WorkspaceBusy:
                if self._scheduled:
                    return Rescued(None, gave_way=True, packs=0, unsent=True)
                raise
            self._stores, words = run, None
            try:
                words = threads.submit(self._run_save_command, self._add_pending_resume(run))
                with run.starting(self._call):
                    self._begin(run)
                error = words.result()
                try:
                    with run.serving(self._call):
                        saved = (self._save_frozen if self._freeze else self._save)(run)
                except GrantExpired as late:
                    if not self._has_stored(run):
                        raise
                    more = f"{late}. The next save goes on with what this one has stored"
                    return Rescued(None, more, packs=run.filled_packs)
                except CheckpointFailed as why:  # raised before anything was sent
                    return Rescued(None, str(why), packs=run.filled_packs, unsent=True)
                packs = run.filled_packs
                sent_s = run.line_s + self._committed_s
                if saved is None:
                    return Rescued(
                        None, error, unchanged=True, packs=packs, unsent=True, sent_s=sent_s
                    )
                moved = self._new_bytes if self._new_bytes >= LEAST_BYTES else 0
                bytes_s = moved / max(self._stored_s, 0.001)
                return Rescued(saved, error, packs=packs, bytes_s=bytes_s, sent_s=sent_s)
            finally:
                if words is not None:
                    wait([words])
                if not self._scheduled and (fault := run.settle()):
                    self._say(fault)
                run.end("the machine's own save is over")

    def _add_pending_resume(self, run: SnapshotRun) -> str:
        """Record that the counterpart of the save command has to run from now on; returns in words
        why the save command must not run."""
        if not self._book.save_argv:
            return ""
        try:
            run.add_pending_resume(self._book.resume_argv, self._book.save_timeout_s)
        except WorkspaceBusy as error:
            return f"the save command did not run: {error}"
        return ""

    def _run_save_command(self, why_not: str) -> str:
        """Let the user's program write its state; returns in words what went wrong. An older state
        is better than none."""
        if why_not:
            self._say(why_not)
            return why_not
        argv, most_s = self._book.save_argv, self._book.save_timeout_s
        if not argv:
            return ""
        if self._left_s is not None:
            left_s = self._left_s - (time.monotonic() - self._began)
            most_s = min(most_s, max(left_s, 0.0) / 2)
        with self._save_command:
            try:
                run_hook(argv, most_s, self._check_goes_on, SAVE)
            except HookFailed as error:
                self._say(str(error))
                return str(error)
        return ""

    def _check_goes_on(self) -> None:
        if self._gives_way.is_set():
            raise RunCancelled("the save gives way to a run")

    def _take_workspace(self) -> SnapshotRun:
        """Hold the workspace. A run of the agent may be about to end: wait for it. If the time runs
        out, end the agent, because every run survives the death of its agent."""
        if self._left_s is None:
            return self._taken_within(0.0 if self._scheduled else WAIT_S)
        for wait_s, number in (
            (self._left_s / 4, signal.SIGTERM),
            (ENDS_S, signal.SIGKILL),
        ):
            with suppress(WorkspaceBusy):
                return self._taken_within(wait_s)
            self._say(f"a run holds workspace {self._book.workspace}: the agent gets {number.name}")
            _signal_agent(self._home, number)
        return self._taken_within(ENDS_S)

    def _taken_within(self, seconds: float) -> SnapshotRun:
        give_up = time.monotonic() + seconds
        while True:
            try:
                return SnapshotRun(self._home, secrets.token_hex(8), self._book.workspace)
            except WorkspaceBusy:
                if time.monotonic() >= give_up:
                    raise
            time.sleep(_POLL_S)

    def _begin(self, run: SnapshotRun) -> None:
        book = self._book
        begin = BeginSnapshot(
            run.id,
            book.workspace,
            book.authority,
            book.roots,
            book.exclude,
            book.key,
            book.known,
            book.compression,
        )
        run.connections.trust(book.authority)
        begun = run.begin(begin, self._call, self._made)
        # Other packs from before the book may have been marked or swept before the marks were read.
        usable = set(book.young) | {
            pack_key(book.workspace, record.pack.id)
            for record in Journal(run.state.journal).read()
            if record.stored_unix > self._given_unix
        }
        self._resumed = [upload.key for upload in begun.resumable if upload.key in usable]

    def _has_stored(self, run: SnapshotRun) -> bool:
        """Whether this save has stored a pack with which the next save can go on."""
        return any(
            record.stored_unix >= self._began_unix for record in Journal(run.state.journal).read()
        )

    def _save(self, run: SnapshotRun) -> OwnSave | None:
        """Save; try again while the store does not answer. None for a scheduled save of a workspace
        that has not changed."""
        give_up = self._began + max(TRIES_S, 2 * (self._left_s or 0.0))
        while True:
            try:
                self._store(run)
                if self._scheduled and run.is_unchanged():
                    return None
                return self._commit(run)
            except GrantExpired as error:
                raise GrantExpired(
                    f"{error}. The machine could not save by itself: the control side has not been "
                    f"there for {self._book.lasts_s / 3600:g} h, or the workspace has grown beyond "
                    "its grants"
                ) from None
            except (StoreUnavailable, StoreCorrupt, AgentLost) as error:
                if time.monotonic() >= give_up:
                    raise
                self._say(f"once more: {error}")
                time.sleep(_RETRY_S)

    def _save_frozen(self, run: SnapshotRun) -> OwnSave | None:
        """Freeze the command, and save with that. The command is ended right before the manifest is
        sent: from then on it goes on nowhere but from what is frozen, whatever becomes of the save.
        If the save fails before that, the command goes on here."""
        freeze, left_s = self._freeze, self._left_s
        if freeze is None or left_s is None:
            raise InvalidInput("a command is frozen for a machine that ends")
        log = self._held_log(freeze.job, left_s)
        self._late = threading.Timer(left_s - (time.monotonic() - self._began), self._call.cancel)
        self._late.start()
        try:
            snapshot = self._book.saves[0].snapshot
            program = Program(freeze.job, freeze.images)
            frozen = run.freeze(program, freeze.criu, left_s, snapshot, self._call)
            if frozen.why_not or not frozen.bytes:
                raise CheckpointFailed(frozen.why_not or "it has ended")
            if self._ends():  # the command may have heard of the shutdown, too
                raise CheckpointFailed("the machine shuts down")
            try:
                return self._save(run)
            except RunCancelled:
                if self._killed:
                    raise
                raise CheckpointFailed(
                    f"its {frozen.bytes:,} frozen bytes were not stored before the time was over"
                ) from None
        finally:
            self._late.cancel()
            if fault := run.settle():
                self._say(fault)
            os.close(log)  # from now on the supervisor says how the command ended

    def _held_log(self, job: str, left_s: float) -> int:
        """The lock of the command's log, which its supervisor holds for a look at a time."""
        folder = JobFolder(self._home, job)
        try:
            while (lock := folder.take_log()) is None:
                if self._ends():
                    raise CheckpointFailed("the machine shuts down")
                if time.monotonic() >= self._began + left_s:
                    raise CheckpointFailed("its supervisor held its log until the time was over")
                time.sleep(_POLL_S)
        except OSError as error:
            raise CheckpointFailed(f"its log cannot be held: {error}") from None
        return lock

    def _end_command(self, run: SnapshotRun) -> None:
        """End the frozen command, while there is time for the manifest. Nothing else ends it."""
        if self._freeze is None or self._killed:
            return
        self._late.cancel()
        self._late.join()
        self._call.check()
        run.end_frozen()
        self._killed = True

    def _store(self, run: SnapshotRun) -> None:
        """Store what is new, until nothing is, or the time or the passes are used up."""
        book, began = self._book, time.monotonic()
        request = StorePasses(
            run.id, MOST_PASSES, book.packs, self._resumed, self._unusable, book.accepted, []
        )
        workers = Workers(workers_in(room()), lambda check: nullcontext())
        try:
            stored = run.store(request, self._call, workers, goes_on=self._has_time_for, asks=False)
        finally:
            self._stored_s += time.monotonic() - began
        self._unusable = []
        self._passes += stored.passes
        self._new_bytes = stored.new_bytes

    def _has_time_for(self, began: float) -> bool:
        """Whether another pass as long as the last one, and the manifest with as much time again,
        would fit."""
        now = time.monotonic()
        return self._left_s is None or now + 2 * (now - began) < self._began + self._left_s

    def _commit(self, run: SnapshotRun) -> OwnSave:
        save, began = self._book.saves[0], time.monotonic()
        self._sends = True
        statistics, accepted = self._statistics(), self._book.accepted
        commit = Commit(run.id, save.snapshot, save.created_unix, statistics, accepted, save.grant)
        try:
            committed = run.commit(commit, self._call, sending=partial(self._end_command, run))
        finally:
            self._committed_s += time.monotonic() - began
        run.keep_own_save()
        return OwnSave(save.snapshot, committed.root, committed.manifest_bytes, time.time())

    def _statistics(self) -> dict[str, int]:
        statistics = {"new_bytes": self._new_bytes, "passes": self._passes, OWN_SAVE: 1}
        of_the_job = self._book.job and not self._scheduled
        return statistics if of_the_job else {**statistics, AUTOSAVE: 1}


def _signal_agent(home: Path, number: signal.Signals) -> None:
    """Send a signal to the agent of HOME, if it lives."""
    with suppress(OSError, ValueError):  # the agent has just gone
        pid = int((home / LIFE_LOCK).read_text("ascii").split()[0])
        # so the process is the agent, and no other process with the same number
        if agent_alive(home):
            os.kill(pid, number)


def _unseen(event: Event) -> None:
    """Drop progress events, because nobody watches."""
