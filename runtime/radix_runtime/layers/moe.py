"""A mixture of experts: each token passes the few experts that the router chooses for it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import ops
from ..errors import ConfigError
from ..quantization.base import ExpertTerms, LinearMethod
from ..quantization.config import LayerKind
from ..specs import Mlp, Moe
from .activation import activation_of_experts, apply_activation
from .base import BuildContext, Fusible, Layer
from .linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from .mlp import GatedMLP
from .router import build_gate
from .weight import WeightStack


class Expert(nn.Module):
    """One expert's weights, a gated MLP of which this rank has a part of the width, or all of it
    where it is alone in `ctx`."""

    def __init__(self, ctx: BuildContext, hidden_size: int, spec: Moe) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(
            ctx.at("gate_up_proj"),
            in_features=hidden_size,
            outputs={"gate_proj": spec.width, "up_proj": spec.width},
            bias=spec.bias,
            kind=LayerKind.EXPERT,
        )
        self.down_proj = RowParallelLinear(
            ctx.at("down_proj"),
            in_features=spec.width,
            out_features=hidden_size,
            bias=spec.bias,
            reduce=False,
            kind=LayerKind.EXPERT,
        )
        self._activation = spec.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden_size] -> this rank's part of the expert's output, of the same shape."""
        return self.down_proj(apply_activation(self._activation, self.gate_up_proj(x)))


