"""A part of a snapshot as a manifest of its own: one file, or one directory with all below it."""

from __future__ import annotations

import msgspec

from torpor.shared.errors import InvalidInput
from torpor.shared.format.manifest import DIRECTORY, FILE, HARDLINK, Entry, Manifest

_PRIVATE = 0o700
_HOME = b"home"
"""The name that a selection of a whole home gets. A directory called ``~`` would be risky: a
careless `rm -r ~` deletes the home."""


def select(manifest: Manifest, root: int, path: bytes) -> tuple[Manifest, bytes]:
    """The manifest of the entry at ``path`` below the root of that number, and its last name.

    The selection has one root, a private directory that holds that name and nothing else. A hard
    link whose file is outside becomes that file. Raises InvalidInput if there is no such entry.
    """
    inside = [
        entry
        for entry in manifest.entries
        if entry.root == root and (entry.path == path or _below(entry.path, path))
    ]
    if not 0 <= root < len(manifest.roots) or not inside:
        raise InvalidInput(
            f"snapshot {manifest.snapshot} has nothing at {path!r} in its directory {root}"
        )
    whole = manifest.roots[root].rstrip("/").rsplit("/", 1)[-1]
    name = path.rsplit(b"/", 1)[-1] or (_HOME if whole == "~" else whole.encode())
    files = {e.path: e for e in manifest.entries if e.root == root and e.kind == FILE}
    moved: dict[bytes, bytes] = {e.path: _moved(e.path, path, name) for e in inside}
    entries = [Entry(DIRECTORY, 0, b"", _PRIVATE, *_owner(inside[0]), inside[0].mtime_ns, 0)]
    for entry in inside:
        if entry.kind == HARDLINK and entry.target not in moved:
            moved[entry.target] = moved[entry.path]  # the next link to that file leads to this path
            entry = msgspec.structs.replace(files[entry.target], path=entry.path)
        target = moved[entry.target] if entry.kind == HARDLINK else entry.target
        entries.append(
            msgspec.structs.replace(entry, root=0, path=moved[entry.path], target=target)
        )
    selected = msgspec.structs.replace(manifest, roots=["selection"], entries=entries, skipped=[])
    return selected, name


def _below(path: bytes, above: bytes) -> bool:
    return not above or path.startswith(above + b"/")


def _moved(path: bytes, above: bytes, name: bytes) -> bytes:
    """``path`` with ``name`` in place of ``above``."""
    below = path[len(above) :].lstrip(b"/")
    return name + b"/" + below if below else name


def _owner(entry: Entry) -> tuple[int, int]:
    return entry.uid, entry.gid
