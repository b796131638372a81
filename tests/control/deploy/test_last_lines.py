"""What is shown of a command's output holds no part of a secret."""

from __future__ import annotations

import json

import pytest

from torpor.control.deploy.last_lines import LAST_LINES, LastLines
from torpor.control.variables import Secrets

TOKEN = "hf_" + "0123456789" * 3
KEY = "-----BEGIN KEY-----\nAAAAbbbbCCCC\nDDDDeeeeFFFF\n-----END KEY-----\n"


def _lines(*values: str) -> LastLines:
    return LastLines(Secrets({str(number): value for number, value in enumerate(values)}))


def test_the_last_lines_are_kept_however_they_come() -> None:
    lines = _lines(TOKEN)
    assert lines.text() == "nothing"
    text = "".join(f"line {number}\n" for number in range(50)) + "no end"
    for at in range(0, len(text), 7):
        lines.add(text[at : at + 7])
    assert lines.text().split("\n") == text.split("\n")[-LAST_LINES:]


@pytest.mark.rule(9)
@pytest.mark.parametrize("begin", [0, 480, 1990, 4990])
@pytest.mark.parametrize("piece", [1, 10, 10_000])
def test_no_cut_leaves_half_a_secret(begin: int, piece: int) -> None:
    """Each line that is shown, and the line that has no end yet, are cut somewhere."""
    lines, text = _lines(TOKEN), "x" * begin + TOKEN + "y" * 1990
    for at in range(0, len(text), piece):
        lines.add(text[at : at + piece])
    assert "345" not in lines.text()
    lines.add("\nend")
    assert "345" not in lines.text() and lines.text().endswith("end")


def test_the_lines_at_the_ends_of_what_was_left_out_are_dropped() -> None:
    lines = _lines(TOKEN)
    lines.add(f"whole\n{TOKEN[:20]}")
    lines.skip()
    assert lines.text() == "whole"
    for piece in (TOKEN[20:25], TOKEN[25:], "\nnext\n", "last"):
        lines.add(piece)
    assert lines.text() == "whole\nnext\nlast"


def test_a_secret_of_several_lines_is_hidden_line_by_line_and_as_json() -> None:
    secrets = Secrets({"KEY": KEY, "JSON": '{\n"private": "a\\nb"\n}'})
    assert secrets.hidden_in(f"at DDDDeeeeFFFF: {json.dumps({'key': KEY})}") == (
        'at ***: {"key": "***"}'
    )
    assert secrets.hidden_in("{}") == "{}", "a bracket on a line of its own is no secret"
    lines = LastLines(secrets)
    for character in KEY:
        lines.add(character)
    assert lines.text() == "***\n***\n***\n***"
