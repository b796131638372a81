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
    "machine idle",
    "machine left",
    "machine forgotten",
    "machine abandoned",
    "machine lost",
    "saves failing",
    "workspace unknown",
    "provider silent",
    "blocks differ",
    "only reported",
    "budget reached",
    "budget spent",
    "budget unread",
    "backup missed",
    "run failed",
    "job failing",
    "job not driven",
    "schedule stopped",
    "installation",
    "disk full",
    "awake",
]

REMINDER_S: Final = 24 * 3600.0
"""Seconds after which an alert that lasts is sent again."""
MOST_MESSAGES: Final = 20
"""Messages that one look sends to one notification block at most. The rest is sent by the next
look."""
_MOST_TEXT: Final = 1000  # characters of a cause in a message
_MOST_TITLE: Final = 200
# bytes of text kept of an alert: as JSON at most 3,600 characters, and a variable holds 5,000
_MOST_KEPT: Final = 600

_WITHOUT_END: Final = ("budget reached", "run failed", "awake", "machine lost")
"""Kinds of alerts whose end is not sent: a month is over, a failed run is old, nothing is awake."""
_SEEN_ONCE: Final = ("run failed", "machine lost", "budget spent")
"""Kinds of alerts that are sent even if only an earlier look saw them."""

_SECRETS: Final = (
    (re.compile(r"(\w://)[^\s/@]*@"), r"\1...@"),
    (re.compile(r"(\w://[^\s?\"'<>]*)\?[^\s\"'<>)]*"), r"\1?..."),
    (re.compile(r"input_value=.*?(?=, input_type=|$)", re.DOTALL), "input_value=..."),
)

Key = tuple[str, str]
"""An alert's kind and subject."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong now. ``workspace``: the one that it is about; empty: the installation.
    ``after_s``: the alert is sent once it has lasted this long. ``at_unix``: when it was last seen.
    It is sent again only if that was later than the last message, and never if ``once`` is set."""

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
    """An alert that has been seen. ``words``: its cause and next step at first, cut short.
    ``raised``: its event was sent. ``told``: when each notification block accepted it last."""

    kind: str
    subject: str
    workspace: str
    title: str
    since_unix: float
    words: str = ""
    raised: bool = False
    told: dict[str, float] = {}

    @property
    def key(self) -> Key:
        return self.kind, self.subject

    @property
    def name(self) -> str:
        """The alert's name in the memory, of hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode(self.key)).hexdigest()[:24]


class AlertMessage(msgspec.Struct, frozen=True):
    """A message to one notification block. ``over``: it says that the alert has ended."""

    block: str
    key: Key
    subject: str
    body: str
    over: bool = False


class Doubt(msgspec.Struct, frozen=True):
    """What could not be looked at: alerts of these kinds, of these workspaces, or with these
    ``keys``. ``known``: the only workspaces that were looked at; None: all of them."""

    kinds: frozenset[str] = frozenset()
    workspaces: frozenset[str] = frozenset()
    known: frozenset[str] | None = None
    keys: frozenset[Key] = frozenset()

    def covers(self, entry: Remembered) -> bool:
        if entry.kind in self.kinds or entry.workspace in self.workspaces:
            return True
        if entry.key in self.keys:
            return True
        return self.known is not None and entry.workspace not in self.known


class DeliveryPlan(msgspec.Struct, frozen=True):
    """``newly_seen``: alerts to record before anything is sent. ``raised``: those whose event is
    due. ``forgotten``: alerts to delete at once, because their end is not sent."""

    newly_seen: list[Remembered]
    raised: list[Remembered]
    messages: list[AlertMessage]
    forgotten: list[Remembered]


def plan(
    alerts: Sequence[Alert],
    remembered: Sequence[Remembered],
    blocks: Sequence[str],
    doubt: Doubt,
    now_unix: float,
    *,
    mended: Collection[Key] = (),
) -> DeliveryPlan:
    """Which alerts to record, raise, send and forget.

    ``mended``: the failed runs that a later run has mended, and the lost machines whose rentals are
    open, of a look that was killed before it closed them. Other failed runs that are too old to be
    seen are forgotten without a message.
    """
    known = {entry.key: entry for entry in remembered}
    seen = {alert.key: alert for alert in alerts}
    new = [newly_seen(alert, now_unix) for alert in seen.values() if alert.key not in known]
    known |= {entry.key: entry for entry in new}
    messages: list[AlertMessage] = []
    raised: list[Remembered] = []
    forgotten: list[Remembered] = []
    for entry in known.values():
        alert = seen.get(entry.key)
        lasts = _is_late(entry, doubt, mended) if alert is None else _lasts(alert, entry, now_unix)
        if lasts and not entry.raised:
            raised.append(entry)
        if alert is not None:
            due = [block for block in blocks if _is_due(alert, entry, block, now_unix)]
            messages += [_message(alert, entry, block) for block in due]
        elif blocks and _is_late(entry, doubt, mended):
            messages += [_late(entry, block) for block in blocks]
        elif not doubt.covers(entry):
            heard = [block for block in blocks if block in entry.told]
            if heard and (entry.kind not in _WITHOUT_END or entry.key in mended):
                messages += [_over(entry, block, now_unix) for block in heard]
            else:
                forgotten.append(entry)
    bounded = [
        message
        for block in blocks
        for message in [candidate for candidate in messages if candidate.block == block][
            :MOST_MESSAGES
        ]
    ]
    return DeliveryPlan(new, raised, bounded, forgotten)


def after(entry: Remembered, message: AlertMessage, now_unix: float) -> Remembered | None:
    """What is remembered of an alert once ``message`` was accepted; None where nobody needs another
    message."""
    if not message.over:
        return msgspec.structs.replace(entry, told={**entry.told, message.block: now_unix})
    left = {block: at for block, at in entry.told.items() if block != message.block}
    return msgspec.structs.replace(entry, told=left, raised=False) if left else None


def rows(alerts: Sequence[Alert], remembered: Sequence[Remembered]) -> list[Row]:
    """A row for each alert: since when it lasts, and who was told of it when."""
    known = {entry.key: entry for entry in remembered}
    found = []
    for alert in alerts:
        entry = known.get(alert.key)
        told = entry.told.items() if entry else ()
        found.append(
            {
                "alert": alert.title,
                "cause": alert.cause,
                "next step": alert.next_step,
                "since": moment(entry.since_unix) if entry else "",
                "told": "; ".join(f"{block} {moment(at)}" for block, at in told) or "nobody yet",
            }
        )
    return found


def lasting(
    alerts: Sequence[Alert], remembered: Sequence[Remembered], doubt: Doubt, now_unix: float
) -> list[Remembered]:
    """The alerts that people should have been told of by now, including those of which this look
    could not say whether they have ended."""
    known = {entry.key: entry for entry in remembered}
    seen = {alert.key: known.get(alert.key) or newly_seen(alert, now_unix) for alert in alerts}
    found = [seen[alert.key] for alert in alerts if _lasts(alert, seen[alert.key], now_unix)]
    kept = [one for key, one in known.items() if key not in seen and one.raised]
    return found + [one for one in kept if doubt.covers(one)]


def without_secrets(words: str) -> str:
    """An error's words as third parties may read them: without what URLs (presigned ones) and
    pydantic's errors carry of secrets."""
    for pattern, instead in _SECRETS:
        words = pattern.sub(instead, words)
    return words


