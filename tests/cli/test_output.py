"""What a command prints: nothing that a terminal would obey, whatever a machine said."""

from __future__ import annotations

import json
import logging

import msgspec
import pandas as pd
import pytest

from torpor.shared.errors import from_wire
from torpor_cli.output import print_report, quiet

SAID = "\x1b]52;c;ZWNobyBvd25lZA==\x07\x9b2J\x7f caf\u00e9\t\u202e"
SHOWN = r"\x1b]52;c;ZWNobyBvd25lZA==\x07\x9b2J\x7f café"


class PrefectConsoleHandler(logging.Handler):
    """Called as Prefect's own, which commands replace."""


class _Report(msgspec.Struct):
    words: str = SAID

    def title(self) -> str:
        return self.words

    def rows(self) -> list[dict[str, str]]:
        return [{"log": self.words}]


@pytest.mark.parametrize(
    "report", [_Report(), [{"log": SAID}], {"log": SAID}, pd.DataFrame({"log": [SAID]})]
)
def test_a_job_s_log_changes_no_terminal(
    report: object, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(report, as_json=False)
    printed = capsys.readouterr().out
    assert SHOWN in printed
    assert not {"\x1b", "\x07", "\x9b", "\x7f", "\u202e"} & {*printed}


@pytest.mark.parametrize("report", [_Report(), pd.DataFrame({"words": [SAID]})])
def test_json_for_a_terminal_means_the_same(
    report: object, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(report, as_json=True)
    printed = capsys.readouterr().out
    read = json.loads(printed)
    assert (read[0] if isinstance(read, list) else read)["words"] == SAID
    assert not {"\x1b", "\x07", "\x9b", "\x7f", "\u202e"} & {*printed}


def test_words_of_a_machine_in_warnings_and_errors_change_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, handler = logging.getLogger(), PrefectConsoleHandler()
    before = [*root.handlers]
    root.addHandler(handler)
    try:
        with quiet(as_json=True):
            logging.getLogger("torpor").warning("%s", SAID)
    finally:
        root.handlers[:] = before
    assert f"torpor: warning: {SHOWN}" in capsys.readouterr().err
    assert SHOWN in str(from_wire({"type": "HookFailed", "message": SAID}))
