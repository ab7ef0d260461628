"""Multi-head latent attention: the latent cache, absorbed decode, un-absorbed prefill."""

from typing import Any

import torch
from torch import nn

from .. import ops
from ..attention.base import LatentSpec
from ..batch import ForwardBatch
from ..quantization.base import Input
from ..quantization.config import LayerKind
from ..quantization.params import Block, LinearShape, Part
from ..specs import Mla
from .base import BuildContext, Fusible, Layer
from .linear import ColumnParallelLinear, MergedLinear, ReplicatedLinear, RowParallelLinear
from .norm import build_norm


class HeadProducts(nn.Module):
    """A product of its own for each head: weights [H, out, in], packed on the CPU."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.packed: ops.PackedHeads | None = None
        self.stacked: torch.Tensor | None = None
        if weights.device.type == "cpu":
            self.packed = ops.PackedHeads(
                tuple(ops.pack_weight(weight.contiguous()) for weight in weights)
            )
        else:
            self.stacked = weights.transpose(1, 2).contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H, in] -> [T, H, out]."""
        if self.packed is not None:  # a row's bits do not depend on the batch
            return ops.linear_heads(x, self.packed)
        assert self.stacked is not None
        out = x.new_empty(*x.shape[:2], self.stacked.shape[2])
        torch.bmm(x.transpose(0, 1), self.stacked, out=out.transpose(0, 1))
        return out


def merges_inputs(ctx: BuildContext, hidden_size: int, spec: Mla) -> bool:
    """Whether queries and latent values are one product of the hidden states: on a GPU, where a
    small product costs as much as its launch, and where both are held in one format that allows
    it."""
    if ctx.device.type == "cpu" or (spec.bias and spec.query_latent_dim is None):
        return False
    shape = LinearShape(
        name=ctx.name, inputs=Block.whole(hidden_size), parts=_input_blocks(ctx, spec)
    )
    method, latent = (ctx.at(str(name)).method_for(LayerKind.LINEAR) for name in shape.parts)
    return method == latent and method.is_divisible and method.for_shape(shape) == method


def _input_blocks(ctx: BuildContext, spec: Mla) -> dict[Part, Block]:
    """This rank's outputs of the products for queries and for latent values."""
    if spec.query_latent_dim is None:
        comm = ctx.communicator
        width = spec.num_heads * (spec.nope_dim + spec.rope_dim)
        queries = Block.share(width, comm.rank, comm.world_size)
    else:
        queries = Block.whole(spec.query_latent_dim)
    latent = Block.whole(spec.latent_dim + spec.rope_dim)
    return {_query_name(spec): queries, "kv_a_proj_with_mqa": latent}


def _query_name(spec: Mla) -> str:
    """What a checkpoint calls the product that queries, or their latent values, come from."""
    return "q_proj" if spec.query_latent_dim is None else "q_a_proj"


