"""TextService: the frontend's face to gRPC clients. It shares every step with the HTTP face.

Streams write their messages instead of yielding them: a handler that is suspended in `yield` when
the client leaves is closed in another task context.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from frontend.api import grpc_text_convert as convert
from frontend.api.grpc_gate import admit, admitted
from frontend.api.grpc_ingress import arrival, end_span, status_of, tell, trace_above
from frontend.api.grpc_text_infill import to_infill_request
from frontend.api.grpc_text_pieces import CHAT, TEXT, Form, Pieces, prompt_ids_of
from frontend.api.grpc_text_pool import PoolMethods
from frontend.desk import FrontDesk
from frontend.gate import Gate
from frontend.generation import Generation
from frontend.prompt_scores import PromptScores
from frontend.request import Ingress, TextRequest
from frontend.validation import check_streamed
from tidemill.runtime.errors import InvalidRequest
from tidemill.runtime.rpc import is_late
from tidemill.v1 import text_pb2 as pb

_MAX_SESSION_CHARS = 256
_FOREVER_S = 1e8
"""time_remaining() of a call without a deadline is larger than this, or None."""


def _check_whole(wanted: TextRequest, method: str) -> None:
    """Raises InvalidRequest for what one message has no place for."""
    if wanted.options.emit_canvas:
        raise InvalidRequest(
            f"emit_canvas is true, and {method} answers with one message, behind the last canvas; "
            f"leave it out, or use {method}Stream",
            param="emit_canvas",
        )


class TextServicer(PoolMethods):
    """The methods of TextService."""

    contract: ClassVar[Any] = pb.DESCRIPTOR.services_by_name["TextService"]

    def __init__(self, desk: FrontDesk, gate: Gate) -> None:
        self._desk = desk
        self._gate = gate

    async def Generate(self, request: Any, context: Any) -> Any:
        """Text for a prompt, in one message."""
        return await self._answer(TEXT, "Generate", request, context)

    async def GenerateStream(self, request: Any, context: Any) -> None:
        """The same in pieces; the last message carries the usage."""
        await self._stream(TEXT, "GenerateStream", request, context)

    async def Chat(self, request: Any, context: Any) -> Any:
        """An answer to messages, in one message."""
        return await self._answer(CHAT, "Chat", request, context)

    async def ChatStream(self, request: Any, context: Any) -> None:
        """The same in pieces; the last message carries the usage."""
        await self._stream(CHAT, "ChatStream", request, context)

    async def _answer(self, form: Form, method: str, request: Any, context: Any) -> Any:
        with self._ingress(method, context) as (ingress, metadata):
            wanted = form.to_request(request, metadata)
            _check_whole(wanted, method)
            async with self._desk.generation(wanted, ingress) as generation:
                results = await generation.collect()
        return form.whole(
            choices=[form.to_choice(r, request.options) for r in results],
            prompt_logprobs=_scores_of(generation, wanted),
            prompt_token_ids=prompt_ids_of(generation, request.options),
            **_frame(form.prefix, generation, ingress),
            **_totals(generation, context),
        )

    async def _stream(self, form: Form, method: str, request: Any, context: Any) -> None:
        with self._ingress(method, context) as (ingress, metadata):
            wanted = form.to_request(request, metadata)
            check_streamed(wanted.options)
            async with self._desk.generation(wanted, ingress) as generation:
                frame = _frame(form.prefix, generation, ingress)
                pieces = Pieces(form, frame, generation, wanted, request.options)
                async for news in generation.deltas():
                    for delta in news:
                        if (message := pieces.make(delta)) is not None:
                            await context.write(message)
            await context.write(pieces.last(_totals(generation, context)))

    async def Tokenize(self, request: Any, context: Any) -> Any:
        """Token ids of a text or of rendered messages."""
        model = self._desk.model_for(request.model)
        prompt, special = convert.to_tokenize(request)
        token_ids = await self._desk.tokenize(model, prompt, special)
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=model.facts.max_model_len)

    async def Detokenize(self, request: Any, context: Any) -> Any:
        """The text of token ids."""
        model = self._desk.model_for(request.model)
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        text = await self._desk.detokenize(model, list(request.token_ids), skip_special_tokens=skip)
        return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: Any, context: Any) -> Any:
        """The one served model, under each of its names."""
        model = self._desk.check_ready()
        cards = [convert.model_card(model, name) for name in model.names.listed]
        return pb.ListModelsResponse(models=cards)

    async def GetModel(self, request: Any, context: Any) -> Any:
        """A model's card, or NOT_FOUND."""
        model = self._desk.model_for(request.id)
        return pb.GetModelResponse(model=convert.model_card(model, model.called(request.id)))

    async def Infill(self, request: Any, context: Any) -> Any:
        """The text of a gap between two others, in one message."""
        with self._ingress("Infill", context) as (ingress, metadata):
            wanted = to_infill_request(request, metadata)
            async with self._desk.generation(wanted, ingress) as generation:
                (result,) = await generation.collect()
        usage = _totals(generation, context)["usage"]
        return pb.InfillResponse(id=f"infill-{ingress.request_id}", text=result.text, usage=usage)

    @contextmanager
    def _ingress(
        self, method: str, context: Any, number: int | None = None
    ) -> Iterator[tuple[Ingress, convert.Metadata]]:
        """A request's id, deadline and SERVER span, around its work.

        `number` counts the requests of a stream: the gate is asked for each, and as the call does
        not fail with one of them, a line says so. Raises Unavailable when it comes too late for
        the drain.
        """
        call = arrival()
        call.span = span = self._desk.tracer.start(call.method, trace_above(call.metadata))
        received, remaining = asyncio.get_running_loop().time(), context.time_remaining()
        limit_s = None if remaining is None or remaining > _FOREVER_S else remaining
        deadline = self._desk.deadline(received, limit_s)
        failure: BaseException | None = None
        try:
            self._desk.check_open()
            if number:
                admit(self._gate)
            known = admitted()
            yield (
                Ingress(
                    request_id=call.request_id + ("" if number is None else f"-{number}"),
                    received=received,
                    created=int(time.time()),
                    span=span,
                    deadline=deadline,
                    session=call.metadata.get("x-session-id", "")[:_MAX_SESSION_CHARS],
                    asked=method,
                    client=call.client,
                    caller=call.caller,
                    use=known.use if known else None,
                ),
                call.metadata,
            )
        except BaseException as caught:
            failure = caught
            raise
        finally:
            now = asyncio.get_running_loop().time()
            status = status_of(failure, late=is_late(received, now, deadline))
            error = None if failure is None else str(failure) or type(failure).__name__
            end_span(span, call.method, status, error)
            self._desk.metrics.rpc_duration.labels(call.method, status).observe(now - received)
            if number is not None and failure is not None:
                tell(call, status, now - received)


