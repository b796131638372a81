"""Alerts: what a person must hear of, and to whom it was told when. A pure function of both.

An alert is told once it has lasted long enough, again after a day while it lasts, and its end is
told too. Told means that the notification block accepted the message; what it refused is sent again
at the next look. What could not be looked at has not ended.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from typing import Final, Literal

import msgspec

from torpor.control.reports import Row, moment

Kind = Literal[
    "machine unknown",
    "machine left",
    "workspace unknown",
    "provider silent",
    "blocks differ",
    "budget reached",
    "budget spent",
    "budget unread",
    "backup missed",
    "run failed",
    "job failing",
    "schedule stopped",
    "installation",
    "disk full",
]

AGAIN_S: Final = 24 * 3600.0
"""An alert that lasts is told again after this time."""
MOST_NOTICES: Final = 20
"""Messages to one notification block in one look; the others are sent at the next one."""
_MOST_TEXT: Final = 1000  # characters of a cause in a message
_MOST_TITLE: Final = 200

_WITHOUT_END: Final = ("budget reached", "run failed")
"""Nobody hears that a month is over, or that a failed run is old."""

_SECRETS: Final = (
    (re.compile(r"(\w://)[^\s/@]*@"), r"\1...@"),
    (re.compile(r"(\w://[^\s?\"'<>]*)\?[^\s\"'<>)]*"), r"\1?..."),
    (re.compile(r"input_value=.*?(?=, input_type=|$)", re.DOTALL), "input_value=..."),
)

Key = tuple[str, str]
"""An alert's kind and subject."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong now. ``workspace``: the one that it is about; empty: the installation.
    ``after_s``: it is told once it has lasted so long. ``at_unix``: when it was last seen to be so.
    It is told again only if that was later than the last message, and never if it is told
    ``once``."""

    kind: Kind
    subject: str
    title: str
    cause: str
    next_step: str
    at_unix: float
    workspace: str = ""
    after_s: float = 0.0
    once: bool = False

    @property
    def key(self) -> Key:
        return self.kind, self.subject


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that has been seen. ``told``: when each notification block accepted it last."""

    kind: str
    subject: str
    workspace: str
    title: str
    since_unix: float
    told: dict[str, float] = {}

    @property
    def key(self) -> Key:
        return self.kind, self.subject

    @property
    def name(self) -> str:
        """The alert's own name, of hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode(self.key)).hexdigest()[:24]


class Notice(msgspec.Struct, frozen=True):
    """A message to one notification block. ``over``: it says that the alert has ended."""

    block: str
    key: Key
    subject: str
    body: str
    over: bool = False


class Doubt(msgspec.Struct, frozen=True):
    """What could not be looked at: alerts of these kinds, or of these workspaces. ``known``: the
    only workspaces that were looked at; None: all of them."""

    kinds: frozenset[str] = frozenset()
    workspaces: frozenset[str] = frozenset()
    known: frozenset[str] | None = None

    def covers(self, one: Remembered) -> bool:
        if one.kind in self.kinds or one.workspace in self.workspaces:
            return True
        return self.known is not None and one.workspace not in self.known


class Plan(msgspec.Struct, frozen=True):
    """``begun`` is to be remembered before anything is sent; ``forgotten`` to be forgotten at once,
    because nobody is to hear of its end."""

    begun: list[Remembered]
    notices: list[Notice]
    forgotten: list[Remembered]


def plan(
    alerts: Sequence[Alert],
    remembered: Sequence[Remembered],
    blocks: Sequence[str],
    doubt: Doubt,
    now_unix: float,
    *,
    mended: Collection[Key] = (),
) -> Plan:
    """What is to be remembered, sent and forgotten. ``mended``: the failed runs after which another
    one went well. Those that are only too old to be seen are forgotten without a word."""
    known = {one.key: one for one in remembered}
    seen = {one.key: one for one in alerts}
    begun = [_begun(one, now_unix) for one in seen.values() if one.key not in known]
    known |= {one.key: one for one in begun}
    notices: list[Notice] = []
    forgotten: list[Remembered] = []
    for one in known.values():
        alert = seen.get(one.key)
        if alert is not None:
            due = [block for block in blocks if _is_due(alert, one, block, now_unix)]
            notices += [_notice(alert, one, block) for block in due]
        elif not doubt.covers(one):
            heard = [block for block in blocks if block in one.told]
            if blocks and not one.told and one.kind == "run failed" and one.key not in mended:
                notices += [_late(one, block) for block in blocks]
                continue
            if heard and (one.kind not in _WITHOUT_END or one.key in mended):
                notices += [_over(one, block, now_unix) for block in heard]
            else:
                forgotten.append(one)
    bounded = [
        notice
        for block in blocks
        for notice in [one for one in notices if one.block == block][:MOST_NOTICES]
    ]
    return Plan(begun, bounded, forgotten)


def after(one: Remembered, notice: Notice, now_unix: float) -> Remembered | None:
    """What is remembered once ``notice`` was accepted; None where nobody needs to hear more."""
    if not notice.over:
        return msgspec.structs.replace(one, told={**one.told, notice.block: now_unix})
    left = {block: at for block, at in one.told.items() if block != notice.block}
    return msgspec.structs.replace(one, told=left) if left else None


def rows(alerts: Sequence[Alert], remembered: Sequence[Remembered]) -> list[Row]:
    """A line for each alert: since when it is so, and who was told of it when."""
    known = {one.key: one for one in remembered}
    found = []
    for alert in alerts:
        one = known.get(alert.key)
        told = one.told.items() if one else ()
        found.append(
            {
                "alert": alert.title,
                "cause": alert.cause,
                "next step": alert.next_step,
                "since": moment(one.since_unix) if one else "",
                "told": "; ".join(f"{block} {moment(at)}" for block, at in told) or "nobody yet",
            }
        )
    return found


def without_secrets(words: str) -> str:
    """An error's words as third parties may read them: without what URLs (presigned ones) and
    pydantic's errors carry of secrets."""
    for pattern, instead in _SECRETS:
        words = pattern.sub(instead, words)
    return words


