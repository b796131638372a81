"""What a snapshot would store now: a request that holds no workspace, and its answer."""

from __future__ import annotations

import msgspec

from torpor.shared.values import WorkspaceName
from torpor.shared.wire.losses import Losses
from torpor.shared.wire.request import Count, Request, Words


class Preview(msgspec.Struct, frozen=True):
    """``root``: the root hash (hex) of the snapshot, among ``known``, that the tree was compared
    with; empty where this machine remembers none of them, and every file counts as new. ``unread``:
    the bytes of ``new_files`` that a snapshot would read. ``skipped``: FIFOs, sockets and devices.
    """

    root: Words
    files: Count
    bytes: Count
    new_files: Count
    unread: Count
    skipped: Count
    losses: Losses


class PreviewSnapshot(Request[Preview], frozen=True):
    """Walk the workspace beside whatever works on it, and look for what a snapshot would lack.
    Holds no workspace, ends no save, and changes nothing.

    ``key`` and ``known`` are as in BeginSnapshot, but ``known`` has root hashes (hex) alone; the
    others are as in LookForLosses.
    """

    op = "snapshot.preview"
    workspace: WorkspaceName
    roots: list[str]
    exclude: list[str]
    key: str | None
    known: list[str]
    accepted: list[str]
    rented: bool
    whole: bool
    wait_s: float
    volumes: list[str]
