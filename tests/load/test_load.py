"""Two jobs at once, whose worker is killed; ``make load`` and ``make chaos`` are the long runs."""

from __future__ import annotations

import pytest

from deployments.installation import Installation
from deployments.server import Server
from tests.fixtures.own_installation import Alone
from tests.load.campaign import figures, run_crowd
from tests.load.crowd import gathered
from tests.load.meter import metered
from tests.load.strikes import Strikes
from tests.markets.every import Markets

pytestmark = pytest.mark.together("automations and make up")


def test_two_jobs_end_right_whose_worker_is_killed(
    torpor_up: Server, installation: Installation, markets: Markets
) -> None:
    alone = Alone(installation, torpor_up)
    with gathered(alone, markets, 2, seed=1) as crowd, metered(installation) as meter:
        strikes = Strikes(crowd, 1, only=("worker",))
        run_crowd(crowd, strikes, 2, works_s=2.0)
        assert crowd.violations == []
        assert strikes.struck == {"worker": 1}
        found = figures(crowd, meter)
    assert found["CPU of the runs of a job, s"] > 1
    assert found["submission to GPU, p50 / p95, s"][0] > 0
