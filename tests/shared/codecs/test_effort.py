"""Text is compressed as hard as the link leaves time for."""

from __future__ import annotations

import sysconfig
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from torpor.shared.codecs.choose import Encoder
from torpor.shared.codecs.effort import LEVELS, SMALLEST_LEVEL, Effort, Pace
from torpor.shared.codecs.stock import ZSTD
from torpor.shared.errors import StoreUnavailable

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


@pytest.mark.parametrize(
    ("paces", "level", "words"),
    [
        ([], 3, "nothing new was encoded"),  # the level that most tools take
        ([WAITS_FOR_THE_LINK], LEVELS[-1], "zstd 3 to 9: parts spent 90% of their time on sending"),
        ([WAITS_FOR_CORES], LEVELS[0], "zstd 1 to 3: "),
        ([QUICK_LINK], LEVELS[0], "zstd 1 to 3: "),
        ([BALANCED], 3, "zstd 3: parts spent 40% of their time on sending"),
        ([WAITS_FOR_THE_LINK, QUICK_LINK], LEVELS[0], "zstd 1 to 9: "),
    ],
)
def test_the_level_follows_what_the_run_waits_for(
    paces: list[Pace], level: int, words: str
) -> None:
    effort = Effort()
    for pace in paces:
        after(effort, pace, 40)
    assert effort.level == level
    assert effort.words.startswith(words)


def test_one_pack_decides_nothing_and_each_step_is_measured_again() -> None:
    effort = Effort()
    levels = [after(effort, WAITS_FOR_THE_LINK, packs).level for packs in (2, 1, 2, 1)]
    assert levels == [3, 6, 6, 9]


def test_the_smallest_is_asked_for_and_stays() -> None:
    effort = after(Effort(smallest=True), WAITS_FOR_CORES, 40)
    assert effort.level == SMALLEST_LEVEL
    assert "asks for the fewest bytes" in effort.words


def test_the_level_reaches_the_encoder() -> None:
    usual = Encoder(Effort()).encode(TEXT)
    hard = Encoder(Effort(smallest=True)).encode(TEXT)
    assert usual[0] == hard[0] == ZSTD.code
    assert len(hard[1]) < len(usual[1]) < len(ZSTD.encode(TEXT))


def test_the_line_is_busy_while_any_pack_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    effort = Effort()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(effort.sending())
        clock[0] = 102.0
        second.enter_context(effort.sending())
        clock[0] = 103.0
        first.close()
        clock[0] = 105.0
    clock[0] = 106.0
    with pytest.raises(StoreUnavailable), effort.sending():
        clock[0] = 107.0
        raise StoreUnavailable("503")
    assert effort.line_s == 5.0 + 1.0
