"""Print what each market can do, as its adapter says, as a Markdown table.

    python -m deployments.market_table

docs/providers.md explains the properties.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, get_type_hints

from blocks import PROVIDERS, ProviderBlock
from torpor.control.providers.seam import Abilities

PROPERTIES: Final[dict[str, Callable[[Abilities], str]]] = {
    "machine": lambda able: able.kind,
    "hosts of many owners": lambda able: _yes(able.many_owners),
    "a trial machine is also ended by": lambda able: able.ends_machines or "nothing",
    "image of your choice": lambda able: _yes(able.images),
    "root that may dump processes": lambda able: _yes(able.privileged),
    "checkpoint": lambda able: able.checkpoint,
    "host key": lambda able: able.host_key,
    "recognises a repeated request by": lambda able: able.idempotency,
    "may hide a new machine for": lambda able: _time(able.settling_s),
    "waits in a queue for": lambda able: _time(able.queue_s) if able.queue_s else "no queue",
    "given up without SSH after": lambda able: _time(able.ready_s),
    "given up without an address after": lambda able: _time(able.address_s or able.ready_s),
    "asked at most every": lambda able: _time(able.poll_s) if able.poll_s else "no limit",
    "billed by": lambda able: _time(able.billing_s),
    "billed after its end": lambda able: _time(able.ending_s) if able.ending_s else "no",
    "proves an end for": lambda able: "ever" if able.forgets_s is None else _time(able.forgets_s),
    "smallest disk": lambda able: f"{able.min_disk_gib:g} GiB" if able.min_disk_gib else "any",
    "a stop keeps": lambda able: able.stop_keeps,
    "a job whose machine is stopped": lambda able: (
        "ends it" if able.stop_keeps == "nothing" else "starts it" if able.restarts else "waits"
    ),
    "a stopped disk, a GiB and month": lambda able: _usd(able.stopped_usd_gib_month),
    "powers itself off without `watch` after": lambda able: (
        "never" if able.deadline_s is None else _time(able.deadline_s)
    ),
    "warning before spot is taken": lambda able: (
        "none" if able.notice_s is None else _time(able.notice_s)
    ),
    "the machine can ask for that warning": lambda able: (
        ", ".join(source.kind for source in able.notices) or "no"
    ),
    "a job may run on several machines": lambda able: _yes(able.private_network),
    "a machine of yours can be adopted": lambda able: able.adopts or "no",
    "live service": lambda able: "tried" if able.tried else "not tried",
}
"""Every line, from the adapters' abilities."""


def main() -> None:
    print(table(), end="")


def table() -> str:
    """One line for each property, one column for each provider block, in Markdown."""
    rows = [
        ["property", *(name_of(kind) for kind in PROVIDERS)],
        ["---"] * (len(PROVIDERS) + 1),
        *(
            [name, *(cell(abilities_of(kind)) for kind in PROVIDERS)]
            for name, cell in PROPERTIES.items()
        ),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def abilities_of(kind: type[ProviderBlock]) -> Abilities:
    """Of the adapter that the block opens, where the block changes nothing."""
    abilities: Abilities = get_type_hints(kind.open)["return"].abilities
    return abilities


def name_of(kind: type[ProviderBlock]) -> str:
    """Of the market, as the forms show it."""
    return kind.get_block_type_name().removesuffix(" Provider")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _usd(usd: float | None) -> str:
    return "not stated" if usd is None else f"{usd:.2f} $"


def _time(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


if __name__ == "__main__":
    main()
