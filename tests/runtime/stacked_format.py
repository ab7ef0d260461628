"""Plain weights whose experts lie in one tensor, as a GPU holds them, on the CPU."""

from __future__ import annotations

from radix_runtime.quantization.at_load import AtLoad
from radix_runtime.quantization.base import LinearMethod
from radix_runtime.quantization.dense import PlainMethod


class StackedMethod(PlainMethod):
    stacks_experts = True


class StackedAtLoad(AtLoad):
    def linear(self) -> LinearMethod:
        return StackedMethod()
