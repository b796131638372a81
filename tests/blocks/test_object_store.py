from __future__ import annotations

import base64
import traceback
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect_aws.credentials import AwsCredentials, MinIOCredentials
from pydantic import SecretStr, ValidationError

from blocks import ObjectStore
from blocks.reference import load_named
from deployments.server import Server
from torpor.shared.errors import InvalidInput

KEY = bytes(range(100, 132))
SECRET = "never-to-be-seen-again"


def store(**fields: Any) -> ObjectStore:
    return ObjectStore(
        **{"flavour": "other", "bucket": "b", "endpoint_url": "http://localhost:1", **fields}
    )


@pytest.fixture(scope="module")
def credentials(prefect_server: Server) -> None:
    """Both kinds under one name: a mix-up would sign with the wrong one."""
    AwsCredentials(aws_access_key_id="aws-id", aws_secret_access_key=SecretStr("aws-secret")).save(
        "same-name"
    )
    MinIOCredentials(
        minio_root_user="minio-id", minio_root_password=SecretStr("minio-secret")
    ).save("same-name")


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    ("reference", "keys"),
    [
        ("aws-credentials/same-name", ("aws-id", "aws-secret")),
        ("minio-credentials/same-name", ("minio-id", "minio-secret")),
        ("same-name", ("aws-id", "aws-secret")),
    ],
)
def test_saved_and_loaded_it_signs_with_the_credentials_it_names(
    reference: str, keys: tuple[str, str]
) -> None:
    store(credentials=reference, prefix="p", region="garage").save("signs", overwrite=True)
    settings = load_named(ObjectStore, "signs", of="test").settings()
    assert (settings.access_key, settings.secret_key) == keys
    assert (settings.bucket, settings.prefix, settings.region) == ("b", "p", "garage")
    assert settings.endpoint_url == "http://localhost:1"


@pytest.mark.usefixtures("credentials")
def test_a_saved_block_given_in_python_stands_for_its_name() -> None:
    block = load_named(MinIOCredentials, "same-name", of="test")
    assert store(credentials=block).credentials == "minio-credentials/same-name"
    with pytest.raises(ValidationError, match="not saved yet"):
        store(credentials=AwsCredentials())


@pytest.mark.usefixtures("credentials")
def test_credentials_of_another_type_or_none_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"type 'secret'.*aws-credentials/NAME"):
        store(credentials="secret/same-name").settings()
    with pytest.raises(InvalidInput, match=r"object store b: .* no block aws-credentials/gone"):
        store(credentials="aws-credentials/gone").settings()


def test_empty_credentials_say_so(prefect_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    AwsCredentials().save("empty", overwrite=True)
    with pytest.raises(InvalidInput, match="nor the environment has an access key"):
        store(credentials="aws-credentials/empty").settings()


def test_tls_and_endpoint_of_the_credentials_block_count(prefect_server: Server) -> None:
    AwsCredentials(
        aws_access_key_id="id",
        aws_secret_access_key=SecretStr("secret"),
        aws_session_token="token",
        aws_client_parameters={"endpoint_url": "https://s3.example.com", "verify": False},
    ).save("with-parameters", overwrite=True)
    settings = ObjectStore(
        flavour="other", bucket="b", credentials="aws-credentials/with-parameters"
    ).settings()
    assert settings.endpoint_url == "https://s3.example.com"
    assert settings.verify_tls is False
    assert settings.session_token == "token"


@pytest.mark.filterwarnings("ignore:verify should be a boolean")
@pytest.mark.parametrize("field", ["verify_cert_path", "verify", ""])
def test_the_certificate_authority_of_the_credentials_block_counts(
    prefect_server: Server, field: str, tmp_path: Path
) -> None:
    bundle = tmp_path / "authority.pem"
    bundle.touch()
    AwsCredentials(
        aws_access_key_id="id",
        aws_secret_access_key=SecretStr("secret"),
        aws_client_parameters={"verify": True} | ({field: str(bundle)} if field else {}),
    ).save("with-authority", overwrite=True)
    settings = store(credentials="aws-credentials/with-authority").settings()
    assert settings.verify_tls == (str(bundle) if field else None)  # None: as the AWS tools do


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(KEY).decode(),
        base64.urlsafe_b64encode(KEY).decode().rstrip("="),
        KEY.hex(),
        f" {KEY.hex().upper()}\n",
    ],
)
def test_a_key_in_base64_or_hexadecimal(text: str) -> None:
    assert store(encryption_key=SecretStr(text)).key() == KEY


def test_a_new_key_is_random_and_whole() -> None:
    keys = {store(encryption_key=ObjectStore.new_encryption_key()).key() for _ in range(2)}
    assert [len(key or b"") for key in keys] == [32, 32]


def test_no_key_keeps_snapshots_plain() -> None:
    assert store().key() is None
    assert store(encryption_key=SecretStr(" ")).key() is None  # the form's empty password box


@pytest.mark.parametrize("text", [SECRET, KEY.hex()[:-2], "********", "ü" * 44])
def test_a_wrong_key_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ValidationError) as refused:
        store(encryption_key=text)
    printed = "".join(traceback.format_exception(refused.value))
    assert "an encryption key is 32 random bytes" in printed
    assert f"'{text}'" not in printed
    assert SECRET not in printed


def test_secrets_show_nowhere(prefect_server: Server) -> None:
    key = base64.b64encode(KEY).decode()
    block = store(encryption_key=SecretStr(key))
    block.save("sealed", overwrite=True)
    with get_client(sync_client=True) as client:
        document = client.read_block_document_by_name(
            "sealed", "object-store", include_secrets=False
        )
    shown = [repr(block), str(block), block.model_dump_json(), str(block.model_dump())]
    assert not any(key in text for text in [*shown, str(document.data)])
    assert load_named(ObjectStore, "sealed", of="test").key() == KEY
    assert ObjectStore.model_json_schema()["secret_fields"] == ["encryption_key"]
