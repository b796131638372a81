"""What others wrote about the markets, against our adapters and our fakes: ``make oracles``.

An adapter asks a fake through Prism, which checks each request and each answer against the market's
own specification. Requests to Google are held against its discovery document, those to Azure
against the models of Microsoft's clients, which ask the fake too, as Vast.ai's own client does.
Specifications are not ours to ship, so these tests are collected only by name, where
../shared/specs has them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import asyncssh
import pytest
import yaml

from tests.fixtures.machines import new_key_pair
from tests.fixtures.waiting import PATIENCE_S, until
from tests.markets.azure import SUBSCRIPTION, FakeAzure
from tests.markets.discovery import Discovery
from tests.markets.faults import Fault
from tests.markets.gcp import PROJECT, ZONES, FakeGcp
from tests.markets.lambda_cloud import FakeLambda
from tests.markets.market import Market
from tests.markets.runpod import FakeRunPod
from tests.markets.server import KEY, Answer, FakeMarket, Request
from tests.markets.tensordock import FakeTensorDock
from tests.markets.vast import FIRST_OFFER, FakeVast
from torpor.control.ports import free_ports
from torpor.control.providers.offers import Offer, misfit
from torpor.control.providers.provider import Absent, Provider
from torpor.control.rental.order import order_for
from torpor.control.safety import never_handed_over
from torpor.shared.errors import NoCapacity, ProviderDenied, ProviderError, QuotaReached
from torpor.shared.values import Label, Machine, MachineId, Want, workspace_name

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("needs_server")]

ROOT = Path(__file__).resolve().parents[2]
SPECS = ROOT.parent / "shared/specs"
TOOLS = ROOT / ".venv/oracles"


class Disagreement(NamedTuple):
    """Where the specification is not what the market does, and how it is mended before use."""

    reason: str
    mend: Callable[[dict[str, Any]], None]


def _slashes(spec: dict[str, Any]) -> None:
    spec["paths"] = {f"{path}/": item for path, item in spec["paths"].items()}


def _env(spec: dict[str, Any]) -> None:
    body = spec["paths"]["/api/v0/asks/{id}/"]["put"]["requestBody"]
    body["content"]["application/json"]["schema"]["properties"]["env"] = {"type": "object"}


def _unknown_instance(spec: dict[str, Any]) -> None:
    item = spec["paths"]["/api/v0/instances/{id}/"]
    item["get"]["responses"]["404"] = item["delete"]["responses"]["404"]


def _locations(spec: dict[str, Any]) -> None:
    """As https://dashboard.tensordock.com/api/docs/fetch-hostnodes shows them."""

    def record(**properties: Any) -> dict[str, Any]:
        known = {"type": "object", "additionalProperties": False, "required": list(properties)}
        return {**known, "properties": properties}

    def numbers(*names: str) -> dict[str, Any]:
        return record(**{name: {"type": "number"} for name in names})

    def flags(*names: str) -> dict[str, Any]:
        return record(**{name: {"type": "boolean"} for name in names})

    text, number = {"type": "string"}, {"type": "number"}
    gpu = record(
        v0Name=text,
        displayName=text,
        max_count={"type": "integer"},
        price_per_hr=number,
        resources=numbers("max_vcpus", "max_ram_gb", "max_storage_gb"),
        pricing=numbers("per_vcpu_hr", "per_gb_ram_hr", "per_gb_storage_hr"),
        network_features=flags(
            "dedicated_ip_available", "port_forwarding_available", "network_storage_available"
        ),
    )
    place = record(
        id=text, city=text, stateprovince=text, country=text, tier=number,
        gpus={"type": "array", "items": gpu},
    )  # fmt: skip
    places = record(locations={"type": "array", "items": place})
    content = {"application/json": {"schema": record(data=places)}}
    answer = {"description": "Locations", "content": content}
    spec["paths"]["/api/v2/locations"] = {"get": {"responses": {"200": answer}}}


def _terraform(spec: dict[str, Any]) -> None:
    schemas = spec["components"]["schemas"]
    count = {"type": "object", "required": ["count"], "additionalProperties": False}
    one = {**count, "properties": {"count": {"type": "integer"}}}
    schemas["Resources"]["properties"]["gpus"] = {"type": "object", "additionalProperties": one}
    forward = {"internal_port": {"type": "integer"}, "external_port": {"type": "integer"}}
    schemas["InstanceAttributes"]["properties"]["portForwards"] = {
        "type": "array",
        "items": {"type": "object", "properties": forward},
    }
    asked = schemas["CreateInstanceRequest"]["properties"]["data"]["properties"]["attributes"]
    asked["additionalProperties"] = False
    asked["properties"]["cloud_init"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"runcmd": {"type": "array", "items": {"type": "string"}}},
    }


