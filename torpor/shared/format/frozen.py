"""What the environment record of a snapshot says of the programs that it holds frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from torpor.shared.values import FrozenPrograms, Host, learned

_KEY: Final = "frozen"
"""Its name in the environment record, where a reader of any torpor takes it for a fact more."""


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
    """What a snapshot of so many programs says; ``gpus``: how many their machine has, where they
    use them."""
    return {_KEY: {"programs": programs, "gpus": gpus}} if programs else {}


def frozen_in(environment: Mapping[str, Any]) -> FrozenPrograms | None:
    """What programs need that are frozen in a snapshot; None where it says nothing of them."""
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
