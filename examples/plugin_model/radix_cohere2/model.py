"""Cohere 2: attention and the MLP of a layer read the same normed input."""

import torch
from torch import nn

from radix_runtime.batch import ForwardBatch
from radix_runtime.layers.attention import Attention
from radix_runtime.layers.base import BuildContext
from radix_runtime.layers.mlp import GatedMLP
from radix_runtime.layers.norm import build_norm
from radix_runtime.layers.rotary import RotaryTables
from radix_runtime.models.decoder import Decoder, DecoderForCausalLM
from radix_runtime.specs import Gqa, Mlp, ModelSpec


class ParallelLayer(nn.Module):
    """residual + attention(norm(residual)) + mlp(norm(residual)). The modules have the names that
    their tensors have in a checkpoint."""

    def __init__(
        self, ctx: BuildContext, model: ModelSpec, *, layer_id: int, rotary: RotaryTables
    ) -> None:
        super().__init__()
        layer = model.layers[layer_id]
        assert layer.pre_norm is not None and isinstance(layer.feed_forward, Mlp)
        assert isinstance(layer.mixer, Gqa)
        self.input_layernorm = build_norm(ctx, layer.pre_norm, model.hidden_size)
        self.self_attn = Attention(
            ctx.at("self_attn"),
            hidden_size=model.hidden_size,
            spec=layer.mixer,
            layer_id=layer_id,
            rotary=rotary.get(layer.mixer.rope),
        )
        self.mlp = GatedMLP(ctx.at("mlp"), hidden_size=model.hidden_size, spec=layer.feed_forward)

    def forward(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """residual [T, hidden_size] -> the same with this layer's sums; its memory may become the
        result."""
        normed = self.input_layernorm(residual)
        residual = self.self_attn(normed, residual, batch)
        return self.mlp(normed, residual)


class Cohere2Decoder(Decoder):
    """The runtime's decoder with parallel layers."""

    layer_class = ParallelLayer


class Cohere2ForCausalLM(DecoderForCausalLM):
    """The runtime's model with that decoder."""

    decoder_class = Cohere2Decoder