def _refusals(spec: dict[str, Any]) -> None:
    item = spec["paths"]["/api/v2/instances"]["post"]["responses"]
    item["403"] = item["400"]
    refusal = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    item["200"] = {
        "description": "Refused",
        "content": {"application/json": {"schema": refusal}},
    }


@dataclass(frozen=True)
class Oracle:
    """One market: its specification, our fake and our adapter."""

    file: str
    fake: type[FakeMarket]
    want: Want
    unknown: str  # a machine's id that was never given
    disagreements: tuple[Disagreement, ...] = ()


VAST = Oracle(
    "vast.openapi.yaml",
    FakeVast,
    Want(gpu="RTX 4090", disk_gib=20, spot="allowed"),
    "987654321",
    (
        Disagreement("Vast.ai's client and documentation end every path with a slash", _slashes),
        Disagreement(
            "env is an object in Vast.ai's client and guide, a string in the specification", _env
        ),
        Disagreement(
            "an unknown instance has no answer in the specification of GET; DELETE's is taken",
            _unknown_instance,
        ),
    ),
)
RUNPOD = Oracle(
    "runpod-rest-v2.openapi.json",
    FakeRunPod,
    Want(gpu="RTX 4090", disk_gib=20, cuda=(12, 4)),
    "pod987654321",
)
LAMBDA = Oracle(
    "lambda-cloud.openapi.json",
    FakeLambda,
    Want(gpu="A10"),
    "f" * 32,
)


class WrappedTensorDock(FakeTensorDock):
    """Of the shapes that it knows, those that the specification has."""

    shape = "attributes"
    documented = True


TENSORDOCK = Oracle(
    "tensordock-v2-instances.openapi.yml",
    WrappedTensorDock,
    Want(gpu="RTX 4090"),
    "7d000000-0000-4000-8000-ffffffffffff",
    (
        Disagreement("locations stand in the documentation only", _locations),
        Disagreement(
            "GPUs are a map by model, forwarded ports a list and cloud_init an object in the "
            "documentation and in the Terraform provider that works",
            _terraform,
        ),
        Disagreement(
            "a create is also refused in an answer that is 200 {error, status}", _refusals
        ),
    ),
)


@dataclass
class Prism:
    """A validating proxy before ``fake``. ``violations`` are its own words."""

    oracle: Oracle
    fake: FakeMarket
    url: str
    log: Path

    def provider(self, key: str = KEY) -> Provider:
        found: Provider = self.oracle.fake.adapter(key, url=self.url, sleep=lambda s: None)
        return found

    def violations(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [line for line in lines if re.search(r"Violation|errors#", line)]


@pytest.fixture(
    scope="module",
    params=[VAST, RUNPOD, LAMBDA, TENSORDOCK],
    ids=lambda oracle: oracle.file.split(".")[0],
)
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prism]:
    oracle: Oracle = request.param
    folder = tmp_path_factory.mktemp("prism")
    spec = yaml.safe_load((SPECS / oracle.file).read_text())
    for disagreement in oracle.disagreements:
        disagreement.mend(spec)
    (folder / "spec.json").write_text(json.dumps(spec, default=str))
    fake, port, log = oracle.fake(Market()), next(iter(free_ports(1))), folder / "prism.log"
    argv = [
        *(TOOLS / "bin/node", TOOLS / "prism/node_modules/.bin/prism", "proxy", "--errors"),
        *("--host", "127.0.0.1", "--port", str(port), folder / "spec.json", fake.url),
    ]
    with log.open("wb") as out:
        # node is a program that starts another one: both end by their group.
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            ready = "Prism is listening"
            until(lambda: ready in log.read_text() or process.poll() is not None, ready)
            assert process.poll() is None, log.read_text()
            yield Prism(oracle, fake, f"http://127.0.0.1:{port}", log)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            fake.close()


@pytest.fixture
def prism(started: Prism) -> Iterator[Prism]:
    """With a fresh market, and without a violation before, during or after the test."""
    started.fake.market = Market(wares=started.oracle.fake.wares())
    started.fake.faults.clear()
    yield started
    assert started.violations() == []


def an_offer(provider: Provider, want: Want) -> Offer:
    return next(offer for offer in provider.offers(want) if not misfit(offer, want))


def label() -> Label:
    return Label("oracle", workspace_name("oracle"), "0123456789abcdef")


def rented(provider: Provider, want: Want, offer: Offer | None = None) -> Machine:
    key = asyncssh.import_private_key(new_key_pair().private)
    return provider.create(order_for(offer or an_offer(provider, want), label(), key, want))


