"""Triton's client of the Open Inference Protocol, over HTTP and gRPC, in its own ways."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

ASK = "json: tom 31 rome"
GREEDY = {"max_tokens": 60, "temperature": 0}
FACES: dict[str, ModuleType] = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> ModuleType:
    return FACES[request.param]


@pytest.fixture
def client(face: ModuleType, url: str) -> Iterator[Any]:
    where = url.removeprefix("http://") if face is FACES["http"] else os.environ["TIDEMILL_GRPC"]
    with face.InferenceServerClient(where) as connected:
        yield connected


def prompts(face: ModuleType, *texts: str, **how: Any) -> Any:
    tensor = face.InferInput("text_input", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=object), **how)
    return tensor


def said(answer: Any, name: str = "text_output") -> list[str]:
    return [one.decode() for one in answer.as_numpy(name).flatten()]


def test_server_and_model(face: ModuleType, client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("demo")
    kind = {} if face is FACES["http"] else {"as_json": True}
    assert client.get_server_metadata(**kind)["name"] == "tidemill"
    model = client.get_model_metadata("demo", **kind)
    assert (model["name"], model["inputs"][0]["name"]) == ("demo", "text_input")
    assert model["inputs"][0]["datatype"] == "BYTES"


def test_a_batch(face: ModuleType, client: Any) -> None:
    answer = client.infer("demo", [prompts(face, "ab", "cd")], parameters=GREEDY, request_id="9")
    texts = said(answer)
    assert len(texts) == 2
    assert all(texts)
    assert set(said(answer, "finish_reason")) <= {"stop", "length"}
    kind = {} if face is FACES["http"] else {"as_json": True}
    assert answer.get_response(**kind)["id"] == "9"
    for prompt, text in zip(("ab", "cd"), texts, strict=True):
        assert said(client.infer("demo", [prompts(face, prompt)], parameters=GREEDY)) == [text]


def test_chosen_outputs_and_tensors_as_parameters(face: ModuleType, client: Any) -> None:
    most = face.InferInput("max_tokens", [1], "INT32")
    most.set_data_from_numpy(np.array([3], dtype=np.int32))
    wanted = [face.InferRequestedOutput("text_output")]
    answer = client.infer("demo", [prompts(face, "ab"), most], outputs=wanted)
    assert 1 <= len(said(answer)[0]) <= 3
    assert answer.as_numpy("finish_reason") is None


def test_json_without_binary_tensors(url: str) -> None:
    face: Any = FACES["http"]
    asked = prompts(face, "ab", binary_data=False)
    wanted = [face.InferRequestedOutput("text_output", binary_data=False)]
    with face.InferenceServerClient(url.removeprefix("http://")) as client:
        answer = client.infer("demo", [asked], outputs=wanted, parameters=GREEDY)
        assert isinstance(answer.as_numpy("text_output")[0], str)


def test_refusals(face: ModuleType, client: Any) -> None:
    for model, inputs, parameters, words in (
        ("other", [prompts(face, "a")], {}, "does not exist"),
        ("demo", [prompts(face, "a")], {"tempratur": 1}, "tempratur"),
        ("demo", [prompts(face, "a")], {"max_tokens": -1}, "max_tokens"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            client.infer(model, inputs, parameters=parameters)


def test_a_stream_and_leaving_it(
    abandoned: AbstractContextManager[None], busy: Callable[[], None]
) -> None:
    face: Any = FACES["grpc"]
    news: queue.Queue[Any] = queue.Queue()
    with face.InferenceServerClient(os.environ["TIDEMILL_GRPC"]) as client:
        long = GREEDY | {"max_tokens": 500, "ignore_eos": True}
        whole = said(client.infer("demo", [prompts(face, ASK)], parameters=long))[0]
        client.start_stream(lambda result, error: news.put((result, error)))
        client.async_stream_infer(
            "demo", [prompts(face, ASK)], parameters=long, enable_empty_final_response=True
        )
        pieces = []
        while True:
            result, error = news.get(timeout=60)
            assert error is None, error
            answer = result.get_response()
            if answer.parameters["triton_final_response"].bool_param:
                break
            pieces += said(result)
        assert "".join(pieces) == whole
        assert len(pieces) > 1, "a slow reader gets several tokens as one, but not all of them"
        client.async_stream_infer("demo", [prompts(face, ASK)], parameters={"tempratur": 1})
        result, error = news.get(timeout=60)
        assert "tempratur" in str(error)
        with abandoned:
            endless = {"max_tokens": 1800, "ignore_eos": True}
            client.async_stream_infer("demo", [prompts(face, ASK)], parameters=endless)
            busy()
            client.stop_stream(cancel_requests=True)
