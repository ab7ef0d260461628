"""Counts the weights that a loader has, and has not packed yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from radix_runtime import ops
from radix_runtime.quantization.params import ParamSpec


class WaitingWeights:
    """Matrices of floats in memory of the loader's or as they lie in a file, from now on. most: of
    them at a time; peak: of their elements; packed: how many have been."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sizes: dict[int, int] = {}
        self.most = 0
        self.peak = 0
        self.packed = 0
        monkeypatch.setattr(torch, "empty", self._noting(torch.empty))
        monkeypatch.setattr(ParamSpec, "part_in_place", self._noting(ParamSpec.part_in_place))
        monkeypatch.setattr(ops, "pack_weight", self._packing(ops.pack_weight))
        monkeypatch.setattr(ops, "pack_merged", self._packing(ops.pack_merged))

    def _noting(self, create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(*args: Any, **options: Any) -> torch.Tensor:
            tensor = create(*args, **options)
            if tensor.dim() == 2 and tensor.is_floating_point() and not tensor.is_meta:
                self._sizes[tensor.data_ptr()] = tensor.numel()
                self.most = max(self.most, len(self._sizes))
                self.peak = max(self.peak, sum(self._sizes.values()))
            return tensor

        return noted

    def _packing(self, pack: Callable[..., Any]) -> Callable[..., Any]:
        def packed(weight: torch.Tensor | Sequence[torch.Tensor], **options: Any) -> Any:
            parts = [weight] if isinstance(weight, torch.Tensor) else weight
            for part in parts:
                if self._sizes.pop(part.data_ptr(), None) is not None:
                    self.packed += 1
            return pack(weight, **options)

        return packed
