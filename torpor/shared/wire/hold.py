"""Holding a workspace on a machine, for a step that stores and restores nothing there."""

from __future__ import annotations

from torpor.shared.wire.request import BeginsRun, Nothing, OfRun


class Hold(BeginsRun[Nothing], frozen=True):
    """Hold the workspace. WorkspaceBusy while another run does."""

    op = "hold.begin"


class EndHold(OfRun[Nothing], frozen=True):
    """Give the workspace back."""

    op = "hold.end"
