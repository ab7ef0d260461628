"""What the scheduler counts. Names end in _total where a value only grows."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Requests are counted by choice: an n=4 request counts four times.
    accepted = finished + aborted + failed + still live."""

    num_requests_total: int = 0  # accepted
    num_refused_requests_total: int = 0  # whole requests answered with an error at submission
    num_finished_requests_total: int = 0
    num_aborted_requests_total: int = 0
    num_failed_requests_total: int = 0
    num_retractions_total: int = 0
    prompt_tokens_total: int = 0
    prefill_tokens_total: int = 0  # prompt tokens computed, again after a retraction too
    cached_tokens_total: int = 0  # prompt tokens not computed at first admission
    generation_tokens_total: int = 0
    dropped_tokens_total: int = 0  # sampled for a request that had ended
    dedup_waits_total: int = 0  # request-steps spent waiting for another's page
    steps_total: int = 0
    invariant_violations_total: int = 0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
