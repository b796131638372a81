"""A short run of the rounds; the long one is ``make attacker``."""

from __future__ import annotations

import pytest

from tests.attacker.__main__ import carry_out

SEEDS = {"plain": 2, "sealed": 1}


@pytest.mark.rule("H17")
@pytest.mark.parametrize("kind", SEEDS)
def test_who_holds_the_buckets_key_alone_runs_ends_and_reads_nothing(kind: str) -> None:
    seed = SEEDS[kind]
    done = carry_out(seed, range(20))
    wrong = [(one.number, one.violations) for one in done if one.violations]
    assert wrong == [], f"python -m tests.attacker --seed {seed} --rounds 20"
    assert sum(one.counts[f"rounds on a {kind} store"] for one in done) == len(done) == 20
    assert all(len(one.did) > 4 for one in done)
