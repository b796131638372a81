from __future__ import annotations

import asyncssh
import pytest
from pydantic import SecretStr, ValidationError

from blocks import SSHIdentity
from blocks.reference import load_named
from deployments.server import Server
from torpor.shared.errors import InvalidInput


def private(kind: str = "ssh-ed25519", **options: object) -> tuple[asyncssh.SSHKey, str]:
    key = asyncssh.generate_private_key(kind)
    return key, key.export_private_key(**options).decode()


def public(key: asyncssh.SSHKey) -> str:
    return " ".join(key.export_public_key().decode().split()[:2])


def test_a_generated_key_is_saved_loaded_and_used(prefect_server: Server) -> None:
    made = SSHIdentity.generate()
    made.save("generated", overwrite=True)
    loaded = load_named(SSHIdentity, "generated", of="test")
    assert loaded.public_key == made.public_key
    assert made.public_key.startswith("ssh-ed25519 ")
    assert loaded.identity().load().get_algorithm() == "ssh-ed25519"


@pytest.mark.parametrize("kind", ["ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256"])
@pytest.mark.parametrize("squeeze", [" ".join, "".join])
def test_line_breaks_that_a_password_box_took_are_put_back(kind: str, squeeze: object) -> None:
    key, text = private(kind)
    assert callable(squeeze)
    identity = SSHIdentity(private_key=SecretStr(squeeze(text.splitlines())))
    assert identity.public_key.startswith(public(key))


def test_pem_keys_and_windows_line_ends() -> None:
    key, text = private("ssh-rsa", format_name="pkcs1-pem")
    assert SSHIdentity(private_key=text.replace("\n", "\r\n")).public_key.startswith(public(key))


def test_a_passphrase_opens_the_key_and_a_wrong_one_says_so() -> None:
    key, text = private(passphrase="opens it", rounds=50)
    identity = SSHIdentity(private_key=SecretStr(text), passphrase=SecretStr("opens it"))
    assert identity.public_key.startswith(public(key))
    for wrong in (SecretStr("wrong"), None):
        with pytest.raises(InvalidInput, match="passphrase"):
            _ = SSHIdentity(private_key=SecretStr(text), passphrase=wrong).public_key


def test_an_empty_passphrase_is_none() -> None:
    _, text = private()
    assert SSHIdentity(private_key=text, passphrase="").identity().passphrase is None


@pytest.mark.parametrize("text", ["ssh-ed25519 AAAA me@here", "", "********", "/root/.ssh/id_rsa"])
def test_what_is_no_private_key_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ValidationError, match="whole text of the file") as refused:
        SSHIdentity(private_key=text)
    assert not text or text not in str(refused.value)


def test_secrets_show_nowhere() -> None:
    _, text = private(passphrase="opens it", rounds=50)
    block = SSHIdentity(private_key=text, passphrase="opens it")
    body = text.splitlines()[1]
    for shown in (repr(block), str(block), block.model_dump_json(), repr(block.identity())):
        assert body not in shown
        assert "opens it" not in shown
    assert SSHIdentity.model_json_schema()["secret_fields"] == ["private_key", "passphrase"]
