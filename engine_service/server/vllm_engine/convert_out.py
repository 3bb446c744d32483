"""The core's plain messages as those of vllm.grpc.engine.VllmEngine.

The generated modules come with the wheel smg-grpc-proto and are loaded when the service is served.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from engine_service.core.facts import EngineFacts
from engine_service.core.messages import Finish, FinishReason, Load
from engine_service.core.step import TokenLogprobs
from tidemill.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    GenerationFailed,
    InvalidRequest,
)

_FINISHES = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}
_MAX_ID = (1 << 31) - 1
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Wire:
    """Makes messages of the two contracts."""

    def __init__(self) -> None:
        """Raises FailedPrecondition where the wheel is missing."""
        try:
            from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
        except ModuleNotFoundError as missing:
            raise FailedPrecondition(
                f"--vllm-facade needs the wheel smg-grpc-proto ({missing}): "
                "pip install 'tidemill[engine]'",
                param="vllm_facade",
            ) from missing
        self._pb: Any = vllm_engine_pb2
        self._common: Any = common_pb2
        self.add_to_server: Any = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server

    # ------------------------------------------------------------ Generate

    def chunk(
        self,
        index: int,
        token_ids: list[int],
        *,
        prompt_tokens: int,
        cached_tokens: int,
        logprobs: list[TokenLogprobs | None],
        scores: Any,
    ) -> Any:
        """New tokens of one output."""
        chunk = self._pb.GenerateStreamChunk(
            index=index,
            token_ids=token_ids,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(token_ids),
            cached_tokens=cached_tokens,
            output_logprobs=self._output_logprobs(logprobs),
            input_logprobs=scores,
        )
        return self._pb.GenerateResponse(chunk=chunk)

    def complete(
        self,
        index: int,
        finish: Finish,
        *,
        output_ids: list[int],
        num_output: int,
        matched: str,
        stop_token_ids: tuple[int, ...],
        logprobs: list[TokenLogprobs | None],
        scores: Any,
    ) -> Any:
        """The end of one output. `matched` is a stop string that was found, or empty; a token is
        named where the caller listed it, as an end of sequence is not.

        Raises the ServiceError that an end without an answer stands for.
        """
        if finish.reason is FinishReason.DEADLINE:
            raise DeadlineExceeded("the request did not finish in time")
        if finish.reason is FinishReason.ERROR:
            raise GenerationFailed(f"the request failed: {finish.detail}")
        if finish.reason is FinishReason.DEAD_END:
            raise InvalidRequest(f"nothing that it allows can follow: {finish.detail}")
        complete = self._pb.GenerateComplete(
            index=index,
            output_ids=output_ids,
            finish_reason="stop" if matched else _FINISHES[finish.reason],
            prompt_tokens=finish.usage.prompt_tokens,
            completion_tokens=num_output,
            cached_tokens=finish.usage.cached_tokens,
            output_logprobs=self._output_logprobs(logprobs),
            input_logprobs=scores,
        )
        if matched:
            complete.matched_stop_str = matched
        elif finish.stop_token_id in stop_token_ids:
            complete.matched_token_id = finish.stop_token_id
        return self._pb.GenerateResponse(complete=complete)

    def input_logprobs(self, prompt: bytes, entries: list[TokenLogprobs]) -> Any:
        """Scores of a prompt; nothing stands before its first token, which has none."""
        token_ids = struct.unpack(f"<{len(prompt) // 4}I", prompt)
        answer = self._pb.InputLogProbs(token_ids=token_ids)
        for _ in range(len(token_ids) - len(entries)):
            answer.token_logprobs.add()
            answer.top_logprobs.add()
        for entry in entries:
            answer.token_logprobs.add(value=entry.logprobs[0])
            answer.top_logprobs.append(self._alternatives(entry))
        return answer

    def _output_logprobs(self, entries: list[TokenLogprobs | None]) -> Any:
        known = [entry for entry in entries if entry is not None]
        if not known:
            return None
        return self._pb.OutputLogProbs(
            token_ids=[entry.token_ids[0] for entry in known],
            token_logprobs=[entry.logprobs[0] for entry in known],
            top_logprobs=map(self._alternatives, known),
        )

    def _alternatives(self, entry: TokenLogprobs) -> Any:
        return self._pb.TopLogProbs(token_ids=entry.token_ids[1:], values=entry.logprobs[1:])

    # ------------------------------------------------------------ the rest

    def embedded(self, finish: Finish, values: Any) -> Any:
        return self._pb.EmbedResponse(
            embedding=values, prompt_tokens=finish.usage.prompt_tokens, embedding_dim=len(values)
        )

    def health(self, *, healthy: bool, detail: str) -> Any:
        return self._pb.HealthCheckResponse(healthy=healthy, message=detail)

    def aborted(self) -> Any:
        return self._pb.AbortResponse()

    def model_info(self, facts: EngineFacts, checkpoint: Mapping[str, Any]) -> Any:
        """`checkpoint` is the model's config.json, as far as it is known."""
        sampling = facts.default_sampling
        defaults = {n: v for n in _DEFAULTS if (v := getattr(sampling, n)) is not None}
        return self._pb.GetModelInfoResponse(
            model_path=facts.model_id,
            served_model_name=facts.model_id,
            tokenizer_path=facts.model_id,
            is_generation=bool(facts.methods),
            max_context_length=facts.max_model_len,
            max_req_input_len=facts.max_model_len - 1,
            vocab_size=facts.vocab_size,
            model_type=str(checkpoint.get("model_type") or ""),
            architectures=[facts.architecture],
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=_id_or_0(checkpoint.get("pad_token_id")),
            bos_token_id=_id_or_0(checkpoint.get("bos_token_id")),
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    def server_info(self, facts: EngineFacts, *, active: int, silence_s: float, up_s: float) -> Any:
        """Of `active` requests nothing was heard for `silence_s`; the server is up for `up_s`."""
        return self._pb.GetServerInfoResponse(
            active_requests=active,
            last_receive_timestamp=datetime.now(UTC).timestamp() - silence_s,
            uptime_seconds=up_s,
            server_type="tidemill",
            data_parallel_size=1,
            block_size=facts.page_size,
            model_dtype=facts.dtype,
            max_num_seqs=facts.max_rows,
            constrained_decoding_start="first_token",
        )

    def loads(self, facts: EngineFacts, load: Load, version: str) -> Any:
        used = load.pages_used / load.pages_total if load.pages_total else 0.0
        one = self._pb.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=load.pages_used * facts.page_size,
            max_total_num_tokens=load.pages_total * facts.page_size,
            token_usage=used,
            utilization=load.running / facts.max_rows,
            max_running_requests=facts.max_rows,
            num_waiting_uncached_tokens=load.waiting_tokens,
        )
        return self._pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=version, dp_rank_count=1, loads=[one]
        )

    def tokenizer_chunks(self, archive: bytes, sha256: str, size: int) -> Iterator[Any]:
        """Pieces of `size` bytes; the last one carries the digest of all."""
        for start in range(0, len(archive), size):
            is_last = start + size >= len(archive)
            yield self._common.GetTokenizerChunk(
                data=archive[start : start + size], sha256=sha256 if is_last else ""
            )


def _id_or_0(said: Any) -> int:
    """Of what a config.json says; 0 where that is no id, or several."""
    is_id = isinstance(said, int) and not isinstance(said, bool) and 0 <= said <= _MAX_ID
    return said if is_id else 0
