"""Prefect's own suite for blocks, over each of ours."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys

import pytest
from prefect.blocks.core import Block
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.filesystems import LocalFileSystem
from prefect.testing.standard_test_suites import BlockStandardTestSuite
from prefect.workers.process import ProcessWorker

import blocks
from blocks import PROVIDERS
from blocks.markets import KeyedProvider
from deployments.installation import CHECKOUT
from deployments.server import Server
from tests.fixtures.waiting import PATIENCE_S

KINDS: list[type[Block]] = [getattr(blocks, name) for name in blocks.__all__]


class TestStandard(BlockStandardTestSuite):
    @pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
    def block(self, request: pytest.FixtureRequest) -> type[Block]:
        kind: type[Block] = request.param
        return kind

    def test_has_a_valid_image(self, block: type[Block]) -> None:
        """Prefect's own test fetches the picture. Ours are those that the installed Prefect
        shows for its own blocks, so it vouches for them without a network here."""
        known = {str(kind._logo_url) for kind in (Secret, LocalFileSystem, ProcessWorker)}
        assert str(block._logo_url) in known

    def test_has_the_slug_of_its_class(self, block: type[Block]) -> None:
        """References such as local-provider/default are stored with this slug."""
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", block.__name__)
        assert block.get_block_type_slug() == words.lower()

    def test_refers_to_other_blocks_by_name_only(self, block: type[Block]) -> None:
        """The form for editing replaces the secrets of nested blocks by asterisks."""
        assert block.model_json_schema()["block_schema_references"] == {}


def test_the_package_exports_every_block() -> None:
    modules = [
        importlib.import_module(f"blocks.{m.name}") for m in pkgutil.iter_modules(blocks.__path__)
    ]
    ours = {
        kind.__name__
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Block) and kind.__module__ == module.__name__
        if kind is not KeyedProvider
    }
    assert sorted(blocks.__all__) == sorted(ours)
    assert set(PROVIDERS) <= set(KINDS)


def test_register_adds_the_types_to_a_server(prefect_server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "block", "register", "-m", "blocks"],
        cwd=CHECKOUT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with get_client(sync_client=True) as client:
        for kind in KINDS:
            slug = kind.get_block_type_slug()
            assert client.read_block_type_by_slug(slug).name == kind.get_block_type_name()
            assert slug not in done.stderr