def _frame(prefix: str, generation: Generation, ingress: Ingress) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{ingress.request_id}",
        "model": generation.called,
        "created_unix_s": ingress.created,
    }


def _totals(generation: Generation, context: Any) -> dict[str, Any]:
    """Usage and timings for the last message; the same go into the trailers."""
    usage, timings = generation.usage, generation.timings
    context.set_trailing_metadata(
        (
            *context.trailing_metadata(),
            ("x-usage-prompt-tokens", str(usage.prompt_tokens)),
            ("x-usage-completion-tokens", str(usage.output_tokens)),
            ("x-usage-cached-tokens", str(usage.cached_tokens)),
            ("x-usage-reasoning-tokens", str(usage.reasoning_tokens)),
            ("x-usage-forward-passes", str(usage.forward_passes)),
            ("x-usage-denoise-steps", str(usage.denoise_steps)),
            ("x-timing-queue-ns", str(timings.queue_ns)),
            ("x-timing-prefill-ns", str(timings.prefill_ns)),
            ("x-timing-decode-ns", str(timings.decode_ns)),
        )
    )
    return {
        "usage": convert.usage_message(usage),
        "timings": convert.timings_message(timings),
    }


def _scores_of(generation: Generation, wanted: TextRequest) -> list[pb.TextLogprobs]:
    return convert.logprob_messages(PromptScores(generation.choices, wanted).all_of(0))
