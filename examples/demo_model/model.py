"""A plain PyTorch Qwen3 for training; its parameter names are those of the checkpoint format."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with norms of q and k and rotary positions."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.dim = config["head_dim"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.dim, config["rms_norm_eps"])
        self.k_norm = RMSNorm(self.dim, config["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, T, hidden]; cos, sin [B, 1, T, dim]; mask [B, 1, T, T] or None for causal."""
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        group = self.heads // self.kv_heads
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves layout."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


class MLP(nn.Module):
    """The gated feed-forward."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        inner = config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """All of the model but its head."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])


class Qwen3(nn.Module):
    """Qwen3 with a tied head. `config` is the content of config.json."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = Body(config)
        self.dim = config["head_dim"]
        self.theta = config["rope_theta"]
        depth = 2 * config["num_hidden_layers"]
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(depth) if last else 0.02)

    def forward(self, ids: Tensor, positions: Tensor, number: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocab] of ids [B, T]; tokens see earlier ones with the same `number`."""
        mask = None
        if number is not None:
            t = ids.shape[1]
            causal = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()
            mask = ((number[:, :, None] == number[:, None, :]) & causal)[:, None]
        steps = torch.arange(0, self.dim, 2, device=ids.device, dtype=torch.float32) / self.dim
        angle = positions[..., None].float() * self.theta**-steps
        angle = torch.cat((angle, angle), dim=-1)[:, None]
        cos = angle.cos()
        sin = angle.sin()
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)
