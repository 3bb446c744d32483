"""Routers: which experts a token takes, and what share each of them has in its result.

They are functions of a token's router logits and know neither experts nor weights. Of equal scores
the lowest expert comes first, so that a choice never depends on how a device sorts.

Shape legend: T tokens, X experts, A experts of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

_TINY = 1e-20
"""Keeps shares finite where all scores have underflowed, as in DeepSeek-V3's published code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router(ABC):
    """One rule of routing; `num_experts` experts, of which a token takes `per_token`."""

    num_experts: int
    per_token: int
    biased: bool = False
    """Whether a checkpoint has a bias for every expert, which `__call__` then wants."""

    @abstractmethod
    def __call__(
        self, logits_TX: torch.Tensor, bias_X: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([T, A] int64 experts, best first, [T, A] shares in the format of the logits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxRouter(Router):
    """The most likely experts of a softmax over all.

    Renormalised, the shares of a token sum to 1, which is a softmax over the chosen logits alone:
    Mixtral (Jiang et al. 2024, arXiv 2401.04088, section 2.1) and Qwen3-MoE. Otherwise they are the
    probabilities themselves: OLMoE (Muennighoff et al. 2024, arXiv 2409.02060).
    """

    renormalised: bool

    def __call__(
        self, logits_TX: torch.Tensor, bias_X: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert bias_X is None, "a softmax router has no bias"
        probabilities, order = logits_TX.softmax(-1).sort(dim=-1, descending=True, stable=True)
        shares = probabilities[:, : self.per_token]
        if self.renormalised:
            shares = shares / shares.sum(-1, keepdim=True)
        return order[:, : self.per_token], shares


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSigmoidRouter(Router):
    """DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), Ling 2.0 and LLaDA2: sigmoid scores, whose
    bias counts for the choice alone, and a choice limited to the best groups of experts.

    A group scores the sum of its two best biased scores. Shares are the chosen scores, normalised
    (where a token takes more than one) and times `scale`.
    """

    num_groups: int
    kept_groups: int
    renormalised: bool
    scale: float

    def __call__(
        self, logits_TX: torch.Tensor, bias_X: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits_TX.sigmoid()
        choices = scores if bias_X is None else scores + bias_X
        if self.kept_groups < self.num_groups:
            choices = choices.masked_fill(~self._kept(choices), float("-inf"))
        experts = _best(choices, self.per_token)
        shares = scores.gather(1, experts)
        if self.renormalised and self.per_token > 1:
            shares = shares / (shares.sum(-1, keepdim=True) + _TINY)
        return experts, shares * self.scale

    def _kept(self, choices_TX: torch.Tensor) -> torch.Tensor:
        """[T, X] bool: experts of the groups that a token may choose from."""
        groups = choices_TX.unflatten(1, (self.num_groups, -1))
        best = _best(groups.topk(2, dim=-1).values.sum(-1), self.kept_groups)
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        return kept.unsqueeze(-1).expand_as(groups).flatten(1)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count] int64 places of the highest scores, highest first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count]
