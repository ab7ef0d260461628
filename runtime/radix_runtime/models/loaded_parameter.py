"""A parameter while its checkpoint tensors are loaded, and the memory that it waits in."""

from collections import Counter

import torch
from torch import nn

from ..families.tensor_views import TensorSource
from ..layers.base import Layer, part_name
from ..quantization.params import Part


class Staging:
    """Memory of parameters that are repacked. The next one of the same size gets it again, for a
    system clears each page that it hands out anew; where none will come it is freed."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
        self._expected: Counter[tuple[torch.Size, torch.dtype]] = Counter()

    def expect(self, param: torch.Tensor) -> None:
        """A parameter of this size will come, and either `take` or do `without`."""
        self._expected[param.shape, param.dtype] += 1

    def without(self, param: torch.Tensor) -> None:
        """It has come, and needs no memory of ours."""
        self._expected[param.shape, param.dtype] -= 1

    def take(self, param: torch.Tensor) -> torch.Tensor:
        """Memory of the size of `param`, with any values."""
        key = (param.shape, param.dtype)
        self._expected[key] -= 1
        free = self._free.pop(key, None)
        return torch.empty(param.shape, dtype=param.dtype) if free is None else free

    def give_back(self, memory: torch.Tensor) -> None:
        """Nothing else uses it any more."""
        key = (memory.shape, memory.dtype)
        if self._expected[key] > 0:
            self._free[key] = memory


class LoadedParameter:
    """A parameter that is to be loaded. `sources`: the names of its tensors, and the part that each
    of them is."""

    def __init__(
        self, layer: Layer, *, prefix: str, name: str, device: torch.device, staging: Staging
    ) -> None:
        self.layer = layer
        self.name = name
        self.path = f"{prefix}.{name}"
        self._device = device
        self._staging = staging
        self._staged: torch.Tensor | None = None
        self._is_repacked = layer.is_repacked(name, device)
        self._in_files: dict[Part, torch.Tensor] = {}
        if self._is_repacked:
            staging.expect(getattr(layer, name))
        self.sources: dict[str, Part] = {
            f"{part_name(prefix, part)}.{layer.suffix(name)}": part for part in layer.parts(name)
        }

    def load(self, source: TensorSource, part: Part) -> None:
        """Takes in one of its tensors, in place where that is possible. Raises ValueError."""
        if self._is_repacked and self.layer.lies_in_files(self.name):
            self._in_files[part] = self.layer.part_in_place(self.name, source, part)
        else:
            self.layer.weight_loader(self.name, self.memory(), source, part)

    def memory(self) -> torch.Tensor:
        """The parameter's memory on its device, from when it is first asked for."""
        param: torch.Tensor = getattr(self.layer, self.name)
        if param.is_meta and self._is_repacked:
            self._staged = self._staging.take(param)
            param = self._put(self._staged)
        elif param.is_meta:
            param = self._put(self.layer.allocate(self.name, self._device))
        return param.data

    def finalize(self) -> None:
        """All of its tensors are loaded. Raises ValueError."""
        if self._in_files:
            self._finalize_in_files()
        else:
            self.layer.finalize(self.name)
        if self._staged is not None:
            self._staging.give_back(self._staged)
            self._staged = None

    def _finalize_in_files(self) -> None:
        parts = [self._in_files[part] for part in self.layer.parts(self.name)]
        self._in_files.clear()
        param: torch.Tensor = getattr(self.layer, self.name)
        if all(part.dtype == param.dtype for part in parts):
            self._staging.without(param)
            self.layer.finalize_parts(self.name, parts)
            return
        memory = self.memory()
        for place, part in zip(memory.split([len(part) for part in parts]), parts, strict=True):
            place.copy_(part)
        self.layer.finalize(self.name)

    def _put(self, tensor: torch.Tensor) -> nn.Parameter:
        param = nn.Parameter(tensor, requires_grad=False)
        setattr(self.layer, self.name, param)
        return param
