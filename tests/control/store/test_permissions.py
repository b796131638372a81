"""The policy of docs/guide/quick-start.md allows each request to a store, and nothing else."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

from tests.fixtures.stores import RECORDS_KEY, Server
from tests.markets.policies import FILES, PAGES, Need, Policy, iam_rights
from torpor.control.store.s3 import S3Store, client_config
from torpor.shared.values import object_key

BUCKET: Final = "MY-BUCKET"
ACTIONS: Final = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
    "HeadBucket": "s3:ListBucket",
}
"""What AWS asks for each operation, by the Service Authorization Reference of Amazon S3."""
OF_THE_BUCKET: Final = ("ListObjectsV2", "HeadBucket")


def test_the_page_shows_the_policy_as_its_file_has_it() -> None:
    assert (FILES / "s3.json").read_text() in (PAGES.parent / "quick-start.md").read_text()


def test_the_policy_of_the_guide_is_what_a_store_needs(seaweed: Server) -> None:
    policy = Policy(iam_rights("s3.json"))
    settings = seaweed.settings(seaweed.bucket())
    client = seaweed.client(config=client_config(settings))

    def ask(operation: str, path: str = "") -> None:
        place = f"arn:aws:s3:::{BUCKET}"
        policy.permits(
            Need(ACTIONS[operation], place if operation in OF_THE_BUCKET else place + path)
        )

    def note(params: dict[str, Any], event_name: str, **_: Any) -> None:
        path = unquote(params["url_path"]).removeprefix(f"/{settings.bucket}")
        operation = event_name.rpartition(".")[2]
        ask(operation, "/each" if operation == "DeleteObjects" else path)

    client.meta.events.register("before-call.s3", note)
    store = S3Store(client, settings.bucket, "pre", root=RECORDS_KEY)
    one, two, none = map(object_key, ("a/one", "a/two", "a/none"))
    store.probe()
    for key in (one, two):
        store.put(key, b"body", if_absent=True)
    assert store.get(one, max_bytes=10) == b"body"
    assert store.head(none) is None and len(list(store.list("a/"))) == 2
    assert {store.grant(verb, one, expires_s=60).verb for verb in ("GET", "PUT")} == {"GET", "PUT"}
    store.delete([one, two])
    store.delete([none])
    S3Store(client, settings.bucket, "pre", root=RECORDS_KEY).head(none)  # looks for the bucket
    assert policy.lacks == [] and policy.unneeded() == []
