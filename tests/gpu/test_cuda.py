"""The engine on a CUDA device gives the tokens that it gives on the CPU.

The worker's plain torch path, in one process: no other component differs between the devices.
"""

from pathlib import Path

import pytest
import torch
import transformers

from tests.models.checkpoints import CASES, Case, write
from tidemill.bench.tasks import held_out, is_correct
from tidemill.llm import LLM
from tidemill.outputs import RequestOutput
from tidemill.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=96)


def answers(model: str, count: int, **config: object) -> list[RequestOutput]:
    llm = LLM(model, **config)
    chats = [[{"role": "user", "content": item.prompt}] for item in held_out(count)]
    return llm.chat(chats, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("model", ["demo", "demo-block", "demo-canvas"])
def test_float32_tokens_equal_those_of_the_cpu(model: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu = answers(model, 70, device="cpu", dtype="float32")
    on_cuda = answers(model, 70, device="cuda", dtype="float32")
    assert [o.outputs[0].token_ids for o in on_cuda] == [o.outputs[0].token_ids for o in on_cpu]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", ["demo", "demo-block", "demo-canvas"])
def test_half_formats_keep_the_quality(model: str, dtype: str) -> None:
    outputs = answers(model, 350, device="cuda", dtype=dtype)
    right = sum(
        is_correct(item, output.outputs[0].text)
        for item, output in zip(held_out(350), outputs, strict=True)
    )
    assert right / 350 >= 0.95


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_architecture_generates_what_transformers_does(
    case: Case, tmp_path: Path, seed: int
) -> None:
    theirs = write(case, tmp_path, seed).to("cuda")
    prompts = [torch.randint(0, 320, (length,)).tolist() for length in (30, 17, 1, 44)]
    settings = transformers.GenerationConfig(max_new_tokens=24, do_sample=False, pad_token_id=0)
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = theirs.generate(ids, settings, attention_mask=torch.ones_like(ids))
        want.append(out[0, len(prompt) :].tolist())
    llm = LLM(str(tmp_path), device="cuda", dtype="float32", skip_tokenizer_init=True)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    got = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in got] == want


def test_pool_leaves_the_rest_of_the_memory_alone() -> None:
    llm = LLM("demo", device="cuda", memory_fraction=0.3)
    free, total = torch.cuda.mem_get_info()
    assert total - free <= 0.32 * total
    assert llm.facts.num_pages * llm.facts.page_size > 100_000
    (output,) = llm.chat([{"role": "user", "content": "add: 20+22"}], PARAMS, use_tqdm=False)
    assert output.outputs[0].text == "42"


def test_preemption_changes_nothing() -> None:
    prompts = [list(range(30 + n, 50 + n)) for n in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    outputs = []
    for num_pages in (None, 40):
        llm = LLM("demo-block", device="cuda", dtype="float32", page_size=16, num_pages=num_pages,
                  max_model_len=256)  # fmt: skip
        outputs.append(llm.generate(prompts, params, use_tqdm=False))
    roomy, tight = outputs
    assert [o.outputs[0].token_ids for o in tight] == [o.outputs[0].token_ids for o in roomy]
    assert sum(output.usage.preemptions for output in tight) > 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_no_step_waits_for_the_device_while_it_is_launched(model: str) -> None:
    """A launch that waits would undo the overlap; `collect` alone may wait, on its own event."""
    llm = LLM(model, device="cuda", dtype="bfloat16", max_model_len=256)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=60, ignore_eos=True)
    for number in range(6):
        llm.add_request(list(range(30 + number, 60 + 3 * number)), params)
        llm.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        llm.add_request(list(range(40, 90)), params)
        for _ in range(12):
            llm.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while llm.has_unfinished_requests:
        llm.step()
