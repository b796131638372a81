"""Which directories a manifest may name. The block of the workspace decides that, and never the
manifest: a hostile machine wrote it, or anybody who can write in the bucket."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final

from torpor.shared.errors import ManifestInvalid, OtherPaths
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import overlap, tidy_path

_MOST: Final = 5
_LONGEST: Final = 200
"""The most directories that a message names, and the most characters of each: a manifest may hold
any number of any length."""

USER_HOME: Final = "user_home"
"""The key in a manifest's machine record of the home directory of the user that torpor logged in
as."""


def check_roots(manifest: Manifest, allowed: Sequence[str], what: str) -> None:
    """Raise OtherPaths unless every root is one of the paths ``allowed``, and ManifestInvalid where
    one root is another or within it."""
    tidy = [tidy_path(root) for root in manifest.roots]
    paths = [tidy_path(path) for path in allowed]
    others = [root for root in tidy if root not in paths]
    if others:
        raise OtherPaths(
            f"{what} names {_shown(others)}, and the workspace's paths are {_shown(paths)}: "
            "nothing was written. If you know these directories, add them to `paths` in the "
            "workspace block, or name them in `accept_paths` of wake; if not, do not trust the "
            "machine that made the snapshot, nor who can write in the bucket, and use an older "
            "snapshot"
        )
    for first, second in combinations(tidy, 2):
        if overlap(first, second):
            raise ManifestInvalid(
                f"{what} is refused: its directories {first} and {second} overlap; "
                "nothing was written"
            )


def places_of(manifest: Manifest) -> list[str]:
    """The absolute paths of the roots on the machine that made the snapshot; none where the machine
    record, which that machine wrote, does not say them."""
    home = manifest.environment.get(USER_HOME)
    if not isinstance(home, str):
        return []
    whole = (home + root[1:] if root.startswith("~/") else root for root in manifest.roots)
    return [*map(tidy_path, whole)]


def _shown(paths: Sequence[str]) -> str:
    more = len(paths) - _MOST
    words = ", ".join(repr(path[:_LONGEST]) for path in paths[:_MOST]) or "none"
    return f"{words} and {more} more" if more > 0 else words
