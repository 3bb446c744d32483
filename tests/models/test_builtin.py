"""The models that come with the package load, and compute what transformers computes with them."""

import json

import pytest
import torch
import transformers

from benchmarks.demo_models.vocabulary import CHAT_TEMPLATE, SPECIAL_TOKENS, encode_chat
from engine_service.model_folder import builtin_models
from frontend.parsers.registry import AUTO, output_format
from frontend.parsers.tools.hermes import HermesParser
from tests.models.checkpoints import load
from tests.models.paged import PagedRunner, PageTable, causal


@pytest.mark.parametrize("name", ["demo", "demo-block"])
def test_logits_equal_transformers(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    folder = builtin_models()[name]
    ours = load(folder)
    block = ours.traits.mask_block
    config = transformers.AutoConfig.for_model("qwen3")
    config.update(transformers.PretrainedConfig.get_config_dict(folder)[0] | {"dtype": "float32"})
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(folder, config=config).eval()
    ids = torch.randint(0, ours.traits.vocab_size, (64,))
    of_block = torch.arange(64) // block
    hidden = of_block[:, None] < of_block[None, :]
    mask = torch.zeros(64, 64).masked_fill(hidden, float("-inf"))[None, None]
    with torch.inference_mode():
        want = theirs(ids[None], attention_mask=mask).logits[0]
    runner = PagedRunner(ours, "sdpa", PageTable(1, 64, 16, seed))
    (got,) = runner.logits([ids], [causal(0, 0, 64, block)])
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("name", ["demo", "demo-block", "demo-canvas"])
def test_template_is_that_of_training_and_tells_of_tools(name: str) -> None:
    folder = builtin_models()[name]
    assert (
        json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert SPECIAL_TOKENS.items() <= tokenizer.get_vocab().items()
    turns = [("system", "Be brief."), ("user", "hi"), ("assistant", "Hello!"), ("user", "add: 1+2")]
    messages = [{"role": role, "content": text} for role, text in turns]

    def rendered(**more: object) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **more))

    plain = rendered(add_generation_prompt=True)
    assert tokenizer.encode(plain, add_special_tokens=False) == encode_chat(turns)
    function = {"name": "add", "parameters": {"type": "object"}}
    told = rendered(tools=[{"type": "function", "function": function}])
    assert told.startswith(f"<|system|>Be brief.\n<tools>\n{json.dumps(function)}\n</tools>\n")
    assert told.endswith(plain.partition("<|eos|>")[2].removesuffix("<|assistant|>"))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "name": "add"},
    ]
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    answered = "<|user|><tool_response>\n3\n</tool_response><|eos|>"
    assert rendered() == f"{plain}{written}<|eos|>{answered}"
    assert output_format(AUTO, AUTO, CHAT_TEMPLATE).tools is HermesParser
