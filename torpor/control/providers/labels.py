"""torpor's label as markets can keep it: in a machine's name, or in its tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from torpor.shared.values import Label, WorkspaceName

_WORD: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAME: Final = re.compile(rf"torpor\.({_WORD})\.({_WORD})\.([0-9a-f]{{8,32}})")
_TAGS: Final = ("torpor-owner", "torpor-workspace", "torpor-rental")


def label_name(label: Label) -> str:
    """A label as a name of at most 167 characters: ``torpor.OWNER.WORKSPACE.RENTAL``."""
    return f"torpor.{label.owner}.{label.workspace}.{label.rental}"


def label_in(name: str | None) -> Label | None:
    """The label in a name; None: the name is not one of torpor's."""
    found = _NAME.fullmatch(name or "")
    return None if found is None else Label(found[1], WorkspaceName(found[2]), found[3])


def label_tags(label: Label) -> dict[str, str]:
    """A label as tags: keys in lower case, values of at most 64 characters."""
    return dict(zip(_TAGS, (label.owner, label.workspace, label.rental), strict=True))


def with_label(tags: Mapping[str, str], label: Label | None) -> dict[str, str]:
    """A machine's tags with ``label``; None: without torpor's tags."""
    kept = {key: value for key, value in tags.items() if key not in _TAGS}
    return kept if label is None else kept | label_tags(label)


def label_among(tags: Mapping[str, str]) -> Label | None:
    """The label among tags; None: the tags are not torpor's, or not all of them."""
    words = [tags.get(key, "") for key in _TAGS]
    return label_in(".".join(["torpor", *words]))
