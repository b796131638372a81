"""What `torpor down` would leave running, by the records of rentals; doubt is named."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from tasks.rented import RentedNow, rented_now
from tests.fixtures.clocked_agent import ClockedStore
from tests.fixtures.lab import DEMO, Lab
from tests.fixtures.plain_flows import hibernate_plainly, plain
from tests.fixtures.rentals import handed_over
from torpor.shared.errors import StoreError
from torpor.shared.values import DRILL, object_key, reserved_name


def _now(lab: Lab) -> RentedNow:
    with plain(lab.opened):
        return rented_now()


def test_it_lists_each_machine_with_its_provider_and_price_until_it_is_ended(lab: Lab) -> None:
    assert _now(lab).rows() == []
    machine = lab.rent()
    drill, _ = handed_over(lab.opened.under(reserved_name(DRILL, DEMO)))
    now = _now(lab)
    assert [(row["machine"], row["provider"], row["$/h"]) for row in now.rows()] == [
        (machine.id, "vast:1", "4.000"),
        (drill.id, "vast:1", "4.000"),
    ]
    assert now.title() == "2 machines are rented, 8.000 $/h, 192.00 $ a day"

    lab.workspace(machine.id).mkdir()
    (lab.workspace(machine.id) / "work").write_bytes(b"mine")
    hibernate_plainly(lab.opened, machine=machine.id)
    assert [row["machine"] for row in _now(lab).rows()] == [drill.id]


def test_a_request_whose_machine_is_not_known_counts_and_a_machine_of_this_host_does_not(
    lab: Lab,
) -> None:
    lab.record(state="abandoned", price_usd_h=0.0)
    (row,) = _now(lab).rows()
    assert (row["machine"], row["$/h"]) == ("not named yet", "not known")
    assert row["note"] == "not finished: abandoned"
    assert _now(lab).title().startswith("1 machine is rented, at least 0.000 $/h")

    here = [msgspec.structs.replace(lab.market.on_sale[0], provider="local://here/machines")]
    lab.market.on_sale = here
    lab.record(state="handed over")
    assert len(_now(lab).rows()) == 1


def test_a_store_that_does_not_answer_and_a_record_that_cannot_be_believed_are_doubts(
    lab: Lab,
) -> None:
    class Away(ClockedStore):
        def list(self, prefix: str) -> object:  # type: ignore[override]
            raise StoreError("the store is away")

    with plain(replace(lab.opened, store=Away(lab.store))):
        away = rented_now()
    assert away.unknown == {DEMO: "the store is away"}
    assert away.title() == "Nobody can say whether machines are rented for demo"

    machine = lab.rent()
    forged = object_key(f"workspaces/{DEMO}/rentals/open/{'f' * 16}")
    lab.store.put(forged, b"{}")
    now = _now(lab)
    assert [row["machine"] for row in now.rows()] == [machine.id, "not known"]
    assert "at least" in now.title()
    assert forged in now.rows()[1]["note"]
