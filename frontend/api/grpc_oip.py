"""inference.GRPCInferenceService: the Open Inference Protocol over gRPC, as KServe has it.

ModelStreamInfer is Triton's extension: each request of the stream is answered in pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import grpc

from frontend.api.finished import check_finished
from frontend.api.grpc_text import TextServicer
from frontend.api.oip import (
    EXTENSIONS,
    OUTPUTS,
    PLATFORM,
    TEXT_INPUTS,
    VERSIONS,
    Answer,
    Asked,
    check_outputs,
    counts,
    flag,
    infer,
    served,
    to_asked,
)
from frontend.api.oip_tensors import NUMBERS, Tensor, check_count, checked, pack, unpack
from frontend.request import Ingress
from frontend.validation import check_streamed
from tidemill import __version__
from tidemill.oip import open_inference_pb2 as pb
from tidemill.runtime.errors import InvalidRequest, ServiceError, Unauthenticated, Unsupported

_FINAL = "triton_final_response"
_ASKS_FINAL = "triton_enable_empty_final_response"
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}


class OipServicer(TextServicer):
    """The methods of GRPCInferenceService, around the same ingress as TextService."""

    contract: ClassVar[Any] = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

    async def ServerLive(self, request: Any, context: Any) -> Any:
        """While the process runs."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        """While requests are taken."""
        return pb.ServerReadyResponse(ready=self._desk.state == "ready")

    async def ModelReady(self, request: Any, context: Any) -> Any:
        """While requests are taken; NOT_FOUND for a model that is not served."""
        if self._desk.state != "ready":
            return pb.ModelReadyResponse(ready=False)
        served(self._desk, request.name, request.version)
        return pb.ModelReadyResponse(ready=True)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Name, version and extensions."""
        return pb.ServerMetadataResponse(name=PLATFORM, version=__version__, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """What the model takes and answers; -1 is any size."""
        kind = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=served(self._desk, request.name, request.version),
            versions=VERSIONS,
            platform=PLATFORM,
            inputs=[kind(name=TEXT_INPUTS[0], datatype="BYTES", shape=[-1])],
            outputs=[kind(name=name, datatype="BYTES", shape=[-1]) for name in OUTPUTS],
        )

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """Text for tensors of prompts."""
        with self._ingress("ModelInfer", context) as (ingress, _):
            asked, _ = self._asked(request)
            answer = await infer(self._desk, asked, _names(request), ingress)
            return _response(request, answer)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> None:
        """One request after the other. One that fails says so and ends nothing, but a key that is
        known no more ends the stream."""
        numbers = itertools.count()
        while (request := await context.read()) is not grpc.aio.EOF:
            try:
                with self._ingress("ModelStreamInfer", context, next(numbers)) as (ingress, _):
                    await self._stream_one(request, context, ingress)
            except Unauthenticated:
                raise
            except ServiceError as error:
                failed = pb.ModelInferResponse(id=request.id, model_name=request.model_name)
                message = pb.ModelStreamInferResponse(
                    error_message=error.message, infer_response=failed
                )
                await context.write(message)

    async def _stream_one(self, request: Any, context: Any, ingress: Ingress) -> None:
        asked, asks_final = self._asked(request, streams=True)
        names, model = check_outputs(_names(request)), asked.request.options.model
        if len(asked.request.prompts) != 1 or asked.request.options.n != 1:
            raise Unsupported(
                "a stream is of one text; send one prompt with n 1, or use ModelInfer",
                param="inputs",
            )
        check_streamed(asked.request.options)
        async with self._desk.generation(asked.request, ingress) as generation:
            async for news in generation.deltas():
                for delta in news:
                    reason = delta.finish_reason or ""
                    check_finished(reason)
                    if not (delta.text or reason):
                        continue
                    columns = {"text_output": delta.text, "finish_reason": reason}
                    outputs = [
                        Tensor(name, "BYTES", asked.shape, [columns[name].encode()])
                        for name in names
                    ]
                    totals = counts(generation) if reason else {}
                    answer = _response(request, Answer(model, outputs, totals))
                    if asks_final:
                        answer.parameters[_FINAL].bool_param = False
                    await context.write(pb.ModelStreamInferResponse(infer_response=answer))
        if asks_final:
            last = _response(request, Answer(model, [], {}))
            last.parameters[_FINAL].bool_param = True
            await context.write(pb.ModelStreamInferResponse(infer_response=last))

    def _asked(self, request: Any, *, streams: bool = False) -> tuple[Asked, bool]:
        """(the request, whether its stream ends with an answer that says so)."""
        model = served(self._desk, request.model_name, request.model_version)
        parameters = _plain(request.parameters)
        asks_final = bool(flag(parameters, _ASKS_FINAL))
        return to_asked(model, _tensors(request), parameters, streams=streams), asks_final


def _tensors(request: Any) -> list[Tensor]:
    check_count(len(request.inputs))
    raw = request.raw_input_contents
    if not raw:
        return [_tensor(one) for one in request.inputs]
    if len(raw) != len(request.inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs",
            param="raw_input_contents",
        )
    if any(one.HasField("contents") for one in request.inputs):
        raise InvalidRequest("set either contents or raw_input_contents", param="contents")
    return [
        unpack(one.name, one.datatype, tuple(one.shape), content)
        for one, content in zip(request.inputs, raw, strict=True)
    ]


def _tensor(one: Any) -> Tensor:
    field = _CONTENTS.get(one.datatype)
    if field is None:
        raise Unsupported(
            f"{one.name} has datatype {one.datatype[:40]} in contents; it must be one of "
            f"{', '.join(_CONTENTS)}, or raw ({', '.join(NUMBERS)})",
            param=one.name,
        )
    values = getattr(one.contents, field)
    return checked(Tensor(one.name, one.datatype, tuple(one.shape), values))


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(value, kind)
    return found


def _names(request: Any) -> list[str]:
    return [one.name for one in request.outputs]


def _response(request: Any, answer: Answer) -> Any:
    """Raw contents, where the request has them: clients that write so read so."""
    response = pb.ModelInferResponse(
        id=request.id, model_name=answer.model, model_version=VERSIONS[0]
    )
    for name, count in answer.parameters.items():
        response.parameters[name].int64_param = count
    for one in answer.outputs:
        output = response.outputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
        if request.raw_input_contents:
            response.raw_output_contents.append(pack(one.values))
        else:
            output.contents.bytes_contents.extend(one.values)
    return response
