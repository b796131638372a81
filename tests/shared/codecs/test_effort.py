"""Chunks are compressed as hard as the link leaves time for."""

from __future__ import annotations

import random
import sysconfig
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fixtures.timed_line import MBIT, Line, Outcome, mixed, stored_over
from torpor.machine.agent.content import weights
from torpor.shared.codecs.choose import Encoder
from torpor.shared.codecs.effort import BALANCED, FASTEST, SMALLEST, Effort, Pace, Step, steps_for
from torpor.shared.codecs.layout import Element, Run
from torpor.shared.codecs.stock import RAW, ZSTD
from torpor.shared.errors import StoreUnavailable
from torpor.shared.format.sizes import CHUNK_BYTES
from torpor.shared.values import GIB, MIB, Compression

TEXT = b"".join(
    path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
)
LINES = {
    "200 Mbit/s": Line(200 * MBIT),
    "1 Gbit/s": Line(1_000 * MBIT),
    "10 Gbit/s": Line(10_000 * MBIT),
    "25 Gbit/s": Line(25_000 * MBIT),
    "local store": Line(40_000 * MBIT, core_s=5.0),
}
FIXED = {step.name: (step,) for step in FASTEST}


def pace(filled: float, encoded: float, cpu: float, sent: float, by_step: float = -1) -> Pace:
    """Of a pack of text, unless ``by_step`` says otherwise; its step is the one that is taken."""
    return Pace(BALANCED[1], filled, encoded, cpu, encoded if by_step < 0 else by_step, sent)


WAITS_FOR_THE_LINE = pace(filled=1, encoded=0.8, cpu=0.8, sent=9)
WAITS_FOR_CORES = pace(filled=5, encoded=4, cpu=1.5, sent=5)
QUICK_LINK = pace(filled=5, encoded=4, cpu=4, sent=0.5)
BALANCE = pace(filled=6, encoded=5, cpu=4.8, sent=4)
WEIGHTS = WAITS_FOR_THE_LINE._replace(by_step=0.1)


def after(effort: Effort, seen: Pace, packs: int) -> Effort:
    for _ in range(packs):
        effort.note(seen._replace(step=effort.step))
    return effort


@pytest.mark.parametrize(
    ("paces", "step", "words"),
    [
        ([], "zstd 3", "nothing new was encoded"),  # the level that most tools take
        ([WAITS_FOR_THE_LINE], "zstd 9", "zstd 3 to zstd 9: parts spent 90% of their time on"),
        ([WAITS_FOR_CORES], "zstd 1", "zstd 1 to zstd 3: "),
        ([QUICK_LINK], "zstd 1", "zstd 1 to zstd 3: "),
        ([BALANCE], "zstd 3", "zstd 3: parts spent 40% of their time on sending"),
        ([WEIGHTS], "zstd 3", "zstd 3: "),  # no level encodes them otherwise
        ([WAITS_FOR_THE_LINE, QUICK_LINK], "zstd 1", "zstd 1 to zstd 9: "),
    ],
)
def test_the_step_follows_what_the_run_waits_for(paces: list[Pace], step: str, words: str) -> None:
    effort = Effort()
    for seen in paces:
        after(effort, seen, 40)
    assert effort.step.name == step
    assert effort.words.startswith(words)


def test_one_pack_decides_nothing_and_each_step_is_measured_again() -> None:
    effort = Effort()
    steps = [after(effort, WAITS_FOR_THE_LINE, packs).step.name for packs in (2, 1, 2, 1)]
    assert steps == ["zstd 3", "zstd 6", "zstd 6", "zstd 9"]


def test_packs_that_were_begun_at_an_earlier_step_say_nothing_of_this_one() -> None:
    """Eight workers end their first packs together."""
    effort = Effort()
    for _ in range(8):
        effort.note(WAITS_FOR_THE_LINE)
    assert effort.step.name == "zstd 6"