class LatentAttention(Layer, Fusible):
    """See specs.Mla. The heads are split over the ranks, the latent values are not. `rotary`:
    float32 [max_positions, rope_dim] (rotary.py)."""

    fusible = True
    special_ops: tuple[str, ...] = (
        "apply_rope_inplace",
        "concat_mla_k",
        "flash_attn_varlen",
        "gather_mla_kv",
        "mla_decode",
        "store_mla_kv",
    )

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        spec: Mla,
        *,
        layer_id: int,
        rotary: torch.Tensor,
    ) -> None:
        super().__init__()
        self._build_inputs(ctx, hidden_size, spec)
        self.kv_a_layernorm = build_norm(ctx, spec.norm, spec.latent_dim)
        self.kv_b_proj = ColumnParallelLinear(
            ctx.at("kv_b_proj"),
            in_features=spec.latent_dim,
            outputs={"kv_b_proj": spec.num_heads * (spec.nope_dim + spec.value_dim)},
        )
        self.o_proj = RowParallelLinear(
            ctx.at("o_proj"),
            in_features=spec.num_heads * spec.value_dim,
            out_features=hidden_size,
            bias=spec.bias,
        )
        self.latent_spec = LatentSpec(
            layer_id=layer_id,
            num_heads=spec.num_heads // ctx.communicator.world_size,
            latent_dim=spec.latent_dim,
            rope_dim=spec.rope_dim,
            scale=spec.scale,
        )
        self.absorb: HeadProducts | None = None  # queries into the space of latent values
        self.values: HeadProducts | None = None  # attended latent values into those of the heads
        self.spec = spec
        self.rotary = rotary
        self._backend = ctx.backend
        self._dtype = ctx.dtype
        self._device = ctx.device
        if ctx.device.type == "cpu":
            self.special_ops = (*self.special_ops, "linear_heads")

    def _build_inputs(self, ctx: BuildContext, hidden_size: int, spec: Mla) -> None:
        """What multiplies the hidden states: `inputs`, or the two products that it would be."""
        self.inputs: MergedLinear | None = None
        width = spec.num_heads * (spec.nope_dim + spec.rope_dim)
        if spec.query_latent_dim is not None:
            self.q_a_layernorm = build_norm(ctx, spec.norm, spec.query_latent_dim)
            self.q_b_proj = ColumnParallelLinear(
                ctx.at("q_b_proj"), in_features=spec.query_latent_dim, outputs={"q_b_proj": width}
            )
        if not merges_inputs(ctx, hidden_size, spec):
            self._build_two_inputs(ctx, hidden_size, spec)
            return
        self.inputs = MergedLinear(
            ctx.at("inputs"),
            in_features=hidden_size,
            blocks=_input_blocks(ctx, spec),
            bias=spec.bias,
        )

    def _build_two_inputs(self, ctx: BuildContext, hidden_size: int, spec: Mla) -> None:
        if spec.query_latent_dim is None:
            width = spec.num_heads * (spec.nope_dim + spec.rope_dim)
            self.q_proj = ColumnParallelLinear(
                ctx.at("q_proj"), in_features=hidden_size, outputs={"q_proj": width}
            )
        else:
            self.q_a_proj = ReplicatedLinear(
                ctx.at("q_a_proj"),
                in_features=hidden_size,
                out_features=spec.query_latent_dim,
                bias=spec.bias,
            )
        self.kv_a_proj_with_mqa = ReplicatedLinear(
            ctx.at("kv_a_proj_with_mqa"),
            in_features=hidden_size,
            out_features=spec.latent_dim + spec.rope_dim,
            bias=spec.bias,
        )

    def complete(self) -> None:
        """Cuts the weight of `kv_b_proj` by heads. What the unit vectors become are its columns, in
        whatever format it is held."""
        spec = self.spec
        units = torch.eye(spec.latent_dim, dtype=self._dtype, device=self._device)
        columns = self.kv_b_proj(units)
        weight = columns.t().unflatten(0, (-1, spec.nope_dim + spec.value_dim))
        self.absorb = HeadProducts(weight[:, : spec.nope_dim].transpose(1, 2))
        self.values = HeadProducts(weight[:, spec.nope_dim :])

    def held_bytes(self) -> int:
        """What `complete` makes of the weight of `kv_b_proj`, a second time."""
        spec = self.spec
        columns = self.latent_spec.num_heads * (spec.nope_dim + spec.value_dim)
        return columns * spec.latent_dim * self._dtype.itemsize

    def forward(
        self,
        hidden: Input,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        *,
        reduce: bool = True,
    ) -> torch.Tensor:
        """residual + attention of hidden, both [T, hidden_size]; stores the tokens' latent values.
        residual's memory may become the result. `reduce`: False leaves the sum over the ranks to
        the caller."""
        out_product = self.o_proj if reduce else self.o_proj.part
        return out_product(self._attend(hidden, batch), residual)

    def _attend(self, hidden: Input, batch: ForwardBatch) -> torch.Tensor:
        """What this rank's heads attend to, [T, heads * value_dim]."""
        spec = self.spec
        cache = batch.kv_pool.latent[self.latent_spec.layer_id]
        q, latent, rotary = self._project(hidden)
        # The same tensors unless the cache has another type than the model.
        dtype = batch.kv_pool.layout.query_dtype
        q = q.to(dtype)
        latent = self.kv_a_layernorm(latent).to(dtype)
        rotary = rotary.to(dtype)
        ops.apply_rope_inplace(
            batch.positions,
            q[..., spec.nope_dim :],
            rotary[:, None],
            spec.rope_dim,
            self.rotary,
            is_neox=not spec.rope.interleaved,
        )
        ops.store_mla_kv(latent, rotary, cache, batch.slot_mapping)
        decoding = batch.num_decode_tokens
        if decoding == len(q):
            return self._decode(q, batch).flatten(1)
        out = q.new_empty(*q.shape[:2], spec.value_dim, dtype=self._dtype)
        if decoding:
            out[:decoding] = self._decode(q[:decoding], batch)
        out[decoding:] = self._prefill(q[decoding:], batch)
        return out.flatten(1)

    def _project(self, hidden: Input) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, this rank's heads, nope_dim + rope_dim], latent values [T, latent_dim] and
        rotary keys [T, rope_dim]."""
        spec = self.spec
        is_latent = spec.query_latent_dim is not None
        if self.inputs is not None:
            q, both = self.inputs(hidden).split(self.inputs.sizes, -1)
        else:
            q = self.q_a_proj(hidden) if is_latent else self.q_proj(hidden)
            both = self.kv_a_proj_with_mqa(hidden)
        if is_latent:
            q = self.q_b_proj(self.q_a_layernorm(q))
        latent, rotary = both.split([spec.latent_dim, spec.rope_dim], -1)
        return q.unflatten(-1, (-1, spec.nope_dim + spec.rope_dim)), latent, rotary

    def _decode(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, heads, value_dim] of the decode entries' queries."""
        assert self.absorb is not None and self.values is not None
        q_nope, q_rope = q.split([self.spec.nope_dim, self.spec.rope_dim], -1)
        q_latent = self.absorb(q_nope.to(self._dtype)).to(q.dtype)
        attended = self._backend.decode_latents(
            self.latent_spec, q_latent, q_rope, batch, torch.empty_like(q_latent)
        )
        return self.values(attended.to(self._dtype))

    def _prefill(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, heads, value_dim] of the chunks' queries."""
        out = q.new_empty(*q.shape[:2], self.spec.value_dim)
        return self._backend.prefill_latents(self.latent_spec, q, self._expand, batch, out)

    def _expand(self, latents: torch.Tensor) -> Any:
        """Latent values [N, latent_dim] -> the heads' keys without positions and their values."""
        spec = self.spec
        both = self.kv_b_proj(latents.to(self._dtype)).to(latents.dtype)
        heads = both.unflatten(-1, (-1, spec.nope_dim + spec.value_dim))
        return heads.split([spec.nope_dim, spec.value_dim], -1)