def _begun(alert: Alert, now_unix: float) -> Remembered:
    return Remembered(
        kind=alert.kind,
        subject=alert.subject,
        workspace=alert.workspace,
        title=alert.title[:_MOST_TITLE],
        since_unix=min(now_unix, alert.at_unix),
    )


def _is_due(alert: Alert, one: Remembered, block: str, now_unix: float) -> bool:
    told_unix = one.told.get(block)
    if told_unix is None:
        return now_unix - one.since_unix >= alert.after_s
    if alert.once:
        return False
    return now_unix - told_unix >= AGAIN_S and alert.at_unix > told_unix


def _notice(alert: Alert, one: Remembered, block: str) -> Notice:
    again = "still: " if block in one.told else ""
    body = (
        f"{without_secrets(alert.cause)[:_MOST_TEXT]}\n"
        f"Next step: {without_secrets(alert.next_step)}\nSince: {moment(one.since_unix)}"
    )
    return Notice(block, one.key, f"torpor: {again}{alert.title[:_MOST_TITLE]}", body)


def _late(one: Remembered, block: str) -> Notice:
    """Of a failed run that is too old to be looked at, and of which nobody has heard: every block
    refused it so long."""
    body = f"Nobody could be told until now: see its run.\nSince: {moment(one.since_unix)}"
    return Notice(block, one.key, f"torpor: {one.title}", body)


def _over(one: Remembered, block: str, now_unix: float) -> Notice:
    return Notice(
        block,
        one.key,
        f"torpor: over: {one.title}",
        f"This is no longer so. Since: {moment(one.since_unix)}. Until: {moment(now_unix)}",
        over=True,
    )
