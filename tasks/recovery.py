"""Makes the blocks of a bucket's workspaces again, on a host that has others or none.

Nothing is written into the bucket, and no block that is here is changed. Each step may be killed
and done again: a block that is there as the record says is left as it is, and one of the same name
that is another one stays, while the bucket's gets a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

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
    is_as,
    made_of,
    other_name,
    references_of,
    renamed,
    saved,
    secret_fields,
)
from torpor.control.recovery import InBucket
from torpor.control.reports import Row
from torpor.control.store.block_records import BlockRecord, Fields
from torpor.shared.errors import InvalidInput, ProviderDenied, TorporError

_OF_UI: Final = "on the UI's page Blocks"


@dataclass
class Recovery:
    """Brings back what ``records`` say into blocks of this host. ``store_block``: the name of the
    bucket's Object Store block here. ``secret``: asked for a field that no record holds; empty for
    not now. ``show``: hears first where it would be sent, unless that is the usual place."""

    store_block: str
    secret: Callable[[str, str], str]
    show: Callable[[str], None]
    done: list[Row] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    whole: bool = True

    def bring_back(self, records: Sequence[BlockRecord]) -> None:
        """All blocks of these records; the budgets last, which name the others."""
        newest: dict[str, Fields] = {}
        for record in sorted(records, key=lambda one: one.written_unix):
            newest |= {
                reference: fields
                for reference, fields in record.settings.blocks.items()
                if reference.startswith(f"{BUDGET}/")
            }
        for record in records:
            try:
                self._workspace(record)
            except TorporError as error:
                self._failed(f"{WORKSPACE}/{record.settings.block}", error)
        for reference, fields in newest.items():
            try:
                self._budget(reference, fields)
            except TorporError as error:
                self._failed(reference, error)

    def _workspace(self, record: BlockRecord) -> None:
        """The record's block, and all that it names."""
        settings = record.settings
        name, reference = settings.block, f"{WORKSPACE}/{settings.block}"
        fields = dict(settings.blocks.get(reference) or {})
        if not fields or fields.get("name") != record.workspace:
            raise InvalidInput("its record holds no settings of the block")
        there = saved(reference)
        if there is None and name in saved_names(Workspace):
            raise InvalidInput(f"a block of that name is here, and is damaged: mend it {_OF_UI}")
        if there is not None and there.model_dump().get("name") != record.workspace:
            self._left(record, ["name"])
            return
        becomes = {}
        for other in references_of(fields):
            if other.startswith(f"{STORE}/"):
                becomes[other] = f"{STORE}/{self.store_block}"
                continue
            held, withheld = settings.blocks.get(other), settings.withheld.get(other, ())
            becomes[other] = self._named(other, held, withheld)
        fields = renamed(fields, becomes)
        if there is None:
            _save(made_of(reference, fields, {}), name)
            self._say(reference, "made")
        elif is_as(there, fields):
            self._say(reference, "was there")
        else:
            own = there.model_dump()
            self._left(record, sorted(one for one in fields if own.get(one) != fields[one]))
            return
        for one in settings.withheld.get(reference, ()):
            if not getattr(saved(reference), one, None):
                self._missing(f"{reference} had {one}, which no plain store keeps: `torpor edit "
                              f"{name} {one}=...`")  # fmt: skip

    def _left(self, record: BlockRecord, differ: Sequence[str]) -> None:
        """A block of this host that is another one stays: its machines are found by it."""
        name, hint = record.settings.block, ""
        if record.side != own_side():  # else a deletion withdraws the record too
            hint = f"; once it is deleted with `torpor delete {name}`, this makes {record.words}'s"
        self.whole = False
        self._say(
            f"{WORKSPACE}/{name}",
            f"left as it is here, with another {', '.join(differ)}: `torpor edit {name}` changes "
            f"it{hint}",
        )

    def _named(self, reference: str, fields: Fields | None, withheld: Sequence[str]) -> str:
        """The block that is as the record says: the one that is here, or a new one; its name is
        another one where that is taken."""
        slug, _, name = reference.partition("/")
        kind, there = KINDS.get(slug), saved(reference)
        if kind is None or fields is None:
            if there is None:
                self._missing(f"{reference} is on no record: make it {_OF_UI}")
            return reference
        if there is not None and (slug == LOCAL or is_as(there, fields)):
            if "private_key" in withheld:
                self._missing(f"{reference}: its private key is on no record, and the one of the "
                              f"block that is here is taken. Where the old host had another one, "
                              f"save that {_OF_UI}")  # fmt: skip
            return reference
        if name in saved_names(kind):
            name = other_name(name, fields)
            reference = f"{slug}/{name}"
            there = saved(reference)
            if there is not None and is_as(there, fields):
                return reference
        self._make(reference, kind, fields, [*withheld])
        return reference

    def _make(self, reference: str, kind: type[Block], fields: Fields, withheld: list[str]) -> None:
        """A block that is not here, with the secrets that a person gives."""
        name = reference.partition("/")[2]
        asked = _texts(kind, withheld)
        if asked and (address := _unusual(kind, fields)):
            self.show(f"{reference} sends what you give to {address}, which is not the usual place")
        given = {one: self.secret(reference, one) for one in asked}
        left = [one for one in withheld if not given.get(one)]
        needed = [one for one in left if _is_needed(kind, one)]
        if needed:
            self.whole = False
            self._say(reference, f"not made: {', '.join(needed)} is on no record")
            again = f"torpor recover --store {self.store_block}"
            if "private_key" in needed:
                self._missing(f"{reference}: its private key is on no record, as in a plain store, "
                              "and the machines that stand let no other one in. Save it "
                              f"{_OF_UI}")  # fmt: skip
                return
            self._missing(f"{reference}: its {', '.join(needed)}. Give the command again, `{again}"
                          f"`, at a terminal, or with {variable_of(reference, needed[0])} set, or "
                          f"save the block {_OF_UI}")  # fmt: skip
            return
        block = made_of(reference, fields, {one: value for one, value in given.items() if value})
        if kind in PROVIDERS and given:
            try:
                block.open().check("")  # type: ignore[attr-defined]
            except ProviderDenied as error:
                self.whole = False
                self._missing(f"{reference} was not made, its market refuses the key: {error}")
                return
        _save(block, name)
        self._say(reference, "made")
        for one in left:
            self._missing(f"{reference} had {one}, which no record holds: fill it in {_OF_UI}")
        credentials = str(fields.get("credentials") or "")
        if credentials and kind in PROVIDERS:
            self._missing(f"{reference} logs in with the block {credentials}: fill it in {_OF_UI}")

    def _budget(self, reference: str, fields: Fields) -> None:
        name, there = reference.partition("/")[2], saved(reference)
        if there is None and name in saved_names(KINDS[BUDGET]):
            raise InvalidInput(f"a block of that name is here, and is damaged: mend it {_OF_UI}")
        if there is None:
            Block.save(made_of(reference, fields, {}), name)  # also where it names none of these
            self._say(reference, "made")
        elif not is_as(there, fields):
            self.whole = False
            self._say(reference, "left: another budget of that name is here")
            return
        else:
            self._say(reference, "was there")
        here = {*saved_names(Workspace)}
        named = {str(one).rpartition("/")[2] for one in fields.get("workspaces") or ()}
        if lost := sorted(named - here):
            self.whole = False
            of = ", ".join(sorted(named & here)) or "it"
            self._missing(
                f"{reference} names workspace {', '.join(lost)}, which is not here. Until it is "
                f"recovered too, or taken out of the budget, nothing is rented for {of}"
            )

    def _failed(self, reference: str, error: TorporError) -> None:
        self.whole = False
        self._say(reference, f"not made: {error}")

    def _say(self, reference: str, becomes: str) -> None:
        row: Row = {"block": reference, "becomes": becomes}
        if row not in self.done:
            self.done.append(row)

    def _missing(self, words: str) -> None:
        if words not in self.unknown:
            self.unknown.append(words)


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


def _save(block: Block, name: str) -> None:
    """InvalidInput where somebody has saved one of that name meanwhile."""
    try:
        block.save(name)
    except ValueError as error:
        raise InvalidInput(f"it could not be saved: {error}") from None


def _texts(kind: type[Block], withheld: Sequence[str]) -> list[str]:
    """Those of the fields that a line of text fills in."""
    if "private_key" in withheld:
        return []  # many lines; without it, its passphrase opens nothing
    lines = {*secret_fields(kind)}
    return [one for one in withheld if one in lines]


def _is_needed(kind: type[Block], field: str) -> bool:
    """Whether the block is of no use without it."""
    return kind.model_fields[field].is_required() or kind.get_block_type_slug() == IDENTITY


def _unusual(kind: type[Block], fields: Fields) -> str:
    """The addresses of a market that are not what a new block of it has."""
    of = {name: field.default for name, field in kind.model_fields.items() if "url" in name}
    return ", ".join(
        str(fields[name]) for name, usual in of.items() if fields.get(name, usual) != usual
    )