def test_a_rental_from_the_look_to_the_proof(prism: Prism) -> None:
    provider, want = prism.provider(), prism.oracle.want
    assert provider.check().name
    prism.fake.market.next_starting_looks = 1
    machine = rented(provider, want)
    assert rented(provider, want).id == machine.id
    states = {live.state for live in map(provider.find, [machine.id] * 3) if type(live) is Machine}
    assert "running" in states
    assert [listed.id for listed in provider.list_own()] == [machine.id]
    provider.destroy(machine, never_handed_over(machine, label()))
    gone = provider.find(machine.id)
    assert isinstance(gone, Absent)
    assert gone.proof
    assert provider.residue() == []
    assert prism.fake.market.alive() == []


def test_a_spot_machine_where_there_is_one(prism: Prism) -> None:
    provider = prism.provider()
    spot = [offer for offer in provider.offers(prism.oracle.want) if offer.spot]
    assert bool(spot) == (prism.oracle is VAST)
    for offer in spot[:1]:
        rented(provider, prism.oracle.want, offer)
        assert prism.fake.market.alive()[0].spot


@pytest.mark.parametrize(
    ("kind", "error"),
    [("no capacity", NoCapacity), ("quota", QuotaReached), ("no money", ProviderDenied)],
)
def test_refusals_as_the_specification_words_them(
    prism: Prism, kind: Any, error: type[ProviderError]
) -> None:
    if prism.oracle is VAST and kind in ("quota", "no money"):
        return  # the specification names no such error; the fake's words are a guess
    prism.fake.faults.arm(Fault(kind, "create"))
    with pytest.raises(error):
        rented(prism.provider(), prism.oracle.want)
    assert prism.fake.market.rented == []


def test_a_wrong_key(prism: Prism) -> None:
    with pytest.raises(ProviderDenied):
        prism.provider("another").list_own()


def test_an_unknown_machine(prism: Prism) -> None:
    assert isinstance(prism.provider().find(MachineId(prism.oracle.unknown)), Absent)


VENDOR_CLIENT = """
import json, sys
from vastai import VastAI
vast = VastAI(api_key=sys.argv[1], server_url=sys.argv[2])
offers = vast.search_offers(query="gpu_name=RTX_4090 rentable=true", order="dph_total")
made = vast.create_instance(
    id=int(sys.argv[3]), image="debian:12", disk=20, label="mine", env="-p 22:22", args=["true"])
shown = vast.show_instance(id=made["new_contract"])
vast.destroy_instance(id=made["new_contract"])
print(json.dumps({"offers": offers, "made": made, "shown": shown}, default=str))
"""


