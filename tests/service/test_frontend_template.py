"""A chat template that does harm, behind a real server: its own requests fail, the others go on."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from frontend.config import FrontendConfig
from frontend.desk import FrontDesk
from frontend.request import Chat
from frontend.template_pool import TemplatePool
from tests.engine_facts import FACTS
from tests.service.frontends import frontend_for, make_engine, serving, write_tokenizer
from tests.waiting import PATIENCE_S, http_client, until
from tidemill.runtime.errors import Unavailable
from tidemill.telemetry.tracer import Tracer
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc

HANGS = (
    "{% if messages[0].content == 'hang' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


async def test_a_template_that_loops_for_ever_is_a_typed_error_and_neighbours_go_on(
    tmp_path: Path,
) -> None:
    engine, _ = make_engine(tmp_path)
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": HANGS}))
    async with serving(engine) as port, frontend_for(port) as frontend:
        assert await frontend.desk.fleet.wait_ready(PATIENCE_S)
        url, address = f"http://127.0.0.1:{frontend.http_port}", f"127.0.0.1:{frontend.grpc_port}"
        async with http_client(url) as client, grpc.aio.insecure_channel(address) as channel:
            stub = rpc.TextServiceStub(channel)

            async def ask(text: str) -> tuple[int, str]:
                body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
                answer = await client.post("/v1/chat/completions", json=body)
                return answer.status_code, answer.text

            message = pb.ChatMessage(role="user", parts=[pb.ContentPart(text="hang")])
            hanging = asyncio.create_task(ask("hang"))
            call = stub.Chat(pb.ChatRequest(messages=[message]))
            workers = frontend.desk._templates._workers
            # Both: one that comes later would be put before a neighbour, who then waits for it.
            await until(
                lambda: (
                    sum(len(one.jobs) for one in workers) == 2
                    and all(one.is_stuck for one in workers if one.jobs)
                )
            )
            served = 0
            while not hanging.done():
                status, text = await ask("ab")
                assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, "ab")
                completion = await client.post(
                    "/v1/completions", json={"prompt": "a", "max_tokens": 1}
                )
                assert completion.status_code == 200
                served += not hanging.done()
            status, text = await hanging
            error = json.loads(text)["error"]
            assert (status, error["param"], error["code"]) == (400, "messages", "template_limit")
            assert "the chat template takes more than 2 s of the CPU" in error["message"]
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert served, "they were served while it hung"
            assert (await ask("ab"))[0] == 200


async def test_an_engine_that_leaves_while_its_model_is_taken_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_up = asyncio.Event()

    class Slow(TemplatePool):
        async def start(self) -> None:
            await super().start()
            is_up.set()
            await asyncio.Event().wait()

    monkeypatch.setattr("frontend.desk.TemplatePool", Slow)
    write_tokenizer(tmp_path)
    desk = FrontDesk(FrontendConfig(), Tracer("frontend", None))
    before = set(multiprocessing.active_children())
    taking = asyncio.create_task(desk.serve(replace(FACTS, model_id="leaves"), tmp_path))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await is_up.wait()
        assert set(multiprocessing.active_children()) - before
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await until(lambda: not set(multiprocessing.active_children()) - before)
    finally:
        await desk.close()


async def test_a_prompt_is_of_one_model(tmp_path: Path) -> None:
    """A request that came for the model before was written by the template of the next one, and
    encoded by its own tokenizer; the engine is the next one's too."""
    desk = FrontDesk(FrontendConfig(), Tracer("frontend", None))
    said = Chat(messages=[{"role": "user", "content": "a"}])
    prompts: tuple[str | Chat, ...] = (said, "a")
    try:
        for name, facts in (("first", FACTS), ("second", replace(FACTS, model_id="other"))):
            (tmp_path / name).mkdir()
            write_tokenizer(tmp_path / name, template=f"{name} {{{{ messages[0].content }}}}")
            before = desk.model
            await desk.serve(facts, tmp_path / name)
        assert before is not None
        for prompt in prompts:
            with pytest.raises(Unavailable, match="serves another model") as refused:
                await desk.tokenize(before, prompt, None)
            assert refused.value.retry_after_ms
        served = desk.model
        assert served is not None
        await desk.serve(replace(served.facts, instance_id="came back"), None)
        told = [await desk.tokenize(served, prompt, None) for prompt in prompts]
        texts = [served.tokenizer.decode(one, skip_special_tokens=False) for one in told]
        assert texts == ["second a", "a"]
    finally:
        await desk.close()
