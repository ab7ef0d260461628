"""Bugs put into the code on purpose: traffic that meets every path must fail, without them pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from radix_runtime.errors import InvariantViolation
from radix_runtime.memory.radix_cache import RadixCache
from radix_runtime.memory.request_table import RequestTable
from radix_runtime.messages import FinishReason, TokenDelta, pack_ids
from radix_runtime.scheduler import batch_builder, lifecycle, policy, scheduler
from radix_runtime.scheduler.batch_builder import Step
from radix_runtime.scheduler.decision import Decision, DecodeEntries
from radix_runtime.scheduler.lifecycle import Lifecycle
from radix_runtime.scheduler.live import LiveRequests, StopIds
from radix_runtime.scheduler.request import Request, State
from radix_runtime.scheduler.results import Results
from radix_runtime.scheduler.rows import Flag
from radix_runtime.step_plan import StepResult
from tests.runtime.check_content import check_content
from tests.runtime.scheduler_rig import Rig

RNG = np.random.default_rng()


def prompt(n: int) -> np.ndarray:
    return RNG.integers(3, 97, n)


Patch = pytest.MonkeyPatch


def traffic(rig: Rig, new: int = 8) -> None:
    """Enough to meet every path: sharing, duplicates, aborts in flight, retraction, the end."""
    shared = prompt(30)
    for turn in range(30):
        for i in range(3):
            ids = np.concatenate([shared[: int(RNG.integers(0, 31))], prompt(6)])
            rig.submit(f"{turn}.{i}", ids, max_new_tokens=new, n=1 + i % 2, seed=i)
        for at in range(6):
            rig.step()
            if at == 3:
                rig.abort(f"{turn}.0")
            if at == 4 and turn % 3 == 0:
                rig.scheduler.retract_youngest()
        if turn % 4 == 3:
            rig.run()
        check_content(rig.engine, rig.life.cache)
    rig.run()
    rig.verify_all()


def bug_pages_freed_while_in_flight(patch: Patch) -> None:
    """I10: finishing releases at once."""

    def end(self: Lifecycle, request: Request) -> None:
        if request.state is State.WAITING:
            self.waiting.remove(request)
            request.move(State.DONE)
            return
        self.running.remove(request)
        request.move(State.DRAINING)
        self._release(request)
        request.move(State.DONE)

    patch.setattr(Lifecycle, "end", end)


def bug_duplicates_freed_at_once(patch: Patch) -> None:
    patch.setattr(policy, "_pages_being_computed", lambda life: set())
    patch.setattr(Lifecycle, "_free_after", lambda self, step, pages: self.allocator.free(pages))


def bug_row_not_pointed_at_the_canonical_pages(patch: Patch) -> None:
    patch.setattr(policy, "_pages_being_computed", lambda life: set())
    insert = RadixCache.insert

    def stale(self: RadixCache, ids: np.ndarray, pages: np.ndarray, key: object) -> object:
        cached, duplicates = insert(self, ids, pages, key)
        cached.pages[:] = pages
        return cached, duplicates

    patch.setattr(RadixCache, "insert", stale)


def bug_lock_leaked(patch: Patch) -> None:
    unlock = RadixCache.unlock
    calls = iter(range(10**9))
    patch.setattr(
        RadixCache, "unlock", lambda self, n: unlock(self, n) if next(calls) % 9 else None
    )


def bug_prefix_not_locked(patch: Patch) -> None:
    patch.setattr(RadixCache, "lock", lambda self, node: None)
    patch.setattr(RadixCache, "unlock", lambda self, node: None)


def bug_page_leaked(patch: Patch) -> None:
    patch.setattr(policy, "_pages_being_computed", lambda life: set())
    reclaim = Lifecycle.reclaim

    def leaky(self: Lifecycle) -> None:
        self.deferred.clear()
        reclaim(self)

    patch.setattr(Lifecycle, "reclaim", leaky)


def bug_admission_ignores_pages(patch: Patch) -> None:
    patch.setattr(policy, "expected_len", lambda total, most, ratio, margin: 0 * total)


def bug_token_sent_after_the_end(patch: Patch) -> None:
    complete = Results.complete

    def careless(self: Results, step: Step, result: StepResult) -> None:
        counts = step.plan.num_samples.tolist()
        for request, count in zip(step.requests(self._life.rows), counts, strict=True):
            if request.ended and count:
                delta = TokenDelta(rid=request.rid, choice=request.choice, ids=pack_ids([0]))
                self._output._deltas.append(delta)
        complete(self, step, result)

    patch.setattr(Results, "complete", careless)


def bug_wrong_page_in_the_plan(patch: Patch) -> None:
    """I13: the host's own books are right, the ranks read something else."""
    take = lifecycle.RequestTable.take_changes
    calls = iter(range(10**9))

    def swapped(self: RequestTable) -> tuple[np.ndarray, ...]:
        rows, indices, pages = take(self)
        if len(pages) > 1 and next(calls) % 5 == 4:
            pages = pages[::-1].copy()
        return rows, indices, pages

    patch.setattr(lifecycle.RequestTable, "take_changes", swapped)


def bug_retraction_forgets_what_was_sent(patch: Patch) -> None:
    retract = Lifecycle.retract

    def forgetful(self: Lifecycle, request: Request) -> None:
        retract(self, request)
        request.sent = 0

    patch.setattr(Lifecycle, "retract", forgetful)


