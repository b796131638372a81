"""A short run of the rounds; the long one is ``make sides``."""

from __future__ import annotations

import secrets

import pytest

from tests.sides.__main__ import carry_out


@pytest.mark.rule(24)
def test_two_control_sides_of_one_bucket_lose_no_work_and_end_no_machine_too_early() -> None:
    seed = secrets.randbelow(1 << 32)
    for number in range(8):
        done = carry_out(seed, number)
        assert done.violations == [], f"--seed {seed} --first {number} --rounds 1"
        assert len(done.did) > 8
