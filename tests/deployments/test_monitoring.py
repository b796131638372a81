"""Alert rules and dashboard: promtool runs the rules; both name only metrics that `watch` writes.

Grafana itself is not run: the dashboard's structure is checked, not its looks.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any, Final

from deployments.installation import CHECKOUT
from tests.fixtures.waiting import PATIENCE_S
from torpor.control.metrics import Fleet, Money, registry
from torpor.control.watch_report import WatchReport

_FOLDER: Final = CHECKOUT / "deployments" / "monitoring"
_COLUMNS: Final = 24  # of a dashboard's grid


def _written() -> set[str]:
    fleet = Fleet(money=Money(at_unix=0.0))
    return {metric.name for metric in registry(WatchReport(0.0, [], [], []), [], fleet).collect()}


def _named(text: str) -> set[str]:
    return set(re.findall(r"\b(?:torpor_|DCGM_)\w+", text))


def _promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=_FOLDER, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_what_prometheus_reads() -> None:
    _promtool("check", "rules", "alerts.yaml")


def test_each_alert_fires_when_it_should_and_not_before() -> None:
    _promtool("test", "rules", "alerts_test.yaml")


def test_every_alert_is_tested() -> None:
    rules = set(re.findall(r"alert: (\w+)", (_FOLDER / "alerts.yaml").read_text()))
    tests = (_FOLDER / "alerts_test.yaml").read_text()
    fires = set(re.findall(r"alertname: (\w+)\n        exp_alerts:\n          -", tests))
    assert fires == rules


def test_rules_and_dashboard_name_only_what_watch_writes() -> None:
    for name in ("alerts.yaml", "dashboard.json"):
        named = _named((_FOLDER / name).read_text())
        assert named and named <= _written(), name


def test_the_guide_names_every_metric() -> None:
    page = (CHECKOUT / "docs" / "guide" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(\w+)", page, re.MULTILINE)) == _written()


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    dashboard: dict[str, Any] = json.loads((_FOLDER / "dashboard.json").read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= dashboard.keys()
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in {"stat", "timeseries", "table"}
        assert panel["title"] and panel["description"]
        assert panel["datasource"]["uid"].strip("${}") in variables
        assert all(target["expr"] for target in panel["targets"])
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= _COLUMNS
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, f"{panel['title']} overlaps another panel"
        taken |= cells
