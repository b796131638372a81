"""Makes the blocks of a bucket's workspaces again on this host, which then owns the workspaces.

First all is planned and all secrets are asked for. Then the blocks are made in an order in which
nothing can rent before its budget is there: identities, stores, markets, idle rules, tunings,
budgets, and the workspaces last. At the end this control side is written as the owner into each
record. No block that is here is changed: one of the same name that is another one stays, and the
bucket's gets a name of its own. Each step may be killed, and the command given again.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from prefect.blocks.core import Block
from prefect.blocks.system import Secret

from blocks import PROVIDERS, Workspace
from blocks.control_side import own_side
from blocks.reference import saved_names
from blocks.settings import (
    BUDGET,
    IDENTITY,
    KINDS,
    LOCAL,
    STORE,
    WORKSPACE,
    budget_becomes,
    differences,
    is_as,
    made_of,
    references_of,
    renamed,
    saved,
    secret_fields,
    unknown_fields,
)
from torpor.control.recovery import InBucket
from torpor.control.reports import Row
from torpor.control.store.workspace_records import (
    Fields,
    Settings,
    WorkspaceRecords,
    other_name,
)
from torpor.shared.errors import InvalidInput, ProviderDenied, TorporError
from torpor.shared.values import WorkspaceName

_OF_UI: Final = "on the UI's page Blocks"
_NO_LINE: Final = ("env", "kubeconfig", "service_account")
"""Secret fields that no line of text fills in: variables, and whole files."""


@dataclass
class _Planned:
    """What becomes of one block of the records. ``reference``: its name here; ``there``: it is here
    as the record says; ``needs``: the blocks without which it must not be made."""

    reference: str
    fields: Fields
    there: bool
    withheld: Sequence[str] = ()
    needs: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass
class Recovery:
    """Brings back what ``found`` says into blocks of this host. ``every``: the settings of all
    workspaces of the bucket. ``store_block``: the name of the bucket's Object Store block here.
    ``secret``: asked for a field that no record holds; empty for not now. ``agree``: asked whether
    the secret may be sent to an address that is not its market's usual one."""

    found: Sequence[InBucket]
    every: Sequence[Settings]
    store_block: str
    secret: Callable[[str, str], str]
    agree: Callable[[str], bool]
    done: list[Row] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    whole: bool = True
    _plan: dict[str, _Planned] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)
    _differs: dict[WorkspaceName, str] = field(default_factory=dict)
    _owns: list[WorkspaceName] = field(default_factory=list)

    def plan(self) -> None:
        """What is to be made, and what is here. Nothing is asked or changed."""
        found = _newest(self.found)
        for settings in found.values():
            self._plan_named(settings)
        becomes = {  # the names of workspaces, before the budgets that name them
            settings.block: self._name_of_workspace(name, found) for name, settings in found.items()
        }
        for name, settings in found.items():
            budgets = self._plan_budgets(settings, becomes)
            self._plan_workspace(name, settings, self._name_of_workspace(name, found), budgets)

    def show(self) -> list[Row]:
        """What ``make`` would do."""
        rows: list[Row] = []
        for one in self._plan.values():
            words = "is here" if one.there else "would be made"
            rows.append({"block": one.reference, "becomes": words})
        return [*self.done, *rows]

    def ask(self) -> None:
        """Ask for all secrets, before the first block is made."""
        for one in self._plan.values():
            if not one.there:
                self._ask(one)

    def make(self) -> None:
        """Make the blocks, in the order of KINDS."""
        order = [*KINDS]
        planned = sorted(
            self._plan.items(), key=lambda item: order.index(item[0].partition("/")[0])
        )
        for key, one in planned:
            if lacks := [self._plan[of].reference for of in one.needs if of in self._failed]:
                self._not_made(key, one, f"without {', '.join(lacks)} it would rent unlimited")
                continue
            try:
                self._make(key, one)
            except TorporError as error:
                self._not_made(key, one, str(error))
        self._see_budgets()

    def take(self, records: WorkspaceRecords) -> None:
        """Make this control side the owner of each workspace that has its block here, as the record
        says, and all blocks that it names: no other side ends its idle machines then, and the
        owner's next run writes what its blocks hold over the record."""
        side, host = own_side(), socket.gethostname()
        blocks = [_workspace(name) for name in saved_names(Workspace)]
        here = {
            block.name: [
                one for one in references_of(block.model_dump(mode="json")) if saved(one) is None
            ]
            for block in blocks
            if block is not None and block.store.rpartition("/")[2] == self.store_block
        }
        for one in self.found:
            lacks, differs = here.get(one.name), self._differs.get(one.name)
            if lacks:
                self._not_owned(one.name, f"it has no {', '.join(lacks)}")
            elif differs:
                self._not_owned(one.name, f"its block here has another {differs} than the record, "
                                "which the next run here would write over. Make them the "
                                "same")  # fmt: skip
            elif lacks is not None:
                try:
                    records.take(one.name, side, host)
                except TorporError as error:
                    self._not_owned(one.name, str(error))
                else:
                    self._owns.append(one.name)

    def _not_owned(self, name: WorkspaceName, why: str) -> None:
        self.whole = False
        self._missing(f"{name} is not owned by this host yet: {why}. Then give the command again")

    @property
    def owns(self) -> Sequence[WorkspaceName]:
        """The workspaces that this control side owns now."""
        return self._owns

    # -- the plan

    def _plan_named(self, settings: Settings) -> None:
        """The blocks that the Workspace block names, and identities of earlier hosts, whose keys
        the record keeps; their names here."""
        named = references_of(settings.blocks.get(settings.reference, {}))
        keys = [one for one in settings.blocks if one.startswith(f"{IDENTITY}/")]
        for reference in dict.fromkeys([*named, *keys]):
            slug = reference.partition("/")[0]
            if slug == STORE or self._key(reference, settings) in self._plan:
                continue
            fields = settings.blocks.get(reference)
            if slug not in KINDS or fields is None:
                if saved(reference) is None:
                    self._missing(f"{reference} is on no record: make it {_OF_UI}")
                continue
            withheld = settings.withheld.get(reference, ())
            self._plan_block(self._key(reference, settings), reference, fields, withheld)

    def _key(self, reference: str, settings: Settings) -> str:
        """Records of one bucket may hold two blocks of one name: of two hosts."""
        fields = settings.blocks.get(reference, {})
        return other_name(reference, fields)

    def _plan_block(
        self, key: str, reference: str, fields: Fields, withheld: Sequence[str]
    ) -> _Planned:
        """The block here that is as the record says, or a new one; its name is another one where
        that is taken. A private key that is here under any name is not made again."""
        slug, _, name = reference.partition("/")
        kind = KINDS[slug]
        here = saved_names(kind)
        taken = {*here, *(one.reference.partition("/")[2] for one in self._of(slug))}
        same = _is_here(slug, name, fields)
        if not same and fields.get("private_key"):
            name = next((one for one in here if _is_here(slug, one, fields)), name)
            same = _is_here(slug, name, fields)
        if name in taken and not same:
            name = other_name(name, fields)
            same = _is_here(slug, name, fields)
        planned = _Planned(f"{slug}/{name}", fields, same, withheld)
        self._plan[key] = planned
        for one in unknown_fields(kind, fields):
            self._missing(f"{planned.reference}: this torpor does not know its {one}, which a "
                          "newer one has kept: bring torpor up to date")  # fmt: skip
        if same and withheld:
            self._missing(f"{planned.reference} is here already, and whether its "
                          f"{', '.join(withheld)} is what the old host had, no record says: see "
                          f"that it is the same account or key, {_OF_UI}")  # fmt: skip
        return planned

    def _of(self, slug: str) -> list[_Planned]:
        return [one for one in self._plan.values() if one.reference.startswith(f"{slug}/")]

    def _name_of_workspace(
        self, workspace: WorkspaceName, found: Mapping[WorkspaceName, Settings]
    ) -> str:
        """The name of its block here: another one where that is another workspace's."""
        settings = found[workspace]
        name, there = settings.block, saved(settings.reference)
        if there is not None and there.model_dump().get("name") == workspace:
            return name
        first = next(of for of, one in found.items() if one.block == name)
        if name in saved_names(Workspace) or first != workspace:
            return other_name(name, {"name": workspace})
        return name

    def _plan_budgets(self, settings: Settings, becomes: dict[str, str]) -> list[str]:
        """The keys of the budgets that limit the workspace."""
        keys = []
        for reference, fields in settings.blocks.items():
            if not reference.startswith(f"{BUDGET}/"):
                continue
            here = budget_becomes(fields, becomes)
            key = other_name(reference, here)
            if key not in self._plan:
                self._plan_block(key, reference, here, ())
            keys.append(key)
        return keys

    def _plan_workspace(
        self, workspace: WorkspaceName, settings: Settings, name: str, budgets: list[str]
    ) -> None:
        fields = dict(settings.blocks.get(settings.reference) or {})
        reference = f"{WORKSPACE}/{name}"
        if not fields or fields.get("name") != workspace:
            self.whole = False
            self._say(reference, "not made: its record holds no settings of the block")
            return
        becomes = {one: self._becomes(one, settings) for one in references_of(fields)}
        fields = renamed(fields, becomes)
        there = saved(reference)
        if there is not None and not is_as(there, fields):
            self.whole = False
            differ = self._differs[workspace] = ", ".join(differences(there, fields))
            self._say(
                reference,
                f"left as it is here, with another {differ} than the record: `torpor edit {name}` "
                f"changes it, `torpor delete {name}` keeps its snapshots and has it made anew",
            )
            return
        withheld = settings.withheld.get(settings.reference, ())
        planned = _Planned(reference, fields, there is not None, withheld, budgets)
        self._plan[reference] = planned
        for one in unknown_fields(Workspace, fields):
            self._missing(f"{reference}: this torpor does not know its setting {one}, which a "
                          "newer one has kept: bring torpor up to date")  # fmt: skip

    def _becomes(self, reference: str, settings: Settings) -> str:
        if reference.startswith(f"{STORE}/"):
            return f"{STORE}/{self.store_block}"
        planned = self._plan.get(self._key(reference, settings))
        return reference if planned is None else planned.reference

    # -- secrets

    def _ask(self, one: _Planned) -> None:
        kind = KINDS[one.reference.partition("/")[0]]
        asked = _texts(kind, one.withheld)
        address = _unusual(kind, one.fields)
        if asked and address and not self.agree(
            f"{one.reference} sends its {', '.join(asked)} to {address}, which is not the usual "
            "place. Send it there?"
        ):  # fmt: skip
            self._missing(f"{one.reference} is not made: the record says that its key goes to "
                          f"{address}, which nobody at a terminal has agreed to. Give the command "
                          f"again there, or save the block {_OF_UI}")  # fmt: skip
            return
        one.given = {name: text for name in asked if (text := self.secret(one.reference, name))}

    # -- making them

    def _make(self, key: str, one: _Planned) -> None:
        slug, _, name = one.reference.partition("/")
        kind = KINDS[slug]
        if one.there:
            self._say(one.reference, "was there")
            return
        left = [field for field in one.withheld if not one.given.get(field)]
        needed = [field for field in left if _is_needed(kind, field)]
        if needed:
            self._lacks(one, needed)
            self._not_made(key, one, f"{', '.join(needed)} is on no record")
            return
        block = made_of(one.reference, one.fields, one.given)
        if kind in PROVIDERS and one.given:
            try:
                block.open().check("")  # type: ignore[attr-defined]
            except ProviderDenied as error:
                self._not_made(key, one, f"its market refuses the key: {error}")
                return
        _save(block, name)
        self._say(one.reference, "made")
        for field_left in left:
            self._missing(f"{one.reference} had {field_left}, which no record holds: fill it in "
                          f"{_OF_UI}")  # fmt: skip
        credentials = str(one.fields.get("credentials") or "")
        if credentials and kind in PROVIDERS:
            self._missing(f"{one.reference} logs in with the block {credentials}: fill it in "
                          f"{_OF_UI}")  # fmt: skip

    def _lacks(self, one: _Planned, needed: Sequence[str]) -> None:
        if "private_key" in needed:
            self._missing(f"{one.reference}: its private key is on no record, and the machines "
                          f"that stand let no other one in. Save your copy {_OF_UI}, and give the "
                          "command again")  # fmt: skip
            return
        variable = variable_of(one.reference, needed[0])
        self._missing(f"{one.reference}: its {', '.join(needed)}. Give the command again, "
                      f"`torpor recover --store {self.store_block}`, at a terminal, or with "
                      f"{variable} set, or save the block {_OF_UI}")  # fmt: skip

    def _see_budgets(self) -> None:
        """Name the budgets that cannot count all that they are for."""
        here = {*saved_names(Workspace)}
        for one in self._of(BUDGET):
            named = {str(name).rpartition("/")[2] for name in one.fields.get("workspaces") or ()}
            if lost := sorted(named - here):
                self.whole = False
                self._missing(f"{one.reference} names workspace {', '.join(lost)}, which is not "
                              "here. Until it is recovered too, or taken out of the budget, "
                              "nothing is rented for the workspaces of the budget")  # fmt: skip
            project = one.fields.get("project")
            same = [of for of in self.every if project and _project_of(of) == project]
            if lost := sorted(of.block for of in same if of.block not in here):
                self.whole = False
                self._missing(f"{one.reference} is for project {project}, and does not count what "
                              f"workspace {', '.join(lost)} costs, which is not here: recover it "
                              "too")  # fmt: skip

    def _not_made(self, key: str, one: _Planned, why: str) -> None:
        self.whole = False
        self._failed.add(key)
        self._say(one.reference, f"not made: {why}")

    def _say(self, reference: str, becomes: str) -> None:
        self.done.append({"block": reference, "becomes": becomes})

    def _missing(self, words: str) -> None:
        if words not in self.unknown:
            self.unknown.append(words)


