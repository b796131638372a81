"""What torpor brings to a machine that it has rented, beside snapshots."""

from __future__ import annotations

from typing import Annotated

import msgspec

from torpor.shared.wire.request import Nothing, Request, Words


class PathsMade(msgspec.Struct, frozen=True):
    """``fault``: why interactive shells begin in the home all the same; empty if they do not."""

    fault: Words


class MakePaths(Request[PathsMade], frozen=True):
    """Make the workspace's directories where they are missing, and let the interactive login shells
    of the agent's user begin in the first of them. WorkspaceInvalid for one that cannot be made.
    Holds no workspace. Repeatable."""

    op = "workspace.paths"
    paths: Annotated[list[str], msgspec.Meta(min_length=1)]


class NoteMadeAgain(Request[Nothing], frozen=True):
    """Record that a deploy fills these directories and can fill them again, so that files in them
    do not count as a user's work. The paths may begin with ~/."""

    op = "machine.made-again"
    paths: list[str]
