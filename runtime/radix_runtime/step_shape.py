"""StepShape: what a step is padded to, so that few shapes of steps exist.

The kernels of a step, and on a GPU its bits, follow from its shape. Padding every step up to one of
few shapes lets a CUDA graph be captured for each of them, and gives the same bits with and without
graphs."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from .step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a padded step. Padding stands behind the real entries, tokens and samples.

    In a decode step every entry has one token and one sample, and so has each padding entry: the
    three sizes are equal. In a step with chunks (`has_chunks`) padding entries have no tokens,
    and padding tokens belong to no entry."""

    tokens: int
    entries: int
    samples: int
    has_chunks: bool

    @property
    def sample_capacity(self) -> int:
        """Most samples that a step of these tokens and entries may have: the same for all of them,
        however many samples they really have."""
        return min(self.tokens, self.entries)


class StepShapes:
    """The shapes that steps are padded to.

    `decode_sizes`: rows of decode steps, and samples of all steps; at least one, none above
    `max_batch`, the entries of a step. `token_sizes`: tokens of steps with chunks. Larger steps
    have no shape, nor do steps of several tokens per decode entry."""

    def __init__(
        self, *, decode_sizes: Iterable[int], token_sizes: Iterable[int], max_batch: int
    ) -> None:
        self.decode_sizes = tuple(sorted(set(decode_sizes)))
        self.token_sizes = tuple(sorted(set(token_sizes)))
        self.max_batch = max_batch

    def of(self, plan: StepPlan) -> StepShape | None:
        """The shape of this step; None: it is run as it is."""
        entries = len(plan.rows)
        num_decode = plan.num_decode
        if entries == 0 or plan.query_len[:num_decode].max(initial=1) > 1:
            return None
        if num_decode == entries:
            return self.decode(_round_up(entries, self.decode_sizes))
        tokens = _round_up(plan.num_tokens, self.token_sizes)
        sampling = int(plan.num_samples.sum())
        samples = _round_up(sampling, self.decode_sizes) if sampling else 0
        if tokens is None or samples is None:
            return None
        return self.with_chunks(tokens, samples)

    def decode(self, size: int | None) -> StepShape | None:
        """That of a decode step of `size` rows; None for None."""
        if size is None:
            return None
        return StepShape(tokens=size, entries=size, samples=size, has_chunks=False)

    def with_chunks(self, tokens: int, samples: int) -> StepShape:
        """That of a step with chunks."""
        return StepShape(tokens=tokens, entries=self.max_batch, samples=samples, has_chunks=True)


def _round_up(size: int, sizes: tuple[int, ...]) -> int | None:
    """The least of the sorted `sizes` that is not below `size`; None where there is none."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


def default_decode_sizes(max_batch: int) -> list[int]:
    """1 to 8, then every 8 up to `max_batch`, which is the last."""
    sizes = [*range(1, min(8, max_batch) + 1), *range(16, max_batch, 8)]
    if max_batch > 8:
        sizes.append(max_batch)
    return sizes


def default_token_sizes(max_tokens: int) -> list[int]:
    """Sizes of steps with chunks, up to `max_tokens`: eight to a power of two from 256 on, so that
    padding adds little to a step that is bound by arithmetic."""
    sizes = []
    size = 32
    while size <= max_tokens:
        sizes.append(size)
        size += max(32, 1 << (size.bit_length() - 4))
    return sizes