def _newest(found: Iterable[InBucket]) -> dict[WorkspaceName, Settings]:
    """What the blocks of each workspace held. Of a block that several records have, as its budgets
    and its identity, the one that the same control side wrote last."""
    known = [one.record for one in found if one.record is not None]
    newest: dict[tuple[str, str], tuple[Fields, list[str]]] = {}
    for record in sorted(known, key=lambda one: one.written_unix):
        if record.settings is not None:
            for reference, fields in record.settings.blocks.items():
                left = record.settings.withheld.get(reference, [])
                newest[record.side, reference] = fields, left
    becomes = {}
    for record in known:
        if (of := record.settings) is not None:
            shared = {one: newest[record.side, one] for one in of.blocks if one != of.reference}
            becomes[record.workspace] = msgspec.structs.replace(
                of,
                blocks=of.blocks | {one: fields for one, (fields, _) in shared.items()},
                withheld=of.withheld | {one: left for one, (_, left) in shared.items() if left},
            )
    return becomes


def variable_of(reference: str, field: str) -> str:
    """The environment variable that gives a secret field of a block."""
    return f"TORPOR_{reference}_{field}".upper().replace("/", "_").replace("-", "_")


def lost_secrets(found: Iterable[InBucket]) -> list[str]:
    """The Secret blocks that open jobs name and that are not here."""
    here = {*saved_names(Secret)}
    named: dict[str, str] = {}
    for one in found:
        for job in one.jobs:
            named |= {line.partition("=")[2]: job.id for line in job.secrets}
    return [
        f"secret/{name}, which job {job} needs: save it {_OF_UI}"
        for name, job in named.items()
        if name and name not in here
    ]


