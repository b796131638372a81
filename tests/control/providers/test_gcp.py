"""Google Cloud: the contract, and this market's traps."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import google.auth.exceptions
import msgspec
import pytest

from tests.control.providers.market_contract import MarketContract, Shop, label, of_model
from tests.fixtures.waiting import until
from tests.markets.gcp import ADDRESS_USD_H, DISK_USD_GIB_MONTH, PROJECT, ZONES
from tests.markets.gcp_rules import IMAGE_GIB
from tests.markets.market import Ware as SoldWare
from tests.markets.server import Answer, Request
from torpor.control.providers.gcp.client import GoogleLogin
from torpor.control.providers.gcp.deadline import WATCHER, start_watcher
from torpor.control.providers.gcp.offers import Priced, Ware, priced
from torpor.control.providers.provider import Absent
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
    label_cells: ClassVar = {"labels"}
    id_cells: ClassVar = {"name", "zone", "kind"}
    row = "gcp"
    sells_spot = True
    states_on_demand = True
    elsewhere: ClassVar = {"project": "another-project"}

    @pytest.fixture
    def want(self) -> Want:
        return Want(gpu="L4", disk_gib=20)

    def with_an_odd_offer(self, body: Any) -> Any:
        """The first row of each zone; other answers, as about an image, are no list."""
        for part in body.get("items", {}).values():
            for rows in part.values():
                if isinstance(rows, list):
                    rows[0] = dict.fromkeys(rows[0])
        return body

    def ask_for_everything(self, shop: Shop) -> None:
        shop.fake.operation_looks = 1
        super().ask_for_everything(shop)
        clock = shop.market.clock
        shop.fake.firewalls.clear()
        provider = shop.connect(
            ssh_from="203.0.113.7/32", deadline_s=3600.0, clock=lambda: clock.now_unix
        )
        machine = provider.create(shop.changed(label=label()))
        clock.advance(1800)
        provider.renew(machine)
        (rented,) = [rented for rented in shop.market.alive() if rented.id == machine.id]
        rented.stopped = rented.suspended = True
        provider.start(machine)
        self._leave_behind(shop, machine)
        shop.destroy(machine)

    def test_the_policy_touches_no_machine_of_another_name(self, shop: Shop) -> None:
        """Whoever has the key asks by himself."""
        zone = ZONES[0]
        for verb, path in (
            ("DELETE", f"zones/{zone}/instances/mine"),
            ("POST", f"zones/{zone}/instances/mine/setLabels"),
            ("POST", f"zones/{zone}/instances/mine/setMetadata"),
            ("DELETE", f"zones/{zone}/disks/mine"),
            ("POST", "global/firewalls"),
        ):
            request = Request(verb, f"/compute/v1/projects/{PROJECT}/{path}", {}, {})
            answer = shop.fake.answer(request, f"Bearer {shop.fake.key}")
            assert answer.status == 403, path
        shop.fake.policy.lacks.clear()

    def test_a_taken_name_is_the_machine_of_the_earlier_create(self, shop: Shop) -> None:
        first = shop.create()
        shop.arm("not found", "list")
        assert shop.create().id == first.id
        shop.arm("not found", "list")
        shop.arm("not found", "find")
        with pytest.raises(CreateUncertain, match="exists"):
            shop.create()
        assert len(shop.market.rented) == 1

    def test_a_label_is_known_in_every_zone(self, shop: Shop, want: Want) -> None:
        first = shop.create()
        here = shop.order.offer
        other = next(
            offer
            for offer in shop.plain.offers(want)
            if offer.region == here.region and offer.id != here.id
        )
        assert shop.create(offer=other, label=first.label).id == first.id
        assert len(shop.market.rented) == 1

    def test_only_a_deletion_that_has_finished_is_a_proof(self, shop: Shop) -> None:
        shop.fake.deletion_looks, shop.fake.operation_looks = 1, 0
        machine = shop.create()
        shop.destroy(machine)
        assert shop.find(machine).state == "stopping"
        assert "delete" in shop.find(machine).proof
        for operation in shop.fake.operations.values():
            if operation["operationType"] == "delete":
                operation["error"] = {"errors": [{"code": "INTERNAL_ERROR"}]}
        assert shop.find(machine) == Absent()
        shop.fake.operations.clear()
        assert shop.find(machine) == Absent()

    def test_a_create_waits_for_its_operation_and_says_why_it_failed(self, shop: Shop) -> None:
        shop.fake.operation_looks = 3
        shop.create()
        assert shop.slept.count(2.0) == 4
        shop.market.wares[0].stock = shop.market.wares[1].stock = 0
        refused = shop.changed(label=label())
        with pytest.raises(NoCapacity, match="ZONE_RESOURCE_POOL_EXHAUSTED"):
            shop.plain.create(refused)
        name = f"torpor-{refused.token}.{shop.order.offer.id.split('/')[1]}"
        proof = shop.plain.find(MachineId(name)).proof
        assert "failed (ZONE_RESOURCE_POOL_EXHAUSTED" in proof

    def test_a_create_whose_operation_is_not_seen_is_uncertain_and_one_that_goes_on_starts(
        self, shop: Shop
    ) -> None:
        shop.arm("unavailable", "account", count=100)
        with pytest.raises(CreateUncertain, match="does not say how it went"):
            shop.create()
        shop.fake.faults.clear()
        shop.fake.operation_looks = 1000
        machine = shop.create(label=label())
        assert machine.state == "starting"

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", NoCapacity),
            ("QUOTA_EXCEEDED", QuotaReached),
            ("PERMISSIONS_ERROR", ProviderDenied),
            ("UNSUPPORTED_OPERATION", NoCapacity),
            ("insufficientCapacity", NoCapacity),
            ("INVALID_USAGE", CreateFailed),
        ],
    )
    def test_each_failure_of_an_operation_blocks_what_it_concerns(
        self, shop: Shop, code: str, error: type[Exception]
    ) -> None:
        shop.fake.exhausted = {"code": code, "message": "in Google's words"}
        shop.arm("no capacity", "create")
        with pytest.raises(error, match="in Google's words") as told:
            shop.create()
        assert type(told.value) is error
        assert shop.market.rented == []

    def test_a_refusal_at_once_for_want_of_capacity_blocks_the_zone(self, shop: Shop) -> None:
        """Google's API has both words for it, in an operation and in an answer."""
        words = (400, "insufficientCapacity", "Not enough resources")
        shop.fake.words["quota"] = words
        shop.arm("quota", "create")
        with pytest.raises(NoCapacity, match="Not enough resources"):
            shop.create()

    @pytest.mark.parametrize(
        "kind",
        ["c4-standard-4", "c4a-standard-4", "n4-standard-4", "m4-megamem-28", "h3-standard-88",
         "a4-highgpu-8g", "e2-standard-4", "n2-standard-4"],
    )  # fmt: skip
    def test_each_machine_type_gets_a_disk_and_a_maintenance_that_it_takes(
        self, shop: Shop, kind: str
    ) -> None:
        shop.market.wares.append(SoldWare("", 0, 0, 0.2, ZONES[0], name=kind, spot_usd_h=0.1))
        provider = shop.connect(prices={kind: 0.2, f"{kind}/spot": 0.1})
        for offer in provider.offers(Want(spot="allowed")):
            provider.create(shop.changed(offer=offer, label=label()))
        assert len(shop.market.rented) == 2

    @pytest.mark.parametrize("code", ["INTERNAL_ERROR", "RESOURCE_ALREADY_EXISTS"])
    def test_a_create_that_failed_and_has_a_machine_of_its_label_is_that_machine(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch, code: str
    ) -> None:
        answer = shop.fake.handle

        def failing(request: Request) -> Answer:
            answered = answer(request)
            for operation in shop.fake.operations.values():
                operation["error"] = {"errors": [{"code": code, "message": "in Google's words"}]}
            return answered

        monkeypatch.setattr(shop.fake, "handle", failing)
        made = shop.create()
        assert made.label == shop.order.label
        shop.arm("not found", "list", count=9)
        shop.asked()["labels"] = {}
        with pytest.raises(CreateUncertain, match="nothing proves"):
            shop.create()

    def test_a_failed_create_without_a_proof_is_uncertain(self, shop: Shop) -> None:
        shop.fake.exhausted = {"code": "RESOURCE_ALREADY_EXISTS"}
        shop.arm("no capacity", "create")
        with pytest.raises(CreateUncertain, match="nothing proves"):
            shop.create()
        shop.fake.operation_looks, shop.fake.exhausted["code"] = 1000, "INTERNAL_ERROR"
        shop.arm("no capacity", "create")
        with pytest.raises(CreateUncertain, match="nothing proves"):
            shop.create(label=label())

    @pytest.mark.parametrize("fault", ["unavailable", "denied", "wrong shape"])
    def test_no_error_after_the_request_promises_that_nothing_was_rented(
        self, shop: Shop, fault: str
    ) -> None:
        shop.arm("no capacity", "create")
        shop.arm(fault, "find", count=100)
        with pytest.raises(CreateUncertain, match="does not say how it went"):
            shop.create()
        shop.fake.faults.clear()
        shop.create()
        shop.arm("not found", "list")  # so the name is asked for again
        shop.arm(fault, "find", count=100)
        with pytest.raises(CreateUncertain, match="does not say how it went"):
            shop.create()
        assert len(shop.market.rented) == 1

    def test_a_missing_permission_is_named(self, shop: Shop) -> None:
        shop.arm("denied", "create")
        with pytest.raises(ProviderDenied, match=r"the permission compute\.instances\.create"):
            shop.create()

    def test_a_limit_of_requests_is_waited_for_though_google_calls_it_forbidden(
        self, shop: Shop
    ) -> None:
        words = (403, "rateLimitExceeded", "Quota exceeded for quota metric 'Queries'")
        shop.fake.words["denied"] = words
        shop.arm("denied", "list", count=2)
        assert shop.plain.list_own() == []
        assert len(shop.slept) == 2

    def test_another_project_is_denied_and_never_empty(self, shop: Shop) -> None:
        wrong = shop.connect(project="not-mine")
        for ask in (
            wrong.check,
            wrong.list_own,
            wrong.residue,
            lambda: wrong.create(shop.order),
        ):
            with pytest.raises(ProviderDenied, match="no project not-mine"):
                ask()

    def test_a_listing_that_lacks_a_zone_is_no_listing(self, shop: Shop) -> None:
        shop.fake.unreachable = ZONES[1]
        for ask in (shop.plain.list_own, shop.plain.residue, lambda: shop.plain.offers(Want())):
            with pytest.raises(ProviderUnavailable, match=ZONES[1]):
                ask()

    def test_the_request_keeps_the_login_and_the_project_s_keys_from_the_machine(
        self, shop: Shop
    ) -> None:
        shop.create()
        asked = shop.asked()
        assert "serviceAccounts" not in asked
        metadata = {item["key"]: item["value"] for item in asked["metadata"]["items"]}
        assert metadata["block-project-ssh-keys"] == "TRUE"
        assert shop.order.host_key.strip() in metadata["startup-script"]
        disk = asked["disks"][0]
        assert disk["autoDelete"]
        assert disk["initializeParams"]["diskSizeGb"] == str(IMAGE_GIB + 20)
        assert disk["initializeParams"]["labels"] == asked["labels"]
        assert asked["scheduling"]["provisioningModel"] == "STANDARD"

    def test_a_spot_machine_that_google_takes_keeps_its_disk_until_it_is_ended(
        self, shop: Shop
    ) -> None:
        (offer,) = of_model(shop.plain.offers(Want(disk_gib=20, spot="only")), "L4")
        assert offer.price_usd_h == pytest.approx(0.28 + _beside(20))
        with pytest.raises(CreateFailed, match="no bids"):
            shop.create(offer=offer, bid_usd_h=0.01)
        machine = shop.create(offer=offer)
        assert shop.asked()["scheduling"]["instanceTerminationAction"] == "STOP"
        shop.market.rented[0].stopped = True
        live = shop.find(machine)
        assert (live.state, live.endpoint) == ("stopped", None)
        assert "its disk is kept and costs on" in live.note
        assert live.price_usd_h == pytest.approx(_beside(20) - ADDRESS_USD_H)
        assert shop.plain.list_own() == [live]
        shop.destroy(live)
        assert shop.fake.disks == {}

    def test_a_machine_that_runs_is_not_started_again(self, shop: Shop) -> None:
        machine = shop.create()
        asked = len(shop.fake.operations)
        shop.plain.start(machine)
        assert len(shop.fake.operations) == asked

    def test_a_suspended_machine_is_resumed(self, shop: Shop) -> None:
        """Google refuses to start it."""
        machine = shop.create()
        rented = shop.market.rented[0]
        shop.market.take(rented)
        rented.suspended = True
        with pytest.raises(NoCapacity, match="ZONE_RESOURCE_POOL_EXHAUSTED"):
            shop.plain.start(machine)
        rented.no_room = False
        shop.plain.start(machine)
        assert [live.state for live in shop.plain.list_own()] == ["running"]

    def test_a_machine_whose_deadline_nobody_renews_stops_and_keeps_its_disk(
        self, shop: Shop
    ) -> None:
        clock = shop.market.clock
        provider = shop.connect(deadline_s=3600.0, clock=lambda: clock.now_unix)
        assert provider.abilities.deadline_s == 3600
        machine = provider.create(shop.order)
        made = shop.asked()["metadata"]["items"]
        script = next(item["value"] for item in made if item["key"] == "startup-script")
        assert WATCHER in script
        for _ in range(5):
            clock.advance(1800)
            provider.renew(machine)
        assert provider.find(machine.id).state == "running"
        now = shop.asked()["metadata"]["items"]
        assert {"key": "startup-script", "value": script} in now
        asked = len(shop.fake.calls)
        provider.renew(machine)
        assert len(shop.fake.calls) == asked + 1  # most of the time is left: it only looked
        with pytest.raises(NotOurs):
            provider.renew(msgspec.structs.replace(machine, label=label()))
        wrong = shop.connect(deadline_s=3600.0, clock=lambda: clock.now_unix - 9000)
        ahead = dict(shop.asked()["metadata"])
        wrong.renew(machine)  # the deadline is of a clock that was ahead
        assert shop.asked()["metadata"] != ahead
        provider.renew(machine)
        clock.advance(3600)
        stopped = provider.find(machine.id)
        assert stopped.state == "stopped"
        assert "its disk is kept and costs on" in stopped.note
        assert stopped.price_usd_h == pytest.approx(_beside(20) - ADDRESS_USD_H)
        assert list(shop.fake.disks) == [machine.id.partition(".")[0]]
        shop.destroy(stopped, provider)
        assert shop.fake.disks == {}

    def test_without_a_deadline_nothing_on_the_machine_ends_it(self, shop: Shop) -> None:
        assert shop.plain.abilities.deadline_s is None
        machine = shop.create()
        assert "poweroff" not in str(shop.asked())
        with_one = shop.connect(deadline_s=60.0)
        before = dict(shop.asked()["metadata"])
        with_one.renew(machine)
        assert shop.asked()["metadata"] == before

    def test_a_change_of_somebody_else_is_not_undone_by_a_renewal(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = shop.market.clock
        provider = shop.connect(deadline_s=3600.0, clock=lambda: clock.now_unix)
        machine = provider.create(shop.order)
        clock.advance(1800)
        answer = shop.fake.handle

        def changing(request: Request) -> Answer:
            if request.path.endswith("/setMetadata"):
                items = shop.asked()["metadata"]["items"]
                items.append({"key": "theirs", "value": "1"})
            return answer(request)

        monkeypatch.setattr(shop.fake, "handle", changing)
        with pytest.raises(ProviderError, match="conditionNotMet"):
            provider.renew(machine)

    def test_disks_and_addresses_that_outlived_a_machine_end_with_its_label(
        self, shop: Shop
    ) -> None:
        machine = shop.create()
        self._leave_behind(shop, machine)
        shop.fake.addresses["mine"] = {**shop.fake.addresses["ours"], "name": "mine", "labels": {}}
        left = shop.plain.residue()
        assert sorted((found.kind, found.label == machine.label) for found in left) == [
            ("address", False), ("address", True), ("disk", True),
        ]  # fmt: skip
        assert left[0].price_usd_h == pytest.approx(_beside(20) - ADDRESS_USD_H)
        shop.destroy(machine)
        assert shop.fake.disks == {}
        assert sorted(shop.fake.addresses) == ["mine", "other"]

    @staticmethod
    def _leave_behind(shop: Shop, machine: Machine) -> None:
        """End the newest machine, whose disk stays, with an address, and one of another label."""
        shop.asked()["disks"][0]["autoDelete"] = False
        shop.destroy(machine)
        labels = shop.asked()["labels"]
        for name, owner in (("ours", labels), ("other", {**labels, "torpor-rental": "f" * 16})):
            shop.fake.addresses[name] = {
                "kind": "compute#address", "name": name, "labels": owner, "users": [],
                "region": "https://www.googleapis.com/compute/v1/projects/p/regions/us-central1",
            }  # fmt: skip

    def test_what_has_no_price_in_the_block_is_not_on_sale(self, shop: Shop) -> None:
        prices = {"g2-standard-4": 0.9, "g2-standard-4/us-central1": 0.8,
                  f"g2-standard-4/{ZONES[0]}": 0.7, "a2-highgpu-1g/spot": 1.8}  # fmt: skip
        provider = shop.connect(prices=prices)
        offers = provider.offers(Want(spot="allowed"))
        beside = _beside(0)
        assert {offer.id: round(offer.price_usd_h - beside, 6) for offer in offers} == {
            f"g2-standard-4/{ZONES[0]}": 0.7,
            f"g2-standard-4/{ZONES[1]}": 0.8,
            f"a2-highgpu-1g/{ZONES[2]}/spot": 1.8,
        }
        assert any("g2-standard-4, a2-highgpu-1g" in note for note in provider.check().notes)
        with pytest.raises(ProviderDenied, match="states no price"):
            shop.connect(prices={}).check()
        assert shop.connect(prices={}).offers(Want()) == []

    def test_gpus_are_those_of_the_machine_type_and_those_attached(self, shop: Shop) -> None:
        offers = shop.plain.offers(Want(disk_gib=20))
        assert {str(o.gpu): (o.gpu_count, o.gpu.vram_gib) for o in offers if o.gpu} == {
            "L4": (1, 24), "T4": (1, 16), "A100 SXM": (1, 40), "H100 SXM": (8, 80),
        }  # fmt: skip
        assert {o.image_gib for o in offers} == {IMAGE_GIB}
        (t4,) = of_model(offers, "T4")
        shop.create(offer=t4)
        (attached,) = shop.asked()["guestAccelerators"]
        assert attached["acceleratorCount"] == 1
        elsewhere = shop.connect(zones=[ZONES[2]])
        assert [o.region for o in elsewhere.offers(Want())] == ["europe-west4"]

    def test_check_says_what_the_project_lacks(self, shop: Shop) -> None:
        notes = shop.plain.check().notes
        assert "quotas in us-central1: NVIDIA_L4_GPUS 1" in notes
        shop.fake.firewalls[0]["targetTags"] = ["web"]
        with pytest.raises(ProviderDenied, match="gcloud compute firewall-rules create torpor"):
            shop.plain.check()
        shop.fake.firewalls[0]["targetTags"] = ["torpor"]
        shop.fake.firewalls[0]["allowed"] = [{"IPProtocol": "tcp", "ports": ["80", "20-23"]}]
        assert shop.plain.check().name.endswith(PROJECT)

    def test_the_first_rental_makes_a_firewall_rule_for_whom_the_block_says(
        self, shop: Shop
    ) -> None:
        """For machines with the tag, and for ports that no rule opens yet; a look makes none."""
        shop.fake.firewalls[0]["sourceRanges"] = ["198.51.100.0/24"]
        shop.fake.operation_looks = 2
        home = "203.0.113.7/32"
        for ports in ((), (), (8000,), (8000, 6006)):
            provider, before = shop.connect(ssh_from=home, ports=ports), len(shop.fake.firewalls)
            notes = [note for note in provider.check().notes if "the first rental" in note]
            provider.offers(Want(gpu="T4"))
            assert len(shop.fake.firewalls) == before
            provider.create(shop.changed(label=label()))
            assert len(shop.fake.firewalls) == before + len(notes)
        made = shop.fake.firewalls[1:]
        assert [rule["allowed"][0]["ports"] for rule in made] == [["22"], ["8000"], ["6006"]]
        for rule in made:
            assert rule["sourceRanges"] == [home]
            assert rule["targetTags"] == shop.asked()["tags"]["items"]
        made[0]["sourceRanges"] = ["203.0.113.7"]  # the same, as Google may write it
        assert len(shop.connect(ssh_from=home).check().notes) == len(shop.plain.check().notes)
        made[1]["disabled"] = True
        with pytest.raises(ProviderDenied, match="disabled torpor's firewall rule torpor-"):
            shop.connect(ssh_from=home, ports=(8000,)).create(shop.changed(label=label()))
        (old,) = {
            note.split(" which this")[0]
            for note in shop.connect(ssh_from="198.51.100.7/32").check().notes
            if f"{made[2]['name']} closes them" in note
        }
        assert old == f"firewall rule {made[2]['name']} opens ports to {home},"

    def test_a_firewall_rule_that_google_refuses_names_what_is_missing(self, shop: Shop) -> None:
        words = "Required 'compute.firewalls.create' permission for 'projects/x'"
        shop.fake.words["denied"] = (403, "forbidden", words)
        shop.arm("denied", "account", skip=1)
        with pytest.raises(ProviderDenied, match=r"open port 8000 .*compute\.firewalls\.create"):
            shop.connect(ssh_from="203.0.113.7/32", ports=(8000,)).create(shop.changed())
        assert shop.market.rented == []

    def test_an_image_must_be_one_that_can_become_a_machine(self, shop: Shop) -> None:
        assert shop.plain.check(_MINE).name
        assert {o.cuda for o in shop.plain.offers(Want(image=_MINE))} == {None}
        with pytest.raises(InvalidInput, match="has no image"):
            shop.plain.check(f"projects/{PROJECT}/global/images/unknown")
        shop.fake.image["licenses"] = ["https://.../licenses/windows-server-2022-dc"]
        with pytest.raises(InvalidInput, match="needs Linux"):
            shop.plain.check(_MINE)


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
