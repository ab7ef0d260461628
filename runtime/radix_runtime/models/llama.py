"""Llama, Mistral, Qwen2 and Qwen3: one decoder; ModelConfig's flags are the differences."""

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import ops
from ..attention.radix import RadixAttention
from ..batch import ForwardBatch
from ..layers.attention import Attention, rotary_table
from ..layers.base import BuildContext
from ..layers.embedding import VocabParallel
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..memory.kv_pool import KVPool
from ..model_config import ModelConfig
from .base import CausalLM


class DecoderLayer(nn.Module):
    def __init__(
        self, ctx: BuildContext, config: ModelConfig, layer_id: int, rotary: torch.Tensor
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(ctx, config, layer_id, rotary)
        self.post_attention_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(ctx, config)

    def forward(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Both halves add to the residual stream in their last product, before it is rounded."""
        residual = self.self_attn(self.input_layernorm(residual), residual, batch)
        return self.mlp(self.post_attention_layernorm(residual), residual)


class Decoder(nn.Module):
    def __init__(self, ctx: BuildContext, config: ModelConfig) -> None:
        super().__init__()
        is_head = config.tie_word_embeddings
        self.embed_tokens = VocabParallel(
            ctx, config.vocab_size, config.hidden_size, is_head=is_head
        )
        rotary = rotary_table(ctx, config.rope)
        self.layers = nn.ModuleList(
            DecoderLayer(ctx, config, i, rotary) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        # On one CPU rank all layers are a single call of the kernel wheel, with the same bits.
        windows = [-1 if window is None else window - 1 for window in config.layer_windows]
        sizes: dict[str, Any] = {"eps": config.rms_norm_eps, "softmax_scale": config.head_dim**-0.5}
        sizes |= {"activation": config.hidden_act, "windows_left": windows, "cos_sin_cache": rotary}
        self._fuse = partial(ops.DenseDecoder.of_modules, self.layers, self.norm, **sizes)
        alone = ctx.device.type == "cpu" and ctx.communicator.world_size == 1
        self._fusible = alone and type(ctx.backend) is RadixAttention
        self._fused_for: KVPool | None = None
        self._fused: ops.DenseDecoder | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(batch.input_ids)
        pool = batch.kv_pool
        if self._fusible and pool is not self._fused_for:
            self._fused_for, self._fused = pool, None
            with suppress(NotImplementedError):  # no library, or weights or a cache of another kind
                self._fused = self._fuse(k_caches=pool.k, v_caches=pool.v)
        if self._fused is not None:
            places = (
                batch.positions,
                batch.slot_mapping,
                batch.page_table,
                batch.kv_lens,
                batch.cu_seqlens_q,
            )
            return self._fused(hidden, *places, max_seqlen_q=batch.max_query_len)
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return self.norm(hidden)


class LlamaForCausalLM(CausalLM):
    def __init__(self, ctx: BuildContext, config: ModelConfig) -> None:
        super().__init__()
        config.check_tp(ctx.communicator.world_size)
        self.model = Decoder(ctx, config)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallel(ctx, config.vocab_size, config.hidden_size, is_head=True)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.model(batch)

    def compute_logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        return (self.lm_head or self.model.embed_tokens).logits(hidden, out)

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        if (
            type(self).compute_logits is not LlamaForCausalLM.compute_logits
        ):  # a subclass has logits of its own
            return None
        return (self.lm_head or self.model.embed_tokens).greedy_tokens(hidden)
