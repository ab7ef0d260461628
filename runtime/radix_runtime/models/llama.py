"""Llama, Mistral, Qwen2 and Qwen3: one decoder; ModelConfig's flags are the differences."""

import torch
from torch import nn

from ..batch import ForwardBatch
from ..layers.attention import Attention
from ..layers.base import BuildContext, Fusible
from ..layers.cpu_decoder import CpuDecoder
from ..layers.embedding import VocabParallel
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import rotary_table
from ..model_config import ModelConfig
from .base import CausalLM


class DecoderLayer(Fusible):
    """Attention and MLP, each on the normed residual stream, to which both add in their last
    product, before it is rounded."""

    fusible = True

    def __init__(
        self, ctx: BuildContext, config: ModelConfig, *, layer_id: int, rotary: torch.Tensor
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(ctx, hidden, eps=eps)
        self.self_attn = Attention(ctx, config, layer_id=layer_id, rotary=rotary)
        self.post_attention_layernorm = RMSNorm(ctx, hidden, eps=eps)
        self.mlp = GatedMLP(ctx, config)

    def forward(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """residual [T, hidden_size] -> the same with this layer's sums; its memory may become the
        result."""
        residual = self.self_attn(self.input_layernorm(residual), residual, batch)
        return self.mlp(self.post_attention_layernorm(residual), residual)


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, ctx: BuildContext, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = VocabParallel(
            ctx,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            is_head=config.tie_word_embeddings,
        )
        rotary = rotary_table(ctx, config.rope)
        self.layers = nn.ModuleList(
            DecoderLayer(ctx, config, layer_id=i, rotary=rotary) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(ctx, config.hidden_size, eps=config.rms_norm_eps)
        self._cpu_decoder = CpuDecoder(ctx, layers=self.layers, norm=self.norm)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """The normed hidden states of the step's tokens, [T, hidden_size]."""
        hidden: torch.Tensor = self.embed_tokens(batch.input_ids)
        if self._cpu_decoder.applies_to(batch.kv_pool):
            return self._cpu_decoder(hidden, batch)
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return self.norm(hidden)


class LlamaForCausalLM(CausalLM):
    """See CausalLM. Raises ConfigError when the ranks cannot split the model."""

    def __init__(self, ctx: BuildContext, config: ModelConfig) -> None:
        super().__init__()
        config.check_tp(ctx.communicator.world_size)
        self.model = Decoder(ctx, config)
        self.lm_head: VocabParallel | None = None
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallel(
                ctx,
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                is_head=True,
            )

    @property
    def head(self) -> VocabParallel:
        """What logits and greedy tokens come from: the output head, or the embedding tied to it."""
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.model(batch)

    def compute_logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        return self.head.logits(hidden, out)

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return self.head.greedy_tokens(hidden)
