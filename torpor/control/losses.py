"""What a destroy would lose, in words for people, and the reasons to keep the machine for it."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from torpor.control.reports import moment
from torpor.shared.format.manifest import Manifest
from torpor.shared.values import GIB, WorkspaceSpec
from torpor.shared.wire.losses import LeftBehind, LinkOut, Losses, summarised
from torpor.shared.wire.snapshot import Missed

SHOWN: Final = 10
"""Directories, or other names, that a report shows; the sum covers all of them."""
_NAMES: Final = 5
_MOST_CHARS: Final = 200
"""The most characters of a path. The machine sends it, so it is not trusted."""


_YOURS: Final = "yours: "
USER_FILES: Final = "~/*"
"""The value of ``accept_lost`` for everything that a user has written in a home beside the
workspace."""


class Lost(msgspec.Struct, frozen=True):
    """``lines``: what is left behind, for a report. ``keep``: why the machine must be kept.
    ``user_files``: what a user has written in a home beside the workspace, or that this is unknown;
    the machine is then kept until a person has accepted the loss, or all of these files are stored.
    ``user_mark``: a hash of these files and of what is unknown. ``storable``: these files are
    known, and nothing else keeps the machine. ``stored``: which of them were stored, for a
    report."""

    lines: list[str] = []
    keep: list[str] = []
    user_files: str = ""
    user_mark: str = ""
    storable: bool = False
    stored: list[str] = []


def judge_losses(losses: Losses, spec: WorkspaceSpec) -> Lost:
    """What ``losses`` mean under the rules of the workspace's block."""
    links = losses.links  # links that lead to an accepted place are not looked at
    folders = [
        folder for folder in losses.folders if not is_accepted(spec.accept_lost, folder.path)
    ]
    user_files = [one for one in losses.user_files if not is_accepted(spec.accept_lost, one.path)]
    lines = [_of_link(link) for link in links[:SHOWN]]
    lines += [f"{_YOURS}{_of_folder(one)}" for one in user_files[:SHOWN]]
    if len(folders) > 1 and losses.total.bytes:
        lines.append(f"{_amount(losses.total)} outside of the workspace, in:")
    others = [
        one for one in folders if not is_accepted([name.path for name in user_files], one.path)
    ]
    lines += [_of_folder(folder) for folder in others[:SHOWN]]
    if len(others) > SHOWN:
        lines.append(f"{len(others) - SHOWN} more directories")
    if losses.caches:
        caches = ", ".join(
            f"{clean(cache.path)} ({size(cache.bytes)})" for cache in losses.caches[:3]
        )
        lines.append(f"caches, which are made again: {caches}")
    lines += _listed(
        "settings of the system that were added or changed", losses.settings, losses.setting_count
    )
    lines += _packages(losses, spec)
    lines += _listed("not looked at", losses.unseen, len(losses.unseen))
    if not losses.complete:
        lines.append("the look was cut short by its time limit: there may be more")
    kept = "" if USER_FILES in spec.accept_lost else _of_user_files(losses, user_files)
    reasons = _reasons(losses, links, spec)
    known = bool(kept) and not losses.user_unseen
    mark = "" if USER_FILES in spec.accept_lost else losses.user_mark
    return Lost(lines, reasons, kept, mark, known and not reasons)


def with_home(lost: Lost, stored: str = "", *, refused: str = "") -> Lost:
    """``lost``, where ``stored`` names the verified snapshot of a user's own files; or ``refused``
    says why there is none."""
    if refused:
        return replace(
            lost, user_files=f"{lost.user_files}, and they were not stored beside it: {refused}"
        )
    named = [line.removeprefix(_YOURS) for line in lost.lines if line.startswith(_YOURS)]
    lines = [line for line in lost.lines if not line.startswith(_YOURS)]
    stored_lines = [f"{stored} has {line}" for line in named]
    return replace(lost, lines=lines, user_files="", stored=stored_lines)


def left_behind(environment: Mapping[str, Any]) -> list[str]:
    """What a wake says about files that the snapshot's machine held and the snapshot lacks."""
    losses = summarised(environment)
    if losses is None:
        return []
    where = [f"{clean(folder.path)} ({size(folder.bytes)})" for folder in losses.folders[:_NAMES]]
    said = []
    if losses.total.bytes:
        said.append(
            f"when the machine of this snapshot was destroyed, {size(losses.total.bytes)} in "
            f"{', '.join(where)}{' and elsewhere' if len(losses.folders) > _NAMES else ''} were "
            "outside of the workspace: they are not in this snapshot"
        )
    return said + [_of_link(link) + ", which was left behind" for link in losses.links[:_NAMES]]


def not_kept(manifest: Manifest) -> list[str]:
    """The first FIFOs, sockets and devices of the workspace, which no snapshot holds."""
    return [
        clean(f"{manifest.roots[name.root]}/{name.path.decode(errors='replace')} ({name.kind})")
        for name in manifest.skipped[:SHOWN]
    ]


