"""What a command prints: tables for people, JSON for programs, and what a run does meanwhile."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import msgspec

from deployments.terminal import say
from torpor.shared.errors import TorporError
from torpor.shared.plain_text import plain, plain_json, short
from torpor_cli.following import Follower

_WIDE: Final = 10_000
"""Columns of a pipe: nothing is cut off for a program that reads the output."""

_OF_PREFECT: Final = "Still processing items"
"""The beginning of a message of Prefect's threads about events and logs that they are still sending
when a command ends."""
_GAP: Final = 2
_FOLDED: Final = 16
"""Columns of a terminal that are enough for a text of several lines."""


def print_report(report: Any, *, as_json: bool, wide: bool = False) -> None:
    """Print what a flow returned: a report, a list of structs, or a pandas table. ``wide``: as in
    print_rows."""
    if as_json:
        print(_json(report))
    elif hasattr(report, "rows"):
        print_rows(report.rows(), report.title(), wide=wide)
    elif hasattr(report, "to_string"):
        print_rows([_numbered(row) for row in report.to_dict("records")], wide=wide)
    elif isinstance(report, list | tuple):
        print_rows([_row(item) for item in report], wide=wide)
    elif report is not None:
        rows = [{"what": name, "value": value} for name, value in _row(report).items()]
        print_rows(rows, wide=wide)


def print_rows(rows: Sequence[Mapping[str, Any]], title: str = "", *, wide: bool = False) -> None:
    """A table of text. A terminal shows the first columns that have values and for which it is wide
    enough, with short names of providers, and names the other columns; a pipe, and a terminal that
    is to be ``wide``, all."""
    if title:
        say(short(title))
    if not rows:
        return
    table, left = rows_table(rows, wide=wide)
    console(wide=wide).print(table)
    if left:
        say(f"--wide shows more: {', '.join(left)}")


def rows_table(rows: Sequence[Mapping[str, Any]], *, wide: bool = False) -> tuple[Any, list[str]]:
    """The table that ``print_rows`` prints, and the columns that it leaves out."""
    from rich.table import Table

    width = _width(wide)
    names, left = (list(rows[0]), []) if width == _WIDE else _fitting(rows, width)
    bold = "bold" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ""
    table = Table(box=None, pad_edge=False, header_style=bold)
    for name in names:
        whole = width != _WIDE and name != names[-1]
        table.add_column(name, overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*(_shown(row.get(name), whole=width == _WIDE) for name in names))
    return table, left


def console(*, wide: bool = False) -> Any:
    """The console on which tables are printed, as wide as ``print_rows`` makes them."""
    from rich.console import Console

    forced = None if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else False
    return Console(width=_width(wide), highlight=False, markup=False, force_terminal=forced)


def _width(wide: bool) -> int:
    if wide or not sys.stdout.isatty():
        return _WIDE
    return shutil.get_terminal_size().columns


def _fitting(rows: Sequence[Mapping[str, Any]], width: int) -> tuple[list[str], list[str]]:
    """The columns that a terminal shows, and the others that have values. The last one that is
    shown may need several lines, split between words: nobody can copy half an id."""
    from rich.cells import cell_len

    shown: list[str] = []
    having = [name for name in rows[0] if any(_shown(row.get(name)) for row in rows)]
    for name in having:
        texts = [name, *(_shown(row.get(name)) for row in rows)]
        widest = max(map(cell_len, texts))
        least = max(_FOLDED, cell_len(name))
        if len(shown) > 1:  # in a table of two columns, "what" and "value", both are shown
            least = max(least, *(cell_len(word) for text in texts for word in text.split()))
        if shown and widest > width and width < least:
            break
        shown.append(name)
        width -= widest + _GAP
        if width <= 0:
            break
    return shown, having[len(shown) :]


@contextmanager
def shown_progress(asks: bool = False) -> Iterator[Follower]:
    """Show warnings, and the progress of what runs in this context, as lines of standard error.
    ``asks``: the flow may ask the person at the terminal."""
    from tasks.progress import followed_by
    from torpor_cli.question import says_yes

    def asked(question: str) -> bool:
        with follower.silent():
            return says_yes(question)

    with (
        Follower() as follower,
        _warnings_to(follower.says),
        followed_by(follower),
        _asked_here(asked, asks),
    ):
        yield follower


@contextmanager
def _asked_here(answers: Callable[[str], bool], asks: bool) -> Iterator[None]:
    """Answer the questions of flows from the terminal, if standard input is one."""
    if not (asks and sys.stdin.isatty()):
        yield
        return
    from tasks.questions import answered_by

    with answered_by(answers):
        yield


def quiet(as_json: bool, *, asks: bool = False) -> AbstractContextManager[object]:
    """Show progress and warnings to people, and only warnings to programs. ``asks``: as in
    shown_progress."""
    return _warnings_to(_to_stderr) if as_json else shown_progress(asks)


def _to_stderr(line: str) -> None:
    say(line, sys.stderr)


@contextmanager
def _warnings_to(says: Callable[[str], None]) -> Iterator[None]:
    """Replace Prefect's console lines: warnings are one plain line each, and the error that ends
    the command is left to the command. The run's log in the UI keeps everything. What Prefect's
    threads say when the context has ended goes to standard error."""
    from prefect.logging.configuration import ensure_logging_setup

    ensure_logging_setup()  # otherwise Prefect adds its handler when the run begins
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if type(handler).__name__ == "PrefectConsoleHandler":
            root.removeHandler(handler)
            root.addHandler(_Warnings())
    ours = [handler for handler in root.handlers if isinstance(handler, _Warnings)]
    for handler in ours:
        handler.says = says
    try:
        yield
    finally:
        for handler in ours:
            handler.says = _to_stderr


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.says: Callable[[str], None] = _to_stderr

    def emit(self, record: logging.LogRecord) -> None:
        words = short(record.getMessage())
        if record.levelno < logging.ERROR and not words.startswith(_OF_PREFECT):
            self.says(f"torpor: {record.levelname.lower()}: {words}")


def _numbered(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of a pandas table as text; empty where a value is missing."""

    def words(value: Any) -> str:
        missing = value is None or value != value  # pandas writes NaN for a missing value
        return "" if missing else f"{value:,.6g}" if isinstance(value, float) else str(value)

    return {str(name): words(value) for name, value in row.items()}


def _json(report: Any) -> str:
    if hasattr(report, "to_json"):
        return plain_json(report.to_json(orient="records", date_format="iso"))
    try:
        encoded = msgspec.json.encode(report, enc_hook=str)
    except TypeError as error:
        raise TorporError(f"a {type(report).__name__} has no form in JSON: {error}") from error
    return plain_json(msgspec.json.format(encoded).decode())


def _row(item: Any) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        return item
    if hasattr(item, "row"):
        return dict(item.row())
    return dict(msgspec.to_builtins(item))


def _shown(value: Any, *, whole: bool = False) -> str:
    return "" if value is None else plain(str(value)) if whole else short(str(value))
