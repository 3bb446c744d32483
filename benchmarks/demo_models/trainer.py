"""The optimiser loop: one training step, drawing of its rows included, is one CUDA graph.

It knows neither objective; it is given a loss function. On a CPU the same step runs eagerly, which
is enough to try the code.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.demo_models.corpus import Rows
from benchmarks.demo_models.model import DemoLM
from benchmarks.demo_models.objectives import Batch

Loss = Callable[[DemoLM, Batch], Tensor]

REPORT_EVERY = 1000
WARM_UP_CALLS = 3
"""Steps before the capture: compilation and allocation must be over by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a training run is made of; figures that worked for models of this size."""

    steps: int
    short_rows: int
    long_rows: int
    learning_rate: float = 2e-3
    final_share: float = 0.01
    warm_up: int = 200
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    max_norm: float = 1.0
    long_weight: float = 0.5

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then cosine to `final_share` of the peak."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = min(1.0, (step - self.warm_up) / max(1, self.steps - self.warm_up))
        cosine = (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final_share + (1 - self.final_share) * cosine)


def on_device(rows: Rows, device: torch.device) -> Batch:
    """All rows of one length in device memory; a step draws from them there."""
    return Batch(
        token_ids=torch.from_numpy(rows.token_ids).to(device),
        learn=torch.from_numpy(rows.learn).to(device),
        window=torch.from_numpy(rows.window).to(device),
    )


def draw(pool: Batch, num_rows: int) -> Batch:
    chosen = torch.randint(len(pool.window), (num_rows,), device=pool.window.device)
    return Batch(
        token_ids=pool.token_ids[chosen].long(),
        learn=pool.learn[chosen],
        window=pool.window[chosen].long(),
    )


class Trainer:
    """Owns the optimiser and the device-side step counter; changes `model` in place."""

    def __init__(self, model: DemoLM, loss: Loss, recipe: Recipe, *, short: Batch, long: Batch):
        self.model, self.loss, self.recipe = model, loss, recipe
        self.short, self.long = short, long
        self.device = short.window.device
        rates = [recipe.rate_at(step) for step in range(recipe.steps)]
        self.rates = torch.tensor(rates, device=self.device)
        self.step_index = torch.zeros(1, dtype=torch.long, device=self.device)
        self.rate = torch.zeros((), device=self.device)
        self.mean_loss = torch.zeros((), device=self.device)
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.dim() == 2]},
                {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=self.rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=self.device.type == "cuda",
            capturable=self.device.type == "cuda",
        )

    def run(self, label: str) -> float:
        """Train to the end of the recipe; returns seconds, compilation and capture included."""
        began = time.perf_counter()
        step = self._captured() if self.device.type == "cuda" else self._step
        while (done := int(self.step_index)) < self.recipe.steps:
            # The counter lives on the device, so the host reads it only once per report.
            for _ in range(min(REPORT_EVERY, self.recipe.steps - done)):
                step()
            seconds = time.perf_counter() - began
            at, loss = int(self.step_index), float(self.mean_loss)
            print(f"{label} step {at} loss {loss:.4f} {seconds:.1f} s", flush=True)
        return time.perf_counter() - began

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._forward_backward_update()

    def _forward_backward_update(self) -> None:
        recipe = self.recipe
        self.rate.copy_(self.rates.gather(0, self.step_index)[0])
        with self._autocast():
            loss = self.loss(self.model, draw(self.short, recipe.short_rows))
            loss = loss + recipe.long_weight * self.loss(
                self.model, draw(self.long, recipe.long_rows)
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, recipe.max_norm, foreach=True)
        self.optimizer.step()
        self.mean_loss.lerp_(loss.detach(), 0.01)
        self.step_index += 1

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        # The cache of rounded weights would outlive the capture, so it is off.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _captured(self) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_CALLS):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self._forward_backward_update()
        return graph.replay
