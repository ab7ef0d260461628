"""FusedNorms: the layers of a decoder with each norm in one launch with what stands around it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..batch import ForwardBatch
from ..quantization.base import Input, LinearMethod, normed
from .attention import Attention
from .base import BuildContext, Fusible
from .linear import RowParallelLinear
from .mla import LatentAttention
from .mlp import GatedMLP
from .moe import SparseMoe
from .norm import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A mixer or a feed-forward, and the norm of what it and the residual add up to. `taker`: what
    takes the norm's result and may want codes of it; None: a tensor is wanted. `adds_residual`: the
    block's last product does."""

    module: Any
    norm: RMSNorm
    taker: LinearMethod | None
    adds_residual: bool

    def run(self, x: Input, residual: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor:
        """This rank's part of the block's sum."""
        out: torch.Tensor
        if isinstance(self.module, Attention | LatentAttention):
            out = self.module(x, residual, batch, reduce=False)
        else:
            out = self.module(x, residual, reduce=False)
        return out


class FusedNorms:
    """Runs the layers and the last norm of a decoder. On one GPU a norm adds to the residual what
    the product before it could not, and quantizes for the product behind it where that takes x in 8
    bits. On several ranks, where their communicator can, one launch sums over the ranks, adds the
    residual and norms. A sum is rounded before the residual is added, and what is quantized is not
    rounded first: last bits differ from the modules' own `forward`, which a CPU keeps.

    `layers`: those that it can run have the modules of models/decoder.py's."""

    def __init__(self, ctx: BuildContext, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        self._communicator = ctx.communicator
        self._is_alone = ctx.communicator.world_size == 1
        self._layers: list[Any] = list(layers)
        self._norm: Any = norm
        self._blocks: list[_Block] = []
        self._first_taker: LinearMethod | None = None  # of the first norm's result
        if _is_plain(norm, RMSNorm) and all(_is_reducible(layer) for layer in self._layers):
            self._blocks = self._plan()
        if self._is_alone:
            gains = any(_gains(block) for block in self._blocks)
            self.applies = gains and ctx.device.type != "cpu"
        else:
            self.applies = ctx.communicator.fuses_norms and bool(self._blocks)

    def _plan(self) -> list[_Block]:
        modules = [module for layer in self._layers for module in (layer.self_attn, layer.mlp)]
        norms = [
            norm
            for layer in self._layers
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        ]
        takers = [_taker(module) if self._is_alone else None for module in modules]
        self._first_taker = takers[0]
        return [
            _Block(
                module=module,
                norm=norm,
                taker=taker,
                adds_residual=self._is_alone and _adds_residual(module),
            )
            for module, norm, taker in zip(
                modules, [*norms[1:], self._norm], [*takers[1:], None], strict=True
            )
        ]

    def __call__(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """residual [T, hidden_size], the embeddings, is overwritten; returns the normed output of
        that shape. Stores what attention caches. Only where `applies`."""
        first = self._layers[0].input_layernorm
        x: Any = _normed(residual, first, self._first_taker)
        for block in self._blocks:
            if block.adds_residual:
                residual = block.run(x, residual, batch)
                x = _normed(residual, block.norm, block.taker)
            else:
                part = block.run(x, None, batch)
                x = self._sum_and_norm(part, residual, block)
        return x

    def _sum_and_norm(self, part: torch.Tensor, residual: torch.Tensor, block: _Block) -> Input:
        norm = block.norm
        if self._is_alone:
            return _normed(part, norm, block.taker, residual)
        return self._communicator.all_reduce_add_rmsnorm(part, residual, norm.weight, norm.eps)


def _normed(
    x: torch.Tensor,
    norm: RMSNorm,
    taker: LinearMethod | None,
    residual: torch.Tensor | None = None,
) -> Input:
    make = normed if taker is None else taker.normed
    return make(x, norm.weight, norm.eps, residual)


def _gains(block: _Block) -> bool:
    """Whether a norm saves a launch on one rank."""
    return not block.adds_residual or (block.taker is not None and block.taker.quantizes_x)


def _taker(module: Any) -> LinearMethod | None:
    """What multiplies x in a block, if one product does, and nothing else sees it."""
    first: Any = None
    if isinstance(module, Attention):
        first = module.qkv_proj
    elif isinstance(module, GatedMLP):
        first = module.gate_up_proj
    elif isinstance(module, LatentAttention):
        first = module.inputs
    if first is None or not first.fusible:
        return None
    method: LinearMethod = first.method
    return method


def _adds_residual(module: Any) -> bool:
    """Whether the last product of a block adds the residual."""
    if isinstance(module, SparseMoe):
        return False
    last = module.down_proj if isinstance(module, GatedMLP) else module.o_proj
    return bool(last.method.adds_residual)


def _is_reducible(layer: Any) -> bool:
    """Whether a layer is nothing but norm, mixer, norm and feed-forward, each of which can leave
    its sum to others."""
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
