"""The page at `/` in a real browser: people see what the API says, and nothing else runs."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, async_playwright, expect

from tests.e2e.cells import CELLS, FEW_STAGES, WATCH, check_reveal, num_stages
from tests.e2e.real_stack import HOST, ROOT, Stack
from tests.service import frontends
from tests.service.fake_engine import serving
from tests.service.frontends import frontend_for, make_engine, write_tokenizer
from tests.waiting import PATIENCE_S, http_client, until
from tidemill.runtime.errors import InvalidRequest, Overloaded

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 1000 * PATIENCE_S
expect.set_options(timeout=WAIT_MS)
THINKING = "{# <think></think> #}{{ messages[-1].content }}<|eos|>"
"""A template whose answers reason; the echo says what the message is."""
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'

CUT = """async ([bytes, size]) => {
  const { events } = await import('/ui/sse.js');
  const chunks = [];
  for (let i = 0; i < bytes.length; i += size) chunks.push(bytes.slice(i, i + size));
  const body = new ReadableStream({
    start(controller) {
      chunks.forEach((chunk) => controller.enqueue(new Uint8Array(chunk)));
      controller.close();
    },
  });
  const found = [];
  for await (const event of events(body)) found.push(event);
  return found;
}"""


REVEAL = """async ([facts, events]) => {
  const { Canvas } = await import('/ui/canvas.js');
  const root = document.createElement('div');
  const canvas = new Canvas(root, facts, { text: (id) => String.fromCharCode(id) });
  const shown = ({ textContent, classList, title }) =>
    [textContent, classList[1], classList.contains('border'), title];
  return events.map(([state, usage, ids]) => {
    if (state) canvas.open(state, usage);
    if (ids.length) canvas.commit(ids);
    return [...root.children].map(shown);
  });
}"""
Event = tuple[dict[str, Any] | None, dict[str, int], list[int]]


def chromium() -> str:
    """The browser; where CI has none the tests fail, elsewhere they are skipped."""
    path = shutil.which("chromium")
    if path is None and os.environ.get("CI") == "true":
        pytest.fail("chromium is missing: .ci/run installs it with apt-get install chromium")
    if path is None:
        pytest.skip("needs chromium")
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    path = chromium()
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(
            executable_path=path, args=list(FLAGS), timeout=3 * WAIT_MS
        )
        yield running
        await running.close()


@pytest.fixture
def block(stack_of: Callable[[str], Stack]) -> Stack:
    """A real stack that serves the block-diffusion model."""
    return stack_of("demo-block")


@pytest_asyncio.fixture(loop_scope="module")
async def echo(tmp_path: Path) -> AsyncIterator[frontends.Stack]:
    """A fake engine that echoes the prompt, behind a frontend whose model has no template."""
    fake, tokenizer = make_engine(tmp_path)
    write_tokenizer(tmp_path / "tokenizer", template=None)
    async with serving(fake) as port, frontend_for(port) as served:
        assert await served.desk.fleet.wait_ready(PATIENCE_S)
        yield frontends.Stack(fake, served, tokenizer)


@asynccontextmanager
async def opened(browser: Browser, url: str, *, noise: bool = False) -> AsyncIterator[Page]:
    """The page, connected. Unless `noise` is expected, its console stays empty and every request
    goes to its own origin."""
    heard: list[str] = []
    async with AsyncExitStack() as closing:
        page = await closing.enter_async_context(await browser.new_page())
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda failure: heard.append(str(failure)))
        page.on("request", lambda r: None if r.url.startswith(f"{url}/") else heard.append(r.url))
        await page.goto(url)
        await page.wait_for_selector("body[data-ready=true]")
        yield page
        assert noise or heard == []


async def ask(page: Page, prompt: str, state: str = "done", **knobs: str) -> None:
    """Types the prompt, presses Enter and waits until the page says `state`."""
    for name, value in knobs.items():
        await page.fill(f"#{name}", value)
    await page.fill("#prompt", prompt)
    await page.press("#prompt", "Enter")
    await page.wait_for_selector(f"body[data-state^={state}]")


async def answer(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http_client(url) as client:
        got = await client.post(path, json=body)
        assert got.status_code == 200, got.text
        return dict(got.json())


async def test_text_and_canvas_of_a_diffusion_model(browser: Browser, block: Stack) -> None:
    body = {"prompt": "reverse: harbour =", "temperature": 0, "max_tokens": 40, "threshold": 2}
    wanted = await answer(block.url, "/v1/completions", {**body, "return_token_ids": True})
    text, token_ids = wanted["choices"][0]["text"], wanted["choices"][0]["token_ids"]
    usage = wanted["usage"]
    assert "ruobrah" in text
    async with opened(browser, block.url) as page:
        await expect(page.locator("#model")).to_contain_text("demo-block")
        await page.check("input[value=completion]")
        knobs = {"temperature": "0", "max_tokens": "40", "threshold": "2"}
        cells, seen = await ask_watched(page, body["prompt"], **knobs)
        assert await page.text_content("#text") == text
        forwards = usage["completion_tokens_details"]["forward_passes"]
        for name, value in (("tokens", usage["completion_tokens"]), ("forwards", forwards)):
            assert await page.text_content(f"#{name}") == str(value)
        # Once more with the model's own threshold: fewer forwards for the same text.
        await page.fill("#threshold", "")
        await ask(page, body["prompt"])
        assert await page.text_content("#text") == text
        assert int(await page.text_content("#forwards") or 0) < forwards
        # The replay hides what was revealed later, and brings it back.
        await page.locator("#moment").fill("0")
        assert set(await page.evaluate(CELLS)) == {"\u2591"}
        await page.locator("#moment").fill(await page.get_attribute("#moment", "max") or "")
        assert await page.evaluate(CELLS) == cells
    assert len(cells) == len(token_ids)
    shown = "".join(cells).replace("\u00b7", " ").replace("\u21b5", "\n")
    assert shown.removesuffix("<|eos|>") == text
    check_reveal(seen, len(token_ids))
    with pytest.raises(AssertionError):  # the check can fail
        check_reveal([states[::-1] for states in seen[-1:]] + seen, len(token_ids))


async def ask_watched(page: Page, prompt: str, **knobs: str) -> tuple[list[str], list[list[str]]]:
    """What the cells say at the end, and their states at every change. Again when only few of them
    were seen: a page that is slower than the model is sent the newest canvas only."""
    for _ in range(5):
        await page.evaluate(WATCH)
        await ask(page, prompt, **knobs)
        await page.wait_for_function(f"({CELLS})().every((text) => text !== '')")
        seen = await page.evaluate("window.seen")
        if num_stages(seen) > FEW_STAGES:
            break
    return await page.evaluate(CELLS), seen


def random_reveal(rng: random.Random) -> tuple[dict[str, int], list[Event], list[list[Any]]]:
    """What the model is, events as the server sends them, and the cells after each of them."""
    length, prompt_len, mask = rng.choice((4, 8)), rng.randint(0, 12), 9617
    first, last = prompt_len // length, prompt_len // length + 3
    num = last * length - prompt_len
    ids = [rng.choice(range(97, 123)) for _ in range(num)]
    steps, sure, events, frames, done = [0] * num, {}, [], [], 0
    for block in range(first, last):
        stop, step = (block + 1) * length - prompt_len, 0
        while done < stop:
            step += 1
            hidden = [i for i in range(done, stop) if not steps[i]]
            for i in rng.sample(hidden, rng.randint(1, min(3, len(hidden)))):
                steps[i] = step
            before, done = done, next((i for i in range(done, stop) if not steps[i]), stop)
            tail = range(done, stop if done < stop else min(num, stop + length))
            open_ids = [ids[i] if steps[i] else rng.choice((mask, mask, 65)) for i in tail]
            place = {"block": block, "step": step}
            if done == stop:
                place, open_ids = {"block": block + 1, "step": 0}, [mask] * len(tail)
            sure |= {i: rng.randint(0, 100) for i in tail if steps[i] and i not in sure}
            state = {**place, "token_ids": open_ids, "fixed": [steps[i] > 0 for i in tail]}
            state["confidence"] = [sure.get(i, 50) / 100 for i in tail]
            usage = {"prompt_tokens": prompt_len, "completion_tokens": done}
            events.append((state if len(tail) else None, usage, ids[before:done]))
            frame = []
            for i, token in enumerate(ids[:done] + open_ids):
                kind = "fixed" if steps[i] else "masked" if token == mask else "tentative"
                title = f"fixed in step {steps[i]} of its block" if steps[i] else ""
                title += f", {sure[i]} % sure" if i in sure else ""
                border = (prompt_len + i + 1) % length == 0
                frame.append([chr(token) if token != mask else "\u2591", kind, border, title])
            frames.append(frame)
    return {"block_length": length, "mask_token_id": mask}, events, frames


async def test_cells_are_the_reveal(browser: Browser, echo: frontends.Stack, seed: int) -> None:
    async with opened(browser, echo.url) as page:
        for number in range(20):
            facts, events, frames = random_reveal(random.Random(seed + number))
            assert await page.evaluate(REVEAL, [facts, events]) == frames
        missing = await page.evaluate(REVEAL, [facts, events[1:]])  # the check can fail
        assert missing != frames[1:]


async def test_the_terminal_shows_the_same(block: Stack, stack: Stack) -> None:
    """README's command, in a pipe; on the other model it says what to do."""
    printed = re.search(
        r"\.venv/bin/(tidemill chat .*--canvas \".*\")", (ROOT / "README.md").read_text()
    )
    assert printed is not None
    command = f"{sys.executable} -m {printed[1]} --temperature=0 --server={HOST}:"
    shell: dict[str, Any] = {
        "shell": True,
        "cwd": ROOT,
        "capture_output": True,
        "text": True,
        "check": False,
    }
    done = await asyncio.to_thread(subprocess.run, f"{command}{block.grpc_port}", **shell)
    assert (done.returncode, done.stdout) == (0, '{"name": "tom", "age": 31, "city": "rome"}\n')
    assert re.fullmatch(r"43 tokens, \d+ forwards, \d+\.\d\d tokens a forward\n", done.stderr)
    command = command.replace("--model demo-block ", "")
    done = await asyncio.to_thread(subprocess.run, f"{command}{stack.grpc_port}", **shell)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"tidemill chat: .*leave --canvas out.*\n", done.stderr)


