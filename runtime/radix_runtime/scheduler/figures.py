"""What the scheduler counts, and the figures it gives to metrics and logs."""

from collections import Counter
from dataclasses import asdict, dataclass

from .decision import Blocked, Decision
from .lifecycle import Lifecycle
from .policy import OutputRatio


@dataclass(slots=True)
class Counters:
    """Everything that only grows. Requests are counted by choice (n=4 counts four times), and
    accepted = finished + aborted + failed + live."""

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
    dropped_tokens_total: int = 0  # sampled for a request that had ended, or past its stop
    late_masks_total: int = 0  # rows that sat a step out because their mask had not come
    dedup_waits_total: int = 0  # request-steps spent waiting for another's page
    steps_total: int = 0
    busy_seconds_total: float = 0.0  # with a step in flight

    def seconds_per_token(self) -> float:
        """Time of the engine for a token, prompt or output, over the whole run so far."""
        done = self.prefill_tokens_total + self.generation_tokens_total
        return self.busy_seconds_total / max(1, done)


def stats(
    life: Lifecycle, counters: Counters, ratio: OutputRatio, decision: Decision
) -> dict[str, float]:
    """The state of queue, pages and cache, and every counter. Names ending in `_total` only grow.
    `decision` is the last one: it says why each waiting request waits."""
    total = life.allocator.num_pages
    used = total - life.available_pages
    cache = life.cache
    return {
        "num_running_reqs": len(life.running),
        "num_queue_reqs": len(life.waiting),
        "num_pending_reqs": len(life.pending),
        **_queue_by_reason(life, decision),
        "num_pages": total,
        "num_used_tokens": used * life.page_size,
        "max_total_num_tokens": total * life.page_size,
        "token_usage": used / total,
        "new_token_ratio": ratio.value,
        **asdict(counters),
        "cache_pages": cache.total_pages,
        "cache_evictable_pages": cache.evictable_pages,
        "cache_nodes": cache.num_nodes,
        "cache_lookups_total": cache.lookups_total,
        "cache_hits_total": cache.hits_total,
        "evicted_pages_total": cache.evicted_pages_total,
        **_host(life),
    }


def _host(life: Lifecycle) -> dict[str, int]:
    if life.host is None:
        return {}
    return {
        "host_pages": life.host.allocator.num_pages,
        "host_used_pages": life.host.allocator.num_pages - life.host.allocator.num_free,
        "host_stored_pages_total": life.host.stored_pages_total,
        "host_loaded_pages_total": life.host.loaded_pages_total,
    }


def _queue_by_reason(life: Lifecycle, decision: Decision) -> dict[str, int]:
    # Few have a reason of their own, however many wait.
    named = Counter(
        reason for request, reason in decision.blocked.items() if request in life.waiting
    )
    named[decision.rest] += len(life.waiting) - named.total()
    return {f"num_queue_{reason.name.lower()}_reqs": named[reason] for reason in Blocked}
