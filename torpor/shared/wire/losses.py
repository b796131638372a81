"""What is on a machine and in no snapshot: the request for a bounded look, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from torpor.shared.values import learned
from torpor.shared.wire.request import MOST, Count, Names, OfRun, Words

Moment = Annotated[float, msgspec.Meta(ge=0, le=MOST)]


class LeftBehind(msgspec.Struct, frozen=True):
    """Files at or below ``path`` that came or changed since the machine began, and that no package
    owns. ``newest_unix``: their newest change, by the machine's clock."""

    path: Words
    files: Count
    bytes: Count
    newest_unix: Moment


Lefts = Annotated[list[LeftBehind], msgspec.Meta(max_length=100)]
"""The largest of many left-behind paths. An agent sends at most 20; 100 are accepted."""


class LinkOut(msgspec.Struct, frozen=True):
    """A symbolic link of the workspace that leads to data outside of it."""

    link: Words
    data: LeftBehind


class Losses(msgspec.Struct, frozen=True):
    """What would be lost with the machine.

    ``complete``: the look has come to its end; else there may be more. ``total``: all of
    ``folders``, also those that are too many to be named. ``caches``: what its program makes again.
    ``settings``: files of the system that were added or changed. ``packages``: those that were
    added and that no wake puts back; ``kept``: those that one with `environment` keep puts back.
    ``unseen``: what was not looked at, and why. ``user_files``: what of it a user has written in a
    home, by its name there, without settings and caches; ``user_total``: all of that;
    ``user_mark``: the same as long as these files have the same names, and ``user_unseen`` is the
    same: why there may be more; empty where all of it is known.
    """

    complete: bool
    total: LeftBehind
    folders: Lefts
    caches: Lefts
    links: Annotated[list[LinkOut], msgspec.Meta(max_length=100)]
    link_count: Count
    settings: Names
    setting_count: Count
    packages: Names
    package_count: Count
    unseen: Names
    user_files: Lefts = []
    user_total: LeftBehind = LeftBehind("/", 0, 0, 0.0)
    user_unseen: Names = []
    user_mark: Words = ""
    kept: Names = []
    kept_count: Count = 0


class LookForLosses(OfRun[Losses], frozen=True):
    """Look for what the snapshot lacks; the first request begins the look, beside other requests.

    ``wait_s``: how long the answer may wait for its end; then it holds what was found until then.
    ``whole``: look at the whole machine, not only at where links lead. ``rented``: what is older
    than the agent's folder came with the machine; on a whole machine that is not, what is older
    than its first start, and nothing of its other disks or behind links. ``accepted``: directories
    to leave out; they may begin with ~/. ``volumes``: where disks are mounted that outlive the
    machine.
    """

    op = "snapshot.losses"
    accepted: list[str]
    rented: bool
    whole: bool
    wait_s: float
    volumes: list[str]


class LookAtHomes(OfRun[Losses], frozen=True):
    """Look at the homes now, for what a user has written there; the answer holds nothing else. The
    others are as in LookForLosses."""

    op = "snapshot.homes"
    accepted: list[str]
    rented: bool
    volumes: list[str]


SUMMARY: Final = "left_behind"
"""The key in the environment record of a snapshot."""
_KEPT: Final = 10


def summary(losses: Losses) -> dict[str, Any]:
    """The losses as the environment record keeps them, for the user who wakes the snapshot."""
    kept = msgspec.structs.replace(
        losses,
        folders=losses.folders[:_KEPT],
        caches=[],
        links=losses.links[:_KEPT],
        settings=losses.settings[:_KEPT],
        packages=losses.packages[:_KEPT],
        kept=losses.kept[:_KEPT],
        unseen=[],
        user_files=losses.user_files[:_KEPT],
        user_unseen=[],
        user_mark="",
    )
    return {SUMMARY: msgspec.to_builtins(kept)}


def summarised(environment: Mapping[str, Any]) -> Losses | None:
    """The losses that ``summary`` put into an environment record. A machine writes the record: what
    does not fit is ignored."""
    try:
        return msgspec.convert(environment.get(SUMMARY), learned(Losses))
    except msgspec.ValidationError:
        return None
