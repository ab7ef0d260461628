"""WeightLayer: a layer whose weight is held by a method of some format."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .. import ops
from ..families.tensor_views import TensorSource
from ..quantization.base import meta_parameter
from ..quantization.config import LayerKind
from ..quantization.params import LinearShape, Outputs, ParamSpec, Part
from .base import BuildContext, Layer


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's tensors and packed weights; what two modules share counts once."""
    held: dict[int, Any] = {}
    for module in model.modules():
        for value in (*vars(module).values(), *module.parameters(False), *module.buffers(False)):
            if isinstance(value, (torch.Tensor, ops.PackedWeight, ops.PackedHeads)):
                held[id(value)] = value
    return sum(int(value.nbytes) for value in held.values())


class WeightStack:
    """What `count` layers of one shape hold, each of it in one tensor: `tensors`, by name, of which
    the first dimension counts the layers. `in_order`: brings a packed weight into the order in
    which the stack holds it."""

    def __init__(
        self, count: int, in_order: Callable[[ops.PackedWeight], ops.PackedWeight] | None = None
    ) -> None:
        self._count = count
        self._in_order = in_order
        self.tensors: dict[str, torch.Tensor] = {}
        self._first: ops.PackedWeight | None = None  # of packed weights

    def put(self, name: str, index: int, value: torch.Tensor) -> torch.Tensor:
        """The place of layer `index` with a copy of its `value`; the memory of all is allocated
        with the first."""
        if name not in self.tensors:
            self.tensors[name] = value.new_empty((self._count, *value.shape))
        return self.tensors[name][index].copy_(value)

    def put_packed(self, name: str, index: int, value: ops.PackedWeight) -> ops.PackedWeight:
        """The same with the bytes of a packed weight. One of another form than the first keeps
        those that it has: `ops.PackedExperts` brings both to one form."""
        if self._in_order is not None:
            value = self._in_order(value)
        if self._first is None:
            self._first = dataclasses.replace(value, data=None)
        if not value.is_like(self._first):
            return value
        return dataclasses.replace(value, data=self.put(name, index, value.data))


class WeightLayer(Layer):
    """`shape`: its outputs and inputs on this rank. The parameters that the method describes are
    attributes of the layer until the method has repacked them; others, as `bias`, of one element
    for each output, are the layer's own."""

    def __init__(
        self, ctx: BuildContext, shape: LinearShape, kind: LayerKind, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.method = ctx.method_for(kind, shape.parts).for_shape(shape)
        self.special_ops = (*self.special_ops, *self.method.special_ops)
        self.shape = shape
        self.compute_dtype = ctx.dtype
        self._specs: dict[str, ParamSpec] = {}
        for spec in self.method.params(shape, ctx.dtype):
            self.declare(spec)
        self._of_method = tuple(self._specs)
        self._missing = set(self._specs)
        self.bias: nn.Parameter | None = None
        if bias:
            self.declare(ParamSpec(name="bias", dims=(Outputs(),), dtype=ctx.dtype))
        self._stack: WeightStack | None = None
        self._biases: WeightStack | None = None
        self._stack_index = 0

    def declare(self, spec: ParamSpec) -> None:
        """A parameter of this layer, on the meta device until it is loaded."""
        self._specs[spec.name] = spec
        size = spec.shape_on_rank(self.shape)
        setattr(self, spec.name, meta_parameter(*size, dtype=spec.dtype))

    @property
    def stored(self) -> tuple[str, ...]:
        """The parameters that hold the weight as the checkpoint does, until they are repacked."""
        return self._of_method

    def held_bytes(self) -> int:
        others = set(self._specs) - set(self._of_method)
        size = sum(self.get_parameter(name).nbytes for name in others)
        return size + self.method.held_bytes(self.shape, self.compute_dtype)

    @property
    def is_stacked(self) -> bool:
        """Whether what the method holds becomes a part of the tensors of a stack."""
        return self._stack is not None

    def put_in(self, stack: WeightStack, index: int) -> None:
        """What the method holds will be that of layer `index` of the stack."""
        self._stack = stack
        self._stack_index = index

    def put_bias_in(self, stack: WeightStack, index: int) -> None:
        """The bias will be that of layer `index` of the stack, under the name `bias`."""
        self._biases = stack
        self._stack_index = index

    def hold(self, **values: Any) -> None:
        """What the method keeps of its parameters from now on, tensors or packed weights by name;
        nothing else of them stays in memory."""
        for name in self._of_method:
            delattr(self, name)
        for name, value in values.items():
            if self._stack is not None and isinstance(value, ops.PackedWeight):
                value = self._stack.put_packed(name, self._stack_index, value)
            if not isinstance(value, torch.Tensor):
                setattr(self, name, value)
                continue
            if self._stack is not None:
                value = self._stack.put(name, self._stack_index, value)
            setattr(self, name, nn.Parameter(value, requires_grad=False))

    def hold_instead(self, name: str, value: Any) -> None:
        """The same value as `hold` was given, in other memory."""
        setattr(self, name, value)

    def parts(self, name: str) -> tuple[Part, ...]:
        return self._specs[name].parts_of(self.shape)

    def suffix(self, name: str) -> str:
        return self._specs[name].suffix or name

    def check_source(self, name: str, source: TensorSource, part: Part) -> None:
        self._specs[name].check_part(self.shape, source.get_shape(), part)

    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        self._specs[name].check_dtype(dtype)

    def is_repacked(self, name: str, device: torch.device) -> bool:
        loads_itself = (
            type(self).weight_loader is not WeightLayer.weight_loader
            or type(self).allocate is not WeightLayer.allocate
            or type(self).finalize is not WeightLayer.finalize
        )
        if device.type != "cpu" or loads_itself:
            return False
        # The method waits for all of its parameters.
        return self.method.repacks and self._of_method == (name,)

    def lies_in_files(self, name: str) -> bool:
        return self._specs[name].lies_in_files(self.shape)

    def part_in_place(self, name: str, source: TensorSource, part: Part) -> torch.Tensor:
        return self._specs[name].part_in_place(self.shape, source, part)

    def finalize_parts(self, name: str, parts: Sequence[torch.Tensor]) -> None:
        self._missing.remove(name)
        self.method.finalize_parts(self, parts)

    def weight_loader(
        self, name: str, param: torch.Tensor, source: TensorSource, part: Part
    ) -> None:
        self._specs[name].load_part(self.shape, param, source, part)

    def fill_random(self, name: str, memory: torch.Tensor, generator: torch.Generator) -> None:
        if name in self._of_method:
            self.method.fill_random(self, name, memory, generator)
        else:
            super().fill_random(name, memory, generator)

    def finalize(self, name: str) -> None:
        if name == "bias" and self._biases is not None and self.bias is not None:
            place = self._biases.put(name, self._stack_index, self.bias.data)
            self.bias = nn.Parameter(place, requires_grad=False)
        if name not in self._of_method:
            return
        self._missing.remove(name)
        if not self._missing:
            self.method.finalize(self)
