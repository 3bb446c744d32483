"""Exact match and tokens per forward over held-out items, by slow and obvious decoding.

No cache: every step recomputes the whole row, and all rows decode in one batch. Decoding follows
the rules that an engine serves with, so the figures are those that a served model must reproduce.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.demo_models.corpus import BLOCK_SIZE, prose
from benchmarks.demo_models.model import DemoLM, bias_of, block_bias
from benchmarks.demo_models.objectives import cross_entropy
from benchmarks.demo_models.vocabulary import EOS, MASK, decode, encode, encode_chat
from tidemill.bench import tasks

MAX_NEW_TOKENS = 80
BATCH_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Generated ids up to and including the end of turn, and the forwards they took."""

    token_ids: list[int]
    forwards: int


Decode = Callable[[DemoLM, list[list[int]]], list[Reply]]


def chat_prompt(item: tasks.Item) -> list[int]:
    return encode_chat([("user", item.prompt)])


def completion_prompt(item: tasks.Item) -> list[int]:
    return encode(tasks.completion_prompt(item))


def padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [rows, time] filled up with masks to whole blocks, and the prompt lengths."""
    longest = max(map(len, prompts)) + MAX_NEW_TOKENS
    ids = torch.full((len(prompts), longest + -longest % BLOCK_SIZE), MASK)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids.to(device), lengths.to(device)


def cut(ids: Tensor, lengths: Tensor, forwards: Tensor) -> list[Reply]:
    replies: list[Reply] = []
    for row, length, steps in zip(ids.tolist(), lengths.tolist(), forwards.tolist(), strict=True):
        new = row[length : length + MAX_NEW_TOKENS]
        if EOS in new:
            new = new[: new.index(EOS) + 1]
        replies.append(Reply(token_ids=new, forwards=steps))
    return replies


@torch.inference_mode()
def decode_greedy(model: DemoLM, prompts: list[list[int]]) -> list[Reply]:
    """Autoregressive decoding without sampling."""
    ids, lengths = padded(prompts, model.model.norm.weight.device)
    rows = torch.arange(len(ids), device=ids.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    ended = torch.zeros_like(rows, dtype=torch.bool)
    forwards = torch.zeros_like(rows)
    for step in range(MAX_NEW_TOKENS):
        hidden = model.hidden_states(ids, positions, None)
        token = model.logits(hidden[rows, lengths + step - 1]).argmax(-1)
        ids[rows, lengths + step] = torch.where(ended, EOS, token)
        forwards += ~ended
        ended |= token == EOS
        if ended.all():
            break
    return cut(ids, lengths, forwards)


def reveal(logits: Tensor, hidden_mask: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Tokens [rows, block] and which of the masked positions to fix (Fast-dLLM, arXiv 2505.22618).

    Every position whose confidence reaches the threshold, and always the best one.
    """
    logits = logits.float()
    logits[..., MASK] = float("-inf")
    confidence, token = logits.softmax(-1).max(-1)
    confidence = confidence.masked_fill(~hidden_mask, -1.0)
    best = torch.zeros_like(hidden_mask).scatter_(1, confidence.argmax(1, keepdim=True), True)
    return token, hidden_mask & ((confidence >= threshold) | best)