def _is_here(slug: str, name: str, fields: Fields) -> bool:
    """Whether the block of this name is as a record says; the place of a host's own machines is
    another one on each host."""
    there = saved(f"{slug}/{name}")
    return there is not None and (slug == LOCAL or is_as(there, fields))


def _workspace(name: str) -> Workspace | None:
    block = saved(f"{WORKSPACE}/{name}")
    return block if isinstance(block, Workspace) else None


def _project_of(settings: Settings) -> str:
    return str(settings.blocks.get(settings.reference, {}).get("project") or "")


def _save(block: Block, name: str) -> None:
    """InvalidInput where somebody has saved one of that name meanwhile. A budget is saved before
    the workspaces that it names."""
    try:
        Block.save(block, name)
    except ValueError as error:
        raise InvalidInput(f"it could not be saved: {error}") from None


def _texts(kind: type[Block], withheld: Sequence[str]) -> list[str]:
    """Those of the fields that a line of text fills in."""
    if "private_key" in withheld:
        return []  # many lines; without it, its passphrase opens nothing
    return [one for one in withheld if one in secret_fields(kind) and one not in _NO_LINE]


def _is_needed(kind: type[Block], field: str) -> bool:
    """Whether the block is of no use without it."""
    return kind.model_fields[field].is_required() or kind.get_block_type_slug() == IDENTITY


def _unusual(kind: type[Block], fields: Fields) -> str:
    """The addresses of a market that are not what a new block of it has."""
    of = {name: field.default for name, field in kind.model_fields.items() if "url" in name}
    return ", ".join(
        str(fields[name]) for name, usual in of.items() if fields.get(name, usual) != usual
    )
