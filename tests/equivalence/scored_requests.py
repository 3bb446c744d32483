"""Requests of which more than tokens is told, or that may not choose every token, through an LLM of
several ranks: log-probabilities, prompts' scores, grammars, penalties, edits and vectors.

`python -m tests.equivalence.scored_requests MODEL NUM_RANKS [NUM_STAGES [FLAGS]]` prints what they
got, as JSON; FLAGS are more fields of the config, as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any
from unittest.mock import patch

from engine_service.ranks import silence
from tests.equivalence.mixed_requests import SIZES
from tidemill import LLM, SamplingParams
from tidemill.sampling_params import StructuredOutputsParams

_WORDS = StructuredOutputsParams(regex="([a-f]{1,3} )*")
_ANY: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "min_p": 0.05, "logprobs": 0},
    {"temperature": 1.1, "top_k": 7, "top_p": 0.9, "n": 2},
    {"temperature": 0.7, "structured_outputs": _WORDS, "logprobs": 1},
    {"temperature": 1.5, "allowed_token_ids": list(range(60, 90)), "min_tokens": 20},
]
_BY_MODEL: dict[str, list[dict[str, Any]]] = {
    "demo": [
        {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1},
        {"temperature": 0.8, "frequency_penalty": 0.7, "prompt_logprobs": 0},
        {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "logprobs": 5},
        {"temperature": 1.2, "logit_bias": {101: 4.0, 116: -3.0}, "stop_token_ids": [32]},
        {"temperature": 1.3, "bad_words": ["e", "th"]},
    ],
    "demo-block": [
        {"temperature": 0.6, "method_params": {"threshold": 0.5, "edit_threshold": 0.6}},
        {"temperature": 0.0, "method_params": {"remasking": "adaptive", "max_parallel": 4}},
        {"temperature": 0.9, "method_params": {"remasking": "origin", "steps": 8}, "logprobs": 2},
    ],
}


def asked(model: str) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, of which some begin alike and some are longer than a step, and what is wanted."""
    rng = random.Random(4)
    prefix = [rng.randrange(97, 123) for _ in range(64)]
    kinds = (_ANY + _BY_MODEL[model]) * 2
    prompts = [
        prefix[: 64 * (number % 3 == 0)]
        + [rng.randrange(97, 123) for _ in range(rng.randint(1, 99))]
        for number in range(len(kinds))
    ]
    params = [
        SamplingParams(max_tokens=rng.randint(22, 40), seed=number, **kind)
        for number, kind in enumerate(kinds)
    ]
    return prompts, params


# A busy machine may starve a rank for seconds, which says nothing about its tokens.
@patch.object(silence, "SERVING_S", 60.0)
def main(model: str, num_ranks: int, num_stages: int = 1, **flags: Any) -> None:
    grid = {
        "tensor_parallel_size": num_ranks // num_stages,
        "pipeline_parallel_size": num_stages,
    }
    llm = LLM(model, **{**SIZES, "num_pages": 60, **grid, **flags})
    prompts, params = asked(model)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    vectors = [one.embedding for one in llm.embed(prompts)]
    llm.close()
    choices = [one for output in outputs for one in output.outputs]
    scored = [one.logprobs for one in choices] + [output.prompt_logprobs for output in outputs]
    entries = [entry for line in scored for entry in line or () if entry]
    found = {
        "tokens": [[one.token_ids, one.finish_reason] for one in choices],
        "ids": [[[token, one.rank] for token, one in entry.items()] for entry in entries],
        "values": [one.logprob for entry in entries for one in entry.values()],
        "vectors": vectors,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    sizes = [int(word) for word in sys.argv[2:4]]
    main(sys.argv[1], *sizes, **json.loads("".join(sys.argv[4:]) or "{}"))
