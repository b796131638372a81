"""How one block names another: ``type/name``, or ``name`` for the default type.

Blocks are not nested: Prefect's edit form cuts off a nested block and replaces its secrets with
asterisks, and a union of blocks may load as the wrong member (docs/contributing/forms.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Annotated, Any, Final, NamedTuple, TypeVar, cast

import httpx
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import BlockDocument
from prefect.exceptions import PrefectHTTPStatusError
from pydantic import BeforeValidator, ValidationError

from blocks.connection import server_in_use
from torpor.shared.errors import InvalidInput

BlockT = TypeVar("BlockT", bound=Block)
ReadT = TypeVar("ReadT")

LOGOS: Final = (
    "https://raw.githubusercontent.com/PrefectHQ/prefect/"
    "420d0d6a78bb6df1fc18bcf188fdad43c1d22ea9/assets/block-logos"
)
"""The pictures of Prefect's own blocks, at one commit, so they cannot change or move."""


class _Loading(NamedTuple):
    """``found``: what was read. ``ahead``: the types of which no block was asked for yet."""

    found: dict[Hashable, Any]
    ahead: set[type[Block]]


_loading: ContextVar[_Loading | None] = ContextVar("loading", default=None)
_NAMED: Final = 5  # most names in an error
_PLAIN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,253}[a-z0-9])?")


@contextmanager
def loading_once(*ahead: type[Block]) -> Iterator[None]:
    """Ask the server once for each block meanwhile: many workspaces name the same store. The first
    block of a type in ``ahead`` brings all saved ones of the type by one request. Such a type has
    no secrets, which the server would not send. Within another such look it is that one."""
    if _loading.get() is not None:
        yield
        return
    token = _loading.set(_Loading({}, {*ahead}))
    try:
        yield
    finally:
        _loading.reset(token)


def load(reference: str, kinds: Sequence[type[BlockT]], *, of: str) -> BlockT:
    """The block that ``reference`` names; a bare name means the first of ``kinds``.

    ``of`` names the referring object in errors; empty where a person names the block. Raises
    InvalidInput.
    """
    slug, _, name = reference.rpartition("/")
    by_slug = {kind.get_block_type_slug(): kind for kind in kinds}
    kind = by_slug.get(slug) if slug else kinds[0]
    if kind is None:
        raise InvalidInput(
            f"{of or 'the call'} names the block {reference!r} of type {slug!r}: it must be one of "
            + ", ".join(f"{known}/NAME" for known in by_slug)
        )
    return load_named(kind, name, of=of)


def load_named(kind: type[BlockT], name: str, *, of: str) -> BlockT:
    """The block of exactly this type and name; InvalidInput if it is missing or damaged."""
    loading = _loading.get()
    if loading is not None and kind in loading.ahead:
        loading.ahead.remove(kind)
        loading.found.update(_all_usable(kind))
    return loaded_once((kind, name), lambda: _load(kind, name, of))


def loaded_once(key: Hashable, read: Callable[[], ReadT]) -> ReadT:
    """What ``read`` returns; within loading_once(), what it returned for the same ``key``."""
    loading = _loading.get()
    if loading is None:
        return read()
    if key not in loading.found:
        loading.found[key] = read()
    return cast(ReadT, loading.found[key])


def _all_usable(kind: type[BlockT]) -> dict[Hashable, BlockT]:
    """The saved blocks of this type. One that cannot be used is not among them: whoever loads it
    gets the error. If the server does not answer, none is."""
    found: dict[Hashable, BlockT] = {}
    with suppress(PrefectHTTPStatusError, httpx.TransportError):
        for document in _documents(kind):
            with suppress(ValueError, TypeError, RuntimeError):
                block = kind._from_block_document(document)
                if document.name and type(block) is kind:
                    found[kind, document.name] = block
    return found


def _load(kind: type[BlockT], name: str, of: str) -> BlockT:
    slug, named = kind.get_block_type_slug(), f"{of}: " if of else ""
    try:
        block = kind.load(name, _sync=True)  # type: ignore[call-arg, unused-ignore]
    except (ValueError, RuntimeError) as cause:
        invalid = cause if isinstance(cause, ValidationError) else cause.__cause__
        if isinstance(invalid, ValidationError):
            raise InvalidInput(
                f"{named}the block {slug}/{name} cannot be used: {faults(invalid)}; correct it on "
                "the UI's page Blocks"
            ) from None
        raise InvalidInput(f"{named}{_missing(kind, name, cause)}") from None
    if type(block) is not kind:
        raise InvalidInput(
            f"{named}the block {slug}/{name} loaded as a {type(block).__name__}, not as a "
            f"{kind.__name__}; torpor did not use it"
        )
    return block


