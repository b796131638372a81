"""The control side's half of a preview: what a snapshot would store now, and since which other."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from torpor.control.remote.agent import Agent
from torpor.control.remote.limits import hostile
from torpor.control.remote.snapshot import KNOWN_SNAPSHOTS
from torpor.control.store.manifests import list_snapshots
from torpor.control.store.object_store import ObjectStore
from torpor.shared.values import StoredSnapshot, WorkspaceSpec
from torpor.shared.wire.preview import Preview, PreviewSnapshot


def preview(
    agent: Agent,
    store: ObjectStore,
    spec: WorkspaceSpec,
    key: bytes | None,
    *,
    rented: bool,
    whole: bool,
    wait_s: float,
    volumes: Sequence[str] = (),
) -> tuple[Preview, StoredSnapshot | None]:
    """What a snapshot would store now, and the snapshot that the machine compared its tree with;
    None where it remembers none of the newest. Holds and changes nothing on the machine. The others
    are as in RemoteSnapshot.losses. Raises WorkspaceInvalid, AgentLost and what the store raises.
    """
    known = {one.root: one for one in list_snapshots(store, spec.name, newest=KNOWN_SNAPSHOTS)}
    found = agent.call(
        PreviewSnapshot(
            spec.name,
            spec.paths,
            spec.exclude,
            None if key is None else key.hex(),
            [*known],
            spec.accept_lost,
            rented,
            whole,
            wait_s,
            list(volumes),
        ),
        request_id=f"preview:{secrets.token_hex(8)}",
    )
    if found.root and found.root not in known:
        raise hostile(agent.hello.machine, "remembers a snapshot that it was not told of")
    return found, known.get(found.root)
