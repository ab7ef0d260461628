"""Llama, Mistral, Qwen2 and Qwen3: one decoder; ModelConfig's flags are the differences."""

import torch
from torch import nn

from ..batch import ForwardBatch
from ..layers.attention import Attention, rotary_table
from ..layers.base import BuildContext
from ..layers.embedding import VocabParallel
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..model_config import ModelConfig
from .base import CausalLM


class DecoderLayer(nn.Module):
    def __init__(self, ctx: BuildContext, config: ModelConfig, layer_id: int, rotary: torch.Tensor) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(ctx, config, layer_id, rotary)
        self.post_attention_layernorm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(ctx, config)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream is `hidden + residual`; only the norms add the two."""
        if residual is None:
            hidden, residual = self.input_layernorm(hidden), hidden
        else:
            hidden = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, batch)
        hidden = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class Decoder(nn.Module):
    def __init__(self, ctx: BuildContext, config: ModelConfig) -> None:
        super().__init__()
        is_head = config.tie_word_embeddings
        self.embed_tokens = VocabParallel(ctx, config.vocab_size, config.hidden_size, is_head=is_head)
        rotary = rotary_table(ctx, config.rope)
        self.layers = nn.ModuleList(DecoderLayer(ctx, config, i, rotary) for i in range(config.num_layers))
        self.norm = RMSNorm(ctx, config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(batch.input_ids)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, batch)
        assert residual is not None
        return self.norm.add(hidden, residual)


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

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return (self.lm_head or self.model.embed_tokens).logits(hidden)
