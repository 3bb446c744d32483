"""A template is a program of whoever made the model: whatever it does, the server goes on."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from frontend import template_pool
from frontend.request import Chat
from frontend.template import RESERVED, ChatTemplate
from frontend.template_pool import MAX_WORKERS, TemplatePool
from tests.waiting import PATIENCE_S, until
from tidemill.runtime.errors import InternalError, InvalidRequest, Overloaded, Unavailable

WHEN_BAD = "{{% if messages[0].content == 'bad' %}}{}{{% endif %}}<{{{{ messages[0].content }}}}>"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": ENDLESS,
    "a call that never returns": "{% set n = 8 + messages | length %}{{ (n ** n) ** (n ** n) }}",
    "that computed when it compiles": "{{ (9 ** 9) ** (9 ** 9) }}",
    "a list of lists of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "memory at once": "{{ 'a' * 10 ** 11 }}",
    "memory by and by": "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "a wide field": "{{ '%99999999999d' % 1 }}",
    "a long text": "{% for i in range(999) %}{{ 'a' * 20000 }}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep recursion in C": "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "files": "{% include '/etc/hostname' %}",
}


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_pool, "_CPU_S", 0.4)


def chat(text: str) -> Chat:
    return Chat(messages=[{"role": "user", "content": text}])


@asynccontextmanager
async def pool_of(template: ChatTemplate) -> AsyncIterator[TemplatePool]:
    pool = TemplatePool(template)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield pool
    finally:
        await pool.close()


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_template_is_refused_and_its_neighbours_are_served(what: str) -> None:
    async with pool_of(ChatTemplate(WHEN_BAD.format(HOSTILE[what]), {})) as pool:
        if what != "that computed when it compiles":
            assert await pool.render(chat("é")) == "<é>"
        bad = asyncio.create_task(pool.render(chat("bad")))
        for number in range(50):
            if what == "that computed when it compiles":
                break
            assert await pool.render(chat(str(number))) == f"<{number}>"
        with pytest.raises(InvalidRequest) as caught:
            await bad
        assert caught.value.param == "messages"
        assert len(caught.value.message) < 1100


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "TemplateError: Roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "UndefinedError: .* has no attribute 'nothing'"),
        ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
        ("{{ messages | no_such_filter }}", "TemplateAssertionError: .*no_such_filter"),
    ],
)
async def test_a_template_says_itself_why_it_refuses(source: str, words: str) -> None:
    """Its process opens no file, and the library loads what tells of errors with the first one."""
    async with pool_of(ChatTemplate(source, {})) as pool:
        with pytest.raises(InvalidRequest, match=words):
            await pool.render(chat("a"))


async def test_neighbours_do_not_wait_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who come when it is known to hang go to another worker at once.

    It hangs until the test sends the signal of its timer, however slowly the others are served.
    """
    monkeypatch.setattr(template_pool, "_CPU_S", 60.0)
    async with pool_of(ChatTemplate(WHEN_BAD.format(ENDLESS), {})) as pool:
        await pool.render(chat("a"))
        bad = asyncio.create_task(pool.render(chat("bad")))
        behind = asyncio.create_task(pool.render(chat("behind")))
        hanging = pool._workers[0]
        await until(lambda: hanging.is_stuck)
        for number in range(20):
            assert await pool.render(chat(str(number))) == f"<{number}>"
        assert not bad.done(), "its neighbours did not wait for its end"
        assert hanging._process.pid is not None
        os.kill(hanging._process.pid, signal.SIGPROF)
        assert await behind == "<behind>", "what was sent with it is rendered by another one"
        with pytest.raises(InvalidRequest, match=r"60 s of the CPU.*--chat-template"):
            await bad


async def test_many_that_hang_take_no_more_than_the_workers_there_are() -> None:
    async with pool_of(ChatTemplate(WHEN_BAD.format(HOSTILE["memory by and by"]), {})) as pool:
        bad = [asyncio.create_task(pool.render(chat("bad"))) for _ in range(2 * MAX_WORKERS)]
        for task in bad:
            with pytest.raises(InvalidRequest):
                await task
            assert len(pool._workers) <= MAX_WORKERS
        assert await pool.render(chat("a")) == "<a>"


async def test_what_its_client_gave_up_is_forgotten() -> None:
    async with pool_of(ChatTemplate(WHEN_BAD.format(ENDLESS), {})) as pool:
        tasks = [asyncio.create_task(pool.render(chat(text))) for text in ("bad", "a", "b")]
        await until(lambda: pool._workers and pool._workers[0].jobs)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert pool._num_unsent_bytes == 0
        assert await pool.render(chat("c")) == "<c>"
        await until(lambda: not any(one.num_bytes for one in pool._workers))


