"""Many who write at once to a server of `make up`."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import httpx
import pytest

from deployments.server import Server
from tests.fixtures.prefect_api import NO_AUTHORITIES, ask, login
from tests.fixtures.waiting import PATIENCE_S

AT_ONCE = 6
TIMES = 15


@pytest.mark.rule(20)
def test_nobody_is_told_that_the_database_is_locked(prefect_server: Server) -> None:
    """The requests that Prefect refused with 503, sent once: a switched schedule, a new run, and a
    worker's sign of life."""
    api = prefect_server.api_url
    flow = ask("POST", f"{api}/flows/", {"name": "busy"})
    pool = ask("POST", f"{api}/work_pools/", {"name": "busy", "type": "process"})
    made = {"name": "busy", "flow_id": flow["id"], "work_pool_name": pool["name"]}
    made["schedules"] = [{"active": False, "schedule": {"cron": "0 0 1 1 *"}}]
    deployment = ask("POST", f"{api}/deployments/", made)
    url = f"{api}/deployments/{deployment['id']}"
    requests: list[tuple[str, str, dict[str, Any]]] = [
        ("PATCH", f"{url}/schedules/{deployment['schedules'][0]['id']}", {"active": False}),
        ("POST", f"{url}/create_flow_run", {"state": {"type": "SCHEDULED"}}),
        ("POST", f"{api}/work_pools/busy/workers/heartbeat", {"name": "one"}),
    ]
    answers: Counter[tuple[str, int]] = Counter()

    def send(number: int) -> None:
        method, where, body = requests[number % len(requests)]
        for _ in range(TIMES):  # a connection each: one that was idle may end meanwhile
            got = httpx.request(
                method, where, json=body, auth=login(), timeout=PATIENCE_S, verify=NO_AUTHORITIES
            )
            answers[method, got.status_code] += 1

    threads = [threading.Thread(target=partial(send, number)) for number in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ask("DELETE", url)
    assert {code // 100 for _, code in answers} == {2}, answers
    assert answers.total() == AT_ONCE * TIMES