def newly_seen(alert: Alert, now_unix: float) -> Remembered:
    """What is remembered of an alert when it is seen for the first time."""
    return Remembered(
        kind=alert.kind,
        subject=alert.subject,
        workspace=alert.workspace,
        title=alert.title[:_MOST_TITLE],
        since_unix=min(now_unix, alert.at_unix),
        words=_words(alert).encode()[:_MOST_KEPT].decode(errors="ignore"),
    )


def _lasts(alert: Alert, entry: Remembered, now_unix: float) -> bool:
    """Whether an alert has lasted so long that people are told."""
    return now_unix - entry.since_unix >= alert.after_s


def _is_due(alert: Alert, entry: Remembered, block: str, now_unix: float) -> bool:
    told_unix = entry.told.get(block)
    if told_unix is None:
        return _lasts(alert, entry, now_unix)
    if alert.once:
        return False
    return now_unix - told_unix >= REMINDER_S and alert.at_unix > told_unix


def _message(alert: Alert, entry: Remembered, block: str) -> AlertMessage:
    again = "still: " if block in entry.told else ""
    body = f"{_words(alert)}\nSince: {moment(entry.since_unix)}"
    return AlertMessage(block, entry.key, f"torpor: {again}{alert.title[:_MOST_TITLE]}", body)


def _words(alert: Alert) -> str:
    cause = without_secrets(alert.cause)[:_MOST_TEXT]
    return f"{cause}\nNext step: {without_secrets(alert.next_step)}"


def _is_late(entry: Remembered, doubt: Doubt, mended: Collection[Key]) -> bool:
    """Whether nobody was told of an alert that no look will see again. A failed run will be seen
    again if this look could not see it."""
    if entry.told or entry.kind not in _SEEN_ONCE or entry.key in mended:
        return False
    return entry.kind != "run failed" or not doubt.covers(entry)


def _late(entry: Remembered, block: str) -> AlertMessage:
    """The message about an alert that is not seen any more, such as a failed run that is too old,
    and that every block has refused until now."""
    body = f"Nobody could be told until now.\n{entry.words}\nSince: {moment(entry.since_unix)}"
    return AlertMessage(block, entry.key, f"torpor: {entry.title}", body)


def _over(entry: Remembered, block: str, now_unix: float) -> AlertMessage:
    return AlertMessage(
        block,
        entry.key,
        f"torpor: over: {entry.title}",
        f"This is no longer so. Since: {moment(entry.since_unix)}. Until: {moment(now_unix)}",
        over=True,
    )
