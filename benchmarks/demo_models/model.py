"""Qwen3's decoder in plain PyTorch, small enough to train in minutes; LLaDA's without head norms.

Module names are those of Qwen3's checkpoints, so that `state_dict()` is the file to export.
SDAR (Cheng et al. 2025, arXiv 2510.06303) keeps these weights and changes only the attention mask,
which is why `hidden_states` takes the mask from outside and knows nothing about diffusion.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the decoder; about 2.3 M parameters, 4.5 MB in bfloat16.

    Query width (heads x head_dim) differs from the hidden size on purpose, as in Qwen3-0.6B: an
    engine that confuses the two fails on this model. Every size splits over two or four ranks.
    """

    vocab_size: int = 272
    hidden_size: int = 192
    intermediate_size: int = 384
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    qk_norm: bool = True
    max_positions: int = 2048


class RMSNorm(nn.Module):
    """Root-mean-square norm, statistics in float32, rounded as the reference does it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the split-halves layout; x is [batch, heads, time, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention, queries and keys normalised if the shape says so."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.rms_eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.rms_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None) -> Tensor:
        rows, time, _ = x.shape
        heads = (rows, time, -1, self.shape.head_dim)
        q, k = self.q_proj(x).view(heads), self.k_proj(x).view(heads)
        if self.shape.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        # Repeated by hand: with `enable_gqa` a dense bias falls back to the slow kernel.
        group = self.shape.num_heads // self.shape.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)
        return self.o_proj(out.transpose(1, 2).reshape(rows, time, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, bias)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps)


class DemoLM(nn.Module):
    """The decoder with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual outputs are scaled down by depth (GPT-2).
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = (2 * shape.num_layers) ** 0.5 if is_output else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def hidden_states(self, token_ids: Tensor, positions: Tensor, bias: Tensor | None) -> Tensor:
        """Final hidden states [rows, time, hidden].

        `token_ids` and `positions` are [rows, time]; `bias` is added to the attention scores,
        [rows or 1, 1, time or 1, time], and None means causal.
        """
        x = self.model.embed_tokens(token_ids)
        cos, sin = self._angles(positions, x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, bias)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def compile_layers(self) -> None:
        """Compile one layer's code, which all layers share; building the whole takes minutes."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.shape.head_dim, 2, device=positions.device, dtype=torch.float32)
        inverse = self.shape.rope_theta ** (-half / self.shape.head_dim)
        angles = positions[:, None, :, None].float() * inverse
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def bias_of(seen: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """0 where `seen` (bool), minus infinity elsewhere; an axis for heads follows the rows."""
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return bias.masked_fill_(~seen, float("-inf"))[:, None]


def block_bias(block: Tensor, view: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Attention bias of block diffusion's training forward, [rows, 1, time, time].

    `block` [rows, time] numbers each position's block; `view` [time] is 0 for the clean copy and 1,
    2, .. for the noisy ones. A clean query sees clean blocks up to its own; a noisy query sees
    earlier clean blocks and its own noisy block (BD3-LM, Arriola et al. 2025, arXiv 2503.09573,
    section 3.2). With `view` all zero this is the block-causal mask of decoding.
    """
    query, key = block[:, :, None], block[:, None, :]
    clean_query, clean_key = (view == 0)[:, None], (view == 0)[None, :]
    same_view = view[:, None] == view[None, :]
    seen = torch.where(
        clean_key,
        torch.where(clean_query, key <= query, key < query),
        same_view & (key == query),
    )
    return bias_of(seen, dtype=dtype)
