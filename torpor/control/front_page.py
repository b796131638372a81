"""The page of torpor in Prefect's UI: what is awake, what it costs, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from torpor.control.alerts.delivery import Alert
from torpor.control.overview import Overview, Overviews
from torpor.control.reports import MOST_ROWS, Row, moment
from torpor.control.watch_report import WatchedJob
from torpor.shared.plain_text import short

KEY: Final = "torpor-overview"
"""The key of the page's artifact in Prefect."""
_MOST: Final = 500  # characters of one text
_ASLEEP: Final = "Nothing is awake"
_COLUMNS: Final = ("workspace", "state", "$/h", "$ this month", "age", "jobs", "sleeps after")
_NEXT: Final = {
    "new": "torpor create {}",
    "asleep": "torpor wake {}",
    "awake": "torpor hibernate {}",
    "not finished": "torpor top",
}
_SPECIAL: Final = re.compile(r"([\\`*_\[\]<>|#~&])")
_ADDRESS: Final = re.compile(r"(:(?=//)|www(?=\.))", re.IGNORECASE)
"""Places where Markdown makes a link of a bare address; a zero-width space there prevents that. Not
at ``@``: commands with USER@HOST are copied from the page, and a mail address opens no page."""

_LINKS: Final = """## Links

* [Deployments](../../deployments) start everything by a form.
* [Runs](../../runs) show what goes on, with logs.
* [Blocks](../../blocks) hold the settings of workspaces, stores and markets.
* `torpor --help` lists the commands of the terminal.
"""


def front_page(
    seen: Overviews,
    alerts: Sequence[Alert],
    jobs: Sequence[WatchedJob],
    at_unix: float,
    *,
    sure: bool = True,
) -> str:
    """The page in Markdown. ``sure``: everything was looked at. What machines and markets have
    named is shown as it is written, and links to no page."""
    watching = _text(seen.watching.replace("`", ""))
    head = (
        f"# {_text(_title(seen))}\n\nSeen at {moment(at_unix)}. {watching}\n\n"
        "Each run of `watch` renews this page. If the time is older than you expect, "
        "`torpor status` looks now.\n"
    )
    parts = [head, _to_do(alerts, sure), _workspaces(seen.workspaces), _jobs(jobs), _LINKS]
    return "\n".join(parts)


def first_page(blocks: Sequence[str], watching: str) -> str:
    """The page before the first look at the workspaces of these ``blocks``."""
    head = (
        f"# torpor is up\n\n{_text(watching.replace('`', ''))}\n\n"
        "Each run of `watch` renews this page. `torpor status` looks now, in the terminal. "
        "`torpor init mywork` makes a workspace: it asks for bucket, market and directories.\n"
    )
    return "\n".join([head, _workspaces([Overview(block=name) for name in blocks]), _LINKS])


def _title(seen: Overviews) -> str:
    if not seen.workspaces:
        return "There is no workspace yet"
    unknown = [one for one in seen.workspaces if one.trouble or one.state in ("", "awake?")]
    least = f"; {len(unknown)} of {len(seen.workspaces)} not known" if unknown else ""
    if not seen.awake:
        return f"{len(unknown)} of {len(seen.workspaces)} not known" if unknown else _ASLEEP
    return f"{len(seen.awake)} of {len(seen.workspaces)} awake: {seen.costs()}{least}"


def _to_do(alerts: Sequence[Alert], sure: bool) -> str:
    lines = [
        f"* **{_text(one.title)}**: {_text(one.cause)}. Next: {_text(one.next_step)}"
        for one in alerts[:MOST_ROWS]
    ]
    lines += _more(alerts)
    if not sure:
        lines.append("* Not everything could be looked at: an alert may be missing here.")
    return "\n".join(["## What to do\n", *(lines or ["Nothing: no alert."]), ""])


def _workspaces(seen: Sequence[Overview]) -> str:
    if not seen:
        return "`torpor init mywork` makes a workspace.\n"
    rows = []
    asleep_last = sorted(seen, key=lambda one: one.state in ("asleep", "new"))
    for one in asleep_last[:MOST_ROWS]:
        row = one.row()
        command = _NEXT.get(row["state"], "torpor status {}").format(one.block)
        rows.append({name: row[name] for name in _COLUMNS} | {"next": command, "note": row["note"]})
    return "\n".join([f"## Workspaces\n\n{_table(rows, code='next')}", *_more(seen)])


def _more(listed: Sequence[object]) -> list[str]:
    """The line about rows that are not shown."""
    more = len(listed) - MOST_ROWS
    return [f"* And {more} more: `torpor status` shows all.\n"] if more > 0 else []


def _jobs(jobs: Sequence[WatchedJob]) -> str:
    if not jobs:
        return ""
    rows = [
        {
            "job": one.job,
            "workspace": one.workspace,
            "state": one.state,
            "what comes next": one.next_step,
            "log": f"torpor job log {one.job} -f",
        }
        for one in jobs[:MOST_ROWS]
    ]
    return "\n".join([f"## Jobs\n\n{_table(rows, code='log')}", *_more(jobs)])


def _table(rows: Sequence[Row], code: str) -> str:
    """A table in Markdown, without columns that are empty in every row. ``code``: the column of
    commands."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]

    def cell(row: Row, name: str) -> str:
        return f"`{row[name].replace('`', '')}`" if name == code else _text(row[name])

    lines = [[*names], ["---"] * len(names), *([cell(row, name) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _text(words: str) -> str:
    """Words that Markdown shows as they are, without a link to a page."""
    shown = _SPECIAL.sub(r"\\\1", " ".join(short(words).split())[:_MOST])
    return _ADDRESS.sub("\\1\u200b", shown)
