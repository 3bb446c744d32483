"""EngineInfoService: what routers and frontends ask before they send anything.

It does not know requests.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engine_service.server import convert_out
from engine_service.server.desk import Desk
from engine_service.server.tokenizer_files import TokenizerFiles
from tidemill.runtime.rpc import answering
from tidemill.v1 import engine_pb2_grpc


class InfoServicer(engine_pb2_grpc.EngineInfoServiceServicer):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def GetEngineInfo(self, request: Any, context: Any) -> Any:
        async with answering(context):
            desk = self._desk
            facts, found = desk.open_facts(), desk.tokenizer
            answer = convert_out.engine_info(
                facts,
                instance_id=desk.instance_id,
                version=package_version(),
                sha256=found.sha256 if isinstance(found, TokenizerFiles) else "",
                max_bytes=desk.config.max_message_bytes,
            )
            answer.started_unix_ns = desk.started_unix_ns
            return answer

    async def GetTokenizer(self, request: Any, context: Any) -> None:
        async with answering(context):
            found = self._desk.open_tokenizer()
            await context.write(convert_out.manifest(found.sha256, found.files))
            chunks = found.chunks(self._desk.config.max_message_bytes)
            while (piece := await asyncio.to_thread(next, chunks, None)) is not None:
                await context.write(convert_out.chunk(*piece))

    async def WatchState(self, request: Any, context: Any) -> None:
        async with answering(context):
            async for snapshot in self._desk.board.watch():
                await context.write(convert_out.state_response(snapshot))


def package_version() -> str:
    try:
        return version("tidemill")
    except PackageNotFoundError:
        return "0+checkout"
