"""Holding a workspace on a machine, for a step that stores and restores nothing there."""

from __future__ import annotations

import msgspec

from torpor.shared.wire.request import BeginsRun, Nothing, OfRun


class Held(msgspec.Struct, frozen=True):
    """``half_restored``: a restore has begun on the machine, and has not ended."""

    half_restored: bool


class Hold(BeginsRun[Held], frozen=True):
    """Hold the workspace. WorkspaceBusy while another run holds it."""

    op = "hold.begin"


class EndHold(OfRun[Nothing], frozen=True):
    """Give the workspace back."""

    op = "hold.end"
