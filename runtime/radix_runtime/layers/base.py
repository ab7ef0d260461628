"""What every layer shares: how it is built, and how a checkpoint tensor finds its place in it."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..attention.base import AttentionBackend
from ..distributed import Communicator
from ..quantization.base import LinearMethod

Part = (
    str | None
)  # of a merged parameter: the checkpoint's name of the module beside it that the part comes from


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Passed down the constructors of a model. `max_positions`: tokens that RoPE must reach."""

    communicator: Communicator
    backend: AttentionBackend
    linear_method: LinearMethod
    dtype: torch.dtype
    device: torch.device
    max_positions: int


class TensorSource(Protocol):
    """A tensor of a checkpoint that is read only where it is indexed (safetensors' slice)."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


class Layer(nn.Module):
    """A module with parameters, created on the meta device; the loader gives each memory, calls
    `weight_loader` for every part once, then `finalize`. These defaults are of a parameter that
    every rank holds whole."""

    def parts(self, name: str) -> tuple[Part, ...]:
        """The parts parameter `name` is merged from; (None,) when it is one tensor."""
        return (None,)

    def weight_loader(self, param: torch.Tensor, source: TensorSource, part: Part) -> None:
        """Copies this rank's slice of `source` into its place in `param`. Raises ValueError on an
        unexpected shape."""
        check_shape(source, tuple(param.shape))
        param.copy_(source[:])

    def finalize(self, name: str) -> None:
        """All parts of parameter `name` are loaded."""


def check_shape(source: TensorSource, expected: tuple[int, ...]) -> None:
    found = tuple(source.get_shape())
    if found != expected:
        raise ValueError(f"has shape {list(found)}, expected {list(expected)}")
