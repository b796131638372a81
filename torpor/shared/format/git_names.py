"""Names that git takes for its own, on any file system.

git runs what a machine writes into a directory called `.git`, and into any directory that has what
`.git` has: the file `HEAD` beside `objects` and `refs`, or beside `commondir`. Without its `HEAD`,
git takes no such directory for a repository.
"""

from __future__ import annotations

import re
from typing import Final

_UNSEEN: Final = dict.fromkeys(
    [*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF]
)
"""Characters that HFS+ ignores in a name: the list of git's `utf8.c`."""
_OF_GIT: Final = re.compile(r"(\.git|git~1)[ .]*(:.*)?", re.IGNORECASE | re.DOTALL)
"""NTFS drops spaces and points at the end, has `git~1` as a short name of `.git`, and opens a
stream of a file by `.git:NAME`."""
_HEAD: Final = re.compile(r"HEAD[ .]*(:.*)?", re.IGNORECASE | re.DOTALL)


def is_of_git(path: str) -> bool:
    """Whether a part of the path is `.git`, or would be on HFS+ or NTFS: `.GIT`, `git~1`, `.git. `.
    A backslash parts names on NTFS."""
    return any(_OF_GIT.fullmatch(part) for part in _parts(path))


def is_head(path: str) -> bool:
    """Whether the last part of the path is `HEAD`, or would be on HFS+ or NTFS: `head`, `HEAD.`."""
    return _HEAD.fullmatch(_parts(path)[-1]) is not None


def _parts(path: str) -> list[str]:
    return re.split(r"[/\\]", path.translate(_UNSEEN))
