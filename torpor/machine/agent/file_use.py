"""Which files of a workspace were used since it was restored here.

A deploy says when its server has answered: what was used by then makes the machine ready. The next
deploy that restores the workspace replaces that. Until then a file that made a machine ready stays
so, as long as it is in the tree: a wake without a deploy forgets nothing. What was written since
counts as well, also if that was later: a server that starts before such a file is restored would
make a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from torpor.machine.agent.call import Call
from torpor.machine.agent.state import Index, WorkspaceState
from torpor.machine.tree.access_times import blind_place, used_files
from torpor.machine.tree.names import READ, Names
from torpor.shared.format.file_use import BEFORE_READY, LATER, NEVER, recorded_use
from torpor.shared.format.manifest import FILE, HARDLINK, Entry
from torpor.shared.wire.request import Nothing
from torpor.shared.wire.restore import NoteReady

Files = set[tuple[int, bytes]]
"""Files, by root and path."""


class Noted(NamedTuple):
    """The class of each entry, or ``blind``: where a disk begins on which reads do not show."""

    classes: bytes = b""
    blind: bytes | None = None


def note_ready(request: NoteReady, call: Call) -> Nothing:
    """Keep which files were used by now, if a restore brought the workspace here."""
    state = WorkspaceState(call.home, request.workspace)
    if (use := state.use()) is not None:
        ready = used_files(use.roots, use.since_ns, call.check)
        state.keep_use(replace(use, ready=ready))
    return Nothing()


def ready_before(index: Index | None) -> Files:
    """The files that made a machine ready, as the last snapshot says them."""
    if index is None:
        return set()
    classes = zip(recorded_use(index.manifest), index.manifest.entries, strict=False)
    return {(entry.root, entry.path) for when, entry in classes if when == BEFORE_READY}


def use_of(
    state: WorkspaceState,
    roots: Sequence[bytes],
    excluded: Callable[[bytes], bool] | None,
    names: Names,
    before: Files,
) -> Noted:
    """The use of each of ``names``, as a walk shows it, if a restore brought ``roots`` here.
    ``before``: the files that made an earlier machine ready."""
    use = state.use()
    if use is None or use.roots != list(roots):
        return Noted()
    if (blind := blind_place(roots, excluded)) is not None:
        return Noted(blind=blind)
    ready = before
    if use.ready is not None:
        ready = {(root, path) for root, paths in enumerate(use.ready) for path in paths}

    def when(entry: Entry, mark: int) -> int:
        if entry.kind not in (FILE, HARDLINK):
            return NEVER
        is_written = entry.mtime_ns >= use.since_ns
        if ready and (is_written or (entry.root, entry.path) in ready):
            return BEFORE_READY
        return LATER if is_written or mark & READ else NEVER

    return Noted(bytes(map(when, names.entries, names.marks)))
