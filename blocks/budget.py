"""The block of a budget: what workspaces or a project may cost in a month."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from typing import Any, Self

from prefect.blocks.core import Block
from prefect.client.orchestration import PrefectClient
from pydantic import Field, HttpUrl, field_validator, model_validator

from blocks.reference import LOGOS, Reference, load, load_all
from blocks.workspace import Workspace
from torpor.control.money import budgets
from torpor.control.money.budgets import OpenBudget
from torpor.control.rental.records import Rentals
from torpor.control.time_zones import zone_named
from torpor.shared.errors import InvalidInput
from torpor.shared.values import WorkspaceName, names_of


class Budget(Block):
    """What some workspaces, or a project, may cost in a calendar month.

    Nothing is rented that the budget cannot pay for an hour, together with all that runs by then.

    Example:
        Limit a workspace to 200 dollars a month:
        ```python
        from blocks import Budget

        Budget(usd_month=200, workspaces=["mywork"]).save("mywork")

        budget = Budget.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Budget"
    _block_type_slug = "budget"
    _logo_url = HttpUrl(f"{LOGOS}/filesystem.png")
    _documentation_url = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

    usd_month: float = Field(
        gt=0, title="Dollars a month", description="The budget of a calendar month, in dollars."
    )
    workspaces: list[Reference] = Field(
        default_factory=list,
        description="The Workspace blocks that the budget is for. Empty: it is for a project.",
    )
    project: str = Field(
        default="",
        description=(
            "The project that the budget is for, as its Workspace blocks name it. Empty: it is for "
            "the workspaces above."
        ),
    )
    timezone: str = Field(
        default="UTC",
        title="Time zone",
        description="The time zone in which months begin, such as Europe/Berlin.",
    )

    def open(self) -> OpenBudget:
        """The budget, with the records of what it counts; raises InvalidInput.

        One that names a Workspace block which cannot be used counts nothing: it stands in the way
        of the other workspaces that it names, and of one that is named as that block.
        """
        name = self._block_document_name or "unnamed"
        me = f"budget {name}"
        named, troubles = self._named(me)
        value = budgets.Budget(
            name=name,
            usd_month=Decimal(str(self.usd_month)),
            timezone=self.timezone,
            workspaces=(*(WorkspaceName(block.name) for block in named), *troubles),
            project=self.project,
        )

        @cache
        def ledgers() -> list[Rentals]:
            # A rental keeps its project when its workspace gets another one.
            return _ledgers(named or load_all(Workspace, of=me))

        trouble = ""
        if troubles:
            trouble = (
                f"{'; '.join(troubles.values())}. Until then nothing is rented for the workspaces "
                f"that {me} may cover ({', '.join(value.workspaces)}): what they have spent is "
                "not known. Or take the name out of the budget"
            )
        return OpenBudget(value, ledgers, trouble)

    def save(
        self,
        name: str | None = None,
        overwrite: bool = False,
        client: PrefectClient | None = None,
        **how: Any,
    ) -> Any:
        """As every block. InvalidInput if it names a Workspace block that cannot be used; a block
        that is saved in the UI is not looked at."""
        _, troubles = self._named(f"budget {name or self._block_document_name or 'unnamed'}")
        if troubles:
            raise InvalidInput(f"{'; '.join(troubles.values())}. The budget was not saved")
        return super().save(name, overwrite, client, **how)

    def _named(self, me: str) -> tuple[list[Workspace], dict[WorkspaceName, str]]:
        """The Workspace blocks that the budget names; and by name, why others cannot be used."""
        found: list[Workspace] = []
        troubles: dict[WorkspaceName, str] = {}
        for one in self.workspaces:
            try:
                found.append(load(one, (Workspace,), of=me))
            except InvalidInput as error:
                troubles[WorkspaceName(one.rpartition("/")[2])] = str(error)
        return found, troubles

    @field_validator("project", "timezone", mode="after")
    @classmethod
    def _trimmed(cls, value: str) -> str:
        return value.strip()

    @field_validator("timezone", mode="after")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            zone_named(value)
        except InvalidInput as cause:
            raise ValueError(str(cause)) from None
        return value

    @model_validator(mode="after")
    def _for_something(self) -> Self:
        if bool(self.workspaces) == bool(self.project):
            raise ValueError(
                "a budget is for workspaces or for a project: fill in one of the two fields"
            )
        return self


def open_all_budgets() -> list[OpenBudget]:
    """Every saved Budget block, with the records of what it counts; raises InvalidInput."""
    return [block.open() for block in load_all(Budget)]


def _ledgers(workspaces: Sequence[Workspace]) -> list[Rentals]:
    found = {}
    for block in workspaces:
        store = block.open_store()
        for name in names_of(WorkspaceName(block.name)):
            found[store.address, name] = Rentals(store, name)
    return [*found.values()]
