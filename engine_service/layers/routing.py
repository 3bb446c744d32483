"""Routers: which experts a token takes, and what share each of them has in its result.

They are functions of router logits and know neither experts nor weights. Of equal scores
the lowest expert comes first, so that a choice never depends on how a device sorts.

Shape legend: T tokens, X experts, A experts of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from engine_service.kernels.block_choice import BlockRule, choose_in_blocks
from engine_service.kernels.group_choice import GroupRule, choose_experts
from engine_service.kernels.likely_choice import SoftmaxRule, choose_likely


@dataclass(frozen=True, slots=True, kw_only=True)
class Router(ABC):
    """One rule of routing; `num_experts` experts, of which a token takes `per_token`."""

    num_experts: int
    per_token: int
    biased: bool = False
    """Whether a checkpoint has a bias for every expert, which `__call__` then wants."""

    @property
    def by_token(self) -> bool:
        """Whether a token's experts are the same whatever tokens it is routed with."""
        return True

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
        return choose_likely(logits_TX, SoftmaxRule(self.per_token, self.renormalised))


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
        rule = GroupRule(
            per_token=self.per_token,
            num_groups=self.num_groups,
            kept_groups=self.kept_groups,
            renormalised=self.renormalised,
            scale=self.scale,
        )
        return choose_experts(logits_TX, bias_X, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSigmoidRouter(Router):
    """LLaDA2.2: the tokens of a block choose among `capacity` experts that the block has chosen, so
    that a block reads the weights of few experts whatever its tokens want.

    An expert's score for a block is its best biased sigmoid score there. Groups of experts play no
    part; shares are as in GroupedSigmoidRouter. Tokens must come in whole blocks of `block`, which
    is how block diffusion computes; what is left over behind the last one is a block of its own.
    """

    block: int
    capacity: int
    renormalised: bool
    scale: float

    @property
    def by_token(self) -> bool:
        return self.capacity == self.num_experts

    def __call__(
        self, logits_TX: torch.Tensor, bias_X: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rule = BlockRule(
            per_token=self.per_token,
            block=self.block,
            capacity=self.capacity,
            renormalised=self.renormalised,
            scale=self.scale,
        )
        return choose_in_blocks(logits_TX, bias_X, rule)
