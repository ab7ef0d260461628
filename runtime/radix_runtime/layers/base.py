"""What every layer shares: how it is built, and how a checkpoint tensor finds its place in it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..attention.base import AttentionBackend
from ..distributed import Communicator
from ..families.tensor_views import TensorSource
from ..quantization.base import LinearMethod
from ..quantization.config import LayerKind, QuantizationConfig
from ..quantization.params import Part
from ..shortcuts import reset_shortcuts


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What the constructors of a model pass down to its layers. `dtype`: the compute type of
    parameters and activations. `max_positions`: how many positions RoPE must reach, in tokens.
    `name`: the path of the module that is built. `checkpoint_names`: the names of modules in the
    checkpoint, where its name rules lead from others to ours. `tensor_names`: the tensors that the
    checkpoint has, by our names, for parameters that it may lack. `persistent_decoder`: whether one
    kernel may run all layers of a decode step (layers/gpu_decoder.py)."""

    communicator: Communicator
    backend: AttentionBackend
    quantization: QuantizationConfig
    dtype: torch.dtype
    device: torch.device
    max_positions: int
    name: str = ""
    checkpoint_names: Mapping[str, str] = field(default_factory=dict)
    tensor_names: frozenset[str] = frozenset()
    persistent_decoder: bool = True

    def at(self, name: str) -> "BuildContext":
        """The same for a module inside of this one."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    def alone(self) -> "BuildContext":
        """The same for a module that this rank holds whole."""
        return replace(self, communicator=Communicator())

    def method_for(self, kind: LayerKind, parts: Iterable[Part] = (None,)) -> LinearMethod:
        """How the weight of this module is held, by its name in the checkpoint, or by those of the
        modules beside it that it is merged from. Raises ConfigError."""
        names = [part_name(self.name, part) for part in parts]
        known = self.checkpoint_names
        return self.quantization.method_for([known.get(name, name) for name in names], kind)


def part_name(module: str, part: Part) -> str:
    """The name of the checkpoint's module that a part of `module` comes from."""
    if part is None:
        return module
    parent = module.rpartition(".")[0]
    return f"{parent}.{part}" if parent else part


class Layer(nn.Module):
    """A module with parameters, created on the meta device. For each parameter the loader calls
    `allocate`, then `weight_loader` once for every part, then `finalize`; at the end `complete` of
    every layer. One that is repacked gets memory of the loader's, or, where it lies in the files,
    `part_in_place` for every part and `finalize_parts`. These defaults are of a parameter that
    every rank holds whole."""

    # Ops of the wheel that this layer needs and most models do not.
    special_ops: tuple[str, ...] = ()
    # What this layer does in many small steps for want of a kernel; None where it does not. Known
    # once it is complete.
    slow: str | None = None

    def parts(self, name: str) -> tuple[Part, ...]:
        """The parts that parameter `name` is merged from; (None,) when it is one tensor."""
        return (None,)

    def suffix(self, name: str) -> str:
        """The name of parameter `name` in a checkpoint, behind that of its module."""
        return name

    def check_source(self, name: str, source: TensorSource, part: Part) -> None:
        """Raises ValueError when the tensor of a checkpoint cannot be `part` of parameter `name`,
        by its shape. Reads none of its elements. A layer that loads it in its own way checks
        it in its own way too."""
        if type(self).weight_loader is not Layer.weight_loader:
            return
        check_shape(source, tuple(getattr(self, name).shape))

    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Raises ValueError when parameter `name` cannot be loaded from elements of that type. A
        copy converts any."""

    def elsewhere(self) -> Iterable[str]:
        """Names, relative to this module, of modules of the checkpoint that other ranks hold
        alone."""
        return ()

    def allocate(self, name: str, device: torch.device) -> torch.Tensor:
        """Memory for parameter `name`, of its shape and dtype."""
        param: torch.Tensor = getattr(self, name)
        return torch.empty(param.shape, dtype=param.dtype, device=device)

    def is_repacked(self, name: str, device: torch.device) -> bool:
        """Whether `finalize` comes as soon as parameter `name` is loaded, and leaves nothing of its
        memory in use."""
        return False

    def lies_in_files(self, name: str) -> bool:
        """Whether parameter `name`, which is repacked, is what this rank needs of its parts'
        tensors, one under the other, so that none has to be copied."""
        return False

    def part_in_place(self, name: str, source: TensorSource, part: Part) -> torch.Tensor:
        """This rank's slice of `source`, a part of a parameter that lies in the files, in the
        file's type. Raises ValueError on an unexpected shape or type."""
        raise NotImplementedError(f"{type(self).__name__} copies its parameters")

    def finalize_parts(self, name: str, parts: Sequence[torch.Tensor]) -> None:
        """`finalize` of a parameter that lies in the files, whose parts these are, in its own type.
        Raises ValueError."""
        raise NotImplementedError(f"{type(self).__name__} copies its parameters")

    def weight_loader(
        self, name: str, param: torch.Tensor, source: TensorSource, part: Part
    ) -> None:
        """Copies this rank's slice of `source` into its place in `param`, the memory of parameter
        `name`. Raises ValueError on an unexpected shape or type."""
        check_shape(source, tuple(param.shape))
        param.copy_(source[:])

    def held_bytes(self) -> int:
        """What the parameters take in memory once they are loaded."""
        return sum(param.nbytes for param in self.parameters(recurse=False))

    def fill_random(self, name: str, memory: torch.Tensor, generator: torch.Generator) -> None:
        """Values for parameter `name` where no checkpoint is read: 1 for the weight of a norm."""
        if name == "weight" and memory.dim() == 1:
            memory.fill_(1)
        else:
            memory.normal_(0, 0.02, generator=generator)

    def finalize(self, name: str) -> None:
        """All parts of parameter `name` are loaded."""

    def complete(self) -> None:
        """The whole model is loaded: what follows from several parameters can be made."""


class Fusible(nn.Module):
    """A module whose forward may run as a part of a larger kernel (cpu_decoder.py). A subclass that
    overrides `forward` is not, unless it says so."""

    fusible = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        reset_shortcuts(cls, Fusible, "forward", ["fusible"])


def check_shape(source: TensorSource, expected: tuple[int, ...]) -> None:
    """Raises ValueError when the tensor of a checkpoint has another shape."""
    found = tuple(source.get_shape())
    if found != expected:
        raise ValueError(f"has shape {list(found)}, expected {list(expected)}")
