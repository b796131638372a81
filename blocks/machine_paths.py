"""Directories on a machine as a field of a block: each has one spelling, so that they can be
compared."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from torpor.shared.errors import InvalidInput
from torpor.shared.values import machine_path


def _tidied(paths: list[str]) -> list[str]:
    try:
        return list(dict.fromkeys(map(machine_path, paths)))
    except InvalidInput as cause:
        raise ValueError(str(cause)) from None


MachinePaths = Annotated[list[str], AfterValidator(_tidied)]
