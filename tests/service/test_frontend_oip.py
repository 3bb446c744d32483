"""The Open Inference Protocol on both faces; the engine is a fake that echoes the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frontend.api.grpc_oip import OipServicer
from frontend.api.oip_tensors import unpack
from tests.service.frontends import Stack, stack
from tests.waiting import until
from tidemill.oip import open_inference_pb2 as pb
from tidemill.oip import open_inference_pb2_grpc as rpc
from tidemill.runtime.errors import InvalidRequest
from tidemill.runtime.rpc import to_error

INFER = "/v2/models/fake/infer"
GENERATE = "/v2/models/fake/generate"
FINAL = "triton_enable_empty_final_response"


@pytest.fixture
async def served(tmp_path: Path) -> Any:
    async with stack(tmp_path) as running:
        yield running
        await until(lambda: running.frontend.desk.fleet.num_slots == 0)


@pytest.fixture
async def http(served: Stack) -> Any:
    async with served.http() as client:
        yield client


@pytest.fixture
async def stub(served: Stack) -> Any:
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        yield rpc.GRPCInferenceServiceStub(channel)


def text(*values: str, **more: Any) -> dict[str, Any]:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [len(values)], "data": values}
    return tensor | more


def body(*inputs: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": {"max_tokens": 4}, **fields}


async def outputs(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(INFER, json=fields)
    assert answer.status_code == 200, answer.text
    return {one["name"]: one for one in answer.json()["outputs"]}


async def test_server_and_model_over_http(http: httpx.AsyncClient) -> None:
    about = (await http.get("/v2")).json()
    assert about["name"] == "tidemill"
    assert "binary_tensor_data" in about["extensions"]
    assert (await http.get("/v2/health/live")).json() == {"live": True}
    assert (await http.get("/v2/health/ready")).json() == {"ready": True}
    for path in ("/v2/models/fake", "/v2/models/fake/versions/1"):
        model = (await http.get(path)).json()
        assert (model["name"], model["versions"]) == ("fake", ["1"])
        assert [one["name"] for one in model["inputs"]] == ["text_input"]
        assert (await http.get(f"{path}/ready")).json() == {"name": "fake", "ready": True}
    for path in ("/v2/models/other", "/v2/models/org/other/ready", "/v2/models/fake/versions/2"):
        answer = await http.get(path)
        assert answer.status_code == 404
        assert answer.json()["code"] == "model_not_found"
        assert isinstance(answer.json()["error"], str)


async def test_batches_have_the_shape_of_their_input(http: httpx.AsyncClient) -> None:
    found = await outputs(http, **body(text("ab", "cde")))
    assert found["text_output"]["data"] == ["abab", "cdec"]
    assert found["text_output"]["shape"] == [2]
    assert found["finish_reason"]["data"] == ["length", "length"]
    column = text("ab", "cde", shape=[2, 1], data=[["ab"], ["cde"]])
    found = await outputs(http, **body(column, outputs=[{"name": "text_output"}]))
    assert list(found) == ["text_output"]
    assert found["text_output"]["shape"] == [2, 1]
    found = await outputs(http, **body(text("ab", "cd"), parameters={"max_tokens": 1, "n": 3}))
    assert found["text_output"]["shape"] == [2, 3]
    assert found["text_output"]["data"] == ["a", "a", "a", "c", "c", "c"]


async def test_ids_and_counts_come_back(http: httpx.AsyncClient) -> None:
    answer = await http.post(INFER, json=body(text("ab"), id="mine"), headers={"x-request-id": "7"})
    assert answer.json()["id"] == "mine"
    assert answer.json()["parameters"]["completion_tokens"] == 4
    assert answer.headers["x-request-id"] == "7"
    assert answer.json()["model_version"] == "1"


async def test_parameters_as_tensors_and_as_json(served: Stack, http: httpx.AsyncClient) -> None:
    number = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [[2]]}
    inner = {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1]}
    inner["data"] = [json.dumps({"temperature": 0.25, "stop": ["x"]})]
    echo = {"name": "exclude_input_in_output", "datatype": "BOOL", "shape": [1], "data": [False]}
    found = await outputs(http, inputs=[text("ab"), number, inner, echo])
    assert found["text_output"]["data"] == ["abab"], "the prompt, and two tokens"
    assert served.engine.submits[-1].sampling.temperature == 0.25


async def test_binary_tensors(http: httpx.AsyncClient) -> None:
    raw = b"\x02\0\0\0ab" + b"\x01\0\0\0c"
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [2]}
    asked = {
        "inputs": [tensor | {"parameters": {"binary_data_size": len(raw)}}],
        "parameters": {"max_tokens": 2},
        "outputs": [
            {"name": "text_output", "parameters": {"binary_data": True}},
            {"name": "finish_reason"},
        ],
    }
    head = json.dumps(asked).encode()
    headers = {"inference-header-content-length": str(len(head))}
    answer = await http.post(INFER, content=head + raw, headers=headers)
    cut = int(answer.headers["inference-header-content-length"])
    assert answer.content[cut:] == b"\x02\0\0\0ab" + b"\x02\0\0\0cc"
    whole = {one["name"]: one for one in json.loads(answer.content[:cut])["outputs"]}
    assert whole["text_output"]["parameters"] == {"binary_data_size": 12}
    assert whole["finish_reason"]["data"] == ["length", "length"]
    for cut, said in (("x", "inference-header"), (str(len(head) + 99), "inference-header")):
        headers = {"inference-header-content-length": cut}
        answer = await http.post(INFER, content=head + raw, headers=headers)
        assert answer.status_code == 400
        assert said in answer.json()["error"]


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        (body(text("a", name="other")), 400, "text_input"),
        (body(text("a"), text("b")), 400, "2 text tensors"),
        (body(text("a", datatype="INT32", data=[1])), 400, "must be BYTES"),
        (body(text("a", shape=[2])), 400, "do not make its shape"),
        (body(text("a", shape=[-1, -1])), 400, "do not make its shape"),
        (body(text("a", data=[7])), 400, "no text but int"),
        (body(text("a"), outputs=[{"name": "x"}]), 400, "no output 'x'"),
        (body(text("a"), parameters={"stream": True}), 400, "generate_stream"),
        (body(text("a"), parameters={"logprobs": 2}), 400, "logprobs is not a parameter here"),
        (body(text("a"), parameters={"tempratur": 1}), 400, "tempratur is neither"),
        (body(text("a"), parameters={"temperature": "hot"}), 400, "temperature"),
        (body(text("a"), parameters={"sampling_parameters": "["}), 400, "is not JSON"),
        (body(text("a"), {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}), 400,
         "x has 2 values"),
        (body(text("a"), {"name": "max_tokens", "datatype": "INT", "shape": [1], "data": [2]}), 400,
         "max_tokens has datatype INT; it must be BYTES or one of BOOL"),
        ({"inputs": []}, 400, "inputs"),
        (body(*[text("a")] * 257), 400, "inputs: List should have at most 256 items"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, asked: dict[str, Any], status: int, said: str
) -> None:
    answer = await http.post(INFER, json=asked)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]


async def test_generate(http: httpx.AsyncClient) -> None:
    asked = {"text_input": "ab", "parameters": {"max_tokens": 3, "details": True}}
    answer = (await http.post(f"{GENERATE}", json=asked)).json()
    assert (answer["text_output"], answer["model_name"]) == ("aba", "fake")
    assert answer["details"]["finish_reason"] == "length"
    assert [one["text"] for one in answer["details"]["logprobs"]] == ["a", "b", "a"]
    asked["parameters"] = {"max_tokens": 9, "stop": ["b"], "details": True}
    answer = (await http.post(f"{GENERATE}", json=asked)).json()
    assert answer["details"]["finish_reason"] == "stop_sequence"
    answer = await http.post(f"{GENERATE}", json={"text_input": "a", "parameters": {"n": 2}})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("n: ")


async def test_parameters_of_generate_may_stand_beside_the_text(http: httpx.AsyncClient) -> None:
    """As Triton takes them; what is none of a completion's is refused there too."""
    for asked in ({"max_tokens": 3}, {"max_tokens": 9, "parameters": {"max_tokens": 3}}):
        answer = await http.post(GENERATE, json={"text_input": "ab", **asked})
        assert answer.json()["text_output"] == "aba"
    asked = {"text_input": "ab", "max_tokens": 3, "exclude_input_in_output": False}
    assert (await http.post(GENERATE, json=asked)).json()["text_output"] == "ababa"
    for name in ("logprobs", "prompt_logprobs"):
        answer = await http.post(GENERATE, json={"text_input": "ab", name: 0})
        assert answer.json()["error"].startswith(f"{name} is not a parameter here"), answer.text
    answer = await http.post(GENERATE, json={"text_input": "ab", "details": True, "max_tokens": 1})
    assert answer.json()["details"]["finish_reason"] == "length"
    answer = await http.post(GENERATE, json={"text_input": "ab", "tempratur": 0})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"].startswith("tempratur")