def local_experts(ctx: BuildContext, spec: Moe) -> range:
    """The experts of which a rank holds weights: a share of the width of all of them, or, where the
    ranks do not divide the width into pieces that their format can be cut in (blocks that share a
    scale, say), a range of whole ones."""
    comm = ctx.communicator
    first = ctx.at("0")
    rows = first.at("gate_up_proj").method_for(LayerKind.EXPERT, ("gate_proj", "up_proj"))
    columns = first.at("down_proj").method_for(LayerKind.EXPERT)
    unit = math.lcm(rows.output_unit, columns.input_unit)
    if comm.world_size == 1 or spec.width % (comm.world_size * unit) == 0:
        return range(spec.num_experts)
    count = spec.num_experts
    return range(comm.rank * count // comm.world_size, (comm.rank + 1) * count // comm.world_size)


class Experts(nn.ModuleDict):
    """The experts of which this rank has weights, by number. They are loaded one by one: on the CPU
    each is packed as soon as it is complete, on a GPU each is moved to its place in [E, out, in]
    or, packed, in [E, bytes].

    `needs_loop`, after loading: no kernel multiplies weights of this format together, and each
    expert is a few calls of its own. Raises ConfigError where the device has no kernel."""

    def __init__(
        self, ctx: BuildContext, hidden_size: int, spec: Moe, shared: GatedMLP | None
    ) -> None:
        self.num_shared = 0
        self.local = local_experts(ctx, spec)
        self._expert_map: torch.Tensor | None = None  # from an expert to its number on this rank
        if len(self.local) < spec.num_experts:
            ctx = ctx.alone()
            numbers = [
                i - self.local.start if i in self.local else -1 for i in range(spec.num_experts)
            ]
            self._expert_map = torch.tensor(numbers, dtype=torch.int32, device=ctx.device)
        experts = {
            str(i): Expert(ctx.at(str(i)), hidden_size=hidden_size, spec=spec) for i in self.local
        }
        super().__init__(experts)
        self._experts = list(experts.values())  # the same, typed
        self._has_terms = spec.bias or spec.activation != "silu"
        self._biases: tuple[WeightStack, WeightStack] | None = None
        self._terms: ExpertTerms | None = None  # made when they are loaded
        self._activation = activation_of_experts(spec.activation)
        self._packed: ops.PackedExperts | None = None
        self._has_looked = False  # `packed`, for packed weights
        self._stacks: tuple[WeightStack, WeightStack] | None = None
        first = {expert.gate_up_proj.method for expert in self._experts}
        second = {expert.down_proj.method for expert in self._experts}
        self._packs = all(method.packs_experts for method in first | second)
        if ctx.device.type != "cpu" or any(method.stacks_experts for method in first | second):
            if spec.shared is not None and self._takes_shared(first | second, spec, shared):
                self.num_shared = spec.shared.mlp.width // spec.width
            self._stack(ctx.device, first, second)
        if spec.bias:
            self._biases = self._stack_biases()

    @property
    def needs_loop(self) -> bool:
        return self._stacks is None and bool(self._experts) and self.packed() is None

    @property
    def is_stacked(self) -> bool:
        """Whether those of a product are in one tensor, [E, out, in] or, packed, [E, bytes]."""
        return self._stacks is not None

    @property
    def op(self) -> str:
        """The op of the wheel that multiplies them."""
        is_plain = self.is_stacked and not self._packs
        return "fused_experts" if is_plain else "fused_experts_packed"

    @property
    def method(self) -> LinearMethod:
        """Of each of them, where they are stacked and not packed."""
        return self._experts[0].down_proj.method

    def stacked(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None:
        """What `method` holds, by name, for gate and up, in this order, and for down: `weight`
        [E, out, in]. Where all experts are stacked on this rank, not packed, without biases and
        with SiLU; else None. After loading."""
        is_part = self._expert_map is not None
        if self._stacks is None or is_part or self._packs or self._has_terms:
            return None
        return self._stacks[0].tensors, self._stacks[1].tensors

    def _stack(
        self, device: torch.device, first: set[LinearMethod], second: set[LinearMethod]
    ) -> None:
        is_tritons = self._has_terms and not self._packs
        if is_tritons and device.type != "cpu" and not ops.has_triton():
            raise ConfigError(
                "experts with biases or an activation other than silu are Triton's on "
                f"{device.type}, and it is not installed"
            )
        # Packed, each of the two products is in a form of its own.
        formats = max(len(first), len(second)) if self._packs else len(first | second)
        if formats > 1:
            raise ConfigError("the experts of a layer are in several formats")
        count = len(self._experts) + self.num_shared
        self._stacks = (WeightStack(count, self._in_order), WeightStack(count, self._in_order))
        for index, expert in enumerate(self._experts):
            expert.gate_up_proj.put_in(self._stacks[0], index)
            expert.down_proj.put_in(self._stacks[1], index)

    def _takes_shared(self, methods: set[LinearMethod], spec: Moe, shared: GatedMLP | None) -> bool:
        """Whether the kernel of these experts may multiply by the shared one too, as further
        experts of their width: one launch less for each of its products."""
        assert spec.shared is not None and shared is not None
        methods = methods | {shared.gate_up_proj.method, shared.down_proj.method}
        is_one_format = len(methods) == 1 and all(method.is_divisible for method in methods)
        width = spec.shared.mlp.width
        is_alike = spec.shared.mlp == Mlp(width=width)  # silu, as theirs is without terms
        divides = width % spec.width == 0
        is_alone = self._expert_map is None and not self._has_terms
        return is_one_format and is_alike and divides and is_alone and not spec.shared.gated

    def take_shared(self, shared: GatedMLP) -> None:
        """Copies what the shared expert's layers hold behind what the others' do, of whose memory
        it is a part from now on: the buffers `shared_w1_NAME` and `shared_w2_NAME`."""
        assert self._stacks is not None
        count = self.num_shared
        w1, w2 = self._stacks
        for name in w1.tensors:
            mine = w1.tensors[name][-count:]
            for half, part in zip(
                mine.chunk(2, 1), _held(shared.gate_up_proj, name).chunk(2), strict=True
            ):
                half.copy_(part.unflatten(0, (count, -1)))
            self.register_buffer(f"shared_w1_{name}", mine, persistent=False)
            mine = w2.tensors[name][-count:]
            mine.copy_(_held(shared.down_proj, name).unflatten(1, (count, -1)).transpose(0, 1))
            self.register_buffer(f"shared_w2_{name}", mine, persistent=False)

    def _in_order(self, weight: ops.PackedWeight) -> ops.PackedWeight:
        """As the kernel for these experts reads it."""
        expert = self._experts[0]
        return ops.PackedExperts.part(
            weight,
            hidden=expert.gate_up_proj.shape.in_features,
            width=expert.down_proj.shape.in_features,
            activation=self._activation,
        )

    def _stack_biases(self) -> tuple[WeightStack, WeightStack]:
        """Where the biases of both products will lie, each in one tensor."""
        stacks = (WeightStack(len(self._experts)), WeightStack(len(self._experts)))
        for index, expert in enumerate(self._experts):
            expert.gate_up_proj.put_bias_in(stacks[0], index)
            expert.down_proj.put_bias_in(stacks[1], index)
        return stacks

    def terms(self) -> ExpertTerms:
        """Biases, of those that this rank adds, and activation. After loading."""
        if self._terms is None:
            bias1 = None
            bias2 = None
            if self._biases is not None:
                bias1 = self._biases[0].tensors["bias"]
                if self._experts[0].down_proj.adds_bias:
                    bias2 = self._biases[1].tensors["bias"]
            self._terms = ExpertTerms(bias1=bias1, bias2=bias2, activation=self._activation)
        return self._terms

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], weights float32 [T, top_k] and ids int32 [T, top_k] of each token's
        experts -> this rank's part of the weighted sum, [T, hidden_size]."""
        if not self._experts:  # more ranks than experts
            return torch.zeros_like(x)
        expert_map = self._expert_map
        if self._stacks is not None and not self._packs:
            w1, w2 = self._stacks
            method = self._experts[0].down_proj.method
            tensors = (w1.tensors, w2.tensors)
            return method.fused_experts(x, *tensors, weights, ids, expert_map, self.terms())
        packed = self.packed()
        if packed is not None:
            terms = self.terms()
            return ops.fused_experts_packed(
                x,
                packed,
                weights,
                ids,
                bias1=terms.bias1,
                bias2=terms.bias2,
                activation=terms.activation,
                expert_map=expert_map,
            )
        return self._one_by_one(x, weights, ids)

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all experts, each in a packed weight of its own."""
        return self._expert_map is None and not self.is_stacked

    def packed(self) -> ops.PackedExperts | None:
        """The experts as the wheel takes them together; None where it does not. After loading."""
        if not self._has_looked:
            self._has_looked = True
            w1 = _packed_weights([expert.gate_up_proj for expert in self._experts])
            w2 = _packed_weights([expert.down_proj for expert in self._experts])
            if w1 is not None and w2 is not None:
                self._packed = ops.PackedExperts(w1=w1, w2=w2, activation=self._activation)
        return self._packed

    def complete(self) -> None:
        """What is packed on a GPU is seen together from the start. Where the experts were not of
        one form new memory holds them, and the former is given back."""
        if self._stacks is None or not self._packs:
            return
        packed = self.packed()
        if packed is None:
            return
        for stack in self._stacks:
            stack.tensors.clear()
        for index, expert in enumerate(self._experts):
            expert.gate_up_proj.hold_instead("weight", packed.w1[index])
            expert.down_proj.hold_instead("weight", packed.w2[index])

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


def _held(layer: ColumnParallelLinear | RowParallelLinear, name: str) -> torch.Tensor:
    """A tensor that a layer of a divisible method holds, outputs by inputs or by blocks of them."""
    value: Any = getattr(layer, name)
    return ops.unpack_weight(value) if isinstance(value, ops.PackedWeight) else value.data


def _packed_weights(
    layers: Sequence[ColumnParallelLinear | RowParallelLinear],
) -> tuple[ops.PackedWeight, ...] | None:
    """None unless every weight is packed."""
    found = [layer.method.packed_weight(layer) for layer in layers]
    packed = tuple(weight for weight in found if weight is not None)
    return packed if len(packed) == len(found) else None


class SparseMoe(Layer, Fusible):
    """Router, experts and, where there is one, the expert that all tokens share: a module of its
    own, or, once it is loaded, some of the experts (`Experts.num_shared`)."""

    fusible = True

    def __init__(self, ctx: BuildContext, hidden_size: int, spec: Moe) -> None:
        super().__init__()
        self.gate = build_gate(ctx.at("gate"), hidden_size, spec)
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: ReplicatedLinear | None = None
        if spec.shared is not None:
            self.shared_expert = GatedMLP(
                ctx.at("shared_expert"),
                hidden_size=hidden_size,
                spec=spec.shared.mlp,
                reduce=False,
            )
            if spec.shared.gated:
                self.shared_expert_gate = ReplicatedLinear(
                    ctx.at("shared_expert_gate"),
                    in_features=hidden_size,
                    out_features=1,
                    kind=LayerKind.ROUTER,
                )
        self.experts = Experts(
            ctx.at("experts"), hidden_size=hidden_size, spec=spec, shared=self.shared_expert
        )
        experts_op = self.experts.op
        is_gated = self.shared_expert_gate is not None
        self.special_ops = (experts_op, "topk_sigmoid") if is_gated else (experts_op,)
        self._spec = spec
        self._communicator = ctx.communicator

    def complete(self) -> None:
        """Layer.complete."""
        self.experts.complete()
        if self.experts.num_shared and self.shared_expert is not None:
            self.experts.take_shared(self.shared_expert)
            self.gate.add_shared(self.experts.num_shared)
            self.shared_expert = None
        if self.experts.needs_loop:
            self.slow = "experts of this format, one after the other"

    def elsewhere(self) -> Iterator[str]:
        """Layer.elsewhere: the experts of other ranks."""
        for number in range(self._spec.num_experts):
            if number in self.experts.local:
                continue
            for part in ("gate_proj", "up_proj", "down_proj"):
                yield f"experts.{number}.{part}"

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, reduce: bool = True
    ) -> torch.Tensor:
        """residual + the experts of x, both [T, hidden_size]; residual's memory may become the
        result. `reduce`: False leaves the sum over the ranks, without a residual, to the caller."""
        weights, ids = self.gate.route(x)
        out = self.experts(x, weights, ids)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                logits = self.shared_expert_gate(x)
                weights, _ = ops.topk_sigmoid(logits, 1, renormalize=False)
                shared = shared * weights  # in float32, so that the sum is rounded once
            out = (out + shared).to(x.dtype)
        if reduce:
            out = self._communicator.all_reduce(out)
        return out if residual is None else residual.add_(out)
