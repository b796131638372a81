"""A budget block: what it is for, and which records it counts."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from prefect_aws.credentials import AwsCredentials
from pydantic import SecretStr, ValidationError

from blocks import Budget, ObjectStore, Workspace
from blocks.budget import open_all_budgets
from deployments.server import Server
from torpor.shared.errors import InvalidInput
from torpor.shared.values import WorkspaceName


@pytest.fixture(scope="module")
def saved(prefect_server: Server) -> None:
    AwsCredentials(aws_access_key_id="id", aws_secret_access_key=SecretStr("x")).save("paid")
    for name in ("paid", "paid-too"):
        ObjectStore(
            flavour="other", bucket=name, endpoint_url="http://localhost:1", credentials="paid"
        ).save(name)
    Workspace(name="one", store="paid", project="p").save("paid-one")
    Workspace(name="two", store="paid-too", project="p").save("paid-two")
    Workspace(name="one", store="paid").save("paid-one-again")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "for workspaces or for a project"),
        ({"workspaces": ["w"], "project": "p"}, "for workspaces or for a project"),
        ({"workspaces": ["w"], "usd_month": 0}, "greater than 0"),
        ({"workspaces": ["w"], "timezone": "Mars"}, "not a time zone"),
        ({"workspaces": ["No Name"]}, "does not name a block"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Budget(**{"usd_month": 5, **fields})


@pytest.mark.usefixtures("saved")
def test_saved_budgets_open_with_the_records_of_what_they_count() -> None:
    Budget(usd_month=0.1, workspaces=["paid-one"], timezone="Europe/Berlin").save("lab-one")
    Budget(usd_month=7, project="p").save("lab-p")
    found = {budget.budget.name: budget for budget in open_all_budgets()}
    one, project = found["lab-one"], found["lab-p"]
    assert one.budget.usd_month == Decimal("0.1")
    assert one.budget.covers(WorkspaceName("drill--one"), "")
    assert not one.budget.covers(WorkspaceName("two"), "p")
    assert [book.workspace for book in one.ledgers()] == [
        "one", "benchmark--one", "benchmark-machines--one", "drill--one", "nodes--one",
    ]  # fmt: skip
    assert project.budget.covers(WorkspaceName("two"), "p")
    # Records of all workspaces: one may have been in the project. Each only once.
    names = [book.workspace for book in project.ledgers()]
    assert names.count(WorkspaceName("one")) == names.count(WorkspaceName("two")) == 1
    assert project.ledgers() is project.ledgers()


@pytest.mark.rule(15)
@pytest.mark.usefixtures("saved")
def test_a_budget_of_a_workspace_that_is_not_there_is_not_saved() -> None:
    words = r"budget bad: there is no block workspace/typo.* was not saved"
    with pytest.raises(InvalidInput, match=words):
        Budget(usd_month=7, workspaces=["paid-one", "typo"]).save("bad")
    assert "bad" not in [budget.budget.name for budget in open_all_budgets()]


@pytest.mark.rule(15)
@pytest.mark.usefixtures("saved")
def test_a_budget_of_a_workspace_that_was_deleted_stands_in_the_way_of_what_it_may_cover() -> None:
    """And of nothing else: what others have spent is known."""
    Workspace(name="gone", store="paid").save("going")
    Budget(usd_month=7, workspaces=["paid-one", "going"]).save("lab-bad")
    try:
        Workspace.delete("going")
        (bad,) = [found for found in open_all_budgets() if found.budget.name == "lab-bad"]
    finally:
        Budget.delete("lab-bad")
    covered = ("one", "drill--one", "going", "two")
    assert [bad.budget.covers(WorkspaceName(name), "p") for name in covered] == [
        True, True, True, False,
    ]  # fmt: skip
    with pytest.raises(InvalidInput, match="budget lab-bad: there is no block workspace/going"):
        bad.status(0.0)
