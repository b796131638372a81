"""Google Cloud: the contract, and this market's traps."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import google.auth.exceptions
import google.oauth2.credentials
import httpx
import msgspec
import pytest

from tests.control.providers.market_contract import MarketContract, label, of_model
from tests.fixtures.waiting import until
from tests.markets.faults import Fault, Kind
from tests.markets.gcp import (
    ADDRESS_USD_H,
    DISK_USD_GIB_MONTH,
    IMAGE_GIB,
    PROJECT,
    ZONES,
    FakeGcp,
    gcp_prices,
    gcp_wares,
)
from tests.markets.market import Market
from tests.markets.server import Answer, FakeMarket, Request
from torpor.control.providers.gcp.client import GoogleLogin
from torpor.control.providers.gcp.deadline import WATCHER, start_watcher
from torpor.control.providers.gcp.offers import Priced, Ware, priced
from torpor.control.providers.gcp.provider import GcpProvider
from torpor.control.providers.seam import Absent, Order, Provider, Restarts
from torpor.control.safety import never_handed_over
from torpor.shared.errors import (
    CreateFailed,
    CreateUncertain,
    InvalidInput,
    NoCapacity,
    NotOurs,
    ProviderDenied,
    ProviderError,
    ProviderUnavailable,
    QuotaReached,
)
from torpor.shared.values import Machine, MachineId, Want

_MINE = f"projects/{PROJECT}/global/images/mine"


class TestGcp(MarketContract):
    body = "vm"

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="L4", disk_gib=20)

    def new_fake(self) -> FakeGcp:
        return FakeGcp(Market(wares=gcp_wares()))

    def connect(
        self, fake: FakeMarket, key: str = "", timeout_s: float = 30.0, **options: Any
    ) -> GcpProvider:
        self.slept = []
        login = GoogleLogin(google.oauth2.credentials.Credentials(key or fake.key))
        named = {
            "project": PROJECT if fake.key != "another-account-key" else "another-project",
            "zones": ZONES,
            "prices": gcp_prices(fake.market.wares),
            "disk_usd_gib_month": DISK_USD_GIB_MONTH,
            **options,
        }
        return GcpProvider(
            login,
            url=fake.url,
            ssh_port=self.ssh_port,
            timeout=httpx.Timeout(timeout_s),
            sleep=self.slept.append,
            **named,
        )

    def foreign(self, fake: FakeMarket) -> MachineId:
        made = fake.market.rent(
            fake.market.wares[0], "by hand", {}, id_of=lambda n: f"by-hand-{n}.{ZONES[0]}"
        )
        return MachineId(made.id)

    @pytest.fixture
    def gcp(self, fake: FakeMarket) -> FakeGcp:
        assert isinstance(fake, FakeGcp)
        return fake

    def test_a_taken_name_is_the_machine_of_the_earlier_create(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        first = plain.create(order)
        gcp.faults.arm(Fault("not found", "list"))
        assert plain.create(order).id == first.id
        gcp.faults.arm(Fault("not found", "list"))
        gcp.faults.arm(Fault("not found", "find"))
        with pytest.raises(CreateUncertain, match="exists"):
            plain.create(order)
        assert len(gcp.market.rented) == 1

    def test_a_label_is_known_in_every_zone(
        self, plain: Provider, gcp: FakeGcp, order: Order, want: Want
    ) -> None:
        first = plain.create(order)
        other = next(o for o in plain.offers(want) if o.region == order.offer.region
                     and o.id != order.offer.id)  # fmt: skip
        assert plain.create(msgspec.structs.replace(order, offer=other)).id == first.id
        assert len(gcp.market.rented) == 1

    def test_only_a_deletion_that_has_finished_is_a_proof(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        gcp.deletion_looks, gcp.operation_looks = 1, 0
        machine = plain.create(order)
        plain.destroy(machine, never_handed_over(machine, order.label))
        ending = plain.find(machine.id)
        assert isinstance(ending, Machine)
        assert ending.state == "stopping"
        ended = plain.find(machine.id)
        assert isinstance(ended, Absent)
        assert "delete" in ended.proof
        for operation in gcp.operations.values():
            if operation["operationType"] == "delete":
                operation["error"] = {"errors": [{"code": "INTERNAL_ERROR"}]}
        assert plain.find(machine.id) == Absent()
        gcp.operations.clear()
        assert plain.find(machine.id) == Absent()

    def test_a_create_waits_for_its_operation_and_says_why_it_failed(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        gcp.operation_looks = 3
        plain.create(order)
        assert self.slept.count(2.0) == 4
        gcp.market.wares[0].stock = gcp.market.wares[1].stock = 0
        refused = msgspec.structs.replace(order, label=label())
        with pytest.raises(NoCapacity, match="ZONE_RESOURCE_POOL_EXHAUSTED"):
            plain.create(refused)
        name = f"torpor-{refused.token}.{order.offer.id.split('/')[1]}"
        gone = plain.find(MachineId(name))
        assert isinstance(gone, Absent)
        assert "failed (ZONE_RESOURCE_POOL_EXHAUSTED" in gone.proof

    def test_a_create_whose_operation_is_not_seen_is_uncertain_and_one_that_goes_on_starts(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        gcp.faults.arm(Fault("unavailable", "account", count=100))
        with pytest.raises(CreateUncertain, match="does not say how it went"):
            plain.create(order)
        gcp.faults.clear()
        gcp.operation_looks = 1000
        machine = plain.create(msgspec.structs.replace(order, label=label()))
        assert machine.state == "starting"

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", NoCapacity),
            ("QUOTA_EXCEEDED", QuotaReached),
            ("PERMISSIONS_ERROR", ProviderDenied),
            ("UNSUPPORTED_OPERATION", CreateFailed),
        ],
    )
    def test_each_failure_of_an_operation_blocks_what_it_concerns(
        self, plain: Provider, gcp: FakeGcp, order: Order, code: str, error: type[Exception]
    ) -> None:
        gcp.exhausted = {"code": code, "message": "in Google's words"}
        gcp.faults.arm(Fault("no capacity", "create"))
        with pytest.raises(error, match="in Google's words") as told:
            plain.create(order)
        assert type(told.value) is error
        assert gcp.market.rented == []

    @pytest.mark.parametrize("code", ["INTERNAL_ERROR", "RESOURCE_ALREADY_EXISTS"])
    def test_a_create_that_failed_and_has_a_machine_of_its_label_is_that_machine(
        self,
        plain: Provider,
        gcp: FakeGcp,
        order: Order,
        monkeypatch: pytest.MonkeyPatch,
        code: str,
    ) -> None:
        answer = gcp.handle

        def failing(request: Request) -> Answer:
            answered = answer(request)
            for operation in gcp.operations.values():
                operation["error"] = {"errors": [{"code": code, "message": "in Google's words"}]}
            return answered

        monkeypatch.setattr(gcp, "handle", failing)
        made = plain.create(order)
        assert made.label == order.label
        gcp.faults.arm(Fault("not found", "list", count=9))
        gcp.market.rented[0].request["labels"] = {}
        with pytest.raises(CreateUncertain, match="nothing proves"):
            plain.create(order)

    def test_a_failed_create_without_a_proof_is_uncertain(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        gcp.exhausted = {"code": "RESOURCE_ALREADY_EXISTS"}
        gcp.faults.arm(Fault("no capacity", "create"))
        with pytest.raises(CreateUncertain, match="nothing proves"):
            plain.create(order)
        gcp.operation_looks, gcp.exhausted["code"] = 1000, "INTERNAL_ERROR"
        gcp.faults.arm(Fault("no capacity", "create"))
        with pytest.raises(CreateUncertain, match="nothing proves"):
            plain.create(msgspec.structs.replace(order, label=label()))

    @pytest.mark.parametrize("fault", ["unavailable", "denied", "wrong shape"])
    def test_no_error_after_the_request_promises_that_nothing_was_rented(
        self, plain: Provider, gcp: FakeGcp, order: Order, fault: Kind
    ) -> None:
        gcp.faults.arm(Fault("no capacity", "create"))
        gcp.faults.arm(Fault(fault, "find", count=100))
        with pytest.raises(CreateUncertain, match="does not say how it went"):
            plain.create(order)
        gcp.faults.clear()
        plain.create(order)
        gcp.faults.arm(Fault("not found", "list"))  # so the name is asked for again
        gcp.faults.arm(Fault(fault, "find", count=100))
        with pytest.raises(CreateUncertain, match="does not say how it went"):
            plain.create(order)
        assert len(gcp.market.rented) == 1

    def test_a_missing_permission_is_named(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        gcp.faults.arm(Fault("denied", "create"))
        with pytest.raises(ProviderDenied, match=r"the permission compute\.instances\.create"):
            plain.create(order)

    def test_a_limit_of_requests_is_waited_for_though_google_calls_it_forbidden(
        self, plain: Provider, gcp: FakeGcp
    ) -> None:
        words = (403, "rateLimitExceeded", "Quota exceeded for quota metric 'Queries'")
        gcp.words["denied"] = words
        gcp.faults.arm(Fault("denied", "list", count=2))
        assert plain.list_own() == []
        assert len(self.slept) == 2

    def test_another_project_is_denied_and_never_empty(self, gcp: FakeGcp, order: Order) -> None:
        wrong = self.connect(gcp, project="not-mine")
        for ask in (wrong.check, wrong.list_own, wrong.residue, lambda: wrong.create(order)):
            with pytest.raises(ProviderDenied, match="no project not-mine"):
                ask()

    def test_a_listing_that_lacks_a_zone_is_no_listing(self, plain: Provider, gcp: FakeGcp) -> None:
        gcp.unreachable = ZONES[1]
        for ask in (plain.list_own, plain.residue, lambda: plain.offers(Want())):
            with pytest.raises(ProviderUnavailable, match=ZONES[1]):
                ask()

    def test_the_request_keeps_the_login_and_the_project_s_keys_from_the_machine(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        plain.create(order)
        asked = gcp.market.rented[0].request
        assert "serviceAccounts" not in asked
        metadata = {item["key"]: item["value"] for item in asked["metadata"]["items"]}
        assert metadata["block-project-ssh-keys"] == "TRUE"
        assert order.host_key.strip() in metadata["startup-script"]
        disk = asked["disks"][0]
        assert disk["autoDelete"]
        assert disk["initializeParams"]["diskSizeGb"] == str(IMAGE_GIB + 20)
        assert disk["initializeParams"]["labels"] == asked["labels"]
        assert asked["scheduling"]["provisioningModel"] == "STANDARD"

    def test_a_spot_machine_that_google_takes_keeps_its_disk_until_it_is_ended(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        (offer,) = [o for o in plain.offers(Want(gpu="L4", disk_gib=20, spot="only")) if o.gpu
                    and o.gpu.model == "L4"]  # fmt: skip
        assert offer.price_usd_h == pytest.approx(0.28 + _beside(20))
        cheap = msgspec.structs.replace(order, offer=offer, bid_usd_h=0.01)
        with pytest.raises(CreateFailed, match="no bids"):
            plain.create(cheap)
        machine = plain.create(msgspec.structs.replace(order, offer=offer))
        assert gcp.market.rented[0].request["scheduling"]["instanceTerminationAction"] == "STOP"
        gcp.market.rented[0].stopped = True
        live = plain.find(machine.id)
        assert isinstance(live, Machine)
        assert (live.state, live.endpoint) == ("stopped", None)
        assert "its disk is kept and costs on" in live.note
        assert live.price_usd_h == pytest.approx(_beside(20) - ADDRESS_USD_H)
        assert plain.list_own() == [live]
        plain.destroy(live, never_handed_over(live, order.label))
        assert gcp.disks == {}

    def test_a_machine_that_google_took_is_started_where_there_is_room(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        assert plain.abilities.restarts
        assert isinstance(plain, Restarts)
        machine = plain.create(order)
        rented = gcp.market.rented[0]
        gcp.market.take(rented)
        gcp.operation_looks = 1
        with pytest.raises(NoCapacity, match="ZONE_RESOURCE_POOL_EXHAUSTED"):
            plain.start(machine)
        rented.no_room = False
        with pytest.raises(NotOurs, match="was not started"):
            plain.start(msgspec.structs.replace(machine, label=label()))
        assert rented.stopped
        plain.start(machine)
        live = plain.find(machine.id)
        assert isinstance(live, Machine)
        assert live.state == "running"
        asked = len(gcp.operations)
        plain.start(machine)  # it runs: Google is not asked again
        assert len(gcp.operations) == asked
        plain.destroy(live, never_handed_over(live, order.label))
        assert plain.list_own() == []

    def test_a_suspended_machine_is_resumed(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        """Google refuses to start it."""
        assert isinstance(plain, Restarts)
        machine = plain.create(order)
        rented = gcp.market.rented[0]
        gcp.market.take(rented)
        rented.suspended = True
        with pytest.raises(NoCapacity, match="ZONE_RESOURCE_POOL_EXHAUSTED"):
            plain.start(machine)
        rented.no_room = False
        plain.start(machine)
        assert [one.state for one in plain.list_own()] == ["running"]

    def test_a_machine_whose_deadline_nobody_renews_stops_and_keeps_its_disk(
        self, gcp: FakeGcp, order: Order
    ) -> None:
        clock = gcp.market.clock
        provider = self.connect(gcp, deadline_s=3600.0, clock=lambda: clock.now_unix)
        assert provider.abilities.deadline_s == 3600
        machine = provider.create(order)
        made = gcp.market.rented[0].request["metadata"]["items"]
        script = next(item["value"] for item in made if item["key"] == "startup-script")
        assert WATCHER in script
        for _ in range(5):
            clock.advance(1800)
            provider.renew(machine)
        live = provider.find(machine.id)
        assert isinstance(live, Machine)
        assert live.state == "running"
        now = gcp.market.rented[0].request["metadata"]["items"]
        assert {"key": "startup-script", "value": script} in now
        asked = len(gcp.calls)
        provider.renew(machine)
        assert len(gcp.calls) == asked + 1  # most of the time is left: it only looked
        with pytest.raises(NotOurs):
            provider.renew(msgspec.structs.replace(machine, label=label()))
        wrong = self.connect(gcp, deadline_s=3600.0, clock=lambda: clock.now_unix - 9000)
        ahead = dict(gcp.market.rented[0].request["metadata"])
        wrong.renew(machine)  # the deadline is of a clock that was ahead
        assert gcp.market.rented[0].request["metadata"] != ahead
        provider.renew(machine)
        clock.advance(3600)
        stopped = provider.find(machine.id)
        assert isinstance(stopped, Machine)
        assert stopped.state == "stopped"
        assert "its disk is kept and costs on" in stopped.note
        assert stopped.price_usd_h == pytest.approx(_beside(20) - ADDRESS_USD_H)
        assert list(gcp.disks) == [machine.id.partition(".")[0]]
        provider.destroy(stopped, never_handed_over(stopped, order.label))
        assert gcp.disks == {}

    def test_without_a_deadline_nothing_on_the_machine_ends_it(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        assert plain.abilities.deadline_s is None
        machine = plain.create(order)
        assert "poweroff" not in str(gcp.market.rented[0].request)
        with_one = self.connect(gcp, deadline_s=60.0)
        before = dict(gcp.market.rented[0].request["metadata"])
        with_one.renew(machine)
        assert gcp.market.rented[0].request["metadata"] == before

    def test_a_change_of_somebody_else_is_not_undone_by_a_renewal(
        self, gcp: FakeGcp, order: Order, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = gcp.market.clock
        provider = self.connect(gcp, deadline_s=3600.0, clock=lambda: clock.now_unix)
        machine = provider.create(order)
        clock.advance(1800)
        answer = gcp.handle

        def changing(request: Request) -> Answer:
            if request.path.endswith("/setMetadata"):
                items = gcp.market.rented[0].request["metadata"]["items"]
                items.append({"key": "theirs", "value": "1"})
            return answer(request)

        monkeypatch.setattr(gcp, "handle", changing)
        with pytest.raises(ProviderError, match="conditionNotMet"):
            provider.renew(machine)

    def test_disks_and_addresses_that_outlived_a_machine_end_with_its_label(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        machine = plain.create(order)
        gcp.market.rented[0].request["disks"][0]["autoDelete"] = False
        plain.destroy(machine, never_handed_over(machine, order.label))
        labels = gcp.market.rented[0].request["labels"]
        for name, owner in (("ours", labels), ("other", {**labels, "torpor-rental": "f" * 16})):
            gcp.addresses[name] = {
                "kind": "compute#address", "name": name, "labels": owner, "users": [],
                "region": "https://www.googleapis.com/compute/v1/projects/p/regions/us-central1",
            }  # fmt: skip
        gcp.addresses["mine"] = {**gcp.addresses["ours"], "name": "mine", "labels": {}}
        left = plain.residue()
        assert sorted((one.kind, one.label == order.label) for one in left) == [
            ("address", False), ("address", True), ("disk", True),
        ]  # fmt: skip
        assert left[0].price_usd_h == pytest.approx(_beside(20) - ADDRESS_USD_H)
        plain.destroy(machine, never_handed_over(machine, order.label))
        assert gcp.disks == {}
        assert sorted(gcp.addresses) == ["mine", "other"]

    def test_what_has_no_price_in_the_block_is_not_on_sale(
        self, gcp: FakeGcp, plain: Provider
    ) -> None:
        prices = {"g2-standard-4": 0.9, "g2-standard-4/us-central1": 0.8,
                  f"g2-standard-4/{ZONES[0]}": 0.7, "a2-highgpu-1g/spot": 1.8}  # fmt: skip
        provider = self.connect(gcp, prices=prices)
        offers = provider.offers(Want(spot="allowed"))
        beside = _beside(0)
        assert {one.id: round(one.price_usd_h - beside, 6) for one in offers} == {
            f"g2-standard-4/{ZONES[0]}": 0.7,
            f"g2-standard-4/{ZONES[1]}": 0.8,
            f"a2-highgpu-1g/{ZONES[2]}/spot": 1.8,
        }
        assert any("g2-standard-4, a2-highgpu-1g" in note for note in provider.check().notes)
        with pytest.raises(ProviderDenied, match="states no price"):
            self.connect(gcp, prices={}).check()
        assert self.connect(gcp, prices={}).offers(Want()) == []

    def test_gpus_are_those_of_the_machine_type_and_those_attached(
        self, plain: Provider, gcp: FakeGcp, order: Order
    ) -> None:
        offers = plain.offers(Want(disk_gib=20))
        assert {str(o.gpu): (o.gpu_count, o.gpu.vram_gib) for o in offers if o.gpu} == {
            "L4": (1, 24), "T4": (1, 16), "A100 SXM": (1, 40), "H100 SXM": (8, 80),
        }  # fmt: skip
        assert {o.image_gib for o in offers} == {IMAGE_GIB}
        (t4,) = of_model(offers, "T4")
        plain.create(msgspec.structs.replace(order, offer=t4))
        (attached,) = gcp.market.rented[0].request["guestAccelerators"]
        assert attached["acceleratorCount"] == 1
        elsewhere = self.connect(gcp, zones=[ZONES[2]])
        assert [o.region for o in elsewhere.offers(Want())] == ["europe-west4"]

    def test_check_says_what_the_project_lacks(self, plain: Provider, gcp: FakeGcp) -> None:
        notes = plain.check().notes
        assert "quotas in us-central1: NVIDIA_L4_GPUS 1" in notes
        gcp.firewalls[0]["targetTags"] = ["web"]
        with pytest.raises(ProviderDenied, match="gcloud compute firewall-rules create torpor"):
            plain.check()
        gcp.firewalls[0]["targetTags"] = ["torpor"]
        gcp.firewalls[0]["allowed"] = [{"IPProtocol": "tcp", "ports": ["80", "20-23"]}]
        assert plain.check().name.endswith(PROJECT)

    def test_an_image_must_be_one_that_can_become_a_machine(
        self, plain: Provider, gcp: FakeGcp
    ) -> None:
        assert plain.check(_MINE).name
        assert {o.cuda for o in plain.offers(Want(image=_MINE))} == {None}
        with pytest.raises(InvalidInput, match="has no image"):
            plain.check(f"projects/{PROJECT}/global/images/unknown")
        gcp.image["licenses"] = ["https://.../licenses/windows-server-2022-dc"]
        with pytest.raises(InvalidInput, match="needs Linux"):
            plain.check(_MINE)


def test_a_price_is_for_a_machine_type_its_accelerators_and_a_place() -> None:
    assert priced("g2-standard-4") == Priced(Ware("g2-standard-4"), "", False)
    assert priced("n1-standard-8+nvidia-tesla-t4x2/us-central1-a/spot") == Priced(
        Ware("n1-standard-8", "nvidia-tesla-t4", 2), "us-central1-a", True
    )
    for wrong in ("", "G2", "g2-standard-4/us-central1/cheap", "g2-standard-4 spot", "a/b"):
        with pytest.raises(InvalidInput):
            priced(wrong)


class _Metadata(BaseHTTPRequestHandler):
    says: str = "a new one"
    asked = 0

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        assert self.path.endswith("/instance/attributes/torpor-deadline")
        type(self).asked += 1
        if self.says == "not HTTP":
            self.wfile.write(b"what\r\n\r\n")
            return
        self.send_response(503 if self.says == "an error" else 200)
        self.end_headers()
        deadline = 0 if self.says == "the old one" else self.asked
        self.wfile.write(f"{deadline}".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_the_program_on_the_machine_powers_it_off_once_nobody_renewed_the_deadline(
    tmp_path: Path,
) -> None:
    off = tmp_path / "off"
    (tmp_path / "poweroff").write_text(f"#!/bin/sh\ntouch {off}\n")
    (tmp_path / "poweroff").chmod(0o755)
    program = tmp_path / "watcher.py"
    program.write_text(WATCHER)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        where = f"http://127.0.0.1:{server.server_port}"
        url = shlex.split(start_watcher(where, 1).partition("torpor-deadline http")[2])[0]
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        argv = [sys.executable, str(program), f"http{url}", "0.1", "0.05"]
        process = subprocess.Popen(argv, env=environment)
        try:
            for says in ("a new one", "an error", "not HTTP"):
                _Metadata.says, enough = says, _Metadata.asked + 8
                until(lambda: _Metadata.asked > enough, f"the program has read {says}")  # noqa: B023
                assert not off.exists()
            _Metadata.says = "the old one"
            until(off.exists, "the machine is off")
        finally:
            process.kill()
            process.wait()
            server.shutdown()


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(InvalidInput, match=r"pip install '\.\[gcp\]'"):
        GoogleLogin.of_this_host()


def test_a_login_that_google_refuses_is_denied_and_one_that_it_cannot_judge_is_not() -> None:
    class Refused:
        valid = False

        def __init__(self, error: Exception) -> None:
            self.error = error

        def refresh(self, _: object) -> None:
            raise self.error

    with pytest.raises(ProviderDenied, match="somebody"):
        refresh = google.auth.exceptions.RefreshError("invalid_grant")
        GoogleLogin(Refused(refresh), "somebody").token()
    with pytest.raises(ProviderUnavailable):
        GoogleLogin(Refused(google.auth.exceptions.TransportError("no route"))).token()


def _beside(disk_gib: float) -> float:
    """What disk and address of a machine cost an hour."""
    return (IMAGE_GIB + disk_gib) * DISK_USD_GIB_MONTH / 730 + ADDRESS_USD_H