async def test_an_autoregressive_model_has_text_and_no_canvas(
    browser: Browser, stack: Stack
) -> None:
    messages = [{"role": "user", "content": "json: tom 31 rome"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 64}
    wanted = await answer(stack.url, "/v1/chat/completions", body)
    async with opened(browser, stack.url) as page:
        assert await page.is_checked("input[value=chat]")
        await page.fill("#temperature", "0")
        await page.click("#examples >> text=json: tom 31 rome")
        await page.wait_for_selector("body[data-state^=done]")
        assert await page.text_content("#text") == wanted["choices"][0]["message"]["content"]
        for hidden in ("#canvas-section", "#diffusion", "#error"):
            assert not await page.is_visible(hidden)


async def test_stop_ends_the_request(browser: Browser, echo: frontends.Stack) -> None:
    echo.engine.hold_after = 20
    async with opened(browser, echo.url) as page:
        assert not await page.is_visible("#mode"), "a chat without a template"
        for stop in ("click", "Escape"):
            await ask(page, "tide ", "running", max_tokens="400")
            await expect(page.locator("#text")).to_contain_text("tide t")
            assert await page.get_attribute("#text", "aria-busy") == "true"
            if stop == "click":
                await page.click("#stop")
            else:
                await page.keyboard.press(stop)
            await page.wait_for_selector("body[data-state=stopped]")
            text = await page.text_content("#text") or ""
            assert ("tide " * 100).startswith(text)
            await until(lambda: echo.engine.live == 0)
            assert await page.text_content("#text") == text
            assert await page.is_disabled("#stop")
    assert echo.engine.outcomes == ["aborted", "aborted"]


async def test_errors_are_told(browser: Browser, echo: frontends.Stack) -> None:
    async with opened(browser, echo.url, noise=True) as page:
        error = page.locator("#error")
        await ask(page, "a", "failed", max_tokens="-1")
        await expect(error).to_contain_text("max_tokens is -1; it must be at least 1")
        echo.engine.refuse = Overloaded("the queue is full", retry_after_ms=2000)
        await ask(page, "a", "failed", max_tokens="4")
        await expect(error).to_have_text("the queue is full (Try again in 2 s.)")
        echo.engine.refuse = InvalidRequest(EVIL)
        await ask(page, "a", "failed")
        await expect(error).to_have_text(EVIL)
        echo.engine.refuse = None
        await ask(page, "abcd")
        assert not await error.is_visible()

        async def cut(route: Route) -> None:
            await route.fulfill(content_type="text/event-stream", body='data: {"choices": []}\n\n')

        lost = "The connection to the server was lost."
        for answered in (lambda route: route.abort(), cut):
            await page.route("**/v1/completions", answered)
            await ask(page, "a", "failed")
            await expect(error).to_have_text(lost)
            await page.unroute("**/v1/completions")
        assert await page.evaluate("window.hacked") is None


async def test_what_a_model_says_is_text(browser: Browser, echo: frontends.Stack) -> None:
    nodes = "document.querySelectorAll('*').length"
    async with opened(browser, echo.url) as page:
        await ask(page, "x")
        before = await page.evaluate(nodes)
        await ask(page, EVIL, max_tokens=str(len(echo.tokenizer.encode(EVIL).ids)))
        assert await page.text_content("#text") == EVIL
        assert await page.evaluate(nodes) == before
        assert await page.evaluate("window.hacked") is None
    # Negative control: as HTML the same text makes nodes; the policy still keeps it from running.
    async with opened(browser, echo.url, noise=True) as page:
        async with page.expect_console_message():
            await page.locator("#text").evaluate("(p, text) => { p.innerHTML = text; }", EVIL)
        assert await page.evaluate(nodes) > before
        assert await page.evaluate("window.hacked") is None


async def test_reasoning_stands_above_the_answer(browser: Browser, tmp_path: Path) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING)
    async with (
        frontends.stack(tmp_path, chat_template=str(template)) as served,
        opened(browser, served.url) as page,
    ):
        block, text = page.locator("#reasoning-section"), page.locator("#text")
        nodes = "document.querySelectorAll('*').length"
        before = await page.evaluate(nodes)
        thinking = f"<think>Where? {EVIL}"
        served.engine.hold_after = len(served.tokenizer.encode(thinking).ids)
        await ask(page, f"{thinking}\n</think>There.", "running", max_tokens="300")
        await expect(page.locator("#reasoning")).to_contain_text(EVIL)
        assert await text.text_content() == ""
        assert await page.is_visible("#reasoning-section:visible + #answer")
        served.engine.hold_after = None
        await page.wait_for_selector("body[data-state^=done]")
        assert await page.text_content("#reasoning") == f"Where? {EVIL}"
        assert await text.text_content() == "There."
        assert await page.evaluate(nodes) == before
        assert await page.evaluate("window.hacked") is None
        # Whoever does not reason has no such block, and keeps nothing of the last answer.
        await ask(page, "There again.")
        await expect(text).to_have_text("There again.")
        assert not await block.is_visible()
        assert await page.text_content("#reasoning") == ""


async def test_streams_may_be_cut_anywhere(browser: Browser, echo: frontends.Stack) -> None:
    lines = [
        "data: tide \u2591\U0001f30a",
        "",
        ": a comment",
        "event: x",
        "data:two",
        "data:  lines",
    ]
    lines += ["data", "", "id: 7", "", "data: a: b", "", "data: cut off"]
    async with opened(browser, echo.url) as page:
        for end in ("\n", "\r\n", "\r"):
            content = list(end.join(lines).encode())
            for size in (1, 2, 3, 5, len(content)):
                found = await page.evaluate(CUT, [content, size])
                assert found == ["tide \u2591\U0001f30a", "two\n lines\n", "a: b"], (end, size)
