"""ReducedNorms: the layers of a decoder with each sum over the ranks in one launch with the norm
that follows it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..batch import ForwardBatch
from .attention import Attention
from .base import BuildContext, Fusible
from .linear import RowParallelLinear
from .mla import LatentAttention
from .mlp import GatedMLP
from .moe import SparseMoe
from .norm import RMSNorm


class ReducedNorms:
    """Runs the layers and the last norm of a decoder of several ranks, where their communicator
    sums over the ranks, adds the residual and norms in one launch. The residual is added to the
    rounded sum, not in the product of rank 0 as the modules' own `forward` does: last bits differ.

    `layers`: those that it can run have the modules of models/decoder.py's."""

    def __init__(self, ctx: BuildContext, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        self._communicator = ctx.communicator
        self._layers: list[Any] = list(layers)
        self._norm: Any = norm
        self.applies = (
            ctx.communicator.fuses_norms
            and _is_plain(norm, RMSNorm)
            and all(_is_reducible(layer) for layer in self._layers)
        )

    def __call__(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """residual [T, hidden_size], the embeddings, is overwritten; returns the normed output of
        that shape. Stores what attention caches. Only where `applies`."""
        following = [layer.input_layernorm for layer in self._layers[1:]]
        normed = self._layers[0].input_layernorm(residual)
        for layer, next_norm in zip(self._layers, [*following, self._norm], strict=True):
            part = layer.self_attn(normed, None, batch, reduce=False)
            normed = self._add_and_norm(part, residual, layer.post_attention_layernorm)
            part = layer.mlp(normed, reduce=False)
            normed = self._add_and_norm(part, residual, next_norm)
        return normed

    def _add_and_norm(
        self, part: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> torch.Tensor:
        return self._communicator.all_reduce_add_rmsnorm(part, residual, norm.weight, norm.eps)


def _is_reducible(layer: Any) -> bool:
    """Whether a layer is nothing but norm, mixer, norm and feed-forward, each of which can leave
    its sum over the ranks to others."""
    if not _is_plain(layer, Fusible) or layer.residual_multiplier != 1:
        return False
    if layer.post_self_attn_layernorm is not None or layer.post_mlp_layernorm is not None:
        return False
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        all(_is_plain(norm, RMSNorm) for norm in norms)
        and _is_plain(layer.self_attn, Attention, LatentAttention)
        and _is_plain(layer.self_attn.o_proj, RowParallelLinear)
        and _leaves_sums(layer.mlp)
    )


def _leaves_sums(feed_forward: Any) -> bool:
    if _is_plain(feed_forward, GatedMLP):
        return _is_plain(feed_forward.down_proj, RowParallelLinear)
    return _is_plain(feed_forward, SparseMoe)


def _is_plain(module: Any, *kinds: type[Fusible]) -> bool:
    """Whether a module is one of these without a forward of its own."""
    return isinstance(module, kinds) and module.fusible
