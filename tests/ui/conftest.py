"""A real browser on the real UI. What it saw is kept as pictures."""

from __future__ import annotations

import base64
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import (
    Browser,
    Locator,
    Page,
    Request,
    TimeoutError,
    expect,
    sync_playwright,
)

from deployments.installation import CHECKOUT
from deployments.server import Server
from tests.fixtures.prefect_api import ask, login
from tests.fixtures.waiting import PATIENCE_S

OUTPUT_VARIABLE = "TORPOR_TEST_OUTPUT"
WAIT_MS = PATIENCE_S * 1000
CLICK_MS = 60_000
"""A page that has not asked the server after this time has lost the click."""


def press(page: Page, button: str, stores: str) -> None:
    """Press what has the server store something under ``stores``, as a person does: once more
    where a form that was just being drawn lost the click, and where the server was too busy (see
    tests/fixtures/prefect_api.py)."""

    def is_stored(request: Request) -> bool:
        return stores in request.url and request.method in ("POST", "PATCH")

    while True:  # the test's own time limit ends it
        try:
            with page.expect_request(is_stored, timeout=CLICK_MS) as asked:
                page.get_by_role("button", name=button).click()
        except TimeoutError:
            continue
        answer = asked.value.response()
        assert answer is not None, f"{asked.value.url}: {asked.value.failure}"
        if answer.status != httpx.codes.SERVICE_UNAVAILABLE:
            assert answer.ok, f"{answer.url}: {answer.status}: {answer.text()}"
            return


def click_for(target: Locator, wanted: Locator) -> None:
    """Click until ``wanted`` is to be seen: a page that was just being drawn loses a click."""
    hangs = time.monotonic() + PATIENCE_S
    while not wanted.is_visible():
        with suppress(TimeoutError):  # a slow page may have taken it away after the last click
            target.click(timeout=CLICK_MS)
        try:
            expect(wanted).to_be_visible(timeout=CLICK_MS)
        except AssertionError:
            if time.monotonic() > hangs:
                raise


def new_block(page: Page, server: Server, slug: str, name: str) -> None:
    """Open the form of a new block, and name it."""
    page.goto(f"{server.ui_url}/v2/blocks/catalog/{slug}/create")
    page.get_by_label("Name", exact=True).first.fill(name)


def save_block(page: Page) -> None:
    press(page, "Save", "/block_documents/")
    page.wait_for_url(re.compile(r"/blocks/block/[0-9a-f-]{36}$"), timeout=WAIT_MS)


def edit_block(page: Page, server: Server, slug: str, name: str) -> None:
    """Open the form of a saved block."""
    url = f"{server.api_url}/block_types/slug/{slug}/block_documents/name/{name}"
    page.goto(f"{server.ui_url}/v2/blocks/block/{ask('GET', url)['id']}/edit")
    expect(page.get_by_text("Block names are not editable")).to_be_visible(timeout=WAIT_MS)


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where screenshots are kept after the test."""
    folder = Path(os.environ.get(OUTPUT_VARIABLE) or CHECKOUT / "out" / "ui")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium")
    if found is None:
        pytest.fail("these tests drive Debian's chromium, which is missing: run `make setup`")
    return found


@pytest.fixture(scope="module")
def browser(needs_server: None, chromium: str) -> Iterator[Browser]:
    """Not for the session: playwright keeps an event loop running in this thread."""
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"], timeout=WAIT_MS
        )
        expect.set_options(timeout=WAIT_MS)
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def _page_of(browser: Browser) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1280, "height": 1400}) as context:
        opened = context.new_page()
        opened.set_default_timeout(WAIT_MS)
        yield opened


@pytest.fixture
def blank_page(browser: Browser) -> Iterator[Page]:
    """A page without cookies, storage or cache, as of a browser that has never been anywhere."""
    with _page_of(browser) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(browser: Browser, prefect_server: Server) -> Iterator[Page]:
    """A page that is logged in at the session's server, as test_first_click.py does by hand. One
    for a file's tests: each fresh one fetches and compiles the whole UI again."""
    kept = base64.b64encode(":".join(login()).encode()).decode()
    with _page_of(browser) as opened:
        opened.add_init_script(f"localStorage.setItem('prefect-password', '{kept}')")
        yield opened
