"""What the op tests share: one comparator, poisoned buffers, random inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from radix_kernels import _loader

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def _chip() -> str:
    """The AMD GPU, or the one that the executor plays (tests/gcn)."""
    if torch.version.hip and torch.cuda.is_available():
        return str(torch.cuda.get_device_properties(0).gcnArchName)
    return os.environ.get("GCN_TARGET", "gfx942")


# What the library quantizes to: OCP's e4m3, or AMD's, whose numbers end at 240 and are half as far
# apart near 0.
_IS_FNUZ = _loader.backend == "rocm" and _chip().startswith("gfx94")
# None in a torch that is older than FP8.
FP8 = getattr(torch, "float8_e4m3fnuz" if _IS_FNUZ else "float8_e4m3fn", None)
FP8_MAX = 240.0 if _IS_FNUZ else 448.0
FP8_SMALLEST = 2.0**-10 if _IS_FNUZ else 2.0**-9  # of the subnormal ones
FP8_CODES = 0x80 if _IS_FNUZ else 0x7F  # of 0 and the positive numbers
FP8_NAN = FP8_CODES

# (norm, worst) for results that are computed in float32 and rounded once to the dtype. The second
# is half a unit in the last place, with a little room for values next to a rounding border.
ROUNDED_ONCE = {
    torch.float32: (1e-6, 4e-6),
    torch.float16: (4.9e-4, 5.2e-4),
    torch.bfloat16: (3.95e-3, 4.1e-3),
}
# The reference in float64 against an oracle of its own.
DEFINITION = (1e-12, 1e-10)
# Attention may round probabilities to the dtype of the values before they meet.
ATTENTION = {torch.float32: (1e-5, 9e-5), torch.float16: (6e-4, 4e-3), torch.bfloat16: (5e-3, 3e-2)}

# q, k and v in FP8: probabilities too meet the values as e4m3, 2.5 % (rms) off each, and sums of
# products keep 14 bits.
ATTENTION_FP8 = (4e-2, 0.6)
LSE_FP8 = (2e-3, 1e-2)

# (op, dtype) -> largest errors that any test saw, for `pytest --numerics`.
measured: dict[tuple[str, str], tuple[float, float]] = {}


def errors(
    got: torch.Tensor, expected: torch.Tensor, quantum: float | torch.Tensor = 0.0
) -> tuple[float, float]:
    """(||d|| / ||e||, max |d| / (|e| + rms(e))) over the finite elements, in float64.

    d is the difference less half a quantum, which is the spacing of the dtype's subnormal numbers
    or of each element.
    """
    finite = torch.isfinite(expected)
    e = expected[finite]
    d = ((got - expected).abs() - quantum / 2)[finite].clamp(min=0)
    if not e.numel():
        return 0.0, 0.0
    norm = e.norm()
    rms = e.square().mean().sqrt()
    if norm == 0:
        zero = float(d.max())
        return (0.0, 0.0) if zero == 0 else (math.inf, math.inf)
    return float(d.norm() / norm), float((d / (e.abs() + rms)).max())


def assert_close(
    op: str,
    got: torch.Tensor,
    expected: torch.Tensor,
    tolerance: tuple[float, float],
    amplitude: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Compare with the unrounded float64 result: shape, NaN and infinity positions, both errors.

    amplitude: where elements are sums of rounded terms, the sums of the terms' magnitudes. Terms
    that cancel leave their rounding behind, so the worst element is given half a unit in the last
    place of that as well.
    """
    assert expected.dtype == torch.float64, "the oracle must not be rounded"
    assert got.shape == expected.shape, f"{op}: shape {got.shape}, expected {expected.shape}"
    wide = got.double().cpu()
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(wide) != test(expected)
        assert not wrong.any(), f"{op}: {name} at other places, first {wrong.nonzero()[0].tolist()}"
    info = torch.finfo(got.dtype)
    norm, worst = errors(wide, expected, info.tiny * info.eps)
    # The table is of well-conditioned inputs and of enough elements for a norm.
    if expected.numel() >= 64 and (tolerance[1] < 0.01 or got.element_size() == 2):
        key = op, str(got.dtype).removeprefix("torch.")
        before = measured.get(key, (0.0, 0.0))
        measured[key] = max(before[0], norm), max(before[1], worst)
    # The rounding of a few elements does not average out.
    allowed = tolerance[0] if expected.numel() >= 64 else 2 * max(tolerance)
    assert norm <= allowed, f"{op}: norm error {norm:.3g}, allowed {allowed:.3g}"
    if amplitude is not None and worst > tolerance[1]:
        worst = errors(wide, expected, info.eps * amplitude())[1]
    assert worst <= tolerance[1], f"{op}: worst element {worst:.3g}, allowed {tolerance[1]:.3g}"


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit; NaNs count as equal to themselves."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    assert torch.equal(got.contiguous().view(word), expected.contiguous().view(word))


@dataclass
class Guarded:
    """A view into a NaN-filled buffer, and the means to see that nothing else was written."""

    view: torch.Tensor
    _buffer: torch.Tensor
    _inside: torch.Tensor

    def check(self) -> None:
        """Fail when an element outside of the view is no longer NaN."""
        assert torch.isnan(self._buffer[~self._inside]).all(), "wrote outside of the view"


def guarded(shape: Sequence[int], dtype: torch.dtype, *, gap: int = 0) -> Guarded:
    """A NaN-filled tensor with `gap` foreign elements after each row, a guard before and after."""
    *rows, width = shape
    count = math.prod(rows)
    step = width + gap
    guard = 32
    buffer = torch.full((count * step + 2 * guard,), math.nan, dtype=dtype)
    strides = [1]
    stride = step
    for size in reversed(rows):
        strides.insert(0, stride)
        stride *= size
    view = buffer.as_strided(tuple(shape), strides, guard)
    inside = torch.zeros(buffer.shape, dtype=torch.bool)
    inside.as_strided(tuple(shape), strides, guard).fill_(True)
    return Guarded(view=view, _buffer=buffer, _inside=inside)


def distant(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose first dimension, of 2 or more, has more than 2**31 elements from its first to
    its last.

    The memory between is reserved and never touched, so on the CPU it costs nothing.
    """
    inner = math.prod(shape[1:])
    steps = shape[0] - 1
    step = (2**31 // steps // 64 + 1) * 64
    assert step > inner
    buffer = torch.empty(steps * step + inner, dtype=dtype)
    strides = [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
    return buffer.as_strided(tuple(shape), (step, *strides))


def spread(
    shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator, *, gap: int = 0
) -> torch.Tensor:
    """Normal numbers with a random scale, in rows that `gap` NaN elements keep apart."""
    values = torch.randn(tuple(shape), generator=rng, dtype=torch.float64)
    values *= 2.0 ** float(torch.randint(-2, 3, (), generator=rng))
    if not gap:
        return values.to(dtype)
    holder = guarded(shape, dtype, gap=gap)
    return holder.view.copy_(values)


def integers(low: int, high: int, size: Sequence[int], rng: torch.Generator) -> torch.Tensor:
    """int64 integers in low .. high - 1."""
    return torch.randint(low, high, tuple(size), generator=rng)
