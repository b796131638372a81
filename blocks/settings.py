"""What the blocks of a workspace hold, as its record in the bucket keeps it, and back.

A market's key, a login, a token, a passphrase and an encryption key are never kept. The private
key of an SSH identity is, in a sealed store only and unless its block says otherwise: it opens the
machines that stand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from prefect.blocks.core import Block
from pydantic import SecretStr, ValidationError

from blocks import PROVIDERS
from blocks.budget import Budget
from blocks.idleness import Idleness
from blocks.object_store import ObjectStore
from blocks.reference import faults, load_named, loading_once, saved_names
from blocks.ssh_identity import SSHIdentity
from blocks.tuning import Tuning
from blocks.workspace import Workspace
from torpor.control.store.workspace_records import COMMANDS, Fields, Settings
from torpor.shared.errors import InvalidInput

KINDS: Final[dict[str, type[Block]]] = {
    kind.get_block_type_slug(): kind
    for kind in (SSHIdentity, ObjectStore, *PROVIDERS, Idleness, Tuning, Budget, Workspace)
}
"""The types of block that are kept, by their slugs, in the order in which they are made again: a
workspace after its budgets."""
WORKSPACE, STORE, IDENTITY, LOCAL, BUDGET = (
    "workspace", "object-store", "ssh-identity", "local-provider", "budget"
)  # fmt: skip
NAMES: Final = {
    "store": STORE,
    "identity": IDENTITY,
    "provider": LOCAL,
    "more_providers": LOCAL,
    "idle": "idleness",
    "tuning": "tuning",
}
"""The fields of a Workspace block that name other blocks, and the type that a bare name means."""
OF_STORE: Final = ("flavour", "patience_min", "price_gb_month_usd", "price_egress_gb_usd")
"""Of a store. Whoever reads a record has its address and keys."""


def settings_of(block: Workspace, *, sealed: bool) -> Settings:
    """What the workspace's block and all blocks that it names hold, and its budgets'. ``sealed``:
    whether nobody but a control side reads it. A block that is missing or damaged is left out."""
    with loading_once():
        return _settings_of(block, sealed=sealed)


def _settings_of(block: Workspace, *, sealed: bool) -> Settings:
    name = str(block._block_document_name)
    kept: dict[str, Fields] = {}
    withheld: dict[str, list[str]] = {}

    def add(reference: str, one: Block) -> None:
        kept[reference], left = fields_of(one, sealed=sealed)
        if left:
            withheld[reference] = left

    add(f"{WORKSPACE}/{name}", block)
    for reference in references_of(kept[f"{WORKSPACE}/{name}"]):
        if (found := saved(reference)) is not None:
            add(reference, found)
    for other in saved_names(Budget):
        budget = saved(f"{BUDGET}/{other}")
        if isinstance(budget, Budget) and _counts(budget, block, name):
            add(f"{BUDGET}/{other}", budget)
    return Settings(block=name, blocks=kept, withheld=withheld)


def _counts(budget: Budget, block: Workspace, name: str) -> bool:
    if budget.project:
        return budget.project == block.project
    return name in {one.rpartition("/")[2] for one in budget.workspaces}


def references_of(workspace: Mapping[str, Any]) -> list[str]:
    """The blocks that a Workspace block names, each as type/name."""
    named = [whole_name(field, one) for field in NAMES for one in _listed(workspace.get(field))]
    return [*dict.fromkeys(named)]


def renamed(workspace: Mapping[str, Any], becomes: Mapping[str, str]) -> Fields:
    """The fields of a Workspace block, with other references in place of those in ``becomes``."""

    def as_it_becomes(field: str, named: str) -> str:
        whole = whole_name(field, named)
        new = becomes.get(whole, whole)
        return named if new == whole else new if "/" in named else new.partition("/")[2]

    new = dict(workspace)
    for field in NAMES:
        value = workspace.get(field)
        if isinstance(value, list):
            new[field] = [as_it_becomes(field, str(one)) for one in value]
        elif value:
            new[field] = as_it_becomes(field, str(value))
    return new


def whole_name(field: str, named: str) -> str:
    """The type/name of the block that this field of a Workspace block names."""
    return named if "/" in named else f"{NAMES[field]}/{named}"


def _listed(value: object) -> list[str]:
    return [str(one) for one in (value if isinstance(value, list) else [value]) if one]


def saved(reference: str) -> Block | None:
    """The saved block; None where it is missing, damaged, or of a type that is not kept."""
    slug, _, name = reference.partition("/")
    kind = KINDS.get(slug)
    try:
        return None if kind is None else load_named(kind, name, of="")
    except InvalidInput:
        return None


def fields_of(block: Block, *, sealed: bool) -> tuple[Fields, list[str]]:
    """The fields of a block that are kept, and the names of those that are set and are not."""
    kind = type(block)
    secret = {str(one).partition(".")[0] for one in secret_fields(kind)}
    fields: Fields = {}
    withheld: list[str] = []
    for name in kind.model_fields:
        value = getattr(block, name)
        if name in secret:
            plain = value.get_secret_value() if value is not None else None
            if plain and name == "private_key" and sealed and getattr(block, "on_record", False):
                fields[name] = plain
            elif plain:
                withheld.append(name)
        elif kind is Workspace and name in COMMANDS and not sealed:
            withheld += [name] if value else []
        elif kind is not ObjectStore or name in OF_STORE:
            fields[name] = json.loads(json.dumps(value))
    return fields, withheld


def secret_fields(kind: type[Block]) -> list[str]:
    """The names of its fields that Prefect hides."""
    return [str(one) for one in kind.model_json_schema().get("secret_fields", [])]


def made_of(reference: str, fields: Fields, secrets: Mapping[str, str]) -> Block:
    """The block that holds these fields and ``secrets``; InvalidInput where it cannot be."""
    kind = KINDS.get(reference.partition("/")[0])
    if kind is None:
        raise InvalidInput(f"{reference}: this torpor has no block of that type")
    known = {name: value for name, value in fields.items() if name in kind.model_fields}
    try:
        return kind(**known, **{name: SecretStr(value) for name, value in secrets.items()})
    except ValidationError as error:
        raise InvalidInput(f"{reference} cannot be made again: {faults(error)}") from None


def is_as(block: Block, fields: Fields) -> bool:
    """Whether the block holds these fields. Fields that are not kept do not count."""
    own, _ = fields_of(block, sealed=True)
    return all(own.get(name, value) == value for name, value in fields.items())


def differences(block: Block, fields: Fields) -> list[str]:
    """In which fields the block is another one than these say."""
    own, _ = fields_of(block, sealed=True)
    return sorted(name for name, value in fields.items() if own.get(name, value) != value)


def unknown_fields(kind: type[Block], fields: Fields) -> list[str]:
    """The fields that a newer torpor's block of this kind had."""
    return sorted(fields.keys() - kind.model_fields.keys())


def budget_becomes(budget: Fields, becomes: Mapping[str, str]) -> Fields:
    """The fields of a budget whose workspaces have these names by now."""
    named = [str(one).rpartition("/")[2] for one in budget.get("workspaces") or ()]
    return {**budget, "workspaces": [becomes.get(one, one) for one in named]}
