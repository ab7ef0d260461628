"""Storage: how the files of a checkpoint hold a quantized weight, whatever multiplies it here."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from .base import LinearMethod
from .dense import DenseMethod
from .params import LinearShape, ParamSpec


class Storage(ABC):
    """How the files of a checkpoint hold a weight. Subclasses are frozen dataclasses, so that two
    of equal settings are equal. `layer` has the loaded parameters as attributes, and `shape`."""

    # A rank's share must begin and end at multiples of these.
    output_unit: int = 1
    input_unit: int = 1

    @property
    @abstractmethod
    def title(self) -> str:
        """The format's name in log lines and errors."""

    @abstractmethod
    def params(self, shape: LinearShape) -> Sequence[ParamSpec]:
        """What a checkpoint holds for a layer of this shape. Raises ConfigError where the layer
        cannot be cut in this way."""

    @abstractmethod
    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        """Values for parameter `name` where no checkpoint is read: of a weight with a deviation of
        about 0.02."""


class WidenableStorage(Storage):
    """One whose weights can be had in the compute type."""

    @abstractmethod
    def weight(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the loaded parameters stand for, [out_features, in_features], rounded to
        `dtype`."""


class StorageMethod(LinearMethod):
    """A method of weights that a checkpoint holds in `storage`; subclasses say how they are
    multiplied."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.output_unit = storage.output_unit
        self.input_unit = storage.input_unit

    def params(self, shape: LinearShape, dtype: torch.dtype) -> Sequence[ParamSpec]:
        return self.storage.params(shape)

    def fill_random(
        self, layer: Any, name: str, memory: torch.Tensor, generator: torch.Generator
    ) -> None:
        self.storage.fill_random(layer, name, memory, generator)


class WidenedMethod(StorageMethod, DenseMethod):
    """Widens the weight to the compute type as it loads, where no kernel multiplies its codes."""

    storage: WidenableStorage

    def __init__(self, storage: WidenableStorage) -> None:
        super().__init__(storage)
        self.widens = storage.title
        # Every size can be widened: what is cut across a block is multiplied by its scale too.
        self.output_unit = 1
        self.input_unit = 1

    def held_bytes(self, shape: LinearShape, dtype: torch.dtype) -> int:
        return DenseMethod.held_bytes(self, shape, dtype)

    def finalize(self, layer: Any) -> None:
        weight = self.storage.weight(layer, layer.compute_dtype)
        check_finite(weight)
        self.keep(layer, weight)


def added(result: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """A product and the residual, whose memory it may take, where the kernel adds none."""
    return result if residual is None else residual.add_(result)


def check_finite(values: torch.Tensor) -> None:
    """Raises ValueError for NaN and infinities."""
    if not bool(values.isfinite().all()):
        raise ValueError("makes a weight that is not finite")