def with_missed(lost: Lost, missed: Missed) -> Lost:
    """``lost``, with what the workspace had on this machine before and lacks now."""
    found = [
        f"{clean(path)} was a directory of the workspace here, and what it held is not found in "
        "the block's `paths`"
        for path in missed.unnamed
    ]
    found += [
        f"{clean(place.path)} had {place.files:,} more files ({size(place.bytes)}) in the snapshot "
        "before"
        for place in missed.vanished
    ]
    found += [
        f"{clean(path)} was a disk with a part of the workspace, and nothing is mounted there now"
        for path in missed.disks
    ]
    if not found:
        return lost
    why = (
        f"{'; '.join(found)}. Bring them back, name a directory in `paths` again, or accept their "
        "loss in `accept_lost`"
    )
    return replace(lost, lines=[*found, *lost.lines], keep=[why, *lost.keep], storable=False)


def is_accepted(accepted: Sequence[str], path: str) -> bool:
    """Whether a directory in ``accepted`` is ``path`` or contains it, by the names as they are
    written."""
    places = [place.rstrip("/") or "/" for place in accepted]
    return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)


def clean(text: str) -> str:
    """A machine's text, cut short and without characters that could break a line or a table."""
    plain = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text)
    plain = plain.replace("|", "¦").replace("`", "'")
    return plain if len(plain) <= _MOST_CHARS else f"{plain[:_MOST_CHARS]}..."


def size(count: int) -> str:
    """A number of bytes, for people."""
    for unit, most in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= most:
            return f"{count / most:.1f} {unit}"
    return f"{count} bytes"


def _reasons(losses: Losses, links: Sequence[LinkOut], spec: WorkspaceSpec) -> list[str]:
    found = []
    if losses.link_count:
        named = "; ".join(_of_link(link) for link in links[:_NAMES])
        unnamed = max(0, losses.link_count - len(losses.links))
        more = unnamed + len(links) - len(links[:_NAMES])
        found.append(
            f"{named}{f'; and {more} more links' if more else ''}: the snapshot has the link and "
            "not the data. Add the directory to `paths`, or accept its loss in `accept_lost`"
        )
    if spec.left_behind == "refuse":
        most = int(spec.left_behind_gib * GIB)
        if losses.total.bytes > most:
            first = _user_files_first(losses)[:_NAMES]
            where = ", ".join(f"{clean(one.path)} ({_count(one)})" for one in first)
            rest = losses.total.files - sum(one.files for one in first)
            also = f", and {rest:,} more files" if rest > 0 else ""
            found.append(
                f"{_amount(losses.total)} outside of the workspace would be lost: {where}{also},"
                f" and the block allows {size(most)} (`left_behind_gib`). Add the directories to "
                "`paths`, move files into one of them, or accept their loss in `accept_lost`"
            )
        elif not losses.complete:
            found.append(
                "the look at what would be lost did not come to its end, and the block refuses "
                "losses (`left_behind`). Accept large directories in `accept_lost`, so that they "
                "are not looked at"
            )
    return found


def _user_files_first(losses: Losses) -> list[LeftBehind]:
    """A user's own files by their names in a home, then the directories beside them."""
    names = [one.path for one in losses.user_files]
    return [
        *losses.user_files,
        *(one for one in losses.folders if not is_accepted(names, one.path)),
    ]


def _of_user_files(losses: Losses, user_files: Sequence[LeftBehind]) -> str:
    found = []
    if user_files:
        named = ", ".join(f"{clean(one.path)} ({_count(one)})" for one in user_files[:_NAMES])
        rest = losses.user_total.files - sum(one.files for one in user_files[:_NAMES])
        more = f" and {rest:,} more files" if rest > 0 else ""
        found.append(
            f"{_count(losses.user_total)} that you wrote beside the workspace are in no snapshot: "
            f"{named}{more}"
        )
    if losses.user_unseen:
        why = "; ".join(clean(words) for words in losses.user_unseen[:_NAMES])
        found.append(f"whether you wrote files beside the workspace is not known: {why}")
    return ", and ".join(found)


def _of_link(link: LinkOut) -> str:
    holds = _amount(link.data) if link.data.files else "which was not looked at in time"
    return f"{clean(link.link)} is a link to {clean(link.data.path)}, {holds}"


def _of_folder(folder: LeftBehind) -> str:
    return f"{clean(folder.path)}: {_amount(folder)}"


def _amount(folder: LeftBehind) -> str:
    return f"{_count(folder)}, newest {moment(min(folder.newest_unix, 4e9))}"


def _count(folder: LeftBehind) -> str:
    return f"{size(folder.bytes)} in {folder.files:,} file{'' if folder.files == 1 else 's'}"


def _packages(losses: Losses, spec: WorkspaceSpec) -> list[str]:
    """``environment`` keep brings those back that the snapshot names."""
    again = "packages that were added, and that a wake puts back where it can"
    never = "packages that were added, and that a wake does not install"
    if spec.environment == "keep":
        return [
            *_listed(again, losses.kept, losses.kept_count),
            *_listed(never, losses.packages, losses.package_count),
        ]
    count = losses.kept_count + losses.package_count
    return _listed(never, [*losses.kept, *losses.packages], count)


def _listed(what: str, names: Sequence[str], count: int) -> list[str]:
    if not names:
        return []
    shown = ", ".join(clean(name) for name in names[:_NAMES])
    more = max(count, len(names)) - len(names[:_NAMES])
    return [f"{what}: {shown}{f', and {more} more' if more else ''}"]
