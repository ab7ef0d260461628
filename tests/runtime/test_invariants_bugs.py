"""Bugs put into the code on purpose: traffic that meets every path must fail, without them pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from radix_runtime.errors import InvariantViolation
from radix_runtime.memory.radix_cache import RadixCache
from radix_runtime.messages import FinishReason, TokenDelta, pack_ids
from radix_runtime.scheduler import batch_builder, lifecycle, policy, scheduler
from radix_runtime.scheduler.batch_builder import Step
from radix_runtime.scheduler.decision import Entry
from radix_runtime.scheduler.lifecycle import Lifecycle
from radix_runtime.scheduler.live import LiveRequests
from radix_runtime.scheduler.request import Request, State
from radix_runtime.scheduler.results import Results
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
    patch.setattr(
        Lifecycle, "reclaim", lambda self: self.deferred.clear() or self._finish_draining()
    )


def bug_admission_ignores_pages(patch: Patch) -> None:
    patch.setattr(policy, "expected_len", lambda request, ratio, size: 0)


def bug_token_sent_after_the_end(patch: Patch) -> None:
    complete = Results.complete

    def careless(self: Results, step: Step, result: StepResult) -> None:
        for entry in step.entries:
            request = entry.request
            if request.ended and entry.num_samples:
                delta = TokenDelta(rid=request.rid, choice=request.choice, ids=pack_ids([0]))
                self._output._deltas.append(delta)
        complete(self, step, result)

    patch.setattr(Results, "complete", careless)


def bug_wrong_page_in_the_plan(patch: Patch) -> None:
    """I13: the host's own books are right, the ranks read something else."""
    take = lifecycle.RequestTable.take_changes
    calls = iter(range(10**9))

    def swapped(self: lifecycle.RequestTable) -> tuple[np.ndarray, ...]:
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

    def early(*args: object) -> object:
        plan, entries = build_step(*args)
        for entry in entries:
            if entry.is_chunk and not entry.num_samples and entry.end % 4 == 0:
                entry.request.computed_len += 1
        return plan, entries

    patch.setattr(scheduler, "build_step", early)


def bug_abort_counts_nothing(patch: Patch) -> None:
    def silent(self: LiveRequests, rid: str, reason: str) -> None:
        for request in list(self.get(rid, ())):
            self._output.add(request, FinishReason("abort", message=reason))
            self._end(request)

    patch.setattr(LiveRequests, "abort", silent)


# With drafts ----------------------------------------------------------------------------------


def draft_bug_rejected_tokens_stay_counted(patch: Patch) -> None:
    accept = Results._accept

    def stuck(self: Results, entry: Entry, tokens: list[int], *rest: object) -> None:
        rejected = entry.num_samples - len(tokens)
        accept(self, entry, tokens, *rest)
        entry.request.total_len += rejected
        entry.request.computed_len += rejected

    patch.setattr(Results, "_accept", stuck)


def draft_bug_rejected_tokens_are_sent(patch: Patch) -> None:
    complete = Results.complete

    def greedy(self: Results, step: Step, result: StepResult) -> None:
        result.counts = step.plan.num_samples[step.plan.num_samples > 0]
        complete(self, step, result)

    patch.setattr(Results, "complete", greedy)


def draft_bug_only_the_total_sinks(patch: Patch) -> None:
    accept = Results._accept

    def half(self: Results, entry: Entry, tokens: list[int], *rest: object) -> None:
        entry.request.computed_len += entry.num_samples - len(tokens)
        accept(self, entry, tokens, *rest)

    patch.setattr(Results, "_accept", half)


def draft_bug_pages_for_one_token_only(patch: Patch) -> None:
    def short(entries: list[Entry], life: Lifecycle) -> None:
        for entry in entries:
            end = entry.end if entry.is_chunk else entry.start + 1
            need = life.allocator.pages_for(end) - entry.request.num_pages
            life.extend([entry.request], [max(0, need)])

    patch.setattr(batch_builder, "_take_pages", short)


def draft_bug_drafts_ignore_the_room(patch: Patch) -> None:
    entries = policy._decode_entries

    def endless(streams: list[Request], room: int, max_samples: int, life: Lifecycle) -> object:
        return entries(streams, 10**6, max_samples, life)

    patch.setattr(policy, "_decode_entries", endless)


def draft_bug_drafts_beyond_the_end(patch: Patch) -> None:
    def entries(streams: list[Request], room: int, most: int, life: Lifecycle) -> list[Entry]:
        return [policy.decode(request, most) for request in streams]

    patch.setattr(policy, "_decode_entries", entries)


def draft_bug_rejected_kv_enters_the_tree(patch: Patch) -> None:
    """All that was launched is shared, accepted or not."""
    patch.setattr(Request, "shareable_len", property(lambda r: min(r.reserved_len, r.num_ids)))


BUGS = [f for n, f in globals().items() if n[:4] == "bug_"]
DRAFT_BUGS = [f for n, f in globals().items() if n[:10] == "draft_bug_"]
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
        traffic(small_rig(1))


@pytest.mark.parametrize("bug", DRAFT_BUGS, ids=lambda f: f.__name__[10:])
def test_a_bug_with_drafts_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises(CAUGHT):
        for page_size in (4, 1):
            traffic(small_rig(4, page_size), new=20)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(("new", "page_size"), [(8, 4), (20, 4), (20, 1)])
def test_the_same_traffic_without_a_bug_passes(samples: int, new: int, page_size: int) -> None:
    traffic(small_rig(samples, page_size), new)
