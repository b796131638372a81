"""What a machine may ask for. Its host may be hostile: each part of a restore becomes a task run,
and each pack a grant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torpor.shared.errors import MachineError
from torpor.shared.format.names import pack_id_of, pack_key
from torpor.shared.values import ObjectKey, WorkspaceName
from torpor.shared.wire.restore import RestorePart

MOST_PACKS: Final = 16_384
"""Packs of one part at most: their grants fit in one request. They hold 900 GiB."""


def check_fetches(
    machine: str, workspace: WorkspaceName, parts: Sequence[RestorePart], most: int
) -> None:
    """Check the parts that a machine wants to fetch: MachineError unless they are few enough and
    all packs are of ``workspace``."""
    _check_count(machine, len(parts), most)
    for part in parts:
        _check_packs(machine, len(part.packs))
        for key in part.packs:
            if not is_pack_of(workspace, key):
                raise hostile(machine, f"asks for {key[:100]!r}, no pack of {workspace}")


def is_pack_of(workspace: WorkspaceName, key: ObjectKey) -> bool:
    try:
        return key == pack_key(workspace, pack_id_of(key))
    except ValueError:
        return False


def _check_count(machine: str, parts: int, most: int) -> None:
    if parts > most:
        raise hostile(machine, f"cuts its work into {parts} parts instead of at most {most}")


def _check_packs(machine: str, packs: int) -> None:
    if packs > MOST_PACKS:
        raise MachineError(
            f"machine {machine} wants {packs} packs in one part, and gets at most {MOST_PACKS}: "
            "restore one directory at a time (`torpor restore`)"
        )


def hostile(machine: str, does: str) -> MachineError:
    return MachineError(
        f"machine {machine} {does}, which no agent does: do not trust its host, and rent elsewhere"
    )
