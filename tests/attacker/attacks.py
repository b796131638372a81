"""What somebody can do who holds the bucket's key alone: read, write, delete and list its objects.
The key that signs is never asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from tests.attacker.installation import Bucket
from torpor.control.store.signatures import ROOT_BYTES, Signer, Unsigned, record_in
from torpor.shared.errors import InvalidInput
from torpor.shared.values import ObjectKey, object_key

MARK: Final = "EVIL"
"""Stands in whatever the attacker invents."""
_TIDY: Final = 40
_EVIL: Final[dict[str, Any]] = {
    "command": ["sh", "-c", f"{MARK} env"],
    "save": [f"{MARK} save"],
    "env": [f"{MARK}=1"],
    "secrets": [f"{MARK}=hugging-face"],
    "host_key": f"ssh-ed25519 {MARK}",
    "jump": {"host": MARK.lower(), "port": 22, "user": "x", "host_key": f"ssh-ed25519 {MARK}"},
    "block": f"{MARK.lower()}-block",
    "why": MARK,
}
_WISHES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/jobs/open/", {"command": _EVIL["command"], "state": "waiting", "process": "",
                     "created_unix": 1.0}),
    ("/jobs/open/", {"command": _EVIL["command"], "secrets": _EVIL["secrets"], "process": "",
                     "created_unix": 1.0}),
    ("/rentals/open/", {"state": "abandoned", "handed_unix": None}),
    ("/rentals/open/", {"state": "ended"}),
    ("settings/", {"sealed": "", "plain": {"owner": {"side": MARK, "host": MARK}}}),
    ("settings/", {"written_unix": 4e9, "format": 1}),
    ("/hosts/", {"host_key": _EVIL["host_key"], "jump": _EVIL["jump"]}),
)  # fmt: skip
_STATES: Final = ("asked", "standing", "handed over", "abandoned", "ended", "waiting", "running",
                  "hibernating", "succeeded", "cancelled")  # fmt: skip
_ODD: Final[tuple[Any, ...]] = (
    None, "", [], {}, -1, 0, 1e308, 1 << 63, 10**40, True, "\0", "a" * 5000, [[[[]]]], MARK,
)  # fmt: skip
JUNK: Final = (
    b"", b"{", b"null", b"[]", b"1", b'"x"', b"\xff\xfe{}", b"[" * 60_000, b'{"a":' * 30_000,
    b'{"signature":"\\ud800","record":{}}', b'{"signature":null,"record":null}',
    b'{"signature":"' + b"a" * 64 + b'"}', b'{"signature":"\xc3\xa9","record":1}',
    b'{"signature":"' + b"0" * 64 + b'","record":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b"<html>not found</html>", b"9" * 5000, b"\0" * 100_000,
)  # fmt: skip
_MOST: Final = 64 * 1024


def kind_of(key: ObjectKey) -> str:
    """The folder that says what an object is: rentals/open, snapshots, canaries."""
    parts = key.split("/")
    if parts[0] != "workspaces":
        return parts[0]
    return "/".join(parts[2:4]) if parts[2] in ("rentals", "jobs") else parts[2]


class Attacker:
    """``one`` is attacked; ``two`` is another bucket of the same key, which the attacker can read.
    ``touched``: the names that were written or deleted."""

    def __init__(self, rng: random.Random, one: Bucket, two: Bucket) -> None:
        self._rng = rng
        self._one = one
        self._two = two
        self._keys: dict[str, Callable[[ObjectKey, bytes], bytes]] = {
            "unsigned": lambda key, body: body,
            "with a made-up signature": self._made_up,
            "signed with another key": Signer(rng.randbytes(ROOT_BYTES), "bucket/one").sign,
            "signed for another bucket": two.signer.sign,
        }
        self.touched: set[ObjectKey] = set()
        self.played_back: set[ObjectKey] = set()

    def act(self) -> str:
        """One action, in words."""
        actions: list[tuple[int, Callable[[], str]]] = [
            (20, self._forge),
            (20, self._forge_well),
            (25, self._play_back),
            (10, self._play_back_rental),
            (8, self._junk),
            (10, self._delete),
            (4, self._delete_kind),
            (6, self._truncate),
            (6, self._flip),
            (8, self._rename),
            (8, self._swap),
            (8, self._transplant),
            (8, self._reopen),
        ]
        weights, does = zip(*actions, strict=True)
        return self._rng.choices(does, weights)[0]()

    # -- new bodies

    def _forge(self) -> str:
        samples = self._samples()
        kind = self._rng.choice(sorted(samples))
        record = msgspec.json.decode(self._rng.choice(samples[kind]))
        if isinstance(record, dict):
            self._twist(record)
        key = self._name(kind)
        how = self._rng.choice(sorted(self._keys))
        body = self._keys[how](key, msgspec.json.encode(record))
        self._put(key, body)
        return f"forge {key} {how}: {str(record)[:300]}"

    def _forge_well(self) -> str:
        """A record that says what the attacker wants, in the words that torpor would write."""
        how = self._rng.choice(sorted(self._keys))
        folder, changes = self._rng.choice(_WISHES)
        there = [key for key in sorted(self._one.bodies) if folder in key]
        key = self._rng.choice(there)
        record = msgspec.json.decode(record_in(self._one.bodies[key][-1])) | changes
        if "id" in record:
            record["id"] = self._rng.randbytes(6).hex()
            key = ObjectKey(f"{key.rpartition('/')[0]}/{record['id']}")
        record |= {"version": record["version"] + 1} if "version" in record else {}
        keys = [key]
        if folder == "/rentals/open/":
            keys.append(ObjectKey(key.replace("/open/", "/handed/")))
        for one in keys:
            self._put(one, self._keys[how](one, msgspec.json.encode(record)))
        return f"forge {' and '.join(keys)} {how}: {changes}"

    def _twist(self, record: dict[str, Any]) -> None:
        rng = self._rng
        for name in [name for name in _EVIL if name in record or rng.random() < 0.1]:
            record[name] = _EVIL[name]
        if "state" in record:
            record["state"] = rng.choice(_STATES)
        if "handed_unix" in record and rng.random() < 0.7:
            record["handed_unix"] = None
        if "version" in record and rng.random() < 0.5:
            record["version"] = rng.choice([1, 2, 1000])
        if rng.random() < 0.3 and record:
            record[rng.choice(sorted(record))] = rng.choice(_ODD)

    def _junk(self) -> str:
        key = self._any()
        self._put(key, self._rng.choice(JUNK))
        return f"write junk to {key}"

    def _made_up(self, key: ObjectKey, body: bytes) -> bytes:
        signature = self._rng.randbytes(32).hex()
        return msgspec.json.encode({"signature": signature, "record": msgspec.Raw(body)})

    def _truncate(self) -> str:
        key = self._any()
        body = self._one.body(key)
        self._put(key, body[: self._rng.randrange(len(body) or 1)])
        return f"truncate {key}"

    def _flip(self) -> str:
        key = self._any()
        body = bytearray(self._one.body(key))
        if body:
            body[self._rng.randrange(len(body))] ^= 1 << self._rng.randrange(8)
        self._put(key, bytes(body))
        return f"flip a bit of {key}"

    # -- bodies that torpor wrote

    def _play_back(self) -> str:
        """Also of an object that is gone."""
        kinds = self._by_kind(sorted(self._one.bodies))
        key = self._rng.choice(kinds[self._rng.choice(sorted(kinds))])
        return self._put_back(key)

    def _play_back_rental(self) -> str:
        """The record of a machine that is there, with or without the copy of its hand-over."""
        there = [key for key in self._one.names() if "/rentals/open/" in key]
        if not there:
            return "nothing"
        key = self._rng.choice(there)
        words = self._put_back(key)
        if self._rng.random() < 0.7:
            copy = ObjectKey(key.replace("/open/", "/handed/"))
            self._one.delete([copy])
            words += f", delete {copy}"
        return words

    def _put_back(self, key: ObjectKey) -> str:
        bodies = self._one.bodies.get(key)
        if not bodies:
            return "nothing"
        number = self._rng.randrange(len(bodies))
        self._put(key, bodies[number])
        self.played_back.add(key)
        return f"put body {number} of {len(bodies)} of {key} back"

    def _rename(self) -> str:
        key = self._any()
        to = self._name(kind_of(key) if self._rng.random() < 0.5 else "")
        self._put(to, self._one.body(key))
        self._remove(key)
        return f"rename {key} to {to}"

    def _swap(self) -> str:
        key = self._any()
        alike = [one for one in self._one.names() if kind_of(one) == kind_of(key) and one != key]
        other = self._rng.choice(alike) if alike else self._any()
        was, body = self._one.body(key), self._one.body(other)
        self._put(key, body)
        self._put(other, was)
        return f"swap {key} with {other}"

    def _transplant(self) -> str:
        """An object of the other bucket, under its own name or another one of its kind."""
        key = self._rng.choice(self._two.names())
        to = key if self._rng.random() < 0.6 else self._name(kind_of(key))
        bodies = self._two.bodies[key]
        self._put(to, self._rng.choice(bodies))
        return f"copy {key} of the other bucket to {to}"

    def _reopen(self) -> str:
        """A copy of what has ended as what is open, or the other way round."""
        pairs = [("/ended/", "/open/"), ("/open/", "/ended/"), ("/handed/", "/open/")]
        was, becomes = self._rng.choice(pairs)
        there = [key for key in self._one.names() if was in key]
        if not there:
            return "nothing"
        key = self._rng.choice(there)
        to = ObjectKey(key.replace(was, becomes))
        self._put(to, self._one.body(key))
        words = f"copy {key} to {to}"
        if self._rng.random() < 0.5:
            self._remove(key)
            words += " and delete it"
        return words

    # -- deletions

    def _delete(self) -> str:
        key = self._any()
        self._remove(key)
        return f"delete {key}"

    def _delete_kind(self) -> str:
        kinds = self._by_kind(self._one.names())
        kind = self._rng.choice(sorted(kinds))
        workspace = self._rng.choice(kinds[kind]).split("/")[1]
        gone = [key for key in kinds[kind] if key.split("/")[1] == workspace]
        for key in gone:
            self._remove(key)
        return f"delete all {len(gone)} {kind} of {workspace}"

    # -- what they share

    def _put(self, key: ObjectKey, body: bytes) -> None:
        self.touched.add(key)
        self._one.attack(key, body)

    def _remove(self, key: ObjectKey) -> None:
        self.touched.add(key)
        self._one.delete([key])

    def _any(self) -> ObjectKey:
        """An object that is there; each kind is as likely as any other."""
        kinds = self._by_kind(self._one.names())
        return self._rng.choice(kinds[self._rng.choice(sorted(kinds))])

    def _by_kind(self, keys: list[ObjectKey]) -> dict[str, list[ObjectKey]]:
        kinds: dict[str, list[ObjectKey]] = {}
        for key in keys:
            kinds.setdefault(kind_of(key), []).append(key)
        return kinds

    def _samples(self) -> dict[str, list[bytes]]:
        """Records as torpor writes them, by their kinds."""
        found: dict[str, list[bytes]] = {}
        for key, bodies in self._one.bodies.items():
            for body in bodies:
                try:
                    record = record_in(body)
                except Unsigned:
                    continue
                found.setdefault(kind_of(key), []).append(record)
        return found

    def _name(self, kind: str) -> ObjectKey:
        """The name of an object of this kind: one that is or was there, or a new one beside it."""
        names = [key for key in self._one.bodies if kind in ("", kind_of(key))]
        key = self._rng.choice(sorted(names) or self._one.names())
        folder, _, last = key.rpartition("/")
        draw = self._rng.random()
        if draw < 0.7:
            return key
        if draw < 0.9:  # another id of the same shape
            last = "".join(self._rng.choice("0123456789abcdef") if c.isalnum() else c for c in last)
        else:
            last = self._rng.choice(["x", "not-an-id", "a" * _TIDY, f"{last}.tmp", "deeper/one"])
        try:
            return object_key(f"{folder}/{last}")
        except InvalidInput:
            return key
