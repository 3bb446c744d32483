"""What a classifier says of texts, over real processes, against transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from tests.e2e.real_stack import Stack, free_port, frontend, running
from tests.models.encoders import write, write_tokenizer
from tests.waiting import http_client
from tidemill import LLM
from tidemill.runtime.errors import InvalidRequest, Unsupported

TEXTS = ["the sea is calm", "x", "reverse harbour"]
NAMES = {0: "calm", 1: "rough", 2: "wild"}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory):
    """A folder, transformers' model of it, and its tokenizer."""
    folder = tmp_path_factory.mktemp("roberta")
    model = write(
        folder,
        "XLMRobertaForSequenceClassification",
        num_labels=3,
        id2label=NAMES,
        label2id={name: number for number, name in NAMES.items()},
        pad_token_id=0,
    )
    return folder, model, write_tokenizer(folder)


@pytest.fixture(scope="module")
def served(classifier, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    logs, port = tmp_path_factory.mktemp("stack"), free_port()
    flags = (f"--engine-port={port}", "--drain-timeout-s=1")
    with (
        running(logs, "engine", str(classifier[0]), *flags),
        frontend(logs, port, "--served-model-name=sea") as stack,
    ):
        stack.wait_ready()
        yield stack


async def asked(stack: Stack, path: str = "/classify", **body: object) -> httpx.Response:
    async with http_client(stack.url) as http:
        return await http.post(path, json=body)


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_probabilities_and_labels_are_those_of_transformers(
    served: Stack, classifier, path: str
) -> None:
    _, model, tokenizer = classifier
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    with torch.no_grad():
        wanted = [model(torch.tensor([one])).logits[0].softmax(-1).numpy() for one in ids]
    for given in (TEXTS, ids):
        response = await asked(served, path, model="sea", input=given)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["model"] == "sea"
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert [one["index"] for one in answer["data"]] == [0, 1, 2]
        for one, probs in zip(answer["data"], wanted, strict=True):
            np.testing.assert_allclose(one["probs"], probs, atol=1e-5)
            assert one["label"] == NAMES[int(probs.argmax())]
            assert one["num_classes"] == 3
    (alone,) = (await asked(served, path, input=TEXTS[0])).json()["data"]
    np.testing.assert_allclose(alone["probs"], wanted[0], atol=1e-5)


def test_offline_it_says_the_same(classifier, tmp_path: Path, monkeypatch) -> None:
    folder, model, tokenizer = classifier
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    with torch.no_grad():
        wanted = [model(torch.tensor([one])).logits[0].softmax(-1).numpy() for one in ids]
    llm = LLM(str(folder))
    for given in (TEXTS, ids):
        found = llm.classify(given)
        assert [one.prompt_token_ids for one in found] == ids
        for one, probs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one.probs, probs, atol=1e-5)
            assert one.label == NAMES[int(probs.argmax())]
    (cut,) = llm.classify("a " * 100, truncate_prompt_tokens=-1)
    assert len(cut.prompt_token_ids) == llm.facts.max_model_len
    with pytest.raises(InvalidRequest, match="context length"):
        llm.classify("a " * 100)

    # Without a tokenizer nobody knows names; least of all the folder that we are in.
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    monkeypatch.chdir(folder)
    (unnamed,) = LLM(str(bare), skip_tokenizer_init=True).classify([ids[0]])
    assert unnamed.label == f"LABEL_{int(wanted[0].argmax())}"


def test_names_may_be_said_over_the_config(classifier) -> None:
    folder, _, _ = classifier
    (plain,) = LLM(str(folder)).classify(TEXTS[:1])
    best = plain.probs.index(max(plain.probs))
    for said, label in (({best: "mine"}, "mine"), ({best + 1: "mine"}, NAMES[best])):
        over = {"id2label": {str(number): name for number, name in said.items()}}
        (found,) = LLM(str(folder), hf_overrides=over).classify(TEXTS[:1])
        assert (found.label, found.probs) == (label, plain.probs)


def test_a_model_that_generates_has_no_labels() -> None:
    with pytest.raises(Unsupported, match="no classification head; ask for embeddings"):
        LLM("demo").classify("x")


async def test_what_cannot_be_is_named(served: Stack, stack: Stack) -> None:
    for body, param in (
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "activation": False}, "activation"),
        ({"input": "a " * 100}, "input"),
        ({"input": "a", "model": "lake"}, "model"),
    ):
        answer = await asked(served, **body)
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"] == param
    generator = await asked(stack, input="a")
    assert generator.status_code == 400
    assert "does not serve classify" in generator.json()["error"]["message"]
