"""What a machine's agent does for a benchmark: content to measure with, and its line to a store."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec

from torpor.control.remote.session import Session
from torpor.shared.transfer.line import Moved
from torpor.shared.values import Grant


class MadeContent(msgspec.Struct, frozen=True):
    files: int
    bytes: int


def make_content(session: Session, name: str, total_bytes: int, seed: int) -> MadeContent:
    """Make ``path_of(name)`` anew on the machine; the same seed gives the same content."""
    args = {"name": name, "bytes": total_bytes, "seed": seed}
    answer = session.call("content.make", args, request=f"content-{secrets.token_hex(8)}")
    return msgspec.convert(answer, MadeContent)


def remove_content(session: Session, name: str, *, place_too: bool = False) -> None:
    """Remove it from the machine; gone already is fine. ``place_too``: nothing of it comes back."""
    args = {"name": name, "place_too": place_too}
    session.call("content.remove", args, request=f"content-{secrets.token_hex(8)}")


def line_of(session: Session) -> Callable[[Sequence[Grant], Sequence[Grant], int, int], Moved]:
    """Moves random bytes between the machine and a store, and says how long that took."""

    def move(
        puts: Sequence[Grant], gets: Sequence[Grant], object_bytes: int, connections: int
    ) -> Moved:
        args = {
            "puts": msgspec.to_builtins(list(puts)),
            "gets": msgspec.to_builtins(list(gets)),
            "object_bytes": object_bytes,
            "connections": connections,
        }
        answer = session.call("line", args, request=f"line-{secrets.token_hex(8)}")
        return Moved(answer["up_s"], answer["down_s"])

    return move
