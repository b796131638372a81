"""A store's key is read without prefect_aws where the block holds it, and by it everywhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prefect_aws.credentials import AwsCredentials, MinIOCredentials
from pydantic import SecretStr

from blocks.access_keys import AccessKeys, access_keys
from tests.fixtures.prefect_server import Server


@pytest.fixture
def no_prefect_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of it raises."""
    monkeypatch.setitem(sys.modules, "prefect_aws.credentials", None)


def test_blocks_and_status_are_imported_without_prefect_aws() -> None:
    asked = "import sys, blocks, tasks.overview, tasks.prefect_alerts; print([*sys.modules])"
    argv = [sys.executable, "-c", asked]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "'blocks.workspace'" in done.stdout
    assert "'prefect_aws'" not in done.stdout and "'aiobotocore'" not in done.stdout


def test_keys_that_the_block_holds_need_no_prefect_aws(
    prefect_server: Server, no_prefect_aws: None
) -> None:
    AwsCredentials(
        aws_access_key_id="id",
        aws_secret_access_key=SecretStr("secret"),
        aws_session_token="token",
        aws_client_parameters={
            "endpoint_url": "https://s3.example.com",
            "verify": False,
            "config": {"s3": {"addressing_style": "virtual"}},
        },
    ).save("plain", overwrite=True)
    MinIOCredentials(minio_root_user="root", minio_root_password=SecretStr("word")).save(
        "plain", overwrite=True
    )
    held = AccessKeys("id", "secret", "token", "https://s3.example.com", False, True)
    assert access_keys("plain", of="test") == held
    assert access_keys("aws-credentials/plain", of="test") == held
    theirs = access_keys("minio-credentials/plain", of="test")
    assert theirs == AccessKeys("root", "word", None, "", None, False)
    assert "secret" not in repr(held)


def test_a_profile_s_key_counts_before_one_of_the_environment(
    prefect_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[work]\naws_access_key_id = p\naws_secret_access_key = of-the-profile\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "e")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-environment")
    AwsCredentials(profile_name="work").save("profile", overwrite=True)
    found = access_keys("aws-credentials/profile", of="test")
    assert (found.access_key, found.secret_key) == ("p", "of-the-profile")