def test_a_run_that_turns_around_looks_longer_before_it_turns_again() -> None:
    effort = after(Effort(), WAITS_FOR_THE_LINE, 3)
    assert after(effort, QUICK_LINK, 3).step.name == "zstd 3"
    assert after(effort, WAITS_FOR_THE_LINE, 5).step.name == "zstd 3"
    assert after(effort, WAITS_FOR_THE_LINE, 1).step.name == "zstd 6"


def test_the_settings_choose_the_steps() -> None:
    assert steps_for(Compression()) is BALANCED
    assert steps_for(Compression(fastest=True)) is FASTEST
    effort = after(Effort(steps_for(Compression(smallest=True))), WAITS_FOR_CORES, 40)
    assert effort.step.name == "zstd 12"
    assert "asks for the fewest bytes" in effort.words


def test_the_step_reaches_the_encoder() -> None:
    by_step = {step.name: Encoder(Effort((step,))).encode(TEXT) for step in (*FASTEST, *SMALLEST)}
    assert by_step.pop("raw") == (RAW.code, TEXT)
    numbers = weights(MIB, random.Random(1))
    as_numbers = [Run(len(numbers), Element.BF16)]
    assert Encoder(Effort(FASTEST[:1])).encode(numbers, as_numbers) == (RAW.code, numbers)
    assert by_step["zstd 3"][0] == by_step["zstd 12"][0] == ZSTD.code
    sizes = [len(stored) for _, stored in by_step.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert Encoder(Effort()).encode(TEXT) == by_step["zstd 3"]


def over(line: str, cores: int, steps: Sequence[Step], size: int = 16 * GIB) -> Outcome:
    return stored_over(LINES[line], cores, Effort(steps), mixed(size))


def test_raw_wins_over_a_fast_line_and_zstd_over_a_slow_one() -> None:
    """As it must with two cores: they encode less than 25 Gbit/s carry."""
    fast, slow = over("25 Gbit/s", 2, FASTEST), over("200 Mbit/s", 2, FASTEST)
    assert fast.share("raw", "lz4") > 0.95
    assert fast.took_s < over("25 Gbit/s", 2, BALANCED).took_s * 0.9
    assert slow.share("raw", "lz4") < 0.15
    assert slow.stored < 0.55
    # the bytes cost the cores of a host that has the store, too: few of them are stored raw
    assert over("local store", 2, FASTEST).share("raw") < 0.1


@pytest.mark.parametrize("cores", [2, 16])
@pytest.mark.parametrize("line", LINES)
def test_no_fixed_encoding_is_much_faster_than_the_choice(line: str, cores: int) -> None:
    fixed = {name: over(line, cores, steps).took_s for name, steps in FIXED.items()}
    for steps, most in ((BALANCED, 1.06), (FASTEST, 1.10)):
        best = min(fixed[step.name] for step in steps)
        assert over(line, cores, steps).took_s < most * best


def test_a_level_that_would_make_the_cores_the_limit_is_not_tried() -> None:
    """Text, by eight workers with a core each, over a line that zstd 3 just leaves full."""
    text = ["text"] * (16 * GIB // CHUNK_BYTES)
    line = LINES["1 Gbit/s"]
    chosen = stored_over(line, 16, Effort(), text)
    assert chosen.took_s < 1.05 * stored_over(line, 16, Effort(FIXED["zstd 1"]), text).took_s
    assert chosen.share("zstd 6", "zstd 9") == 0


@pytest.mark.parametrize("line", LINES)
def test_a_workspace_that_asks_for_nothing_pays_for_no_more_bytes_than_zstd_1(line: str) -> None:
    outcome = over(line, 2, BALANCED)
    assert outcome.share("raw", "lz4") == 0
    assert outcome.stored <= over(line, 2, FIXED["zstd 1"]).stored
    if "Mbit/s" in line:
        assert outcome.stored < over(line, 2, FIXED["zstd 3"]).stored


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
