"""An LLM that cannot be made leaves nothing behind: there is no object to close."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from engine_service.models.decoder import Decoder
from tidemill import LLM
from tidemill.runtime.errors import FailedPrecondition


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
