"""What is told to whom and when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from torpor.control.alerts.delivery import (
    MOST_MESSAGES,
    REMINDER_S,
    Alert,
    DeliveryPlan,
    Doubt,
    Remembered,
    after,
    lasting,
    newly_seen,
    plan,
)

NOW = 1_800_000_000.0
HOOK, MAIL = "custom-webhook/mine", "email/mine"


def _alert(subject: str = "m-1", **changes: Any) -> Alert:
    fields: dict[str, Any] = {
        "kind": "machine unknown",
        "subject": subject,
        "title": f"machine {subject} of workspace demo cannot be judged",
        "cause": "the sampler is dead",
        "next_step": "log in",
        "workspace": "demo",
        "at_unix": NOW,
    }
    return Alert(**{**fields, **changes})


_NONE = Doubt()


class Watcher:
    """Looks again and again, as runs of `watch` do, with a memory that outlives each run."""

    def __init__(self, *blocks: str) -> None:
        self.blocks = blocks or (HOOK,)
        self.memory: dict[tuple[str, str], Remembered] = {}
        self.refusing: set[str] = set()
        self.raised: list[str] = []

    def look(
        self, *alerts: Alert, at: float = 0.0, doubt: Doubt = _NONE, **options: Any
    ) -> list[str]:
        """The subjects of the messages that were accepted."""
        now = NOW + at
        alerts = tuple(msgspec.structs.replace(alert, at_unix=now) for alert in alerts)
        found = self._plan(alerts, doubt, now, options)
        accepted = []
        for new in found.newly_seen:
            self.memory[new.key] = new
        for entry in found.raised:
            self.raised.append(entry.subject)
            self.memory[entry.key] = msgspec.structs.replace(entry, raised=True)
        for forgotten in found.forgotten:
            del self.memory[forgotten.key]
        for message in found.messages:
            if message.block in self.refusing:
                continue
            accepted.append(f"{message.block}: {message.subject}")
            left = after(self.memory[message.key], message, now)
            if left is None:
                del self.memory[message.key]
            else:
                self.memory[message.key] = left
        return accepted

    def _plan(self, alerts: Any, doubt: Doubt, now: float, options: dict[str, Any]) -> DeliveryPlan:
        return plan(alerts, [*self.memory.values()], self.blocks, doubt, now, **options)


@pytest.mark.rule(19)
def test_an_alert_is_told_once_again_after_a_day_and_when_it_is_over() -> None:
    seen = Watcher()
    title = "machine m-1 of workspace demo cannot be judged"
    assert seen.look(_alert()) == [f"{HOOK}: torpor: {title}"]
    assert seen.look(_alert(), at=120) == []
    assert seen.look(_alert(), at=REMINDER_S - 1) == []
    assert seen.look(_alert(), at=REMINDER_S) == [f"{HOOK}: torpor: still: {title}"]
    assert seen.look(_alert(), at=REMINDER_S + 120) == []
    assert seen.look(at=REMINDER_S + 240) == [f"{HOOK}: torpor: over: {title}"]
    assert seen.look(at=REMINDER_S + 360) == []
    assert seen.memory == {}


@pytest.mark.rule(19)
def test_what_a_block_refused_is_sent_again_at_the_next_look_and_to_no_other() -> None:
    seen = Watcher(HOOK, MAIL)
    seen.refusing = {MAIL}
    assert [told.split(":")[0] for told in seen.look(_alert())] == [HOOK]
    assert seen.look(_alert(), at=120) == []
    seen.refusing = set()
    assert [told.split(":")[0] for told in seen.look(_alert(), at=240)] == [MAIL]
    seen.refusing = {HOOK}
    assert [told.split(":")[0] for told in seen.look(at=360)] == [MAIL]  # its end
    seen.refusing = set()
    assert [told.split(":")[0] for told in seen.look(at=480)] == [HOOK]
    assert seen.memory == {}


def test_what_did_not_last_is_told_to_nobody() -> None:
    seen = Watcher()
    late = _alert(after_s=1800)
    assert seen.look(late) == []
    assert seen.look(late, at=1799) == []
    assert seen.look(at=1801) == [] and seen.memory == {}
    assert seen.look(late, at=1900) == []  # it counts from its new beginning
    assert len(seen.look(late, at=3700)) == 1


def test_an_alert_is_raised_once_when_it_has_lasted_also_where_nobody_is_to_be_told() -> None:
    seen = Watcher()
    seen.blocks = ()
    late, lost = _alert("m-1", after_s=1800), _alert("m-2", kind="machine lost", once=True)
    seen.look(late, lost)
    assert seen.raised == ["m-2"]
    seen.look(late, at=1800)
    seen.look(late, at=1920)
    assert seen.raised == ["m-2", "m-1"]
    seen.look(at=2040)
    seen.look(late, at=2160)
    seen.look(late, at=4000)
    assert seen.raised == ["m-2", "m-1", "m-1"]  # it began once more
    memory = [*seen.memory.values()]
    begun_late = _alert("m-3", after_s=1, at_unix=NOW + 4000)
    heard = lasting([late, lost, begun_late], memory, Doubt(), NOW + 4000)
    assert [one.subject for one in heard] == ["m-1", "m-2"]
    silent = Doubt(kinds=frozenset({"machine unknown"}))
    assert [one.subject for one in lasting([], memory, silent, NOW + 4000)] == ["m-1"]
    assert lasting([], memory, Doubt(), NOW + 4000) == []


def test_what_only_a_killed_look_saw_is_raised_by_the_next_one() -> None:
    seen = Watcher()
    spent = newly_seen(_alert("lab", kind="budget spent"), NOW)
    seen.memory[spent.key] = spent
    assert len(seen.look(at=120)) == 1 and seen.raised == ["lab"]
    assert len(seen.look(at=240)) == 1 and seen.raised == ["lab"]  # its end


@pytest.mark.rule(19)
@pytest.mark.parametrize(
    "doubt",
    [
        Doubt(kinds=frozenset({"machine unknown"})),
        Doubt(workspaces=frozenset({"demo"})),
        Doubt(known=frozenset({"other"})),
        Doubt(keys=frozenset({("machine unknown", "m-1")})),
    ],
)
def test_what_could_not_be_looked_at_has_not_ended(doubt: Doubt) -> None:
    seen = Watcher()
    seen.look(_alert())
    assert seen.look(at=120, doubt=doubt) == []
    assert seen.look(_alert(), at=240) == []  # it was told before
    assert len(seen.look(at=360)) == 1


def test_a_failed_run_that_is_only_too_old_is_forgotten_without_a_word() -> None:
    seen = Watcher()
    failed = _alert(kind="run failed")
    seen.look(failed)
    assert seen.look(at=120) == [] and seen.memory == {}
    seen.look(failed)
    assert len(seen.look(at=120, mended={failed.key})) == 1 and seen.memory == {}


@pytest.mark.rule(19)
def test_a_failed_run_whose_notice_was_refused_until_it_is_too_old_is_told_all_the_same() -> None:
    seen, failed = Watcher(), _alert(kind="run failed")
    seen.refusing = {HOOK}
    assert seen.look(failed) == [] and seen.look(at=120) == []
    seen.refusing = set()
    assert seen.look(at=240) == [f"{HOOK}: torpor: {failed.title}"]
    assert seen.look(at=360) == [] and seen.memory == {}


def test_what_happened_once_is_not_told_again() -> None:
    seen = Watcher()
    seen.look(_alert())
    found = seen._plan((_alert(at_unix=NOW - 60),), Doubt(), NOW + 2 * REMINDER_S, {})
    assert found.messages == []
    seen, once = Watcher(), _alert(kind="budget reached", once=True)
    assert len(seen.look(once, at=120)) == 1
    assert seen.look(once, at=9 * REMINDER_S) == []
    assert seen.look(at=30 * REMINDER_S) == []  # the next month


def test_a_message_names_cause_next_step_and_since_when_and_their_number_is_bounded() -> None:
    found = plan([_alert(str(n)) for n in range(50)], [], [HOOK, MAIL], Doubt(), NOW)
    assert len(found.messages) == 2 * MOST_MESSAGES and len(found.newly_seen) == 50
    assert found.messages[0].body == (
        "the sampler is dead\nNext step: log in\nSince: 2027-01-15 08:00 UTC"
    )


@pytest.mark.rule(19)
def test_a_message_holds_no_query_of_a_url_and_no_value_of_a_field() -> None:
    cause = (
        "GET https://me:pw@s3.example/b/k?X-Amz-Credential=AKIA&X-Amz-Signature=5e failed; "
        "1 error: [type=string_type, input_value={'key': 'hush, hush'}, input_type=dict] "
        "input_value='cu"
    )
    (message,) = plan([_alert(cause=cause)], [], [HOOK], Doubt(), NOW).messages
    assert message.body.startswith(
        "GET https://...@s3.example/b/k?... failed; 1 error: "
        "[type=string_type, input_value=..., input_type=dict] input_value=...\nNext"
    )
