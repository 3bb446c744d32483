"""Asks a server for the name of its model, before any load: address, key and certificate are then
known to be right. It does not know load.
"""

from __future__ import annotations

import asyncio

import grpc
import httpx

from tidemill.bench.traffic.grpc_face import channel, key_metadata
from tidemill.bench.traffic.target import Target
from tidemill.runtime.errors import InvalidRequest, Unavailable
from tidemill.runtime.rpc import to_error
from tidemill.v1 import text_pb2 as pb
from tidemill.v1 import text_pb2_grpc as rpc

_PATIENCE_S = 10.0
_SAID_CHARS = 300


def first_model(target: Target) -> str:
    """The first model that the first address lists. Raises Unavailable where nobody answers, and
    what the server answers instead of a list."""
    if target.is_grpc:
        return asyncio.run(_over_grpc(target))
    return _over_http(target)


def _over_http(target: Target) -> str:
    url = target.urls[0].rstrip("/").removesuffix("/v1") + "/v1/models"
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    verify = target.context_of(url) or True
    try:
        answer = httpx.get(url, headers=headers, verify=verify, timeout=_PATIENCE_S)
        if answer.status_code == 200:
            return str(answer.json()["data"][0]["id"])
    except httpx.TransportError as error:
        raise Unavailable(f"cannot reach {url}: {error}", param="url") from None
    except (ValueError, LookupError, TypeError):
        raise InvalidRequest(f"{url} lists no model; name one with --served-model") from None
    raise InvalidRequest(
        f"{url} answered {answer.status_code}: {answer.text[:_SAID_CHARS]}; "
        "look at --url and --api-key, or name the model with --served-model"
    )


async def _over_grpc(target: Target) -> str:
    async with channel(target, target.urls[0]) as made:
        try:
            listed = await rpc.TextServiceStub(made).ListModels(
                pb.ListModelsRequest(), timeout=_PATIENCE_S, metadata=key_metadata(target)
            )
        except grpc.aio.AioRpcError as failure:
            raise to_error(failure) from failure
    return str(listed.models[0].id)
