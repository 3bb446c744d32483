"""An LLM that cannot be made leaves nothing behind: there is no object to close. One that was made
refuses by name what no call takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_service.models.decoder import Decoder
from tidemill import LLM, BeamSearchParams, SamplingParams
from tidemill.runtime.errors import FailedPrecondition, InvalidRequest
from tidemill.sampling_params import StructuredOutputsParams


def test_a_tokenizer_that_cannot_be_read_ends_the_ranks_and_frees_the_model(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    size = {"max_model_len": 64, "num_pages": 16, "tensor_parallel_size": 2}
    with pytest.raises(FailedPrecondition) as refused:
        LLM("demo", tokenizer=str(tmp_path), **size)
    assert refused.value.__traceback__ is not None, "which holds what was begun, as a shell does"
    gc.collect()
    assert not [one for one in gc.get_objects() if issubclass(type(one), Decoder)]
    with LLM("demo", **size) as llm:
        assert [one for one in gc.get_objects() if issubclass(type(one), Decoder)], "the control"
        assert llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids


BEAMS = BeamSearchParams(beam_width=2, max_tokens=4)


def test_parameters_of_another_kind_are_refused_by_name() -> None:
    """They failed on an attribute that they do not have, deep in the reading of a prompt."""
    wrong: tuple[tuple[Any, str, str], ...] = (
        ({"temperature": 0.0}, "sampling_params", "of type dict; pass SamplingParams"),
        ("greedy", "sampling_params", "of type str"),
        (3, "sampling_params", "of type int"),
        (BEAMS, "sampling_params", "LLM.beam_search takes BeamSearchParams"),
        ([BEAMS], "sampling_params[0]", "LLM.beam_search takes BeamSearchParams"),
        ([{"temperature": 0.0}], "sampling_params[0]", "of type dict"),
    )
    with LLM("demo", max_model_len=64, num_pages=16) as llm:
        for value, name, words in wrong:
            for call in (llm.generate, llm.chat):
                with pytest.raises(InvalidRequest) as refused:
                    call([{"role": "user", "content": "a"}], value, use_tqdm=False)
                assert refused.value.param == name
                assert words in refused.value.message
        for mask in ([True, False], [[3, False]], {"prompt_token_ids": [True]}):
            with pytest.raises(InvalidRequest, match="of type bool; pass token ids"):
                llm.generate(mask, use_tqdm=False)  # type: ignore[arg-type]
        for wrong_input in ([True], [[3, False]], ["a", 3], [b"a"]):
            with pytest.raises(InvalidRequest, match=r"of type (bool|int|bytes); pass"):
                llm.embed(wrong_input)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="of type dict"):
            llm.add_request("a", {"temperature": 0.0})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=r"LLM\.generate takes SamplingParams"):
            llm.beam_search("a", SamplingParams(max_tokens=4))  # type: ignore[arg-type]
        assert llm.generate("a", [None], use_tqdm=False)  # type: ignore[list-item]
        assert llm.beam_search("a", BEAMS)


def test_parts_of_another_kind_are_refused_by_name() -> None:
    """They were errors of Python's, or were taken: a suffix 0 for none, a schema for json_object's
    True, and any prompt for the text of the token ids beside it."""
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(json_object={"a": 1}))  # type: ignore[arg-type]
    chat = [{"role": "user", "content": "a"}]
    with LLM("demo", max_model_len=64, num_pages=16) as llm:
        wrong: tuple[tuple[Callable[[], Any], str, str], ...] = (
            (lambda: llm.generate({"prompt_token_ids": [3], "prompt": 3}), "prompt", "a text or N"),
            (lambda: llm.generate({"prompt": "a", "suffix": 0}), "suffix", "must be a text"),
            (lambda: llm.generate({"prompt": "a", "suffix": []}), "suffix", "must be a text"),
            (lambda: llm.generate("a", asked), "structured_outputs.json_object", "given as json"),
            (lambda: llm.chat(chat, tools=3), "tools", "list"),
            (lambda: llm.chat(chat, tools={}), "tools", "list"),
            (lambda: llm.chat(chat, tools=""), "tools", "list"),
            (lambda: llm.get_output([]), "request_id", "no request"),  # type: ignore[arg-type]
        )
        for call, name, words in wrong:
            with pytest.raises(InvalidRequest, match=words) as refused:
                call()
            assert refused.value.param == name
        given = {"prompt_token_ids": [97], "prompt": "a", "suffix": None}
        assert llm.generate(given, use_tqdm=False)[0].prompt == "a"
