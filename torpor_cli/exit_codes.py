"""The exit code of an error, and the message for it."""

from __future__ import annotations

from typing import Final

from torpor.shared.errors import (
    BudgetExceeded,
    HostKeyChanged,
    InvalidInput,
    LacksWork,
    NewerFiles,
    NotOurs,
    OtherPaths,
    SnapshotKept,
    StillChanging,
    TorporError,
    UnsafeDestroy,
    UnsavedWork,
    WorkspaceAwake,
)

FAILED: Final = 1
WRONG_USE: Final = 2
REFUSED: Final = 3
INTERRUPTED: Final = 130

_REFUSED: Final = (
    BudgetExceeded,
    HostKeyChanged,
    LacksWork,
    NewerFiles,
    NotOurs,
    OtherPaths,
    SnapshotKept,
    StillChanging,
    UnsafeDestroy,
    UnsavedWork,
    WorkspaceAwake,
)
"""Errors whose exit code is that of a refusal: something would be lost, overwritten or paid for
twice."""


def explained(error: Exception) -> tuple[int, str]:
    """The exit code of an error, and the text that a person reads. A fault of the code gets no text
    and keeps its traceback."""
    if isinstance(error, _REFUSED):
        return REFUSED, str(error)
    if isinstance(error, InvalidInput):
        return WRONG_USE, str(error)
    if isinstance(error, TorporError):
        return FAILED, str(error)
    # not imported above, as Prefect's own errors are not: `torpor --help` would wait for them
    import httpx

    if isinstance(error, httpx.TransportError):
        from torpor.control.own_server import how_to_start

        return FAILED, f"the Prefect server does not answer ({error}): run {how_to_start()}"
    if type(error).__name__ in ("ParameterTypeError", "ParameterBindError"):
        return WRONG_USE, str(error)
    return FAILED, ""
