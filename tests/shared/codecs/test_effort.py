"""Text is compressed as hard as the link leaves time for."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from torpor.shared.codecs.choose import Encoder
from torpor.shared.codecs.effort import LEVELS, SMALLEST_LEVEL, Effort, Pace
from torpor.shared.codecs.stock import ZSTD

WAITS_FOR_THE_LINK = Pace(filled=1, encoded=0.8, encoded_cpu=0.8, sent=9)
WAITS_FOR_CORES = Pace(filled=5, encoded=4, encoded_cpu=1.5, sent=5)
QUICK_LINK = Pace(filled=5, encoded=4, encoded_cpu=4, sent=0.5)
BALANCED = Pace(filled=6, encoded=5, encoded_cpu=4.8, sent=4)
TEXT = b"".join(
    path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
)


def after(effort: Effort, pace: Pace, packs: int) -> Effort:
    for _ in range(packs):
        effort.note(pace)
    return effort


def test_it_begins_at_the_level_that_most_tools_take() -> None:
    assert Effort().level == 3


def test_a_slow_link_raises_the_level_to_the_top_and_says_so() -> None:
    effort = after(Effort(), WAITS_FOR_THE_LINK, 40)
    assert effort.level == LEVELS[-1]
    assert effort.words == "zstd 3 to 9: parts spent 90% of their time on sending"


@pytest.mark.parametrize("pace", [WAITS_FOR_CORES, QUICK_LINK])
def test_where_cores_are_the_limit_the_level_falls(pace: Pace) -> None:
    assert after(Effort(), pace, 40).level == LEVELS[0]


def test_what_is_balanced_stays() -> None:
    effort = after(Effort(), BALANCED, 40)
    assert effort.level == 3
    assert effort.words == "zstd 3: parts spent 40% of their time on sending"


def test_a_link_that_grows_quick_lowers_the_level_again() -> None:
    effort = after(Effort(), WAITS_FOR_THE_LINK, 40)
    assert after(effort, QUICK_LINK, 40).level == LEVELS[0]


def test_one_pack_decides_nothing_and_each_step_is_measured_again() -> None:
    effort = after(Effort(), WAITS_FOR_THE_LINK, 2)
    assert effort.level == 3
    assert after(effort, WAITS_FOR_THE_LINK, 1).level == 6
    assert after(effort, WAITS_FOR_THE_LINK, 2).level == 6
    assert after(effort, WAITS_FOR_THE_LINK, 1).level == 9


def test_the_smallest_is_asked_for_and_stays() -> None:
    effort = after(Effort(smallest=True), WAITS_FOR_CORES, 40)
    assert effort.level == SMALLEST_LEVEL
    assert "asks for the fewest bytes" in effort.words


def test_a_run_that_encoded_nothing_claims_nothing() -> None:
    assert Effort().words == "nothing new was encoded"


def test_the_level_reaches_the_encoder() -> None:
    usual = Encoder(Effort()).encode(TEXT)
    hard = Encoder(Effort(smallest=True)).encode(TEXT)
    assert usual[0] == hard[0] == ZSTD.code
    assert len(hard[1]) < len(usual[1]) < len(ZSTD.encode(TEXT))
