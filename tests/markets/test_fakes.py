"""The fake markets keep books, page, hide and fail as they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.fixtures.waiting import PATIENCE_S
from tests.markets.faults import Fault
from tests.markets.lambda_cloud import FakeLambda
from tests.markets.market import Market, Rented
from tests.markets.runpod import FakeRunPod
from tests.markets.server import KEY, FakeMarket
from tests.markets.shop import lambda_wares, runpod_wares, vast_wares
from tests.markets.vast import FIRST_OFFER, FakeVast


@dataclass
class Rig:
    """A fake, and how a client rents, lists and ends there by hand."""

    fake: FakeMarket
    rent: Callable[[httpx.Client, str], httpx.Response]
    made: Callable[[httpx.Response], str]
    listed: Callable[[httpx.Client], list[str]]
    find: Callable[[httpx.Client, str], httpx.Response]
    destroy: Callable[[httpx.Client, str], httpx.Response]

    def client(self, key: str = KEY) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(
            base_url=self.fake.url, headers=headers, timeout=PATIENCE_S, trust_env=False
        )


def _vast() -> Rig:
    def listed(client: httpx.Client) -> list[str]:
        found, query = [], {"limit": "25"}
        while True:
            page: dict[str, Any] = client.get("/api/v1/instances/", params=query).json()
            found += [str(one["id"]) for one in page["instances"]]
            if page["next_token"] is None:
                return found
            query["after_token"] = page["next_token"]

    env = {"-p 22:22": "1"}
    asked = {"image": "debian:12", "disk": 20, "runtype": "args", "args": ["true"], "env": env}
    return Rig(
        FakeVast(Market(wares=vast_wares())),
        lambda c, label: c.put(f"/api/v0/asks/{FIRST_OFFER}/", json={**asked, "label": label}),
        lambda answer: str(answer.json()["new_contract"]),
        listed,
        lambda client, id: client.get(f"/api/v0/instances/{id}/"),
        lambda client, id: client.delete(f"/api/v0/instances/{id}/"),
    )


def _runpod() -> Rig:
    asked = {"image": "debian:12", "gpu": {"id": "NVIDIA GeForce RTX 4090", "count": 1}}
    return Rig(
        FakeRunPod(Market(wares=runpod_wares())),
        lambda client, label: client.post("/v2/pods", json={**asked, "name": label}),
        lambda answer: str(answer.json()["id"]),
        lambda client: [pod["id"] for pod in client.get("/v2/pods").json()["pods"]],
        lambda client, id: client.get(f"/v2/pods/{id}"),
        lambda client, id: client.delete(f"/v2/pods/{id}"),
    )


def _lambda() -> Rig:
    where = {"region_name": "us-west-1", "instance_type_name": "gpu_1x_a10"}

    def rent(client: httpx.Client, label: str) -> httpx.Response:
        client.post("/api/v1/ssh-keys", json={"name": "mine", "public_key": "ssh-ed25519 A"})
        asked = {**where, "ssh_key_names": ["mine"], "name": label}
        return client.post("/api/v1/instance-operations/launch", json=asked)

    return Rig(
        FakeLambda(Market(wares=lambda_wares())),
        rent,
        lambda answer: str(answer.json()["data"]["instance_ids"][0]),
        lambda client: [one["id"] for one in client.get("/api/v1/instances").json()["data"]],
        lambda client, id: client.get(f"/api/v1/instances/{id}"),
        lambda client, id: client.post(
            "/api/v1/instance-operations/terminate", json={"instance_ids": [id]}
        ),
    )


@pytest.fixture(params=[_vast, _runpod, _lambda], ids=["vast", "runpod", "lambda"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig: Rig = request.param()
    yield rig
    rig.fake.close()


def test_it_bills_from_the_create_to_the_end(rig: Rig) -> None:
    market = rig.fake.market
    with rig.client() as client:
        made = rig.made(rig.rent(client, "mine"))
        assert rig.listed(client) == [made]
        assert market.alive()[0].label == "mine"
        market.clock.advance(1800)
        assert market.spent_usd() == pytest.approx(market.rented[0].usd_h / 2)
        assert rig.destroy(client, made).is_success
        market.clock.advance(1800)
        assert rig.listed(client) == []
    assert market.spent_usd() == pytest.approx(market.rented[0].usd_h / 2)


def test_a_wrong_key_is_refused(rig: Rig) -> None:
    with rig.client("another") as client:
        assert rig.rent(client, "mine").status_code == 401
    assert rig.fake.market.rented == []


def test_a_lost_answer_leaves_a_machine(rig: Rig) -> None:
    rig.fake.faults.arm(Fault("lost", "create"))
    with rig.client() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            rig.rent(client, "mine")
        assert len(rig.listed(client)) == 1


@pytest.mark.parametrize("kind", ["error after", "error that created"])
def test_an_error_that_created_a_machine(rig: Rig, kind: Any) -> None:
    rig.fake.faults.arm(Fault(kind, "create"))
    with rig.client() as client:
        assert rig.rent(client, "mine").is_error
        assert len(rig.listed(client)) == len(rig.fake.market.alive()) == 1


@pytest.mark.parametrize("kind", ["no capacity", "quota", "denied", "no money"])
def test_a_refusal_rents_nothing(rig: Rig, kind: Any) -> None:
    rig.fake.faults.arm(Fault(kind, "create"))
    with rig.client() as client:
        assert 400 <= rig.rent(client, "mine").status_code < 500
        assert rig.fake.market.rented == []
        assert rig.rent(client, "mine").is_success


def test_a_machine_is_hidden_for_some_listings(rig: Rig) -> None:
    rig.fake.market.next_hidden_looks = 2
    with rig.client() as client:
        made = rig.made(rig.rent(client, "mine"))
        assert [rig.listed(client) for _ in range(3)] == [[], [], [made]]


def test_it_lives_on_after_a_destroy_that_was_answered(rig: Rig) -> None:
    rig.fake.faults.arm(Fault("lives", "destroy"))
    with rig.client() as client:
        made = rig.made(rig.rent(client, "mine"))
        assert rig.destroy(client, made).is_success
        assert rig.listed(client) == [made]
        assert rig.destroy(client, made).is_success
        assert rig.fake.market.alive() == []


def test_it_is_not_found_and_lives(rig: Rig) -> None:
    rig.fake.faults.arm(Fault("not found", "find"))
    with rig.client() as client:
        made = rig.made(rig.rent(client, "mine"))
        assert rig.find(client, made).status_code == 404
        assert rig.find(client, made).status_code == 200


def test_answers_that_no_market_gives(rig: Rig) -> None:
    with rig.client() as client:
        made = rig.made(rig.rent(client, "mine"))
        rig.fake.faults.arm(Fault("too many", retry_after_s=7))
        refused = rig.find(client, made)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "7")
        assert refused.text.startswith("API requests too frequent")
        rig.fake.faults.arm(Fault("error body"))
        assert rig.find(client, made).status_code == 200
        rig.fake.faults.arm(Fault("not json", skip=1))
        assert rig.find(client, made).json()
        assert "html" in rig.find(client, made).text
        rig.fake.faults.arm(Fault("hang"))
        with pytest.raises(httpx.ReadTimeout):
            client.get("/", timeout=0.05)


def test_vast_shows_25_at_a_time_and_nothing_in_its_retired_list() -> None:
    rig = _vast()
    market: Market = rig.fake.market
    foreign: list[Rented] = [
        market.rent(market.wares[0], "somebody's", {}, id_of=str) for _ in range(30)
    ]
    with rig.client() as client:
        page = client.get("/api/v1/instances/").json()
        assert (len(page["instances"]), page["total_instances"]) == (25, 30)
        assert rig.listed(client) == [machine.id for machine in foreign]
        assert client.get("/api/v0/instances/").json() == {"instances": []}
    rig.fake.close()


def test_vast_rents_on_demand_what_carries_no_bid() -> None:
    rig = _vast()
    with rig.client() as client:
        bids = client.post("/api/v0/bundles/", json={"type": "bid"}).json()["offers"]
        assert bids[0]["dph_base"] == 0.20
        rig.rent(client, "no bid")
        asked = {"image": "debian:12", "label": "bid", "price": 0.25}
        assert client.put(f"/api/v0/asks/{FIRST_OFFER}/", json=asked).is_success
    assert [machine.spot for machine in rig.fake.market.rented] == [False, True]
    rig.fake.close()


def test_lambda_calls_a_machine_terminated_once_it_has_ended() -> None:
    rig = _lambda()
    assert isinstance(rig.fake, FakeLambda)
    rig.fake.ending_looks = 2
    with rig.client() as client:
        made = rig.made(rig.rent(client, "mine"))
        said = rig.destroy(client, made).json()["data"]["terminated_instances"]
        states = [rig.find(client, made).json()["data"]["status"] for _ in range(2)]
    assert [said[0]["status"], *states] == ["terminating", "terminating", "terminated"]
    rig.fake.close()
