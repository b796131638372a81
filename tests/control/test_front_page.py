"""Torpor's page in the UI."""

from __future__ import annotations

import re

from torpor.control.alerts.delivery import Alert
from torpor.control.front_page import first_page, front_page
from torpor.control.overview import Overview, Overviews
from torpor.control.watch_report import WatchedJob
from torpor.shared.values import WorkspaceName

ASLEEP = Overview(block="mywork", state="asleep", newest_age_s=7200.0, month_usd=12.3)
AWAKE = Overview(block="big", state="awake", machines=["m-1 at vast"], usd_h=0.3, jobs=1)
JOB = WatchedJob("3f2a9c81d04e", WorkspaceName("big"), "running", driven=True, next_step="it runs")
ALERT = Alert(
    kind="machine idle",
    subject="vast m-1",
    title="machine m-1 of workspace big is idle",
    cause="it costs 0.30 $/h",
    next_step="hibernate it",
    at_unix=0.0,
)


def test_the_page_says_what_is_awake_what_is_wrong_and_the_next_command() -> None:
    seen = Overviews([ASLEEP, AWAKE], "watch looks next at 12:22")
    page = front_page(seen, [ALERT], [JOB], 0.0)
    assert page.startswith(
        "# 1 of 2 awake: 0.300 $/h, 7.20 $ a day\n\nSeen at 1970-01-01 00:00 UTC"
    )
    assert (
        "* **machine m-1 of workspace big is idle**: it costs 0.30 $/h. Next: hibernate it" in page
    )
    assert "| mywork | asleep |  | 12.30 | 2 h |  | `torpor wake mywork` |" in page
    assert "| big | awake | 0.300 |  |  | 1 | `torpor hibernate big` |" in page
    assert "| 3f2a9c81d04e | big | running | it runs | `torpor job log 3f2a9c81d04e -f` |" in page


def test_an_installation_without_a_workspace_is_told_how_to_make_one() -> None:
    for page in (front_page(Overviews([]), [], [], 0.0), first_page([], "")):
        assert "`torpor init mywork`" in page


def test_what_could_not_be_looked_at_is_not_called_asleep() -> None:
    silent = Overview(block="mywork", state="awake?", trouble="market vast is silent")
    page = front_page(Overviews([silent]), [], [], 0.0, sure=False)
    assert page.startswith("# 1 of 1 not known\n") and "Not everything could be looked at" in page
    assert "Nothing: no alert" not in page


def test_the_awake_come_first_and_the_rest_is_counted() -> None:
    page = front_page(Overviews([ASLEEP] * 250 + [AWAKE]), [ALERT] * 201, [], 0.0)
    assert page.index("| big | awake |") < page.index("| mywork | asleep |")
    assert "And 51 more" in page and "And 1 more" in page


def test_what_a_machine_or_a_market_says_makes_no_link_no_cell_and_no_page_of_its_own() -> None:
    hostile = (
        "a | b [pay](http://evil.x) www.evil.x m@evil.x <img src=x> `rm` **x** ~~y~~ &lt;\n# Title"
    )
    page = front_page(Overviews([Overview(block="mywork", trouble=hostile)]), [], [], 0.0)
    (line,) = [line for line in page.splitlines() if "evil" in line]
    cell = line.split(" | ")[-1].removesuffix(" |")
    assert re.sub(r"\\(.)|\u200b", r"\1", cell) == hostile.replace("\n", " ")
    assert not re.search(r"://|www\.|(?<!\\)[`*_<>|#~&\[\]]", cell)  # no address, tag or mark