@torch.inference_mode()
def decode_blocks(model: DemoLM, prompts: list[list[int]], threshold: float) -> list[Reply]:
    """Block diffusion with early exit at the end of turn.

    A finished block's keys and values are made by the next block's first forward, as in an engine
    that fuses the two, so only denoising forwards are counted.
    """
    ids, lengths = padded(prompts, model.model.norm.weight.device)
    rows = torch.arange(len(ids), device=ids.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    bias = block_bias(
        positions // BLOCK_SIZE, torch.zeros_like(positions[0]), dtype=model.model.norm.weight.dtype
    )
    # What is still hidden is tracked apart from the ids: a prompt may contain a mask token.
    hidden_mask = positions >= lengths[:, None]
    start = lengths // BLOCK_SIZE * BLOCK_SIZE
    ended = torch.zeros_like(rows, dtype=torch.bool)
    forwards = torch.zeros_like(rows)
    while not ended.all():
        inside = start[:, None] + torch.arange(BLOCK_SIZE, device=ids.device)
        states = model.hidden_states(ids, positions, bias)[rows[:, None], inside]
        still = hidden_mask.gather(1, inside)
        token, take = reveal(model.logits(states), still & ~ended[:, None], threshold)
        ids.scatter_(1, inside, torch.where(take, token, ids.gather(1, inside)))
        hidden_mask.scatter_(1, inside, still & ~take)
        forwards += ~ended
        fixed = ~hidden_mask.gather(1, inside)
        is_end = (ids.gather(1, inside) == EOS) & (inside >= lengths[:, None])
        # The reply is over once its first end of turn has no hidden position before it.
        ended |= (fixed.cumprod(1).bool() & is_end).any(1)
        start = torch.where(fixed.all(1) & ~ended, start + BLOCK_SIZE, start)
        ended |= start >= (lengths + MAX_NEW_TOKENS).clamp(max=ids.shape[1] - BLOCK_SIZE)
    return cut(ids, lengths, forwards)


@torch.inference_mode()
def decode_canvas(
    model: DemoLM, prompts: list[list[int]], threshold: float, block: int = 32
) -> list[Reply]:
    """Full-canvas diffusion, block by block of an answer of MAX_NEW_TOKENS, with early exit."""
    ids, lengths = padded(prompts, model.model.norm.weight.device)
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    ends = (lengths + MAX_NEW_TOKENS)[:, None]
    bias = bias_of((positions < ends)[:, None], dtype=model.model.norm.weight.dtype)
    hidden_mask = (positions >= lengths[:, None]) & (positions < ends)
    start = lengths[:, None].clone()
    ended = torch.zeros_like(start, dtype=torch.bool)
    forwards = torch.zeros_like(lengths)
    while not ended.all():
        inside = (start + torch.arange(block, device=ids.device)).clamp(max=ids.shape[1] - 1)
        still = hidden_mask[rows, inside] & (inside < start + block) & ~ended
        states = model.hidden_states(ids, positions, bias)[rows, inside]
        token, take = reveal(model.logits(states), still, threshold)
        ids[rows, inside] = torch.where(take, token, ids[rows, inside])
        hidden_mask[rows, inside] = hidden_mask[rows, inside] & ~take
        forwards += ~ended[:, 0]
        open_before = (hidden_mask & (positions >= lengths[:, None])).cumsum(1) > 0
        is_end = (ids == EOS) & (positions >= lengths[:, None]) & (positions < ends)
        ended |= (is_end & ~open_before).any(1, keepdim=True)
        finished = ~hidden_mask[rows, inside].any(1, keepdim=True)
        start = torch.where(finished & ~ended, start + block, start)
        ended |= start >= ends
    return cut(ids, lengths, forwards)


@dataclass(frozen=True, slots=True)
class Score:
    """Exact match and tokens per forward with their standard errors."""

    items: int
    exact_match: float
    exact_match_se: float
    tokens_per_forward: float
    tokens_per_forward_se: float


def score(right: list[bool], replies: list[Reply]) -> Score:
    """Standard errors: binomial for exact match, first-order for the ratio of sums."""
    n = len(right)
    match = sum(right) / n
    tokens = [len(reply.token_ids) for reply in replies]
    steps = [reply.forwards for reply in replies]
    ratio = sum(tokens) / sum(steps)
    spread = sum((t - ratio * s) ** 2 for t, s in zip(tokens, steps, strict=True))
    ratio_se = math.sqrt(spread / max(1, n * (n - 1))) / (sum(steps) / n)
    return Score(n, match, math.sqrt(match * (1 - match) / n), ratio, ratio_se)


def measure(
    model: DemoLM,
    items: list[tasks.Item],
    decode_batch: Decode,
    *,
    to_prompt: Callable[[tasks.Item], list[int]],
) -> dict[str, Score]:
    """Scores by task, and over all items under 'all'; items of like length share a batch."""
    order = sorted(items, key=lambda item: len(item.prompt))
    replies: list[Reply] = []
    for i in range(0, len(order), BATCH_ROWS):
        replies += decode_batch(model, [to_prompt(item) for item in order[i : i + BATCH_ROWS]])
    right = [
        tasks.is_correct(item, decode(reply.token_ids))
        for item, reply in zip(order, replies, strict=True)
    ]
    scores = {
        name: score(
            [ok for ok, item in zip(right, order, strict=True) if item.task == name],
            [reply for reply, item in zip(replies, order, strict=True) if item.task == name],
        )
        for name in sorted({item.task for item in items})
    }
    return {**scores, "all": score(right, replies)}


@torch.inference_mode()
def prose_loss(model: DemoLM, *, windows: int = 512, length: int = 256) -> float:
    """Next-byte loss in nats on the second half of windows of validation prose."""
    device = model.model.norm.weight.device
    text = encode(prose(validation=True))
    stride = (len(text) - length) // windows
    rows = [text[i * stride : i * stride + length] for i in range(windows)]
    ids = torch.tensor(rows, device=device)
    positions = torch.arange(length - 1, device=device)[None]
    hidden = model.hidden_states(ids[:, :-1], positions, None)
    return float(cross_entropy(model.logits(hidden), ids[:, 1:])[:, length // 2 :].mean())