def _missing(kind: type[Block], name: str, cause: Exception) -> str:
    """The message about a block that does not load: similar names, and the next step."""
    slug, said = kind.get_block_type_slug(), _first_line(cause)
    # for other errors, Prefect's words say more
    if said.startswith("Unable to find block document"):
        with suppress(PrefectHTTPStatusError, httpx.TransportError):  # the server has gone
            said = _near(name, saved_names(kind))
    with_it = f"`torpor init {name}`" if slug == "workspace" else f"save({name!r}) in Python"
    return (
        f"there is no block {slug}/{name} at {server_in_use()} ({said}). {with_it} makes "
        f"it, or add a block of type {kind.get_block_type_name()} and of that name on the UI's "
        "page Blocks"
    )


def _near(name: str, names: Sequence[str]) -> str:
    if not names:
        return "none of this type is saved"
    near = get_close_matches(name, names, _NAMED) or names[:_NAMED]
    return f"saved: {', '.join(near)}" + (" and others" if len(names) > len(near) else "")


def load_all(kind: type[BlockT], *, of: str = "this installation") -> list[BlockT]:
    """Every saved block of this type; InvalidInput if one of them is damaged."""
    return _load_all([(kind, name) for name in saved_names(kind)], of)


def load_all_of(kinds: Sequence[type[BlockT]], *, of: str = "this installation") -> list[BlockT]:
    """Every saved block of these types; InvalidInput if one of them is damaged."""
    return _load_all(saved_names_of(kinds), of)


def _load_all(named: Sequence[tuple[type[BlockT], str]], of: str) -> list[BlockT]:
    found = []
    for kind, name in named:
        try:
            found.append(load_named(kind, name, of=of))
        except InvalidInput:
            if name in saved_names(kind):  # otherwise somebody has deleted the block meanwhile
                raise
    return found


def saved_names(kind: type[Block]) -> list[str]:
    """The name of every saved block of this type."""
    return [one.name for one in _documents(kind) if one.name]


def saved_names_of(kinds: Sequence[type[BlockT]]) -> list[tuple[type[BlockT], str]]:
    """The type and name of every saved block of these types, in their order: two requests, where
    the server sends all of them at once."""
    by_slug = {kind.get_block_type_slug(): kind for kind in kinds}
    wanted = {"block_types": {"slug": {"any_": [*by_slug]}}}
    with get_client(sync_client=True) as client:
        documents = client.request("POST", "/block_documents/filter", json=wanted).json()
        count = client.request("POST", "/block_documents/count", json=wanted).json()
    if len(documents) != count:  # it sends fewer at once, or one was saved or deleted meanwhile
        return [(kind, name) for kind in kinds for name in saved_names(kind)]
    named = [(by_slug[one["block_type"]["slug"]], one["name"]) for one in documents]
    return sorted(named, key=lambda one: (kinds.index(one[0]), one[1]))


def _documents(kind: type[Block]) -> list[BlockDocument]:
    """Every saved block of this type, without its secrets."""
    with get_client(sync_client=True) as client:
        try:
            # A Prefect server answers with all of them, whatever limit or offset it is asked for.
            return client.read_block_documents_by_type(
                kind.get_block_type_slug(), include_secrets=False
            )
        except PrefectHTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            return []  # a server on which no block of this type was ever saved


def faults(invalid: ValidationError) -> str:
    """The faults, without the input, which may be a secret."""
    return "; ".join(
        f"{'.'.join(str(step) for step in fault['loc']) or 'block'}: {fault['msg']}"
        for fault in invalid.errors(include_input=False, include_url=False, include_context=False)
    )


def _as_reference(value: object) -> object:
    """Replace a saved block, given in Python, by its reference."""
    if isinstance(value, Block):
        name = value._block_document_name
        if name is None:
            raise ValueError(
                f"this {type(value).__name__} block is not saved yet: call save('NAME') on it first"
            )
        return f"{value.get_block_type_slug()}/{name}"
    if isinstance(value, str):
        value = value.strip()
        slug, slash, name = value.rpartition("/")
        if not _PLAIN.fullmatch(name) or (slash and not _PLAIN.fullmatch(slug)):
            raise ValueError(
                f"{value!r} does not name a block: write its name (lower-case letters, digits and "
                "hyphens), or type/name"
            )
    return value


def _as_optional_reference(value: object) -> object:
    nothing = value is None or (isinstance(value, str) and not value.strip())
    return "" if nothing else _as_reference(value)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).strip().rstrip(".")


Reference = Annotated[str, BeforeValidator(_as_reference)]
"""A block's name or type/name; in Python also the saved block itself."""

OptionalReference = Annotated[str, BeforeValidator(_as_optional_reference)]
"""As ``Reference``, or empty where no block is named."""
