"""Answers of a fake market in which one machine's row has an odd cell."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.markets.server import Answer, FakeMarket, Request

MISSING: Final = "the cell is missing"
ODD: Final[tuple[Any, ...]] = (None, {"odd": 1}, ["odd"], 7, MISSING)
"""What a cell may hold in place of what the market's specification says."""

SPECIFIED: Final = {
    "vast": (
        "actual_status cur_state dph_base dph_total extra_env geolocation gpu_name "
        "gpu_ram host_id id image_runtype image_uuid instance intended_status is_bid "
        "label local_ipaddrs machine_id min_bid next_state num_gpus onstart ports "
        "public_ipaddr reliability2 search ssh_host ssh_port start_date status_msg "
        "storage_cost template_id time_remaining uptime_mins verification volume_info"
    ),
    "runpod": (
        "actions args cloud cluster cost cpu createdAt cudaVersion dataCenterId disk "
        "env globalNetworking gpu id image locked mounts name ports registry runtime "
        "ssh startedAt status template"
    ),
    "lambda": (
        "actions file_system_mounts file_system_names firewall_rulesets hostname id "
        "instance_type ip jupyter_token jupyter_url name private_ip region "
        "ssh_key_names status tags"
    ),
    "tensordock": (
        "id image ipAddress location_id name portForwards rateHourly resources status type"
    ),
}
"""The cells of a row in the markets' specifications, of which the fakes do not send all (Vast.ai's
OpenAPI file of August 2026, RunPod's of its API version 2, Lambda's 1.10.0, and one of TensorDock's
that others wrote)."""

Path = tuple[str, ...]


class OddRow:
    """The row of one machine, wherever it stands in an answer. ``cells``: the paths of its cells,
    one level deep, as they were seen. ``odd``: what some of them hold from now on."""

    def __init__(self, market: str, machine: str) -> None:
        self._names = {machine, machine.partition(".")[0]}
        self.cells: set[Path] = {(cell,) for cell in SPECIFIED.get(market, "").split()}
        self.odd: dict[Path, Any] = {}

    def spoil(self, body: Any) -> None:
        for row in _dicts(body):
            meta = row.get("metadata")
            named = [row.get("id"), row.get("name"), row.get("server_id")]
            named += [meta.get("name")] if isinstance(meta, dict) else []
            if self._names.isdisjoint(str(name) for name in named):
                continue
            for key, value in [*row.items()]:
                self.cells.add((key,))
                if isinstance(value, dict):
                    self.cells |= {(key, inner) for inner in value}
            for path, odd in self.odd.items():
                _put(row, path, odd)


@contextmanager
def odd_row(fake: FakeMarket, market: str, machine: str) -> Iterator[OddRow]:
    """Spoil the machine's row in the fake's answers, until the context ends."""
    row, plainly = OddRow(market, machine), fake.answer

    def answer(request: Request, authorization: str) -> Answer | None:
        said = plainly(request, authorization)
        if said is not None and isinstance(said.body, (dict, list)):
            body = copy.deepcopy(said.body)
            row.spoil(body)
            said = Answer(said.status, body, said.content_type, said.headers)
        return said

    spoils: Callable[[Request, str], Answer | None] = answer
    fake.answer = spoils  # type: ignore[method-assign]
    try:
        yield row
    finally:
        fake.answer = plainly  # type: ignore[method-assign]


def _dicts(body: Any) -> Iterator[dict[str, Any]]:
    inner = body.values() if isinstance(body, dict) else body if isinstance(body, list) else ()
    for value in [*inner]:
        yield from _dicts(value)
    if isinstance(body, dict):
        yield body


def _put(row: dict[str, Any], path: Path, odd: Any) -> None:
    for key in path[:-1]:
        row = row.get(key) or {}
        if not isinstance(row, dict):
            return
    if odd is MISSING:
        row.pop(path[-1], None)
    else:
        row[path[-1]] = copy.deepcopy(odd)  # it may get a cell of its own
