"""No secret is in a recording, wherever it stood."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.fixtures.machines import new_key_pair
from torpor.control.providers.market_client import Exchange
from torpor.control.smoke.recording import Recorder
from torpor.control.smoke.redact import ADDRESS, REDACTED, Redactor

CANARY = "canary-8f14e45fceea167a"
HIDDEN = {
    "the key": CANARY,
    "a host": "198.51.100.77",
    "a host by name": "ec2-198-51-100-77.compute.example",
    "a host of IPv6": "2606:4700:10::6816:1a2b",
    "a person": "jane.doe+gpu@company.example",
}


def _plants(secret: str) -> dict[str, object]:
    return {
        "word": f"before {secret} after",
        "url": f"https://{secret}/x?y={quote(secret, safe='')}",
        "nested": [{"list": [secret]}, json.dumps({"args": secret})],
        secret: "as a name",
    }


@pytest.fixture
def record(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "recording", Redactor([CANARY]))


@pytest.mark.parametrize("before", ["", "a", "ab"])
def test_a_secret_in_base64_is_redacted_wherever_it_begins(before: str) -> None:
    redactor = Redactor(["tok>?~\u00ff-canary"])
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        told = encode(f"{before}tok>?~\u00ff-canary!".encode()).decode()
        left = redactor.text(told).replace(REDACTED, "")
        assert len(left) <= 7, left
        assert len(redactor.text(quote(told, safe="")).replace(REDACTED, "")) <= 11


def test_the_scripts_of_an_account_are_redacted_and_their_ids_are_not() -> None:
    told = Redactor([]).value([{"id": "s-1", "script": "export PIN=1234"}, {"script_id": "s-1"}])
    assert told == [{"id": "s-1", "script": REDACTED}, {"script_id": "s-1"}]


def test_the_content_of_a_kubernetes_secret_is_redacted_also_where_nobody_knows_it() -> None:
    short = {"env.PIN": base64.b64encode(b"1234").decode(), "start": "c2V0"}
    answer = {"kind": "Secret", "metadata": {"name": "torpor-1"}, "data": short}
    told = Redactor([]).value({**answer, "stringData": {"env.PIN": "1234"}})
    assert told == {
        "kind": "Secret",
        "metadata": {"name": "torpor-1"},
        "data": {"env.PIN": REDACTED, "start": REDACTED},
        "stringData": {"env.PIN": REDACTED},
    }
    assert Redactor([]).value({"kind": "Job", "data": "stays"})["data"] == "stays"


def _written(record: Recorder) -> str:
    return "".join(file.read_text() for file in record.folder.iterdir())


@pytest.mark.parametrize("secret", HIDDEN.values(), ids=HIDDEN)
def test_a_secret_is_nowhere_in_the_folder(record: Recorder, secret: str) -> None:
    body = json.dumps(_plants(secret)).encode()
    for request, kind in ((body, "application/json"), (f"key={quote(secret)}".encode(), _FORM)):
        record(
            Exchange(
                method="POST",
                url=f"https://market.example/{quote(secret)}/x?api={quote(secret)}",
                request_headers=[("Content-Type", kind), ("X-Any", secret)],
                request=request,
                began_unix=1.9e9,
                seconds=0.5,
                status=200,
                headers=[("Location", f"/{secret}")],
                body=f"<p>{secret}</p>".encode() if kind == _FORM else body,
                error=f"refused {secret}",
            )
        )
    record.keep("report", {"said": secret})
    written = _written(record)
    assert len([*record.folder.iterdir()]) == 3
    assert "before" in written and "market.example" not in written
    for part in (secret, secret.partition(".compute")[0], "198.51.100", "jane.doe"):
        assert part not in written


_FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    "name",
    ["Authorization", "set-cookie", "X-Api-Key", "root_pass", "password", "user_data", "email",
     "session_token", "stringData", "onstart", "username",
     "billaddress_line1", "billaddress_city", "billaddress_zip", "billaddress_country", "last4",
     "user", "login", "tax_id", "vat_number", "company", "zip_code", "postalCode", "city"],
)  # fmt: skip
def test_a_field_of_a_secret_name_is_redacted_whatever_it_holds(name: str) -> None:
    redactor = Redactor([])
    assert redactor.headers([(name, "whatever")]) == {name.lower(): REDACTED}
    assert redactor.value({name: ["a", {"b": "c"}, 7, None]}) == {
        name: [REDACTED, {"b": REDACTED}, 7, None]
    }


@pytest.mark.parametrize(
    "name", ["public_ipaddr", "ipAddress", "capacity", "capacitystatus", "syntax", "address"]
)
def test_a_field_that_an_adapter_reads_is_no_secret(name: str) -> None:
    assert Redactor([]).value({name: "198.51.100.7", "b": [name]}) == {name: ADDRESS, "b": [name]}


@pytest.mark.parametrize("name", ["token", "key", "api_key", "sig", "X-Amz-Signature", "sigToken"])
def test_a_secret_in_a_url_is_redacted_without_being_known(name: str) -> None:
    told = Redactor([]).value({"jupyter_url": f"see https://a.example/?a=1&{name}=53c1&keys=2 now"})
    assert told == {"jupyter_url": f"see https://a.example/?a=1&{name}={REDACTED}&keys=2 now"}


def test_keys_and_packed_scripts_are_redacted_without_being_known() -> None:
    pair = new_key_pair()
    packed = base64.b64encode(pair.private.encode()).decode()
    said = Redactor([]).value(
        {"a": pair.private, "b": f"{pair.public} me@host", "c": f'eval "$(echo {packed} | x)"'}
    )
    assert said["a"].strip() == REDACTED
    assert said["b"] == f"ssh-ed25519 {REDACTED}"
    assert said["c"] == f'eval "$(echo {REDACTED} | x)"'


def test_a_part_of_a_known_secret_is_redacted() -> None:
    config = f"users:\n- name: me\n  user:\n    token: {CANARY}\n"
    assert Redactor([config]).value({"said": f"bad {CANARY}"}) == {"said": f"bad {REDACTED}"}


@pytest.mark.parametrize(
    "kept",
    ["500002", "12:30:45", "NVIDIA GeForce RTX 4090", "127.0.0.1", "torpor drill--smoke 0a1b2c",
     "550.54.14", "https://compute.example/projects/p/zones/us-central1-a/instances/torpor-1",
     "22/tcp", 7, None, True, 0.25],
)  # fmt: skip
def test_what_an_adapter_reads_stays(kept: object) -> None:
    assert Redactor([CANARY]).value({"name": kept}) == {"name": kept}


def test_an_address_stays_an_address() -> None:
    assert Redactor([]).text("at 8.8.8.8:22") == f"at {ADDRESS}:22"


def test_the_environment_and_the_login_of_a_container_are_redacted() -> None:
    body = {"env": {"-p 22:22": "1", "T": "canary"}, "extra_env": [["T", "canary"]]}
    told = Redactor([]).value(body | {"image_login": "-u me -p canary ghcr.io"})
    assert "canary" not in str(told)
