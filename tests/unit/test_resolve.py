"""Defaults by device and model, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine_service.config import EngineConfig
from engine_service.core.step import FULL
from engine_service.resolve import resolve
from tidemill.runtime.errors import InvalidRequest


def run(
    device: str = "cpu",
    *,
    block: int = 1,
    length: int = 1000,
    vocab: int = 1000,
    hidden: int = 4096,
    **flags,
):
    traits = SimpleNamespace(
        mask_block=block, max_model_len=length, vocab_size=vocab, hidden_size=hidden
    )
    return resolve(EngineConfig(**flags), traits, torch.device(device))


@pytest.mark.parametrize(
    ("device", "block", "page_size", "rows", "tokens", "logits", "width"),
    [
        ("cpu", 1, 16, 64, 1024, 64, 1008),
        ("cuda", 1, 64, 256, 8192, 256, 1024),
        ("cpu", 16, 16, 64, 1024, 1024, 1008),
        ("cpu", 4, 16, 64, 1024, 256, 1008),
        ("cpu", 32, 16, 64, 2048, 2048, 1024),
        ("cuda", 32, 64, 256, 8192, 8192, 1024),
        ("cpu", 24, 24, 64, 1536, 1536, 1008),
    ],
)
def test_defaults(device, block, page_size, rows, tokens, logits, width):
    got = run(device, block=block)
    assert got.page_size == page_size
    assert got.max_rows == rows
    assert got.token_budget == tokens
    assert got.logit_budget == logits
    assert got.table_width == width
    assert got.max_model_len == 1000
    assert len(got.reasons) == 5


def test_a_model_that_sees_everything_needs_its_whole_canvas_in_one_step():
    got = run(block=FULL, length=4096)
    assert (got.page_size, got.table_width, got.token_budget) == (16, 4096, 4096)
    assert got.logit_budget == 64 * 32
    assert run("cuda", block=FULL, length=4096).token_budget == 8192


@pytest.mark.parametrize(
    ("hidden", "tokens"),
    [(64, 32_768), (1024, 32_768), (1025, 16_384), (1448, 16_384), (1449, 8192), (4096, 8192)],
)
def test_small_models_take_longer_steps_where_launching_takes_longest(hidden: int, tokens: int):
    assert run("cuda", hidden=hidden).token_budget == tokens
    assert run("cuda", hidden=hidden, token_budget=70).token_budget == 70
    assert run("cpu", hidden=hidden).token_budget == 1024


def test_chosen_values_stay_and_need_no_reason():
    got = run(page_size=8, max_rows=3, token_budget=70, logit_budget=5, max_model_len=100)
    sizes = (got.page_size, got.max_rows, got.token_budget, got.logit_budget, got.max_model_len)
    assert sizes == (8, 3, 70, 5, 100)
    assert got.table_width == 104
    assert got.reasons == ()


def test_large_vocabularies_bound_the_logits_in_memory():
    got = run("cuda", block=32, vocab=151_936)
    assert got.logit_budget == 8192
    assert 32 <= got.logit_chunk < 512
    assert got.logit_chunk * 151_936 * 4 <= 256 << 20
    assert run(vocab=1000).logit_chunk == 64


@pytest.mark.parametrize(
    ("flags", "param", "words"),
    [
        ({"page_size": 12, "block": 8}, "page_size", "--page-size 16"),
        ({"page_size": 0}, "page_size", "pass 1 or more"),
        ({"max_model_len": 1001}, "max_model_len", "limit of 1000"),
        ({"max_model_len": 1}, "max_model_len", "pass 2 or more"),
        ({"max_rows": 0}, "max_rows", "one request"),
        ({"token_budget": 15, "block": 16}, "token_budget", "pass 16 or more"),
        ({"logit_budget": 15, "block": 16}, "logit_budget", "one block"),
        ({"kv_connector": "shm"}, "kv_connector", "'shm', .* pass --role prefill or --role decode"),
        ({"kv_transfer_timeout_s": 5.0}, "kv_transfer_timeout_s", "is 5.0, which only engines"),
        ({"kv_tls_ca": "ca.pem"}, "kv_tls_ca", "leave it out"),
        ({"kv_tls_name": "name"}, "kv_tls_name", "leave it out"),
    ],
)
def test_wrong_values_are_refused_with_the_fix(flags, param, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        run(**flags)
    assert caught.value.param == param


@pytest.mark.parametrize("page_size", [4, 8, 16, 32, 48])
def test_divisors_and_multiples_of_the_block_are_fine(page_size):
    assert run(block=16, page_size=page_size).page_size == page_size
