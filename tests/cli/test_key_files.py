"""The files in which this host keeps the keys of its stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.control.own_server import FOLDER_VARIABLE
from torpor.shared.errors import InvalidInput
from torpor.shared.format.user_keys import UserKey
from torpor_cli.key_files import keep_key, kept_keys, key_file

NO_TEXT = b"\xff\xfe\x00not a key"


def test_a_key_file_that_is_no_text_is_named_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    file = key_file("mine")
    file.parent.mkdir(parents=True)
    file.write_bytes(NO_TEXT)
    with pytest.raises(InvalidInput, match=f"{file} is the place of a key"):
        next(kept_keys("mine"))
    with pytest.raises(InvalidInput, match="no text"):
        keep_key("mine", UserKey.of("aa" * 32))
    assert file.read_bytes() == NO_TEXT
