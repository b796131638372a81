from __future__ import annotations

import pytest

from tests.fixtures.supervised import Machine


@pytest.fixture
def machine(supervised: Machine) -> Machine:
    return supervised
