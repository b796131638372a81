"""The step of `watch` that sends alerts and remembers which were sent."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from tasks.events import AlertRaised, emit
from tasks.retries import ONCE
from tasks.runner import runner
from tasks.step import step
from torpor.control.alerts.delivery import Alert, Doubt, Key, Remembered, after, newly_seen, plan
from torpor.shared.errors import NotDelivered
from torpor.shared.values import WorkspaceName


class Delivered(NamedTuple):
    """What is remembered of alerts after a delivery, and why each notification block that refused a
    message did so."""

    remembered: list[Remembered]
    refused: list[str]

    def since_unix(self, kind: str, subject: str) -> float | None:
        """Since when an alert has been seen; None if it has not."""
        found = [one.since_unix for one in self.remembered if one.key == (kind, subject)]
        return found[0] if found else None


def remember(alerts: Sequence[Alert]) -> None:
    """Record alerts that the next look sends if this one is killed before it sends them. A failure
    is only logged: the look goes on with its work."""
    try:
        if alerts:
            _remember(alerts)
    except Exception as error:  # noqa: BLE001 - the server's client raises any
        runner().log.error("%d alerts were not remembered: %s", len(alerts), error)


@step("remember alerts", retries=ONCE)
def _remember(alerts: Sequence[Alert]) -> None:
    server = runner().alerts
    known = {one.key for one in server.remembered()}
    for alert in alerts:
        if alert.key not in known:
            server.remember(newly_seen(alert, time.time()))


@step("tell of alerts", retries=ONCE)
def tell(
    alerts: Sequence[Alert], blocks: Sequence[str], doubt: Doubt, mended: Collection[Key]
) -> Delivered:
    """Send what is due: the event of an alert once, and messages by these notification blocks. A
    message is remembered right after its block accepted it, so a run that is killed in between
    sends one message twice and loses none. An event may be lost. A block that refuses one message
    gets no other in this look."""
    server, now_unix = runner().alerts, time.time()
    memory = {one.key: one for one in server.remembered()}
    wanted = plan(alerts, [*memory.values()], blocks, doubt, now_unix, mended=mended)
    for one in wanted.newly_seen:
        server.remember(one)
        memory[one.key] = one
    for one in wanted.raised:
        emit(
            AlertRaised(
                workspace=WorkspaceName(one.workspace),
                kind=one.kind,
                subject=one.subject,
                title=one.title,
                message=one.words,
                name=one.name,
            )
        )
        memory[one.key] = replace(one, raised=True)
        server.remember(memory[one.key])
    for one in wanted.forgotten:
        server.forget(one)
        del memory[one.key]
    refused: dict[str, str] = {}
    for message in wanted.messages:
        if message.block in refused:
            continue
        try:
            server.notify(message.block, message.subject, message.body)
        except NotDelivered as error:
            refused[message.block] = str(error)
            runner().log.error("%s", error)
            continue
        before = memory.pop(message.key)
        left = after(before, message, now_unix)
        if left is None:
            server.forget(before)
        else:
            server.remember(left)
            memory[left.key] = left
    return Delivered([*memory.values()], [*refused.values()])
