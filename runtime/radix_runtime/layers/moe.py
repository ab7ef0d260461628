"""A mixture of experts: each token passes the few experts that the router chooses for it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from .. import ops
from ..distributed import Communicator
from ..errors import ConfigError
from ..quantization.dense import DenseMethod
from ..specs import Moe
from .activation import apply_activation
from .base import BuildContext, Layer
from .linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, WeightStack
from .mlp import GatedMLP
from .router import build_gate


class Expert(nn.Module):
    """One expert's weights, a gated MLP of which this rank has a part of the width, or all of it
    where it is alone in `ctx`."""

    def __init__(self, ctx: BuildContext, hidden_size: int, spec: Moe) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(
            ctx,
            in_features=hidden_size,
            outputs={"gate_proj": spec.width, "up_proj": spec.width},
            bias=spec.bias,
        )
        self.down_proj = RowParallelLinear(
            ctx, in_features=spec.width, out_features=hidden_size, bias=spec.bias, reduce=False
        )
        self._activation = spec.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden_size] -> this rank's part of the expert's output, of the same shape."""
        return self.down_proj(apply_activation(self._activation, self.gate_up_proj(x)))


def local_experts(spec: Moe, rank: int, ranks: int) -> range:
    """The experts of which a rank holds weights: a share of the width of all of them, or, where the
    ranks do not divide the width, a range of whole ones."""
    if spec.width % ranks == 0:
        return range(spec.num_experts)
    return range(rank * spec.num_experts // ranks, (rank + 1) * spec.num_experts // ranks)


class Experts(nn.ModuleDict):
    """The experts of which this rank has weights, by number. They are loaded one by one: on the CPU
    each is packed as soon as it is complete, on a GPU each is loaded into its place in [E, out,
    in].

    `needs_loop`: no kernel multiplies these experts together, and each is a few calls of its own.
    Raises ConfigError where the device cannot do that."""

    def __init__(self, ctx: BuildContext, hidden_size: int, spec: Moe) -> None:
        comm = ctx.communicator
        self.local = local_experts(spec, comm.rank, comm.world_size)
        self._expert_map: torch.Tensor | None = None  # from an expert to its number on this rank
        if len(self.local) < spec.num_experts:
            ctx = replace(ctx, communicator=Communicator())
            numbers = [
                i - self.local.start if i in self.local else -1 for i in range(spec.num_experts)
            ]
            self._expert_map = torch.tensor(numbers, dtype=torch.int32, device=ctx.device)
        experts = [Expert(ctx, hidden_size=hidden_size, spec=spec) for _ in self.local]
        super().__init__({str(i): expert for i, expert in zip(self.local, experts, strict=True)})
        self._experts = experts  # the same, typed
        self.needs_loop = spec.bias or spec.activation != "silu"
        self._packed: ops.PackedExperts | None = None
        self._stacks: tuple[WeightStack, WeightStack] | None = None
        if ctx.device.type != "cpu":
            self._stack(ctx.device)

    def _stack(self, device: torch.device) -> None:
        if self.needs_loop:
            raise ConfigError(
                "experts with biases or an activation other than silu have no kernel on "
                f"{device.type}; they run on the CPU"
            )
        self._stacks = (WeightStack(len(self._experts)), WeightStack(len(self._experts)))
        for index, expert in enumerate(self._experts):
            expert.gate_up_proj.put_in(self._stacks[0], index)
            expert.down_proj.put_in(self._stacks[1], index)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], weights float32 [T, top_k] and ids int32 [T, top_k] of each token's
        experts -> this rank's part of the weighted sum, [T, hidden_size]."""
        expert_map = self._expert_map
        if self._stacks is not None:
            w1, w2 = self._stacks
            return ops.fused_experts(x, w1.data, w2.data, weights, ids, expert_map=expert_map)
        packed = self._pack()
        if packed is not None:
            return ops.fused_experts_packed(x, packed, weights, ids, expert_map=expert_map)
        return self._one_by_one(x, weights, ids)

    def _pack(self) -> ops.PackedExperts | None:
        """The experts as the wheel takes them together; None where it does not. After loading."""
        if self._packed is None and not self.needs_loop:
            w1 = _packed_weights([expert.gate_up_proj for expert in self._experts])
            w2 = _packed_weights([expert.down_proj for expert in self._experts])
            if w1 is None or w2 is None:
                self.needs_loop = True
            else:
                self._packed = ops.PackedExperts(w1=w1, w2=w2)
        return self._packed

    def _one_by_one(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Sums in float32, in the order of the experts: a row's bits depend on no other row."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in ids.unique().tolist():
            if number not in self.local:
                continue
            rows, places = (ids == number).nonzero(as_tuple=True)
            output = self._experts[number - self.local.start](x[rows])
            total.index_add_(0, rows, output.float() * weights[rows, places, None])
        return total.to(x.dtype)


def _packed_weights(
    layers: Sequence[ColumnParallelLinear | RowParallelLinear],
) -> tuple[ops.PackedWeight, ...] | None:
    """None unless every weight is packed."""
    found = [layer.method.packed_weight(layer) for layer in layers]
    packed = tuple(weight for weight in found if weight is not None)
    return packed if len(packed) == len(found) else None


class SparseMoe(Layer):
    """Router, experts and, where there is one, the expert that all tokens share."""

    def __init__(self, ctx: BuildContext, hidden_size: int, spec: Moe) -> None:
        super().__init__()
        self.gate = build_gate(ctx, hidden_size, spec)
        self.experts = Experts(ctx, hidden_size=hidden_size, spec=spec)
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: ReplicatedLinear | None = None
        if spec.shared is not None:
            self.shared_expert = GatedMLP(
                ctx, hidden_size=hidden_size, spec=spec.shared.mlp, reduce=False
            )
            if spec.shared.gated:
                self.shared_expert_gate = ReplicatedLinear(
                    ctx.with_method(DenseMethod()), in_features=hidden_size, out_features=1
                )
        if self.experts.needs_loop:
            self.slow = "experts with biases or an activation other than silu, one after the other"
        is_cpu = ctx.device.type == "cpu"
        self.special_ops = ("fused_experts_packed" if is_cpu else "fused_experts",)
        self._spec = spec
        self._communicator = ctx.communicator

    def elsewhere(self) -> Iterator[str]:
        """Layer.elsewhere: the experts of other ranks."""
        for number in range(self._spec.num_experts):
            if number in self.experts.local:
                continue
            for part in ("gate_proj", "up_proj", "down_proj"):
                yield f"experts.{number}.{part}.weight"
                if self._spec.bias:
                    yield f"experts.{number}.{part}.bias"

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """residual + the experts of x, both [T, hidden_size]; residual's memory may become the
        result."""
        weights, ids = self.gate.route(x)
        out = self.experts(x, weights, ids)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                shared = shared * self.shared_expert_gate(x).sigmoid()
            out = out + shared
        out = self._communicator.all_reduce(out)
        return out if residual is None else residual.add_(out)
