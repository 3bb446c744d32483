"""The page at `/` of a server that asks for a key, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.e2e import test_web_page
from tests.e2e.test_web_page import WAIT_MS, ask
from tests.service import frontends

pytestmark = pytest.mark.asyncio(loop_scope="module")
browser = test_web_page.browser


async def test_the_page_asks_for_a_key_where_the_server_does(
    browser: Browser, tmp_path: Path
) -> None:
    """The page itself comes without one; a wrong key is told, the right one is not kept."""
    key = "k" * 40
    async with frontends.stack(tmp_path, api_key=key) as served:
        page = await browser.new_page()
        page.set_default_timeout(WAIT_MS)
        await page.goto(served.url)
        await expect(page.locator("#model")).to_contain_text("You didn't provide an API key")
        for shown in ("wrong", key):
            await page.fill("#key", shown)
            await page.press("#key", "Tab")
            if shown == "wrong":
                await expect(page.locator("#model")).to_contain_text("Incorrect API key")
        await page.wait_for_selector("body[data-ready=true]")
        await page.check("input[value=completion]")
        await ask(page, "tide ", max_tokens="5")
        await expect(page.locator("#text")).to_have_text("tide ")
        await page.reload()
        await expect(page.locator("#model")).to_contain_text("You didn't provide an API key")
        await page.close()
