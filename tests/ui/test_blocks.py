"""The forms of our blocks in a real browser: made, edited, and loaded again as they were."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from blocks import Budget, ObjectStore, SSHIdentity, Workspace
from blocks.reference import load_named
from deployments.server import Server
from tests.ui.conftest import click_for, edit_block, new_block, save_block


def test_a_workspace_made_and_edited(torpor_up: Server, page: Page, pictures: object) -> None:
    new_block(page, torpor_up, "tuning", "ui-few")
    page.get_by_label("Quiesce timeout (seconds) (Optional)").fill("8")
    page.screenshot(path=f"{pictures}/block-tuning.png", full_page=True)
    save_block(page)
    new_block(page, torpor_up, "idleness", "ui-patient")
    page.get_by_label("Idle minutes (Optional)").fill("120")
    page.screenshot(path=f"{pictures}/block-idleness.png", full_page=True)
    save_block(page)
    new_block(page, torpor_up, "workspace", "ui-made")
    page.get_by_label("Workspace name").fill("ui-made")
    page.get_by_role("button", name="Add item").first.click()
    page.locator("textarea").nth(2).fill("/data")
    page.get_by_label("GPU (Optional)").fill("RTX 4090")
    page.get_by_label("Idle rules (Optional)").fill("ui-patient")
    page.get_by_label("Tuning (Optional)").fill("ui-few")
    page.screenshot(path=f"{pictures}/block-workspace.png", full_page=True)
    save_block(page)
    made = load_named(Workspace, "ui-made", of="test")
    assert (made.name, made.paths, made.gpu) == (
        "ui-made",
        ["~/workspace", "/data"],
        "RTX 4090",
    )
    assert (made.spec().quiesce_timeout_s, made.spec().idle.minutes) == (8, 120)
    assert (made.store, made.provider, made.identity) == (
        "default",
        "local-provider/default",
        "default",
    )
    assert made.max_price_usd_h is None
    made.open_store().probe()

    edit_block(page, torpor_up, "workspace", "ui-made")
    page.get_by_label("Tuning (Optional)").fill("")
    save_block(page)
    edited = load_named(Workspace, "ui-made", of="test")
    assert edited.model_dump(exclude={"tuning"}) == made.model_dump(exclude={"tuning"})
    assert (edited.tuning, edited.spec().quiesce_timeout_s) == ("", 300)
    edited.open_store().probe()


def test_a_store_edited_keeps_its_key_and_its_credentials(
    torpor_up: Server, page: Page, pictures: object
) -> None:
    """With a nested credentials block, Save alone replaced the secret access key by asterisks."""
    default = load_named(ObjectStore, "default", of="test")
    key = ObjectStore.new_encryption_key()
    ObjectStore(
        flavour="seaweedfs",
        bucket=default.bucket,
        endpoint_url=default.endpoint_url,
        credentials=default.credentials,
        encryption_key=key,
    ).save("ui-sealed", overwrite=True, _sync=True)  # playwright keeps an event loop running
    before = load_named(ObjectStore, "ui-sealed", of="test")
    edit_block(page, torpor_up, "object-store", "ui-sealed")
    page.get_by_label("Prefix (Optional)").fill("elsewhere")
    page.screenshot(path=f"{pictures}/block-object-store.png", full_page=True)
    save_block(page)
    after = load_named(ObjectStore, "ui-sealed", of="test")
    assert after.prefix == "elsewhere"
    assert after.key() == before.key() is not None
    assert after.settings().secret_key == before.settings().secret_key
    after.open().probe()


def test_a_budget_made(torpor_up: Server, page: Page, pictures: object) -> None:
    new_block(page, torpor_up, "budget", "ui-budget")
    page.get_by_label("Dollars a month").fill("12.5")
    page.get_by_label("Project (Optional)").fill("vision")
    page.screenshot(path=f"{pictures}/block-budget.png", full_page=True)
    save_block(page)
    made = load_named(Budget, "ui-budget", of="test")
    assert (made.usd_month, made.project, made.workspaces, made.timezone) == (
        12.5, "vision", [], "UTC",
    )  # fmt: skip


def test_a_private_key_pasted_into_the_form(
    torpor_up: Server, page: Page, pictures: object
) -> None:
    made = SSHIdentity.generate()
    new_block(page, torpor_up, "ssh-identity", "ui-pasted")
    box = page.locator("input[type=password]").first
    box.fill(made.private_key.get_secret_value())
    assert "\n" not in box.input_value(), "see docs/contributing/forms.md: line breaks"
    page.screenshot(path=f"{pictures}/block-ssh-identity.png", full_page=True)
    save_block(page)
    assert (
        load_named(SSHIdentity, "ui-pasted", of="test").public_key.split()[:2]
        == (made.public_key.split()[:2])
    )


def test_a_save_that_the_server_was_too_busy_for_can_be_pressed_again(
    torpor_up: Server, page: Page, pictures: object
) -> None:
    """SQLite's writers meet now and then; Prefect's client asks again, its UI leaves it to us."""
    new_block(page, torpor_up, "workspace", "ui-busy")
    page.get_by_label("Workspace name").fill("ui-busy")
    busy = {"status": 503, "json": {"exception_message": "Service Unavailable"}}
    page.route("**/api/block_documents/", lambda route: route.fulfill(**busy))
    refusal = page.get_by_text("Unknown error while creating block")
    click_for(page.get_by_role("button", name="Save"), refusal)
    page.screenshot(path=f"{pictures}/block-busy.png", full_page=True)
    expect(page.get_by_label("Workspace name")).to_have_value("ui-busy")
    page.unroute("**/api/block_documents/")
    save_block(page)
    assert load_named(Workspace, "ui-busy", of="test").name == "ui-busy"
