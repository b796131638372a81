"""What a wake would rent: offers in the order in which it tries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torpor.control.compare.choices import Choice, Terms, choice_of
from torpor.control.compare.experience import Past
from torpor.control.providers.seam import Provider
from torpor.control.rental.search import Offers, Tried
from torpor.control.reports import Row, WorkspaceReport
from torpor.shared.values import MachineId

MOST_SHOWN: Final = 50
"""Offers in the table, and as many that do not fit."""


class OffersReport(WorkspaceReport, frozen=True):
    """``fitting``: best first. ``refused``: the other offers, and providers that sold nothing.
    ``snapshot``: empty if the workspace has none. ``awake``: machines on which it is already."""

    snapshot: str
    fitting: list[Choice]
    refused: list[Tried]
    awake: list[MachineId]
    ranked: bool = False  # by whether frozen programs can go on

    def title(self) -> str:
        of = f"snapshot {self.snapshot} of " if self.snapshot else ""
        awake = f"; it is awake on {', '.join(self.awake)}" if self.awake else ""
        fit = "1 offer fits" if len(self.fitting) == 1 else f"{len(self.fitting)} offers fit"
        return (
            f"{fit} {of}workspace {self.workspace}, "
            f"{len(self.refused)} do not{awake}. Nothing was rented"
        )

    def rows(self) -> list[Row]:
        fitting = [self._row(choice, self.ranked) for choice in self.fitting[:MOST_SHOWN]]
        return [*fitting, *({**_EMPTY, **tried.row()} for tried in self.refused[:MOST_SHOWN])]

    @staticmethod
    def _row(choice: Choice, ranked: bool) -> Row:
        offer = choice.offer
        fits = "fits, spot" if offer.spot else "fits"
        return {
            "market": choice.market,
            "GPU": choice.gpu,
            "$/h": f"{offer.bound_usd_h:.3f}",
            "ready after": _begins(choice),
            "outcome": "; ".join([fits, *([choice.prospect.words] if ranked else [])]),
            "$ a day": f"{offer.bound_usd_h * 24:.2f}",
            "region": offer.region,
            "reliability": "" if offer.reliability is None else f"{offer.reliability:.3f}",
            "offer": offer.id,
            "provider": offer.provider,
        }


_EMPTY: Final = {
    "market": "", "GPU": "", "$/h": "", "ready after": "", "outcome": "", "$ a day": "",
    "region": "", "reliability": "", "offer": "", "provider": "",
}  # fmt: skip


def offered(
    offers: Offers, providers: Sequence[Provider], past: Past, terms: Terms
) -> list[Choice]:
    """The fitting offers in their order, with what ``past`` rentals say of each one's start."""
    able = {provider.identity: provider.abilities for provider in providers}
    return [
        choice_of(offer, able[offer.provider], past.of(offer), terms, past.flown.of(offer))
        for offer in offers.fitting
    ]


def _begins(choice: Choice) -> str:
    """Seconds until SSH answers and the snapshot is restored. Without a rental of this workspace
    there, the start is the most that the market is given."""
    most = "" if choice.starts else "at most "
    if choice.work_s is not None:
        return f"{most}{choice.work_s:.0f} s"
    return f"{most}{choice.start_p50_s:.0f} s and the restore"
