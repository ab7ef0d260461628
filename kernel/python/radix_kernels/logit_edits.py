"""What changes the logits of a draw."""

from __future__ import annotations

from dataclasses import dataclass

from ._arrays import Array


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What changes the logits of a draw before temperature, in this order; None leaves a step out.

    bias: ids int32 [B, M] and values float32 [B, M], added; an id twice counts twice. penalties:
    counts, slots, repetition, frequency, presence, as `apply_penalties_inplace` takes them.
    min_tokens: stop ids int32 [B, M] and positions int64 [B]; a row's stop ids are -inf while its
    position is below. bitmask: int32 [B, ceil(V / 32)]; bit `id % 32` of word `id // 32` allows an
    id, the others are -inf. In a list of ids a negative one ends the row; an id of V or more is
    skipped.
    """

    bias: tuple[Array, Array] | None = None
    penalties: tuple[Array, Array, Array, Array, Array] | None = None
    min_tokens: tuple[Array, Array] | None = None
    bitmask: Array | None = None

    def flat(self) -> tuple[Array | None, ...]:
        """The ten tensors in the order of the native call."""
        bias = self.bias or (None, None)
        penalties = self.penalties or (None, None, None, None, None)
        min_tokens = self.min_tokens or (None, None)
        return (*bias, *penalties, *min_tokens, self.bitmask)

    @classmethod
    def of(cls, flat: tuple[Array | None, ...]) -> LogitEdits:
        """The edits that `flat` was made of."""
        bias_ids, bias_values = flat[0:2]
        counts, slots, repetition, frequency, presence = flat[2:7]
        stop_ids, min_position = flat[7:9]
        penalties = (counts, slots, repetition, frequency, presence)
        return cls(
            bias=None if bias_ids is None else (bias_ids, bias_values),
            penalties=None if counts is None else penalties,
            min_tokens=None if stop_ids is None else (stop_ids, min_position),
            bitmask=flat[9],
        )
