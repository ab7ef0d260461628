"""The decoder: built from a ModelSpec, layer by layer, of the blocks that its records name.

A model that does not fit subclasses `DecoderForCausalLM`, or a part of it, in a file of its own."""

from typing import Any

import torch
from torch import nn

from ..batch import ForwardBatch
from ..layers.attention import Attention
from ..layers.base import BuildContext, Fusible
from ..layers.cpu_decoder import CpuDecoder
from ..layers.embedding import VocabParallel
from ..layers.fused_norms import FusedNorms
from ..layers.gpu_decoder import GpuDecoder
from ..layers.mla import LatentAttention
from ..layers.mlp import GatedMLP
from ..layers.moe import SparseMoe
from ..layers.norm import LayerNorm, RMSNorm, build_norm
from ..layers.rotary import RotaryTables
from ..model_config import ModelConfig
from ..quantization.config import LayerKind
from ..specs import FeedForward, Gqa, Mixer, Mla, Mlp, ModelSpec, Moe, Norm
from .base import CausalLM

# The block of each kind of mixer: (BuildContext, hidden_size, spec, layer_id=, rotary=) -> module.
MIXERS: dict[type[Mixer], Any] = {Gqa: Attention, Mla: LatentAttention}
# The block of each kind of feed-forward: (BuildContext, hidden_size, spec) -> module.
FEED_FORWARDS: dict[type[FeedForward], Any] = {Mlp: GatedMLP, Moe: SparseMoe}


class DecoderLayer(Fusible):
    """A mixer and a feed-forward on the residual stream (see specs.Layer). Where nothing stands
    behind them, both add to it in their last product, before it is rounded."""

    fusible = True

    def __init__(
        self, ctx: BuildContext, model: ModelSpec, *, layer_id: int, rotary: RotaryTables
    ) -> None:
        super().__init__()
        layer = model.layers[layer_id]
        hidden = model.hidden_size
        self.input_layernorm = _optional_norm(ctx, layer.pre_norm, hidden)
        self.self_attn = MIXERS[type(layer.mixer)](
            ctx.at("self_attn"),
            hidden,
            layer.mixer,
            layer_id=layer_id,
            rotary=rotary.get(layer.mixer.rope),
        )
        self.post_self_attn_layernorm = _optional_norm(ctx, layer.post_norm, hidden)
        self.post_attention_layernorm = _optional_norm(ctx, layer.pre_norm, hidden)
        feed_forward = layer.feed_forward
        self.mlp = FEED_FORWARDS[type(feed_forward)](ctx.at("mlp"), hidden, feed_forward)
        self.post_mlp_layernorm = _optional_norm(ctx, layer.post_norm, hidden)
        self.residual_multiplier = layer.residual_multiplier
        self._adds_in_products = layer.post_norm is None and layer.residual_multiplier == 1
        self._multiplier = torch.full((1,), layer.residual_multiplier, device=ctx.device)

    def forward(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """residual [T, hidden_size] -> the same with this layer's sums; its memory may become the
        result."""
        if self._adds_in_products:
            residual = self.self_attn(_normed(self.input_layernorm, residual), residual, batch)
            return self.mlp(_normed(self.post_attention_layernorm, residual), residual)
        out = self.self_attn(_normed(self.input_layernorm, residual), None, batch)
        residual = self._add(residual, _normed(self.post_self_attn_layernorm, out))
        out = self.mlp(_normed(self.post_attention_layernorm, residual))
        return self._add(residual, _normed(self.post_mlp_layernorm, out))

    def _add(self, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.residual_multiplier == 1:
            return residual.add_(out)
        return residual.add_(out * self._multiplier)  # in float32, so that the sum is rounded once


def _optional_norm(ctx: BuildContext, spec: Norm | None, size: int) -> RMSNorm | LayerNorm | None:
    return None if spec is None else build_norm(ctx, spec, size)


def _normed(norm: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    layer_class: type[nn.Module] = DecoderLayer  # a subclass may have another, built alike

    def __init__(self, ctx: BuildContext, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = VocabParallel(
            ctx.at("embed_tokens"),
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            kind=LayerKind.TIED_HEAD if spec.tied_head else LayerKind.EMBEDDING,
        )
        rotary = RotaryTables(ctx)
        self.layers = nn.ModuleList(
            self.layer_class(ctx.at(f"layers.{i}"), spec, layer_id=i, rotary=rotary)
            for i in range(spec.num_layers)
        )
        self.norm = build_norm(ctx, spec.final_norm, spec.hidden_size)
        self._embedding_multiplier: float | None = None
        if spec.embedding_multiplier != 1:
            multiplier = torch.tensor(spec.embedding_multiplier, dtype=ctx.dtype)
            self._embedding_multiplier = float(multiplier)
        self._cpu_decoder = CpuDecoder(ctx, layers=self.layers, norm=self.norm)
        self._gpu_decoder = GpuDecoder(ctx, layers=self.layers, norm=self.norm)
        self._fused_norms = FusedNorms(ctx, layers=self.layers, norm=self.norm)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """The normed hidden states of the step's tokens, [T, hidden_size]."""
        hidden: torch.Tensor = self.embed_tokens(batch.input_ids)
        if self._embedding_multiplier is not None:
            hidden = hidden * self._embedding_multiplier
        if self._cpu_decoder.applies_to(batch.kv_pool):
            return self._cpu_decoder(hidden, batch)
        if self._gpu_decoder.applies_to(batch):
            return self._gpu_decoder(hidden, batch)
        if self._fused_norms.applies:
            return self._fused_norms(hidden, batch)
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return self.norm(hidden)


class DecoderForCausalLM(CausalLM):
    """See CausalLM. Raises ConfigError when the ranks cannot split the model."""

    decoder_class: type[Decoder] = Decoder  # a subclass may have another, built alike

    def __init__(self, ctx: BuildContext, config: ModelConfig) -> None:
        super().__init__()
        spec = config.spec
        spec.check_tp(ctx.communicator.world_size)
        self.model = self.decoder_class(ctx.at("model"), spec)
        self.lm_head: VocabParallel | None = None
        if not spec.tied_head:
            self.lm_head = VocabParallel(
                ctx.at("lm_head"),
                vocab_size=spec.vocab_size,
                hidden_size=spec.hidden_size,
                kind=LayerKind.HEAD,
            )
        self._logit_multiplier = spec.logit_multiplier
        self._logit_softcap = spec.logit_softcap

    @property
    def head(self) -> VocabParallel:
        """What logits and greedy tokens come from: the output head, or the embedding tied to it."""
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.model(batch)

    def compute_logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        logits = self.head.logits(hidden, out)
        return None if logits is None else self._scale(logits)

    def _scale(self, logits: torch.Tensor) -> torch.Tensor:
        """Products of the head -> logits, in place."""
        if self._logit_multiplier != 1:
            logits.mul_(self._logit_multiplier)
        if self._logit_softcap is not None:
            logits.div_(self._logit_softcap).tanh_().mul_(self._logit_softcap)
        return logits

    def vocabulary_shard(self) -> range | None:
        return self.head.shard

    def shard_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._scale(self.head.shard_logits(hidden))

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        if self._logit_multiplier != 1 or self._logit_softcap is not None:
            return None  # rounding may make logits equal whose products differ
        return self.head.greedy_tokens(hidden)
