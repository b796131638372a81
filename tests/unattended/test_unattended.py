"""Nobody calls a flow. In the middle everything is killed, and `make up` is all that is done."""

from __future__ import annotations

from tests.fixtures.alone import Alone
from tests.unattended.story import STEPS, Story, cycle, unattended


def test_an_installation_takes_care_of_itself(alone: Alone) -> None:
    def crash(story: Story) -> None:
        story.lose_everything()
        alone.up()

    with unattended(alone, print) as story:
        alone.up()
        story.switch_on()
        found = cycle(story, crash)
        assert f"counted to {STEPS}" in story.log_of_job(found)
        runs = story.runs()
        print(runs)
