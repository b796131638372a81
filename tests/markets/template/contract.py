"""Example: the contract, and this market's traps."""

from __future__ import annotations

import pytest

from tests.control.providers.market_contract import MarketContract
from torpor.shared.values import Want


class TestExample(MarketContract):
    row = "example"
    images = False

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="H100", disk_gib=20)
