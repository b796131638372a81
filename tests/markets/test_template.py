"""The template of a market keeps the contract as it is, and its copy is a market's files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.markets.every import FAKES
from tests.markets.server import KEY
from tests.markets.template import contract
from tests.markets.template.__main__ import begin
from tests.markets.template.block import ExampleProvider
from tests.markets.template.fake import FakeExample

PROJECT = Path(__file__).parents[2]
_IMPORT = r"^from ((?:torpor|tests|blocks)[\w.]*) import (\w+)"


class TestTemplate(contract.TestExample):
    @pytest.fixture(autouse=True)
    def listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(FAKES, "example", FakeExample)


def test_its_block_opens_its_adapter() -> None:
    with FakeExample() as fake:
        provider = ExampleProvider(**fake.settings()).open()
        assert provider.check().balance_usd == 100
        assert provider.identity == fake.connect(KEY).identity


def test_a_copy_has_the_files_of_a_market_and_imports_what_is_there(tmp_path: Path) -> None:
    folders = ["torpor/control/providers", "blocks", "tests/markets", "tests/control/providers"]
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    made = begin("shop", tmp_path)
    assert [str(path.parent.relative_to(tmp_path)) for path in made] == folders
    for path in made:
        text = path.read_text()
        assert not re.search("xample|template", text), path
        compile(text, path, "exec")
        for package, name in re.findall(_IMPORT, text, re.MULTILINE):
            modules = [package.replace(".", "/"), f"{package}.{name}".replace(".", "/")]
            tried = [root / f"{module}.py" for root in (PROJECT, tmp_path) for module in modules]
            assert any(there.exists() for there in tried), (path, package)
    with pytest.raises(FileExistsError, match="nothing was written"):
        begin("shop", tmp_path)
    with pytest.raises(ValueError, match="no name of a market"):
        begin("../shop", tmp_path)