def bug_uncommitted_pages_enter_the_tree(patch: Patch) -> None:
    patch.setattr(Request, "shareable_len", property(lambda self: self.num_ids))


def bug_position_off_by_one(patch: Patch) -> None:
    build_step = scheduler.build_step

    def early(decision: Decision, *args: object) -> object:
        plan = build_step(decision, *args)
        for entry in decision.chunks:
            if not entry.num_samples and entry.end % 4 == 0:
                entry.request.computed_len += 1
        return plan

    patch.setattr(scheduler, "build_step", early)


def bug_abort_counts_nothing(patch: Patch) -> None:
    def silent(self: LiveRequests, rid: str, reason: str) -> None:
        for request in list(self.get(rid, ())):
            self._output.add(request, FinishReason("abort", message=reason))
            self._end(request)

    patch.setattr(LiveRequests, "abort", silent)


def bug_ids_that_end_a_request_are_not_seen(patch: Patch) -> None:
    patch.setattr(StopIds, "among", lambda self, tokens: np.zeros_like(tokens))


def bug_rows_that_have_ended_get_tokens(patch: Patch) -> None:
    need = Results._need_attention

    def blind(self: Results, rows: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        self._life.rows.flags[rows] &= ~np.uint8(Flag.ENDED)
        return need(self, rows, *rest)

    patch.setattr(Results, "_need_attention", blind)


def bug_a_block_is_not_taken_over(patch: Patch) -> None:
    patch.setattr(Request, "settle", lambda self: None)


# With drafts ----------------------------------------------------------------------------------


def draft_bug_rejected_tokens_stay_counted(patch: Patch) -> None:
    accept = Results._accept_all

    def stuck(self: Results, streams: DecodeEntries, counts: np.ndarray, *rest: object) -> None:
        accept(self, streams, counts, *rest)
        self._life.rows.total_len[streams.rows] += streams.num_samples - counts
        self._life.rows.computed_len[streams.rows] += streams.num_samples - counts

    patch.setattr(Results, "_accept_all", stuck)


def draft_bug_rejected_tokens_are_sent(patch: Patch) -> None:
    complete = Results.complete

    def greedy(self: Results, step: Step, result: StepResult) -> None:
        result.counts = step.plan.num_samples[step.plan.num_samples > 0]
        complete(self, step, result)

    patch.setattr(Results, "complete", greedy)


def draft_bug_only_the_total_sinks(patch: Patch) -> None:
    accept = Results._accept_all

    def half(self: Results, streams: DecodeEntries, counts: np.ndarray, *rest: object) -> None:
        self._life.rows.computed_len[streams.rows] += streams.num_samples - counts
        accept(self, streams, counts, *rest)

    patch.setattr(Results, "_accept_all", half)


def draft_bug_pages_for_one_token_only(patch: Patch) -> None:
    take_pages = batch_builder._take_pages

    def short(rows: np.ndarray, ends: np.ndarray, life: Lifecycle) -> None:
        decodes = np.isin(rows, life.rows.decoding)
        take_pages(rows, np.where(decodes, life.rows.computed_len[rows] + 1, ends), life)

    patch.setattr(batch_builder, "_take_pages", short)


def draft_bug_drafts_ignore_the_room(patch: Patch) -> None:
    entries = policy._decode_entries

    def endless(streams: object, start: object, room: int, *rest: object) -> object:
        return entries(streams, start, 10**6, *rest)

    patch.setattr(policy, "_decode_entries", endless)


def draft_bug_drafts_beyond_the_end(patch: Patch) -> None:
    def entries(
        streams: np.ndarray, start: np.ndarray, room: int, most: int, life: Lifecycle
    ) -> DecodeEntries:
        return DecodeEntries(
            rows=streams,
            start=start,
            num_samples=np.full_like(start, most),
            total_samples=most * len(start),
        )

    patch.setattr(policy, "_decode_entries", entries)


def draft_bug_rejected_kv_enters_the_tree(patch: Patch) -> None:
    """All that was launched is shared, accepted or not."""
    patch.setattr(Request, "shareable_len", property(lambda r: min(r.reserved_len, r.num_ids)))


BUGS = [f for n, f in globals().items() if n[:4] == "bug_"]
DRAFT_BUGS = [f for n, f in globals().items() if n[:10] == "draft_bug_"]
TRIES = 3  # the traffic is random: about one in a thousand misses a bug
CAUGHT = (InvariantViolation, AssertionError, ValueError, IndexError)


def small_rig(samples: int, page_size: int = 4) -> Rig:
    return Rig(
        samples=samples, rows=4, pages=56 // page_size, page_size=page_size, chunk=8,
        schedule_conservativeness=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda f: f.__name__[4:])
def test_a_bug_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises(CAUGHT):
        for _ in range(TRIES):
            traffic(small_rig(1))


@pytest.mark.parametrize("bug", DRAFT_BUGS, ids=lambda f: f.__name__[10:])
def test_a_bug_with_drafts_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises(CAUGHT):
        for page_size in (4, 1) * TRIES:
            traffic(small_rig(4, page_size), new=20)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(("new", "page_size"), [(8, 4), (20, 4), (20, 1)])
def test_the_same_traffic_without_a_bug_passes(samples: int, new: int, page_size: int) -> None:
    traffic(small_rig(samples, page_size), new)
