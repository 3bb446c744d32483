"""Every attention library gives the reference's tokens in float32, and its logits in bfloat16
within what that format rounds; float32 is IEEE float32. Every bound has a control that breaks it.

Two ways of rounding to bfloat16 part ways layer by layer, whatever they computed before. So the
libraries are compared twice: with nothing but attention in bfloat16, where 1e-2 is theirs alone,
and with all of the model in bfloat16, where nobody may be further off than the format is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_service.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    LayerCache,
)
from engine_service.attention.select import create_backend, rank_backends, read_capability
from engine_service.config import EngineConfig
from engine_service.models.base import CausalModel
from engine_service.worker.checkpoint import fetch_checkpoint
from engine_service.worker.weights import load_model
from tests.models.checkpoints import CASES, SIZES, write
from tests.models.paged import PagedRunner, PageTable, causal, poisoned
from tidemill.llm import LLM
from tidemill.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BACKEND_BOUND = 1e-2
"""bfloat16: of the largest logit, between two attention libraries over the same weights."""
FORMAT_FACTOR = 1.5
"""A model in bfloat16: how many times its distance from float32 two libraries may be apart."""
NUM_PROMPTS = 12
"""Over which that is taken on average."""
KERNEL_BOUND = 3e-2
"""bfloat16: of the largest logit, against float32 over the same weights."""
EXACT_BOUND = 2e-5
"""float32: of the largest logit, against float64; TF32 is a hundred times as far."""
PAGE_SIZE = 64
PROMPTS, STEPS = (160, 70), 8
WIDE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of Qwen3's shape, one with a window, without weights."""
    folder = tmp_path_factory.mktemp("wide")
    layers = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    windowed = {"use_sliding_window": True, "sliding_window": 100, "layer_types": layers}
    (folder / "config.json").write_text(json.dumps(WIDE | windowed))
    return folder


def load(model: str | Path, dtype: torch.dtype, device: torch.device = CUDA) -> CausalModel:
    """A built-in model, or a random one of a folder's shape."""
    load_format = "dummy" if isinstance(model, Path) else "auto"
    config = EngineConfig(model=str(model), load_format=load_format)
    checkpoint = fetch_checkpoint(config, lambda *_: None)
    return load_model(config, checkpoint, device=device, dtype=dtype, report=lambda *_: None)


def copy_of(
    model: CausalModel, source: str | Path, dtype: torch.dtype, device: torch.device = CUDA
) -> CausalModel:
    """The same weights in another format or place; `source` is what `model` was loaded from."""
    made = load(source, dtype, device)
    with torch.no_grad():
        for own, other in zip(made.parameters(), model.parameters(), strict=True):
            own.copy_(other)
    return made


def runner_of(model: CausalModel, backend: str, seed: int) -> PagedRunner:
    device = next(model.parameters()).device
    table = PageTable(len(PROMPTS), max(PROMPTS) + 32 * (STEPS + 1), PAGE_SIZE, seed, device)
    return PagedRunner(model, backend, table)