def test_the_client_of_vast_rents_and_ends_at_the_fake() -> None:
    fake = FakeVast()
    try:
        argv = [str(TOOLS / "bin/python"), "-c", VENDOR_CLIENT, KEY, fake.url, str(FIRST_OFFER)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + str(fake.calls)
        told = json.loads(done.stdout.splitlines()[-1])
        machine = fake.market.rented[0]
        assert str(told["made"]["new_contract"]) == machine.id
        assert told["shown"]["label"] == machine.label == "mine"
        assert machine.request["env"] == {"-p 22:22": "1"}
        assert [offer["gpu_name"] for offer in told["offers"]] == ["RTX 4090"] * 2
        assert fake.market.alive() == []
    finally:
        fake.close()


def test_google_s_document_knows_every_request_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    discovery, fake = Discovery.installed(TOOLS), FakeGcp()
    answered = fake.answer

    def judged(request: Request, authorization: str) -> Answer | None:
        answer = answered(request, authorization)
        discovery.judge(request, answer)
        return answer

    monkeypatch.setattr(fake, "answer", judged)
    provider = fake.connect(
        subnetwork="mine",
        deadline_s=3600,
        ssh_from="203.0.113.7/32",
        ports=(8000,),
        clock=lambda: fake.market.clock.now_unix,
    )
    try:
        assert provider.check().name
        for gpu, spot in (("L4", "never"), ("L4", "only"), ("T4", "never")):
            want = Want(gpu=gpu, disk_gib=20, spot=spot)  # type: ignore[arg-type]
            fake.operation_looks = 1
            machine = rented(provider, want)
            assert rented(provider, want).id == machine.id
            assert type(provider.find(machine.id)) is Machine
            assert [listed.id for listed in provider.list_own()] == [machine.id]
            fake.market.clock.advance(1800)
            provider.renew(machine)
            fake.market.rented[-1].request["disks"][0]["autoDelete"] = False
            fake.addresses["kept"] = {
                "kind": "compute#address",
                "name": "kept",
                "labels": fake.market.rented[-1].request["labels"],
                "region": "https://www.googleapis.com/compute/v1/projects/p/regions/us-central1",
                "users": [],
            }
            fake.operation_looks = 0
            for _ in range(2):
                provider.destroy(machine, never_handed_over(machine, label()))
            gone = provider.find(machine.id)
            assert isinstance(gone, Absent)
            assert gone.proof
            assert provider.residue() == []
            fake.operations.clear()
        assert discovery.violations == []
        assert {
            "compute.instances.insert",
            "compute.instances.get",
            "compute.instances.delete",
            "compute.instances.aggregatedList",
            "compute.instances.setMetadata",
            "compute.zoneOperations.get",
            "compute.zoneOperations.list",
            "compute.images.getFromFamily",
            "compute.firewalls.insert",
            "compute.globalOperations.get",
            "compute.disks.delete",
            "compute.addresses.delete",
            "compute.machineTypes.aggregatedList",
        } <= discovery.asked
    finally:
        fake.close()


def test_google_s_document_does_not_know_other_requests() -> None:
    discovery = Discovery.installed(TOOLS)
    path = f"/compute/v1/projects/{PROJECT}/zones/{ZONES[0]}/instances"
    for request in (
        Request("POST", path, {}, {"machineTipe": "g2-standard-4"}),
        Request("POST", path, {}, {"scheduling": {"instanceTerminationAction": "KEEP"}}),
        Request("POST", path, {}, {"labels": {"a": 1}}),
        Request("POST", path, {"request": "1"}, {}),
        Request("PUT", path, {}, {}),
        Request("GET", f"{path}/mine", {}, {"name": "mine"}),
    ):
        discovery.violations.clear()
        discovery.judge(request, None)
        assert len(discovery.violations) == 1, request


def test_microsoft_s_models_know_every_request_and_answer_and_its_clients_rent_at_the_fake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, exchanges = FakeAzure(), []
    answered = fake.answer

    def heard(request: Request, authorization: str) -> Answer | None:
        answer = answered(request, authorization)
        if answer is not None and request.path.startswith("/subscriptions/"):
            exchanges.append((request.method, request.path, request.body, answer.body))
        return answer

    monkeypatch.setattr(fake, "answer", heard)
    provider = fake.connect(ports=(8000,))
    try:
        assert provider.check().name
        for spot in ("never", "only"):
            machine = rented(provider, Want(gpu="T4", disk_gib=20, spot=spot))  # type: ignore[arg-type]
            assert type(provider.find(machine.id)) is Machine
            assert [listed.id for listed in provider.list_own()] == [machine.id]
            assert provider.residue() == []
            group = f"/resourceGroups/{machine.id}"
            bodies = {
                name: next(
                    asked
                    for method, path, asked, _ in exchanges
                    if method == "PUT" and part in path
                )
                for name, part in (
                    ("ResourceGroup", group),
                    ("NetworkSecurityGroup", f"{group}/providers/Microsoft.Network/networkSec"),
                    ("VirtualNetwork", f"{group}/providers/Microsoft.Network/virtualNet"),
                    ("VirtualMachine", f"{group}/providers/Microsoft.Compute/virtualM"),
                )
            }
            provider.destroy(machine, never_handed_over(machine, label()))
            gone = provider.find(machine.id)
            assert isinstance(gone, Absent)
            assert gone.proof
        fake.links, fake.operation_looks = fake.url, 2  # the clients follow links
        text = json.dumps({"exchanges": exchanges, "bodies": bodies})
        fake.faults.arm(Fault("no capacity", "create", skip=1))
        told = _microsoft_says(fake, text.replace(machine.id, "NAME"))
        assert told["unknown"] == []
        used = told["used"]
        assert (used["state"], used["power"]) == ("Succeeded", ["PowerState/running"])
        assert used["addresses"] == [fake.market.rented[-1].address]
        assert "Standard_NC4as_T4_v3" in used["skus"]
        assert "lowPriorityCores" in used["quotas"]
        assert (len(used["groups"]), used["left"]) == (1, [])
        assert used["failed"] == "AllocationFailed"
    finally:
        fake.close()


def test_microsoft_s_models_do_not_know_other_requests() -> None:
    path = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/torpor"
    wrong: list[dict[str, Any]] = [
        {"propertis": {}},
        {"properties": {"hardwareProfile": {"vmSise": "Standard_NC4as_T4_v3"}}},
        {"properties": {"networkProfile": {"networkInterfaceConfigurations": [{"card": 1}]}}},
        {"properties": {"provisioningState": "Succeeded"}},
    ]
    text = json.dumps({"exchanges": [("PUT", path, asked, {}) for asked in wrong]})
    with FakeAzure() as fake:
        assert len(_microsoft_says(fake, text)["unknown"]) == len(wrong)


def _microsoft_says(fake: FakeAzure, text: str) -> dict[str, Any]:
    script = Path(__file__).with_name("azure_models.py")
    done = subprocess.run(
        [str(TOOLS / "bin/python"), "-P", str(script), fake.url, SUBSCRIPTION, fake.key],
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told
