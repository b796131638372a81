"""What a snapshot would store now, and what it would lack: a look that holds no workspace."""

from __future__ import annotations

from torpor.machine.agent.brought import new_directories
from torpor.machine.agent.call import Call
from torpor.machine.agent.losses import LookBehind
from torpor.machine.agent.runs import seal_of
from torpor.machine.agent.snapshot import holds_no_work, why_used
from torpor.machine.agent.state import WorkspaceState
from torpor.machine.tree.names import Names
from torpor.machine.tree.plan import cut
from torpor.machine.tree.walk import compile_excludes, hold_nothing, resolve_roots, walk
from torpor.shared.values import workspace_name
from torpor.shared.wire.losses import LookForLosses
from torpor.shared.wire.preview import Preview, PreviewSnapshot


def preview(request: PreviewSnapshot, call: Call) -> Preview:
    """Compare the tree with the newest of the known snapshots that this machine remembers, by the
    walk that begins each pass of a snapshot."""
    state = WorkspaceState(call.home, workspace_name(request.workspace))
    state.check_not_half_restored("; there is nothing whole to store before")
    record = state.sync_record()
    if record is not None and record.mixed:
        raise state.half_synced(record, ", which continues it")
    used = why_used(state, call.home, len(request.known))
    new = new_directories(call.home)
    roots = resolve_roots(request.roots, new, not_empty=used)
    seal, among = seal_of(request.key), {bytes.fromhex(root) for root in request.known}
    index = state.load_own_save(roots, seal, among) or state.load_index(roots, seal, among)
    held = Names(len(roots)) if index is None else index.held
    chunks = 0 if index is None else len(index.manifest.chunks)
    behind = LookBehind(call.home, roots)
    look = LookForLosses(
        "", request.accepted, request.rented, request.whole, request.wait_s, request.volumes
    )
    try:
        if request.whole:
            behind.begin(look)  # runs beside the walk
        seen = walk(roots, held, compile_excludes(request.exclude), call.check)
        entries = seen.names.settled().entries
        left_empty = not used and new.issuperset(roots) and hold_nothing(roots)
        if len(seen.names) == len(roots) and not left_empty:
            raise holds_no_work(state.workspace, request.roots, roots)
        losses = behind.losses(look, entries, call)
    finally:
        behind.close()
    totals = entries.totals(chunks)
    return Preview(
        root="" if index is None else index.root.hex(),
        files=totals.files,
        bytes=totals.size + sum(size for size, _ in seen.unread.sizes()),
        new_files=len(seen.unread),
        unread=sum(job.length for job in cut(seen.unread, roots)),
        skipped=len(seen.skipped),
        losses=losses,
    )
