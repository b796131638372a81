"""What the environment record of a snapshot says of programs that the snapshot holds frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from torpor.shared.values import FrozenPrograms, Host, learned

_KEY: Final = "frozen"
"""The key in the manifest's environment record. Readers that do not know the key ignore it."""


class _Record(msgspec.Struct, frozen=True):
    programs: int = 0
    gpus: int = 0


class _Machine(msgspec.Struct, frozen=True):
    frozen: _Record = msgspec.field(default=_Record(), name=_KEY)
    kernel: str | None = None
    cpu_features: str | None = None
    nvidia_driver: str | None = None
    gpus: list[str] = []


def frozen_record(programs: int, gpus: int) -> dict[str, Any]:
    """The fact of a snapshot with this many frozen programs. ``gpus``: how many GPUs their machine
    has, if the programs use them."""
    return {_KEY: {"programs": programs, "gpus": gpus}} if programs else {}


def frozen_in(environment: Mapping[str, Any]) -> FrozenPrograms | None:
    """What the frozen programs of a snapshot need to go on; None where the snapshot says nothing of
    frozen programs."""
    try:
        was = msgspec.convert(environment, learned(_Machine))
    except msgspec.ValidationError:
        return None
    if not was.frozen.programs:
        return None
    gpus = was.frozen.gpus
    driver = (was.nvidia_driver or "") if gpus else ""
    host = Host(was.kernel or "", was.cpu_features or "", driver)
    return FrozenPrograms(host, was.gpus[0].partition(",")[0] if gpus and was.gpus else "", gpus)
