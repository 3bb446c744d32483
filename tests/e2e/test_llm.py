"""tidemill.LLM on the built-in models: the shapes users know, and what happens to wrong values."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from frontend.tokenizer import TextTokenizer
from tidemill.llm import LLM
from tidemill.runtime.errors import InvalidRequest, NotFound, ServiceError, Unsupported
from tidemill.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM("demo", max_model_len=512)


@pytest.fixture(scope="module")
def block() -> LLM:
    return LLM("demo-block", max_model_len=512)


def text_of(llm: LLM, prompt: object, params: SamplingParams = GREEDY) -> str:
    (output,) = llm.generate(prompt, params, use_tqdm=False)  # type: ignore[arg-type]
    return output.outputs[0].text.strip()


@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_answers_are_right_and_in_order(model: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(model.removeprefix("demo-"))
    sums = [(a, b) for a in (3, 41, 507) for b in (9, 88, 123)]
    chats = [[{"role": "user", "content": f"add: {a}+{b}"}] for a, b in sums]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == [str(a + b) for a, b in sums]
    assert {o.outputs[0].finish_reason for o in outputs} == {"stop"}
    assert {o.outputs[0].stop_reason for o in outputs} == {None}
    assert not llm.has_unfinished_requests


def test_prompt_forms_agree(demo: LLM) -> None:
    text = "add: 12+34 ="
    ids = demo.generate(text, GREEDY, use_tqdm=False)[0].prompt_token_ids
    answers = {text_of(demo, form) for form in (text, ids, {"prompt": text}, [text], [ids])}
    assert answers == {"46"}
    assert text_of(demo, {"prompt_token_ids": ids}) == "46"


def test_block_diffusion_commits_several_tokens_per_forward(block: LLM) -> None:
    (output,) = block.chat(
        [{"role": "user", "content": "repeat: tide n=5"}], GREEDY, use_tqdm=False
    )
    assert output.outputs[0].text == "tide tide tide tide tide"
    assert output.usage.output_tokens / output.usage.denoise_steps > 3


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        (5, "prompts is 5, of type int; pass one or a list of them: a text, token ids, or"),
        (b"ab", "prompts is b'ab', of type bytes"),
        ([None], "prompt is None, of type NoneType; pass a text, token ids, or a dictionary"),
        (["ab", 5], "prompt is 5, of type int"),
        ({"prompt_token_ids": 5}, "prompt is 5, of type int"),
    ],
)
def test_prompts_of_another_kind_are_named(demo: LLM, prompts: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as refused:
        demo.generate(prompts, GREEDY)
    assert refused.value.param in ("prompt", "prompts")


def test_one_params_per_prompt_and_length(demo: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    outputs = demo.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5, 9]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
    with pytest.raises(InvalidRequest, match="3 prompts but 2 SamplingParams"):
        demo.generate(["a", "b", "c"], params[:2], use_tqdm=False)


def test_choices_differ_and_repeat_with_their_seed(demo: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, n=3, seed=7, ignore_eos=True)
    first, second = (demo.generate("To be", params, use_tqdm=False)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3


def test_stop_string_is_cut_and_ends_the_request(demo: LLM) -> None:
    chat = [{"role": "user", "content": "count: 3 n=6"}]
    whole = demo.chat(chat, GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = whole[3:5]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=stop)
    cut = demo.chat(chat, params, use_tqdm=False)[0].outputs[0]
    assert cut.text == whole[: whole.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = SamplingParams(
        temperature=0.0, max_tokens=24, stop=[stop], include_stop_str_in_output=True
    )
    assert demo.chat(chat, kept, use_tqdm=False)[0].outputs[0].text.endswith(stop)
    assert not demo.has_unfinished_requests


def test_min_tokens_protects_from_stop_strings(demo: LLM) -> None:
    chat = [{"role": "user", "content": "count: 3 n=6"}]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=" 4", min_tokens=5)
    text = demo.chat(chat, params, use_tqdm=False)[0].outputs[0].text
    assert text.startswith("3 4 5")


def test_tokens_that_end_a_text_are_not_part_of_it(demo: LLM) -> None:
    chat = [{"role": "user", "content": "count: 3 n=6"}]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=[ord("5")])
    ended = demo.chat(chat, params, use_tqdm=False)[0].outputs[0]
    assert (ended.text, ended.stop_reason, ended.token_ids[-1]) == ("3 4 ", ord("5"), ord("5"))
    shown = SamplingParams(temperature=0.0, max_tokens=24, skip_special_tokens=False)
    assert demo.chat(chat, shown, use_tqdm=False)[0].outputs[0].text == "3 4 5 6 7 8"


def test_logprobs_are_those_of_the_chosen_tokens(demo: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, prompt_logprobs=0)
    (output,) = demo.generate("add: 1+2 =", params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for token_id, table in zip(completion.token_ids, completion.logprobs, strict=True):
        assert table[token_id].rank == 1
        assert table[token_id].logprob == max(entry.logprob for entry in table.values()) <= 0
    total = sum(
        t[i].logprob for i, t in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert math.isclose(completion.cumulative_logprob or 0, total, abs_tol=1e-5)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_callers_may_drive_the_loop(demo: LLM) -> None:
    ids = [demo.add_request(f"add: {n}+{n} =", GREEDY) for n in (5, 21)]
    assert demo.get_output(ids[0]) is None
    finished = []
    while demo.has_unfinished_requests:
        finished += demo.step()
    assert sorted(output.request_id for output in finished) == sorted(ids)
    texts = [demo.get_output(request_id).outputs[0].text.strip() for request_id in ids]  # type: ignore[union-attr]
    assert texts == ["10", "42"]
    with pytest.raises(InvalidRequest, match="no request"):
        demo.get_output(ids[0])
    assert not demo._requests, "nothing of what was returned is kept"


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(temperature=-1.0), "temperature"),
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(n=0), "n"),
        (SamplingParams(max_tokens=-3), "max_tokens"),
        (SamplingParams(max_tokens=0), "max_tokens"),
        (SamplingParams(method="sideways"), "method"),
        (SamplingParams(method_params={"speed": 3}), "speed"),
    ],
)
def test_wrong_values_name_their_parameter(demo: LLM, params: SamplingParams, param: str) -> None:
    with pytest.raises(ServiceError) as caught:
        demo.generate(["fine", "also fine"], [GREEDY, params], use_tqdm=False)
    assert param in f"{caught.value.param} {caught.value.message}"
    demo.step()
    assert not demo.has_unfinished_requests, "the fine prompt was taken back"
    assert text_of(demo, "add: 2+2 =") == "4"


def test_unknown_keyword_is_an_error() -> None:
    with pytest.raises(TypeError, match="did you mean 'page_size'"):
        LLM("demo", page_sise=32)


def test_what_cannot_work_yet_says_so(block: LLM) -> None:
    with pytest.raises(Unsupported, match="tensor_parallel_size is 2, pass 1"):
        LLM("demo", tensor_parallel_size=2, executor="simulated")
    with pytest.raises(Unsupported, match="pipeline_parallel_size is 2, pass 1"):
        LLM("demo", pipeline_parallel_size=2, executor="simulated")
    with pytest.raises(Unsupported, match="presence_penalty"):
        block.generate("x", SamplingParams(presence_penalty=1.0), use_tqdm=False)


def test_unknown_model_says_what_to_do() -> None:
    with pytest.raises((NotFound, ServiceError), match="no-such-folder"):
        LLM("./no-such-folder/model")


def test_the_tokenizer_speaks_transformers(demo: LLM) -> None:
    """What scripts for other engines do with it gives the prompts that `chat` and `generate` make;
    transformers' own reading of the folder says the same."""
    tokenizer = demo.get_tokenizer()
    talk = [{"role": "user", "content": "add: 12+34"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    (chatted,) = demo.chat(talk, GREEDY, use_tqdm=False)
    assert tokenizer.encode(text, add_special_tokens=False) == chatted.prompt_token_ids
    assert text_of(demo, text) == "46"
    assert tokenizer.decode(chatted.outputs[0].token_ids, skip_special_tokens=True) == "46"

    theirs = PreTrainedTokenizerFast.from_pretrained(demo.facts.tokenizer_dir)
    assert tokenizer.special_tokens_map == theirs.special_tokens_map != {}
    assert (tokenizer.eos_token_id, len(tokenizer)) == (theirs.eos_token_id, len(theirs))
    assert tokenizer.decode([257, 65], skip_special_tokens=True) == "A"
    assert tokenizer.model_max_length == 512

    tokenizer("x " * 2000, truncation=True, padding="max_length")
    assert len(demo.generate("x" * 300, GREEDY, False)[0].prompt_token_ids) == 300, "it is a copy"


def test_names_of_tokens_that_are_not_added_split_no_text(tmp_path: Path) -> None:
    """They are in the vocabulary, or nowhere; templates see them all the same."""
    vocab = {"a": 0, "<": 1, "s": 2, ">": 3, "<s>": 4}
    made = Tokenizer(BPE(vocab=vocab, merges=[]))
    made.add_special_tokens(["<e>"])
    made.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "<e>", "pad_token": "<p>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    ours = TextTokenizer(tmp_path)
    theirs = ours.as_transformers(64)
    assert theirs.special_tokens_map == names
    assert (len(theirs), theirs.bos_token_id, theirs.eos_token_id) == (6, 4, 5)
    wanted = [0, 1, 2, 3, 5]
    assert ours.encode("a<s><e>", add_special_tokens=False) == wanted
    assert theirs.encode("a<s><e>", add_special_tokens=False) == wanted
    split = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    assert split.encode("a<s><e>", add_special_tokens=False) != wanted, "the control"


def test_without_a_tokenizer_prompts_are_ids() -> None:
    llm = LLM("demo", skip_tokenizer_init=True, max_model_len=64)
    (output,) = llm.generate([[65, 66]], SamplingParams(max_tokens=3, ignore_eos=True), False)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
        llm.generate("text", use_tqdm=False)
    with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
        llm.get_tokenizer()
    with pytest.raises(InvalidRequest, match="stop strings"):
        llm.generate([[65]], SamplingParams(stop="x"), use_tqdm=False)
