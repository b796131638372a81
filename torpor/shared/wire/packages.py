"""The request that puts packages back on a machine, and its answer."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from torpor.shared.wire.request import Count, Names, OfRun, Words

INSTALL_S: Final = 600.0
"""How long apt-get and pip may take together until they change the system: apt-get two thirds of
it, and then pip one."""
SETTLE_S: Final = 1800.0
"""How long either may then change the system, whatever happens."""
ANSWER_S: Final = INSTALL_S + 2 * SETTLE_S + 120.0


class NotBack(msgspec.Struct, frozen=True):
    """Packages that are missing for one reason: the first names, and how many. ``kind``: apt or
    pip."""

    kind: Words
    why: Words
    names: Names
    count: Count


class PackagesBack(msgspec.Struct, frozen=True):
    """``back``: packages with their versions, and how many. ``other``: those that are there in
    another version than the snapshot names, or than the machine had before pip."""

    back: Names
    back_count: Count
    other: Names
    other_count: Count
    not_back: Annotated[list[NotBack], msgspec.Meta(max_length=100)]


class PutPackagesBack(OfRun[PackagesBack], frozen=True):
    """Put back what the snapshot of this restore names of packages of apt and pip, outside of the
    workspace, and what the machine lacks. Before the machine is handed over. Later snapshots of the
    machine name them, too. ``rented``: nothing is installed on a machine that is not. Repeatable;
    writes nothing into the workspace."""

    op = "restore.packages"
    rented: bool
