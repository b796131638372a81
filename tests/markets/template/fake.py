"""A fake of Example's API: offers and instances, in the shapes and the words of the market."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.markets.market import Rented, Ware
from tests.markets.server import Answer, FakeMarket, Request
from tests.markets.template.adapter import ExampleProvider


def example_wares() -> list[Ware]:
    return [
        Ware("NVIDIA H100 80GB SXM", 1, 80, 2.50, "north", name="h100-north"),
        Ware("NVIDIA H100 80GB SXM", 1, 80, 2.60, "south", name="h100-south"),
    ]


class FakeExample(FakeMarket):
    """``ware.name`` is the offer's id. An instance that ended is found, and in no listing."""

    adapter = ExampleProvider
    wares = staticmethod(example_wares)
    body = "vm"
    given_port = True
    routes: ClassVar = {
        r"GET /account": ("account", {"name": "me@example.com", "balance_usd": 100.0}),
        r"GET /offers": ("offers", "_offers"),
        r"POST /instances": ("create", "_create"),
        r"GET /instances": ("list", "_list"),
        r"GET /instances/([a-z0-9-]+)": ("find", "_show"),
        r"DELETE /instances/([a-z0-9-]+)": ("destroy", "_end"),
    }
    words: ClassVar = {
        "no capacity": (400, "No capacity available"),
        "quota": (400, "You have reached your limit of instances"),
        "no money": (402, "Insufficient funds"),
        "denied": (403, "This key may not do that"),
        "wrong key": (401, "Unknown key"),
        "no route": (404, "Not found"),
        "gone": (404, "Instance not found"),
        "error body": (200, "Something went wrong"),
    }

    @staticmethod
    def error(status: int, message: str) -> Answer:
        return Answer(status, {"error": message})

    def _offers(self, request: Request) -> Answer:
        rows = [
            {
                "id": ware.name,
                "gpu": ware.gpu,
                "gpus": ware.gpu_count,
                "usd_h": ware.usd_h,
                "region": ware.region,
                "disk_gib": ware.disk_gib,
                "stock": ware.stock,
            }
            for ware in self.market.wares
        ]
        return Answer(200, rows)

    def _create(self, request: Request) -> Answer:
        if refused := self.refusal(request):
            return refused
        asked = request.body
        found = [ware for ware in self.market.wares if ware.name == asked["offer"]]
        if not found:
            return self.error(400, "Unknown offer")
        machine = self.market.rent(
            found[0],
            asked["name"],
            asked,
            id_of=lambda number: f"i-{number:08x}",
            script=asked["user_data"],
        )
        return self.failed() if request.has("error that created") else self._made(machine)

    def _made(self, machine: Rented) -> Answer:
        return Answer(201, {"id": machine.id})

    def _list(self, request: Request) -> Answer:
        return Answer(200, [self._instance(machine) for machine in self.listed(request)])

    def _show(self, request: Request, number: str) -> Answer:
        machine = next((m for m in self.market.rented if m.id == number), None)
        if machine is None or request.has("not found") or self.market.hidden(machine):
            return self.error(*self.words["gone"])
        return Answer(200, self._instance(machine))

    def _end(self, request: Request, number: str) -> Answer:
        machine = self.found(request, number)
        if machine is None:
            return self.error(*self.words["gone"])
        self.end(request, machine)
        return Answer(204)

    def _instance(self, machine: Rented) -> dict[str, Any]:
        status = "booting" if self.market.starting(machine) else "active"
        return {
            "id": machine.id,
            "name": machine.label,
            "status": status if machine.alive else "ended",
            "usd_h": machine.usd_h,
            "ip": machine.address if machine.alive and status == "active" else None,
        }
