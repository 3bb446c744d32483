"""A real worker against transformers: same weights, same tokens, whatever the pages and chunks."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch

from tests.equivalence.worker_driver import MAX_LEN, Asked, generate, make_worker
from tests.models.checkpoints import CASES, SIZES, write

VOCAB = SIZES["vocab_size"]
NAMES = ("qwen3", "qwen2", "llama", "mistral")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder and transformers' model of each case that is asked for, written once."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            case = next(case for case in CASES if case.name == name)
            made[name] = folder, write(case, folder, seed=11)
        return made[name]

    return get


def theirs(model, prompt: list[int], count: int, **options) -> list[int]:
    """transformers' greedy continuation."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    return out[0, len(prompt) :].tolist()


def random_requests(rng: random.Random, count: int, **sampling) -> list[Asked]:
    return [
        Asked(
            prompt=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))],
            count=rng.randint(1, 14),
            sampling=dict(sampling),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_transformers(models, name):
    folder, model = models(name)
    rng = random.Random(1)
    requests = random_requests(rng, 10)
    generate(make_worker(folder), requests, 16, rng)
    for asked in requests:
        assert asked.tokens == theirs(model, asked.prompt, asked.count)
    assert len({tuple(asked.tokens) for asked in requests}) > 5  # prompts matter


@pytest.mark.parametrize(
    ("page_size", "chunk", "logit_budget"), [(1, 3, 1), (4, 1, 8), (16, 7, 2), (32, 100, 8)]
)
def test_pages_chunks_and_logit_pieces_change_nothing(models, page_size, chunk, logit_budget):
    folder, model = models("qwen3")
    rng = random.Random(page_size)
    worker = make_worker(folder, page_size=page_size, logit_budget=logit_budget)
    requests = random_requests(rng, 9, prompt_logprobs=1, logprobs=2)
    generate(worker, requests, chunk, rng)
    for asked in requests:
        assert asked.tokens == theirs(model, asked.prompt, asked.count)
        check_logprobs(model, asked)


def check_logprobs(model, asked: Asked) -> None:
    """Scores of the prompt and of the output are log_softmax of one dense forward."""
    sequence = [*asked.prompt, *asked.tokens]
    with torch.no_grad():
        dense = model(torch.tensor([sequence])).logits[0].log_softmax(-1)
    entries = [*asked.scores, *asked.logprobs]
    assert len(entries) == len(sequence) - 1
    for position, entry in enumerate(entries, start=1):
        row = dense[position - 1]
        assert entry.token_ids[0] == sequence[position]
        expected = row[list(entry.token_ids)]
        torch.testing.assert_close(torch.tensor(entry.logprobs), expected, rtol=1e-3, atol=1e-3)
        assert entry.rank == 1 + int((row > row[sequence[position]]).sum())


def test_reference_attention_gives_the_same_tokens(models):
    folder, model = models("qwen3")
    rng = random.Random(5)
    requests = random_requests(rng, 4)
    generate(make_worker(folder, attention_backend="reference"), requests, 8, rng)
    for asked in requests:
        assert asked.tokens == theirs(model, asked.prompt, asked.count)


def test_repetition_penalty_equals_transformers(models):
    folder, model = models("qwen3")
    rng = random.Random(2)
    requests = random_requests(rng, 6, repetition_penalty=1.7)
    generate(make_worker(folder), requests, 16, rng)
    plain = [theirs(model, asked.prompt, asked.count) for asked in requests]
    for asked in requests:
        assert asked.tokens == theirs(model, asked.prompt, asked.count, repetition_penalty=1.7)
    assert [asked.tokens for asked in requests] != plain  # the penalty matters


def test_samples_do_not_depend_on_batch_rows_pages_or_chunks(models):
    folder, _ = models("qwen3")
    worker = make_worker(folder)

    def ask(seed: int) -> Asked:
        rng = random.Random(seed)
        sampling = {
            "temperature": rng.choice([0.7, 5.0, 20.0]),
            "top_k": rng.choice([0, 40]),
            "top_p": rng.choice([1.0, 0.95]),
            "presence_penalty": rng.choice([0.0, 0.5]),
            "seed": seed,
        }
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        return Asked(prompt=prompt, count=10, sampling=sampling)

    together = [ask(seed) for seed in range(8)]
    generate(worker, together, 5, random.Random(0))
    for seed in range(8):
        alone = ask(seed)
        generate(worker, [alone], 64, random.Random(seed + 100))
        assert alone.tokens == together[seed].tokens
    other = [ask(seed) for seed in range(8)]
    for asked in other:
        asked.sampling["seed"] += 1000
    generate(worker, other, 5, random.Random(0))
    differ = sum(a.tokens != b.tokens for a, b in zip(together, other, strict=True))
    assert differ > 4  # the control: the seed is what matters


def test_a_wrong_page_makes_it_fail(models):
    """Negative control: one page number changed behind the tables' back."""
    folder, model = models("qwen3")
    rng = random.Random(4)
    asked = Asked(prompt=[rng.randrange(VOCAB) for _ in range(40)], count=14)
    worker = make_worker(folder)
    tables = worker._runner._tables
    original, lines = tables.apply, tables.pages.on_device

    def apply(new_rows, page_appends, masks):
        original(new_rows, page_appends, masks)
        if page_appends:
            lines[page_appends[0].row, 0] = lines[page_appends[0].row, 1]

    tables.apply = apply
    generate(worker, [asked], 16, rng)
    assert asked.tokens != theirs(model, asked.prompt, asked.count)


def test_start_up_reports_stages_and_facts(models):
    folder, _ = models("qwen3")
    worker = make_worker(Path(folder), page_size=8)
    facts = worker.facts()
    assert list(facts["stage_seconds"]) == [
        "device",
        "checkpoint",
        "ranks",
        "weights",
        "profile",
        "kv",
        "tables",
        "kernels",
    ]
    assert facts["page_size"] == 8
    assert facts["num_pages"] == worker.limits.num_pages == 8 * MAX_LEN // 8
    assert (facts["dtype"], facts["device"]) == ("float32", "cpu")
    assert facts["methods"] == ("autoregressive",)
