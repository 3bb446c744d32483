"""A chat template that does harm, behind a real server: its own requests fail, the others go on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc

from tests.service.frontends import frontend_for, make_engine, serving
from tests.waiting import PATIENCE_S, http_client, until
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