def all_logits(runner: PagedRunner, seed: int) -> torch.Tensor:
    """[T, V] float32 on the CPU: two prompts in one step, then as many steps as STEPS says of one
    block per row. The ids depend on the seed alone."""
    traits, device = runner.model.traits, runner.table.device
    draw = torch.Generator().manual_seed(seed)
    unit = traits.mask_block
    starts = [-(-length // unit) * unit for length in PROMPTS]
    rows = [
        torch.randint(0, min(traits.vocab_size, 256), (start + STEPS * unit,), generator=draw)
        for start in starts
    ]
    rows = [row.to(device) for row in rows]
    steps = [[causal(row, 0, start, unit) for row, start in enumerate(starts)]]
    steps += [
        [causal(row, start + n * unit, start + (n + 1) * unit, unit)
         for row, start in enumerate(starts)]
        for n in range(STEPS)
    ]  # fmt: skip
    return torch.cat([part.float().cpu() for step in steps for part in runner.logits(rows, step)])


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest, as a part of the largest logit; NaN stays NaN."""
    return float((got - want).abs().max() / want.abs().max())


def libraries(model: CausalModel, dtype: torch.dtype) -> list[str]:
    """All that can serve the model here, FlashAttention included where it is installed."""
    traits = model.traits
    shape = AttentionShape(
        num_heads=traits.num_heads,
        num_kv_heads=traits.num_kv_heads,
        head_dim=traits.head_dim,
        page_size=PAGE_SIZE,
        dtype=dtype,
    )
    return [choice.name for choice in rank_backends("auto", read_capability(shape, CUDA))]


class Rounded(AttentionBackend):
    """A library of bfloat16 in a model of float32: it rounds what goes in and widens what comes
    out."""

    def __init__(self, library: AttentionBackend) -> None:
        super().__init__(library.shape)
        self._library = library

    def empty_cache(self, num_pages: int, device: torch.device) -> LayerCache:
        return self._library.empty_cache(num_pages, device)

    def plan(self, batch: AttentionBatch, *, window: int | None) -> object:
        return self._library.plan(batch, window=window)

    def store(self, k_TKD, v_TKD, **rest) -> None:
        self._library.store(k_TKD.bfloat16(), v_TKD.bfloat16(), **rest)

    def attend(self, q_THD, **rest) -> torch.Tensor:
        return self._library.attend(q_THD.bfloat16(), **rest).float()


def rounded(model: CausalModel, backend: str, seed: int) -> PagedRunner:
    """A runner of a float32 model with attention, cache included, in bfloat16."""
    runner = runner_of(model, "reference", seed)
    shape = replace(runner.backend.shape, dtype=torch.bfloat16)
    runner.backend = Rounded(create_backend(backend, shape))
    table = runner.table
    runner.caches = [
        poisoned(runner.backend.empty_cache(table.num_pages, table.device)) for _ in runner.caches
    ]
    return runner


def scaled(runner: PagedRunner, factor: float) -> PagedRunner:
    """The same runner with a wrong softmax scale."""
    attend = runner.backend.attend
    runner.backend.attend = lambda q, *, scale, **rest: attend(q, scale=factor * scale, **rest)
    return runner


def longer_window(runner: PagedRunner) -> PagedRunner:
    """The same runner with every sliding window one key too long."""
    plan = runner.backend.plan
    runner.backend.plan = lambda batch, *, window: plan(batch, window=window and window + 1)
    return runner


@pytest.mark.parametrize("model", ["demo", "demo-block", "wide"])
def test_attention_in_bfloat16_equals_the_references(
    model: str, wide: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """Everything around attention is float32: what differs is the library's doing."""
    ours = load(wide if model == "wide" else model, torch.float32)
    want = all_logits(rounded(ours, "reference", seed), seed)
    names = libraries(ours, torch.bfloat16)
    assert {"triton", "sdpa"} <= set(names)
    for name in names:
        off = difference(all_logits(rounded(ours, name, seed), seed), want)
        record_property(f"{model} {name}", off)
        assert off <= BACKEND_BOUND, f"{name} is off by {off}"


@pytest.mark.parametrize("mistake", [lambda made: scaled(made, 1.05), longer_window])
def test_control_a_small_mistake_exceeds_the_bound(
    mistake: Callable[[PagedRunner], PagedRunner], wide: Path, seed: int
) -> None:
    ours = load(wide, torch.float32)
    want = all_logits(rounded(ours, "reference", seed), seed)
    for name in libraries(ours, torch.bfloat16):
        got = all_logits(mistake(rounded(ours, name, seed)), seed)
        assert difference(got, want) > BACKEND_BOUND, name


@pytest.mark.parametrize("model", ["demo", "demo-block", "wide"])
def test_a_bfloat16_model_differs_by_no_more_than_its_format(
    model: str, wide: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """On average over prompts: of one, the format's own distance is 0.008 to 0.022 by luck."""
    source = wide if model == "wide" else model
    ours = load(source, torch.bfloat16)
    exact = copy_of(ours, source, torch.float32)
    off: dict[str, list[float]] = {
        name: [] for name in ("format", *libraries(ours, torch.bfloat16))
    }
    for prompts in range(seed, seed + NUM_PROMPTS):
        want = all_logits(runner_of(ours, "reference", prompts), prompts)
        for name, found in off.items():
            runner = (
                runner_of(exact, "reference", prompts)
                if name == "format"
                else runner_of(ours, name, prompts)
            )
            found.append(difference(all_logits(runner, prompts), want))
    mean = {name: sum(found) / len(found) for name, found in off.items()}
    record_property(model, mean)
    bound = max(BACKEND_BOUND, FORMAT_FACTOR * mean["format"])
    assert max(mean.values()) <= bound, mean


@pytest.mark.parametrize("model", ["demo", "demo-block", "wide"])
def test_bfloat16_kernels_stay_near_float32(
    model: str, wide: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """And no further from it than torch's operators on the CPU, which is too slow for the last."""
    source = wide if model == "wide" else model
    ours = load(source, torch.bfloat16)
    exact = copy_of(ours, source, torch.float32)
    want = all_logits(runner_of(exact, "reference", seed), seed)
    off = difference(all_logits(runner_of(ours, "triton", seed), seed), want)
    record_property(f"{model} kernels", off)
    assert off <= KERNEL_BOUND
    if model != "wide":
        plain = copy_of(ours, source, torch.bfloat16, CPU)
        off_plain = difference(all_logits(runner_of(plain, "reference", seed), seed), want)
        record_property(f"{model} plain", off_plain)
        assert off <= 2 * off_plain


def test_float32_is_ieee(wide: Path, seed: int) -> None:
    """Products of float32 keep all of its bits in the engine, whichever library computes them."""
    LLM("demo", device="cuda", dtype="float32", max_model_len=256, num_pages=64, max_rows=2)
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.allow_tf32 is False
    ours = load(wide, torch.float32)
    exact = copy_of(ours, wide, torch.float64, CPU)
    want = all_logits(runner_of(exact, "reference", seed), seed)
    for name in libraries(ours, torch.float32):
        off = difference(all_logits(runner_of(ours, name, seed), seed), want)
        assert off <= EXACT_BOUND, f"{name} is off by {off}"


@pytest.mark.filterwarnings("ignore:Please use the new API settings")
def test_control_tf32_shows(wide: Path, seed: int) -> None:
    ours = load(wide, torch.float32)
    want = all_logits(runner_of(ours, "triton", seed), seed)
    torch.set_float32_matmul_precision("high")
    try:
        got = all_logits(runner_of(ours, "triton", seed), seed)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert difference(got, want) > 5 * EXACT_BOUND


def tokens(model: str | Path, backend: str, seed: int) -> list[list[int]]:
    """Of greedy and of seeded requests; a reference that is slow gets small ones."""
    draw = random.Random(seed)
    lengths = (1, 5, 40, 90, 130, 17, 64, 3)
    ids = range(32, 120) if isinstance(model, str) else range(SIZES["vocab_size"])
    prompts = [[draw.choice(ids) for _ in range(length)] for length in lengths]
    hot = 0.8 if isinstance(model, str) else 6.0
    params = [
        SamplingParams(
            temperature=(0.0, hot)[n % 2], seed=n, top_k=(0, 20)[n % 4 == 3], max_tokens=24,
            ignore_eos=True,
        )
        for n in range(len(prompts))
    ]  # fmt: skip
    llm = LLM(
        str(model), device="cuda", dtype="float32", attention_backend=backend, max_rows=6,
        max_model_len=256, num_pages=64, skip_tokenizer_init=True,
    )  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def check_tokens(model: str | Path, seed: int) -> None:
    want = tokens(model, "reference", seed)
    assert tokens(model, "reference", seed + 1) != want, "the control: other prompts"
    for backend in ("triton", "sdpa"):
        assert tokens(model, backend, seed) == want, backend


@pytest.mark.parametrize("model", ["demo", "demo-block"])
def test_float32_tokens_of_the_demos(model: str, seed: int) -> None:
    check_tokens(model, seed)


@pytest.mark.parametrize("number", range(2))
def test_float32_tokens_of_random_architectures(number: int, tmp_path: Path, seed: int) -> None:
    case = random.Random(seed).sample(CASES, 2)[number]
    print(case.name)
    write(case, tmp_path, seed)
    check_tokens(tmp_path, seed)
