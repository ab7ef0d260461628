"""What the cases of the self-test share: inputs, poisoned outputs, the measure of an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import radix_kernels
from radix_kernels import reference as definitions

# Cases unpack lists of tensors into calls, which a type checker does not follow.
rk: Any = radix_kernels
reference: Any = definitions

GUARD = 64  # elements before and behind an output
_POISON = 0xFF  # every byte: NaN, or -1


class Wrong(AssertionError):
    """A result that is not just inexact: its shape, NaN where there is none, a write outside."""


@dataclass
class Trial:
    """The calls of one op with one dtype: makes what they take and keeps the worst error seen."""

    dtype: torch.dtype
    device: str
    random: torch.Generator
    cases: int = 0
    worst: float = 0.0
    bound: float = math.inf
    _guarded: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers on the CPU, rounded to the trial's dtype or this one."""
        values = torch.randn(shape, generator=self.random, dtype=torch.float64)
        return values.to(dtype or self.dtype)

    def rand(self, *shape: int) -> torch.Tensor:
        """float32 numbers in 0 .. 1 on the CPU."""
        return torch.rand(shape, generator=self.random)

    def integers(self, low: int, high: int, *shape: int, dtype: Any = torch.int32) -> torch.Tensor:
        """Integers in low .. high - 1 on the CPU."""
        return torch.randint(low, high, shape, generator=self.random).to(dtype)

    def shuffled(self, count: int) -> torch.Tensor:
        """0 .. count - 1 in any order, int64, on the CPU."""
        return torch.randperm(count, generator=self.random)

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """A copy on the device that is tested."""
        return x.to(self.device, copy=True)

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An output on the device that is tested, every byte 0xff, between guards of the same."""
        dtype = dtype or self.dtype
        count = math.prod(shape)
        item = torch.empty(0, dtype=dtype).element_size()
        poison = torch.full(((count + 2 * GUARD) * item,), _POISON, dtype=torch.uint8)
        buffer = poison.to(self.device)
        self._guarded.append((buffer, GUARD * item))
        return buffer.view(dtype)[GUARD : GUARD + count].view(shape)

    def near(self, got: torch.Tensor, exact: torch.Tensor, bound: float) -> None:
        """Counts one case: max |got - exact| / (|exact| + rms(exact)) is at most the bound."""
        self.keep(_error(got.detach().cpu(), exact), bound)

    def same(self, got: torch.Tensor, expected: torch.Tensor, wrong: float = 0.0) -> None:
        """Counts one case: at most this part of the elements is not equal bit for bit."""
        found = got.detach().cpu()
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise Wrong(f"{tuple(found.shape)} of {found.dtype}, not {tuple(expected.shape)}")
        different = _bits(found) != _bits(expected)
        self.keep(float(different.double().mean()) if different.numel() else 0.0, wrong)

    def keep(self, error: float, bound: float) -> None:
        """Counts one case with this error."""
        self.cases += 1
        self.check_guards()
        before = _share(self.worst, self.bound)
        if self.bound == math.inf or not _share(error, bound) <= before:
            self.worst = error
            self.bound = bound

    def check_guards(self) -> None:
        """Wrong where something was written outside of an output."""
        for buffer, guard in self._guarded:
            outside = torch.cat([buffer[:guard], buffer[-guard:]])
            if bool((outside != _POISON).any()):
                raise Wrong("memory outside of the output was written")
        self._guarded.clear()

    @property
    def name(self) -> str:
        """The dtype's, as `capabilities()` has it."""
        return str(self.dtype).rpartition(".")[2]

    @property
    def is_narrow(self) -> bool:
        """True for a dtype of one byte: INT8 or FP8."""
        return torch.empty(0, dtype=self.dtype).element_size() == 1

    @property
    def ok(self) -> bool:
        """Every error within its bound; NaN is none."""
        return self.worst <= self.bound


Case = Callable[[Trial], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Registers the calls of an op under the function's name."""
    CASES[function.__name__] = function
    return function


def _share(error: float, bound: float) -> float:
    """How much of its bound an error is."""
    if bound == math.inf or error == 0:
        return 0.0
    return error / bound if bound else math.inf


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    if got.shape != exact.shape:
        raise Wrong(f"a result of {tuple(got.shape)}, expected {tuple(exact.shape)}")
    wide = got.double()
    expected = exact.double()
    if not torch.equal(wide.isnan(), expected.isnan()):
        raise Wrong("NaN at other places than the reference: not written, or read from poison")
    finite = expected.isfinite()
    if not torch.equal(wide[~finite].nan_to_num(), expected[~finite].nan_to_num()):
        raise Wrong("infinity at other places than the reference")
    if not bool(finite.any()):
        return 0.0
    info = torch.finfo(got.dtype)
    quantum = info.tiny * info.eps  # between subnormal numbers
    difference = ((wide - expected)[finite].abs() - quantum / 2).clamp(min=0)
    size = expected[finite].abs()
    scale = size + size.square().mean().sqrt()
    return float((difference / scale.clamp(min=1e-300)).max())


def _bits(x: torch.Tensor) -> torch.Tensor:
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(word)
