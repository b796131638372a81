"""What a command prints: nothing that a terminal would obey, whatever a machine said."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Final

import msgspec
import pandas as pd
import pytest

from torpor.shared.errors import from_wire
from torpor_cli.app import main
from torpor_cli.output import print_report, print_rows, quiet

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


@pytest.mark.rule("H13")
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


OFFERS = [
    {
        "market": "vast", "GPU": "8 x RTX PRO 6000 Workstation", "$/h": "12.345",
        "ready after": "at most 1200 s", "outcome": outcome, "notes": "", "region": "Ohio, US",
        "provider": "vast://9ea7c0ffee9ea7c0",
    }
    for outcome in ("fits, spot", "it costs 12 $/h, the limit is 4 $/h")
]  # fmt: skip


@pytest.mark.parametrize("columns", [80, 60])
def test_a_terminal_shows_the_first_columns_that_have_values_and_names_the_others(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_rows(OFFERS)
    *table, rest = capsys.readouterr().out.splitlines()
    shown = ["market", "GPU", "$/h", "ready after", "outcome"][: 5 if columns == 80 else 4]
    assert [word for word in OFFERS[0] if word in table[0]] == shown
    assert all(len(line.rstrip()) <= columns for line in table)
    assert "8 x RTX PRO 6000 Workstation" in table[1]  # in one piece, whatever follows
    left = [name for name in OFFERS[0] if name not in (*shown, "notes")]
    assert rest == f"--wide shows more: {', '.join(left)}"


def test_a_terminal_tears_no_id_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    row = {"snapshot": "20261130T040351Z-57e199d5", "made": "2026-11-30 04:03:51 UTC"}
    row |= {"verified": "yes", "machine": "m-936671ef4663-cb64553d"}
    print_rows([row])
    _, shown, rest = capsys.readouterr().out.splitlines()
    assert shown.split("  ")[:3] == [row["snapshot"], row["made"], "yes"]
    assert rest == "--wide shows more: machine"
    print_rows([{"what": "directories", "value": f"/home/{'a' * 90}"}])
    assert "/home/" in capsys.readouterr().out  # a value is shown, however long it is


def test_a_wide_terminal_and_a_pipe_show_everything_in_a_line_a_row_and_a_pipe_is_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_rows(OFFERS)
    piped = capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_rows(OFFERS, wide=True)
    for printed in (piped, capsys.readouterr().out):
        assert "\x1b" not in printed
        head, *rows = printed.splitlines()
        assert head.split("  ")[0] == "market"
        assert [row.rstrip()[-12:] for row in rows] == [OFFERS[0]["provider"][-12:]] * 2


def test_a_terminal_names_an_account_by_its_market_and_a_pipe_by_its_whole_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"machine": f"m1 at {name}"} for name in (OFFERS[0]["provider"], "local://vm/a/b.c")]
    rows += [{"machine": "m1 at gcp://project"}]
    print_rows(rows)
    assert "m1 at vast://9ea7c0ffee9ea7c0" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    print_rows(rows, "Of vast://9ea7c0ffee9ea7c0, local://vm/a/b.c: 3")
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "Of vast, local: 3",
        "machine",
        "m1 at vast",
        "m1 at local",
        "m1 at gcp://project",
    ]


def test_a_pandas_table_is_empty_where_nothing_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = pd.DataFrame(
        {"hours": [0.123456789, 2.0], "usd": [float("nan"), 1.5], "gpu": [None, "a"]}
    )
    print_report(table, as_json=False)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["hours", "usd", "gpu"],
        ["0.123457"],
        ["2", "1.5", "a"],
    ]


def test_what_prefect_s_own_threads_say_at_the_end_is_not_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, handler = logging.getLogger(), PrefectConsoleHandler()
    before = [*root.handlers]
    root.addHandler(handler)
    try:
        with quiet(as_json=True):
            logging.getLogger("EventsWorker").warning(
                "Still processing items: 3 items remaining..."
            )
            logging.getLogger("torpor").warning("a warning")
    finally:
        root.handlers[:] = before
    said = capsys.readouterr().err
    assert "torpor: warning: a warning\n" in said
    assert "Still processing" not in said


_BEGINS: Final = """
import logging
from torpor_cli.output import quiet
with quiet(as_json=True):
    import prefect.main  # as a flow does, which sets up Prefect's logging
    logging.getLogger("torpor").warning("a warning")
"""


def test_prefect_prints_no_line_of_its_own_when_a_run_begins() -> None:
    done = subprocess.run([sys.executable, "-c", _BEGINS], capture_output=True, text=True)
    assert done.stderr == "torpor: warning: a warning\n"


def test_a_title_an_error_and_a_warning_end_their_lines_between_words_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    print_rows([], f"Workspaces: {', '.join(f'workspace-{number}' for number in range(12))}")
    monkeypatch.setattr("sys.argv", ["torpor", "status", "--no-such-option"])
    with pytest.raises(SystemExit):
        main()
    with quiet(as_json=True):
        logging.getLogger("torpor").warning("word " * 40)
    out, err = capsys.readouterr()
    assert out.count("\n") == 3
    assert err.count("\n") == 5
    assert all(len(line) <= 80 for line in (out + err).splitlines())
    assert {word.strip(",") for line in out.splitlines() for word in line.split()[1:]} <= {
        f"workspace-{number}" for number in range(12)
    }
