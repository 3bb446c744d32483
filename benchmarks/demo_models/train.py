"""Trains the packaged models, measures them, and writes their folders and a result file.

    python -m benchmarks.demo_models.train

One GPU, a few minutes; README.md beside this has the figures.
"""

import argparse
import datetime
import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.demo_models import corpus, evaluate, export
from benchmarks.demo_models.model import DemoLM, Shape
from benchmarks.demo_models.objectives import (
    Batch,
    autoregressive_loss,
    block_diffusion_loss,
    canvas_loss,
)
from benchmarks.demo_models.trainer import Recipe, Trainer, on_device
from tidemill.bench import tasks

ROOT = Path(__file__).resolve().parents[2]
THRESHOLDS = (0.7, 0.9, 0.95)
DEFAULT_THRESHOLD = 0.9


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the packaged models.")
    parser.add_argument("--out", type=Path, default=ROOT / "tidemill" / "builtin")
    parser.add_argument("--results", type=Path, help="JSON file; default benchmarks/results/..")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--short-pool", type=int, default=1_000_000, help="distinct short rows")
    parser.add_argument("--long-pool", type=int, default=100_000, help="distinct long rows")
    parser.add_argument("--ar-steps", type=int, default=6_500)
    parser.add_argument("--block-steps", type=int, default=8_000)
    parser.add_argument("--canvas-steps", type=int, default=10_000)
    parser.add_argument("--only", choices=("demo-canvas",), help="train this one alone")
    parser.add_argument("--items", type=int, default=2_800, help="held-out items to measure with")
    return parser.parse_args()


def rounded(model: DemoLM) -> DemoLM:
    """A bfloat16 copy, computing in bfloat16: what is shipped is what is measured."""
    copy = DemoLM(model.shape).to(model.model.norm.weight.device, torch.bfloat16)
    copy.load_state_dict(export.rounded_weights(model))
    return copy.eval()


Result = dict[str, dict[str, evaluate.Score]]


def measure_autoregressive(model: DemoLM, items: list[tasks.Item]) -> Result:
    decode = evaluate.decode_greedy
    return {
        "chat": evaluate.measure(model, items, decode, to_prompt=evaluate.chat_prompt),
        "completion": evaluate.measure(model, items, decode, to_prompt=evaluate.completion_prompt),
    }


def measure_diffusion(
    model: DemoLM, decoder: Callable[..., list[evaluate.Reply]], items: list[tasks.Item]
) -> Result:
    result: Result = {}
    for threshold in THRESHOLDS:
        decode = functools.partial(decoder, threshold=threshold)
        name = "chat" if threshold == DEFAULT_THRESHOLD else f"chat, threshold {threshold}"
        result[name] = evaluate.measure(model, items, decode, to_prompt=evaluate.chat_prompt)
    decode = functools.partial(decoder, threshold=DEFAULT_THRESHOLD)
    result["completion"] = evaluate.measure(
        model, items, decode, to_prompt=evaluate.completion_prompt
    )
    return result


def print_table(label: str, result: Result) -> None:
    for form, scores in result.items():
        print(f"\n{label}, {form}")
        print(f"{'task':10}{'items':>7}{'exact match':>20}{'tokens per forward':>24}")
        for name, s in scores.items():
            match = f"{s.exact_match:.4f} ± {s.exact_match_se:.4f}"
            speed = f"{s.tokens_per_forward:.2f} ± {s.tokens_per_forward_se:.2f}"
            print(f"{name:10}{s.items:>7}{match:>20}{speed:>24}", flush=True)


def summary(model: DemoLM, recipe: Recipe, seconds: float, result: Result) -> dict[str, object]:
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_seconds": round(seconds, 1),
        "recipe": asdict(recipe),
        "scores": {
            form: {name: asdict(score) for name, score in scores.items()}
            for form, scores in result.items()
        },
    }


def train_autoregressive(
    args: argparse.Namespace, model: DemoLM, *, short: Batch, long: Batch
) -> dict[str, object]:
    recipe = Recipe(steps=args.ar_steps, short_rows=256, long_rows=32)
    seconds = Trainer(model, autoregressive_loss, recipe, short=short, long=long).run("demo")
    export.write_folder(args.out / "demo", model, export.autoregressive_config(model.shape))
    shipped = rounded(model)
    result = measure_autoregressive(shipped, tasks.held_out(args.items))
    print_table("demo", result)
    loss = evaluate.prose_loss(shipped)
    print(f"validation prose: {loss:.3f} nats a byte")
    return {**summary(model, recipe, seconds, result), "prose_nats_per_byte": round(loss, 4)}


def train_blocks(
    args: argparse.Namespace, model: DemoLM, *, short: Batch, long: Batch
) -> dict[str, object]:
    """`model` holds the autoregressive weights: learning starts from them (SDAR, section 3)."""
    recipe = Recipe(steps=args.block_steps, short_rows=160, long_rows=32)
    seconds = Trainer(model, block_diffusion_loss, recipe, short=short, long=long).run("demo-block")
    export.write_folder(args.out / "demo-block", model, export.block_config(model.shape))
    result = measure_diffusion(rounded(model), evaluate.decode_blocks, tasks.held_out(args.items))
    print_table("demo-block", result)
    return summary(model, recipe, seconds, result)


def train_canvas(args: argparse.Namespace, *, short: Batch, long: Batch) -> dict[str, object]:
    """LLaDA's decoder has no head norms, so it cannot start from `demo`; it learns from left to
    right first all the same, as Dream did: from random weights alone it never learnt to look up."""
    shape = Shape(num_heads=6, num_kv_heads=6, qk_norm=False)
    model = DemoLM(shape).to(short.window.device)
    if short.window.is_cuda:
        model.compile_layers()
    first = Recipe(steps=args.ar_steps, short_rows=256, long_rows=32)
    seconds = Trainer(model, autoregressive_loss, first, short=short, long=long).run("to the right")
    recipe = Recipe(steps=args.canvas_steps, short_rows=256, long_rows=32)
    seconds += Trainer(model, canvas_loss, recipe, short=short, long=long).run("demo-canvas")
    config = export.canvas_config(shape)
    export.write_folder(args.out / "demo-canvas", model, config, rename=export.llada_name)
    items = tasks.held_out(args.items)
    result = measure_diffusion(rounded(model), evaluate.decode_canvas, items)
    print_table("demo-canvas", result)
    return {**summary(model, recipe, seconds, result), "shape": asdict(shape)}


def main() -> None:
    args = arguments()
    # Rows are made first: worker processes must not be forked once CUDA has started.
    short_rows = corpus.build(args.short_pool, corpus.SHORT_LEN, seed=args.seed)
    long_rows = corpus.build(args.long_pool, corpus.LONG_LEN, seed=args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    short, long = on_device(short_rows, device), on_device(long_rows, device)
    model = DemoLM(Shape()).to(device)
    if device.type == "cuda":
        model.compile_layers()
    today = datetime.date.today().isoformat()
    results = {
        "date": today,
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "shape": asdict(model.shape),
        "threshold": DEFAULT_THRESHOLD,
    }
    if args.only is None:
        results["demo"] = train_autoregressive(args, model, short=short, long=long)
        results["demo-block"] = train_blocks(args, model, short=short, long=long)
    results["demo-canvas"] = train_canvas(args, short=short, long=long)
    path = args.results or ROOT / "benchmarks" / "results" / f"demo_models_{today}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
