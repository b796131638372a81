"""Nobody calls a flow. In the middle everything is killed, and `make up` is all that is done."""

from __future__ import annotations

from tests.fixtures.own_installation import Alone
from tests.unattended.story import STEPS, Story, cycle, unattended


def test_an_installation_takes_care_of_itself(alone: Alone) -> None:
    with unattended(alone, print) as story:
        alone.up()
        story.switch_on()
        found = cycle(story, Story.lose_everything)
        assert f"counted to {STEPS}" in story.log_of_job(found)
        runs = story.runs()
        assert runs["watch Completed"] and runs["backup Completed"]
