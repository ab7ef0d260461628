"""What every layer shares: how it is built, and how a checkpoint tensor finds its place in it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..attention.base import AttentionBackend
from ..distributed import Communicator
from ..families.tensor_views import TensorSource
from ..quantization.base import LinearMethod
from ..shortcuts import reset_shortcuts

# One of the checkpoint tensors that are merged into a parameter: the name of the module that it
# belongs to in the checkpoint, a sibling of ours; None: the parameter's own module.
Part = str | None


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What the constructors of a model pass down to its layers. `dtype`: the compute type of
    parameters and activations. `max_positions`: how many positions RoPE must reach, in tokens."""

    communicator: Communicator
    backend: AttentionBackend
    linear_method: LinearMethod
    dtype: torch.dtype
    device: torch.device
    max_positions: int

    def with_method(self, method: LinearMethod) -> "BuildContext":
        """The same for layers whose weights are held by another method."""
        return replace(self, linear_method=method)


class Layer(nn.Module):
    """A module with parameters, created on the meta device. For each parameter the loader calls
    `allocate`, then `weight_loader` once for every part, then `finalize`. These defaults are of a
    parameter that every rank holds whole."""

    # Ops of the wheel that this layer needs and most models do not.
    special_ops: tuple[str, ...] = ()
    # What this layer does in many small steps for want of a kernel; None where it does not.
    slow: str | None = None

    def parts(self, name: str) -> tuple[Part, ...]:
        """The parts that parameter `name` is merged from; (None,) when it is one tensor."""
        return (None,)

    def elsewhere(self) -> Iterable[str]:
        """Names, relative to this module, of tensors of the checkpoint that other ranks hold
        alone."""
        return ()

    def allocate(self, name: str, device: torch.device) -> torch.Tensor:
        """Memory for parameter `name`, of its shape and dtype."""
        param: torch.Tensor = getattr(self, name)
        return torch.empty(param.shape, dtype=param.dtype, device=device)

    def weight_loader(self, param: torch.Tensor, source: TensorSource, part: Part) -> None:
        """Copies this rank's slice of `source` into its place in `param`. Raises ValueError on an
        unexpected shape."""
        check_shape(source, tuple(param.shape))
        param.copy_(source[:])

    def finalize(self, name: str) -> None:
        """All parts of parameter `name` are loaded."""


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
