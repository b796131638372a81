"""The keys that people hold: their text, and the key object that one of them opens."""

from __future__ import annotations

import base64

import msgspec
import pytest

from torpor.shared.errors import InvalidInput, WrongKey
from torpor.shared.format.user_keys import KeyObject, UserKey, checked_label

SECRET = bytes(range(32))
STORE_KEY = bytes(range(64, 96))
OPENS = UserKey(SECRET, opens=True)


@pytest.mark.parametrize("opens", [True, False])
def test_a_key_comes_back_from_its_text_as_a_person_types_it(opens: bool) -> None:
    key = UserKey(SECRET, opens=opens)
    typed = key.text.lower().replace("-", " ", 4).replace("-", "\n").replace("o", "0")
    for text in (key.text, f"  {key.text}\n", key.text.replace("-", ""), typed):
        assert UserKey.of(text) == key
    assert SECRET.hex() not in repr(key)


@pytest.mark.parametrize("text", [SECRET.hex(), base64.b64encode(SECRET).decode()])
def test_base64_and_hexadecimal_are_the_store_key_itself(text: str) -> None:
    assert UserKey.of(text) == UserKey(SECRET, opens=False)


def test_each_typing_mistake_is_found_and_no_error_repeats_the_key() -> None:
    text = OPENS.text
    head = len("torpor-opens-")
    letters = [at for at in range(head, len(text)) if text[at] != "-"]
    wrong = [f"{text[:at]}{'B' if text[at] == 'A' else 'A'}{text[at + 1 :]}" for at in letters]
    wrong += [text[:at] + text[at + 1 :] for at in letters]
    wrong += [text[:at] + text[at + 1] + text[at] + text[at + 2 :] for at in range(head, head + 3)]
    for typed in (one for one in wrong if one != text):
        with pytest.raises(InvalidInput, match="typing mistake") as refused:
            UserKey.of(typed)
        assert typed[head : head + 8] not in str(refused.value)


def test_a_key_that_opens_a_key_object_is_never_read_as_a_store_key() -> None:
    for text in (
        OPENS.text.replace("opens", "store"),  # a sheet that was typed wrong
        OPENS.text.removeprefix("torpor-"),
        OPENS.text.removeprefix("torpor-opens-"),
        OPENS.text.removeprefix("torpor-opens-").replace("-", ""),
    ):
        with pytest.raises(InvalidInput):
            UserKey.of(text)


@pytest.mark.parametrize(
    "change",
    [
        {"label": "mine"},
        {"made_unix": 2},
        {"made_unix": -1},
        {"replaces": "0" * 32},
        {"id": "0" * 32},
        {"sealed": b""},
        {"label": "escro", "replaces": "w"},  # the same bytes, cut elsewhere
    ],
)
def test_a_key_opens_only_what_was_sealed_for_it_as_it_was(change: dict[str, object]) -> None:
    made = OPENS.seal(STORE_KEY, "escrow", 1)
    assert OPENS.open(made) == STORE_KEY
    with pytest.raises(WrongKey):
        OPENS.open(msgspec.structs.replace(made, **change))
    with pytest.raises(WrongKey):
        UserKey(STORE_KEY, opens=True).open(made)


def test_each_bit_of_the_sealed_store_key_counts() -> None:
    made = OPENS.seal(STORE_KEY, "escrow", 1)
    for at in range(len(made.sealed)):
        sealed = bytearray(made.sealed)
        sealed[at] ^= 1
        with pytest.raises(WrongKey):
            OPENS.open(msgspec.structs.replace(made, sealed=bytes(sealed)))


def test_a_key_object_says_nothing_of_the_keys() -> None:
    made = msgspec.json.encode(OPENS.seal(STORE_KEY, "escrow", 1))
    for secret in (SECRET, STORE_KEY):
        assert secret not in made and base64.b64encode(secret) not in made
    assert msgspec.json.decode(made, type=KeyObject).id == OPENS.id


@pytest.mark.parametrize("label", ["", " ", "x" * 61, "a\nb", "\x1b[2J"])
def test_a_label_is_one_line_for_people(label: str) -> None:
    with pytest.raises(InvalidInput, match="label"):
        checked_label(label)
