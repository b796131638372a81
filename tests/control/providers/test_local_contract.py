"""The local provider against the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.provider_contract import KilledCreate, ProviderContract
from tests.fixtures.kill_points import killed_at
from tests.fixtures.machines import destroy_all
from torpor.control.providers.local.lock import sweep
from torpor.control.providers.local.provider import LocalProvider
from torpor.shared.values import MachineId, Want


class TestLocal(ProviderContract):
    reach_stride = 5  # the server's Python takes 0.4 s to start

    @pytest.fixture
    def provider(self, machines_folder: Path) -> Iterator[LocalProvider]:
        folder = machines_folder / "machines"
        provider = LocalProvider(folder)
        yield provider
        destroy_all(provider)
        if folder.exists():
            sweep(folder)
            assert {path.name for path in folder.iterdir()} <= {"m-0123456789ab"}

    @pytest.fixture
    def other_provider(self, machines_folder: Path) -> LocalProvider:
        return LocalProvider(machines_folder / "other")

    @pytest.fixture
    def want(self) -> Want:
        return Want(disk_gib=0.01)

    @pytest.fixture
    def unlabelled(self, machines_folder: Path) -> MachineId:
        """A folder with a machine's name that does not say whose it is."""
        root = machines_folder / "machines" / "m-0123456789ab"
        root.mkdir(parents=True)
        (root / "machine.json").write_text('{"version": 1, "id": ')
        return MachineId("m-0123456789ab-00000000")

    @pytest.fixture
    def killed_create(self, provider: LocalProvider) -> KilledCreate:
        return lambda order, step: killed_at(step, lambda: provider.create(order))