async def test_a_queue_that_is_full_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_pool, "_MOST_WAITING_BYTES", 100)
    async with pool_of(ChatTemplate("x", {})) as pool:
        first = asyncio.create_task(pool.render(chat("a" * 100)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            await pool.render(chat("b"))
        assert (caught.value.reason, caught.value.retry_after_ms) == ("TEMPLATE_BUSY", 1000)
        assert await first == "x"
        assert await pool.render(chat("b")) == "x"


async def test_what_clients_have_left_waits_until_it_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients that give up and ask again would else pile up more than may wait."""
    monkeypatch.setattr(template_pool, "_MOST_WAITING_BYTES", 10_000)
    monkeypatch.setattr(template_pool, "MAX_WORKERS", 1)
    monkeypatch.setattr(template_pool, "_CPU_S", 2 * PATIENCE_S)
    async with pool_of(ChatTemplate(WHEN_BAD.format(ENDLESS), {})) as pool:
        await pool.render(chat("good"))
        (worker,) = pool._workers
        bad = asyncio.create_task(pool.render(chat("bad")))
        for number in range(1, 4):
            left = asyncio.create_task(pool.render(chat("a" * 4000)))
            await until(lambda number=number: len(worker.jobs) == 1 + number)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        with pytest.raises(Overloaded):
            await pool.render(chat("b"))
        os.kill(worker._process.pid, signal.SIGKILL)
        await asyncio.gather(bad, return_exceptions=True)
        assert await pool.render(chat("b")) == "<b>"


class Spy(ChatTemplate):
    """Does what no sandbox would let a template do."""

    def render(self, chat: Chat) -> str:
        path = Path(chat.messages[0]["content"])
        try:
            return path.read_text()
        except OSError as failure:
            return type(failure).__name__ + str(failure.errno)


async def test_a_template_that_left_its_sandbox_would_open_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    spied = chat(str(tmp_path / "secret"))
    assert Spy("", {}).render(spied) == "secret", "the control: here it could"
    async with pool_of(Spy("", {})) as pool:
        assert await pool.render(spied) == "OSError24"


async def test_a_pool_that_is_closed_blames_no_conversation() -> None:
    """It is when an engine of another model comes: what is under way then may be sent again."""
    async with pool_of(ChatTemplate(WHEN_BAD.format(ENDLESS), {})) as pool:
        await pool.start()
        tasks = [asyncio.create_task(pool.render(chat(text))) for text in ("bad", "a", "b")]
        await until(lambda: len(pool._workers[0].jobs) == len(tasks))
        await pool.close()
        for task in tasks:
            with pytest.raises(Unavailable) as caught:
                await task
            assert caught.value.retry_after_ms == 1000
        with pytest.raises(Unavailable):
            await pool.render(chat("a"))


async def test_who_waits_hears_that_no_other_worker_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system may refuse that for reasons of its own, such as too many open files."""
    async with pool_of(ChatTemplate(WHEN_BAD.format(ENDLESS), {})) as pool:
        await pool.start()
        tasks = [asyncio.create_task(pool.render(chat(text))) for text in ("bad", "a", "b")]
        await until(lambda: len(pool._workers[0].jobs) == len(tasks))

        def refused() -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(template_pool, "prepare", refused)
        with pytest.raises(InvalidRequest):
            await tasks[0]
        for task in tasks[1:]:
            with pytest.raises(OSError, match="Too many open files"):
                await task


class Dead(ChatTemplate):
    def __setstate__(self, state: object) -> None:
        raise SystemExit


async def test_a_process_that_does_not_start_is_not_tried_for_ever() -> None:
    async with pool_of(Dead("", {})) as pool:
        with pytest.raises(InternalError, match="see the log"):
            await pool.render(chat("a"))


class Sick(ChatTemplate):
    """Its process comes up where a file says so."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not Path(self.source).exists():
            raise SystemExit

    def render(self, chat: Chat) -> str:
        return "well"


async def test_processes_are_tried_again_when_a_while_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three that did not come up turned chats off for as long as the server ran."""
    async with pool_of(Sick(str(tmp_path / "well"), {})) as pool:
        for _ in range(2):
            with pytest.raises(InternalError, match="see the log"):
                await pool.render(chat("a"))
        (tmp_path / "well").touch()
        with pytest.raises(InternalError, match="see the log"):
            await pool.render(chat("a"))
        monkeypatch.setattr(template_pool, "_PAUSE_S", 0.0)
        assert await pool.render(chat("a")) == "well"


class Slow(ChatTemplate):
    """Its process never comes up and never ends."""

    def __setstate__(self, state: object) -> None:
        time.sleep(10 * PATIENCE_S)


async def test_a_process_that_is_never_ready_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_pool, "_START_S", 0.2)
    async with pool_of(Slow("", {})) as pool:
        with pytest.raises(InternalError, match="see the log"):
            await pool.render(chat("a"))


async def test_a_pool_is_closed_while_a_process_comes_up() -> None:
    async with asyncio.timeout(PATIENCE_S):
        pool = TemplatePool(Slow("", {}))
        asked = asyncio.create_task(pool.render(chat("a")))
        await until(lambda: pool._starting is not None)
        await pool.close()
        with pytest.raises(Unavailable):
            await asked


async def test_a_worker_that_died_idle_is_not_blamed_on_who_comes_next() -> None:
    async with pool_of(ChatTemplate(WHEN_BAD.format(""), {})) as pool:
        await pool.start()
        process = pool._workers[0]._process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()  # dead, and this loop has not heard of it
        assert await pool.render(chat("a")) == "<a>"


def test_reserved_names_are_those_of_the_renderer() -> None:
    assert {*inspect.signature(render_jinja_template).parameters, "messages"} == RESERVED