async def test_generate_stream(http: httpx.AsyncClient) -> None:
    asked = {"text_input": "ab", "parameters": {"max_tokens": 5, "stream": True}}
    assert "generate_stream" in (await http.post(GENERATE, json=asked)).text, "the control"
    answer = await http.post(f"{GENERATE}_stream", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert "".join(one["text_output"] for one in events) == "ababa"
    refused = await http.post(f"{GENERATE}_stream", json={"text_input": "", "parameters": {}})
    assert refused.status_code == 400


async def test_details_of_a_stream_leave_out_no_token(http: httpx.AsyncClient) -> None:
    """Also of text that is held back, because it may be the beginning of a stop string."""
    wanted = {"max_tokens": 7, "stop": ["bX"], "details": True}
    asked = {"text_input": "ab<|user|>", "parameters": wanted}
    answer = await http.post(f"{GENERATE}_stream", json=asked)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    streamed = [token for one in events for token in one["details"]["logprobs"]]
    whole = (await http.post(GENERATE, json=asked)).json()["details"]["logprobs"]
    assert streamed == whole
    assert [one["special"] for one in whole] == [False, False, True] * 2 + [False]


@pytest.mark.parametrize("name", ["details", "exclude_input_in_output"])
async def test_flags_are_true_or_false(http: httpx.AsyncClient, name: str) -> None:

    async def ask(**given: object) -> dict[str, Any]:
        asked = {"text_input": "ab", "parameters": {"max_tokens": 3, **given}}
        return dict((await http.post(GENERATE, json=asked)).json())

    for wrong in ("no", "false", 2, [], {}):
        assert (await ask(**{name: wrong}))["error"].startswith(f"{name} is ")
    default = name != "details"
    assert await ask(**{name: None}) == await ask(**{name: default}) == await ask()
    assert await ask(**{name: not default}) != await ask()


async def test_the_prompt_may_stand_in_front_by_a_parameter_too(http: httpx.AsyncClient) -> None:
    fields = body(text("ab"), parameters={"max_tokens": 3, "exclude_input_in_output": False})
    assert (await outputs(http, **fields))["text_output"]["data"] == ["ababa"]


# ---------------------------------------------------------------- gRPC


def request(*values: bytes, **parameters: Any) -> pb.ModelInferRequest:
    asked = pb.ModelInferRequest(model_name="fake", id="7")
    tensor = asked.inputs.add(name="text_input", datatype="BYTES", shape=[len(values)])
    tensor.contents.bytes_contents.extend(values)
    for name, value in parameters.items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(asked.parameters[name], kinds[type(value)], value)
    return asked


async def test_server_and_model_over_grpc(stub: Any) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(name="fake", version="1"))).ready
    assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "tidemill"
    model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="fake"))
    assert [one.name for one in model.outputs] == ["text_output", "finish_reason"]
    for asked in ({"name": "other"}, {"name": "fake", "version": "3"}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelReady(pb.ModelReadyRequest(**asked))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_infer_over_grpc(served: Stack, stub: Any) -> None:
    asked = request(b"ab", b"cde", max_tokens=3, temperature=0.5, stop="x", ignore_eos=True)
    answer = await stub.ModelInfer(asked)
    assert (answer.id, answer.model_name, answer.model_version) == ("7", "fake", "1")
    assert list(answer.outputs[0].contents.bytes_contents) == [b"aba", b"cde"]
    assert answer.parameters["completion_tokens"].int64_param == 6
    sampling = served.engine.submits[-1].sampling
    assert (sampling.max_tokens, sampling.temperature) == (3, 0.5)


async def test_raw_contents(stub: Any) -> None:
    asked = request(b"", max_tokens=2)
    asked.inputs[0].ClearField("contents")
    asked.inputs.add(name="temperature", datatype="FP32", shape=[1])
    asked.raw_input_contents.extend([b"\x02\0\0\0ab", b"\0\0\0\x3f"])
    answer = await stub.ModelInfer(asked)
    assert answer.raw_output_contents[0] == b"\x02\0\0\0ab"
    assert not answer.outputs[0].HasField("contents")
    for broken in (b"\x09\0\0\0ab", b"\x01\0"):
        asked.raw_input_contents[0] = broken
        with pytest.raises(grpc.aio.AioRpcError, match="ends inside of a text"):
            await stub.ModelInfer(asked)


async def test_refusals_over_grpc(stub: Any) -> None:
    odd = request(b"a")
    odd.inputs.add(name="x", datatype="BF16", shape=[1])
    many = request(b"a")
    many.inputs.extend([odd.inputs[1]] * 256)
    for asked, code, param in (
        (many, "INVALID_ARGUMENT", "inputs"),
        (request(b"\xff"), "INVALID_ARGUMENT", "text_input"),
        (request(b"a", tempratur=1), "UNIMPLEMENTED", "tempratur"),
        (request(b"a", **{FINAL: 2}), "INVALID_ARGUMENT", FINAL),
        (odd, "UNIMPLEMENTED", "x"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(asked)
        assert caught.value.code().name == code
        assert to_error(caught.value).param == param


@pytest.mark.parametrize(
    ("datatype", "shape", "content", "said"),
    [
        ("BYTES", (1,) * 9, b"\x01\0\0\0a", "has 9 dimensions; it may have 8"),
        ("BYTES", (2000,), bytes(8000), "more than 1024 values"),
        ("UINT8", (5000,), bytes(5000), "has 5000 values; a parameter has one"),
    ],
)
def test_what_cannot_be_used_is_refused_before_it_is_read(
    datatype: str, shape: tuple[int, ...], content: bytes, said: str
) -> None:
    """A product of a million sizes, or a million numbers, would hold up everybody."""
    with pytest.raises(InvalidRequest, match=said):
        unpack("x", datatype, shape, content)


async def test_streams_go_on_after_a_request_that_fails(stub: Any) -> None:
    call = stub.ModelStreamInfer()
    for asked in (
        request(b"ab", max_tokens=5, **{FINAL: True}),
        request(b"a", b"b"),
        request(b"c", max_tokens=1),
    ):
        await call.write(asked)
    await call.done_writing()
    answers = [one async for one in call]
    bad = [one for one in answers if one.error_message]
    assert [one.infer_response.id for one in bad] == ["7"]
    assert "one text" in bad[0].error_message
    at = answers.index(bad[0])
    first, second = answers[:at], answers[at + 1 :]
    finals = [one.infer_response.parameters["triton_final_response"].bool_param for one in first]
    assert finals == [False] * (len(first) - 1) + [True]
    texts = [one.infer_response.outputs[0].contents.bytes_contents[0] for one in first[:-1]]
    assert b"".join(texts) == b"ababa"
    (last,) = second
    assert [out.contents.bytes_contents[0] for out in last.infer_response.outputs] == [
        b"c",
        b"length",
    ]


async def test_leaving_a_stream_ends_it_at_the_engine(served: Stack, stub: Any) -> None:
    call = stub.ModelStreamInfer()
    await call.write(request(b"ab", max_tokens=400))
    assert not (await call.read()).error_message
    call.cancel()
    await until(lambda: served.frontend.desk.num_live == 0)


async def test_health_knows_the_service(served: Stack) -> None:
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        ask = health_pb2_grpc.HealthStub(channel).Check
        asked = health_pb2.HealthCheckRequest(service=OipServicer.contract.full_name)
        assert (await ask(asked)).status == health_pb2.HealthCheckResponse.SERVING


async def test_every_rpc_is_there() -> None:
    names = {one.name for one in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    assert names == {
        "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata",
        "ModelInfer", "ModelStreamInfer",
    }  # fmt: skip
    assert OipServicer.contract.full_name == "inference.GRPCInferenceService"
