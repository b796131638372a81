"""Azure: the contract, and this market's traps."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.control.providers.market_contract import MarketContract
from torpor.shared.values import Want


class TestAzure(MarketContract):
    row = "azure"
    sells_spot = True
    elsewhere: ClassVar = {"subscription": "00000000-0000-0000-0000-000000000000"}

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="T4", disk_gib=20)
