"""Decode entries of several tokens: how many a plan gives, and what is done with those accepted."""

from __future__ import annotations

import numpy as np
import pytest

from radix_runtime.errors import InvariantViolation
from radix_runtime.messages import Generate, pack_ids, unpack_ids
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.scheduler.decision import Decision
from radix_runtime.scheduler.lifecycle import Lifecycle
from radix_runtime.scheduler.policy import plan_step
from radix_runtime.scheduler.request import Request
from radix_runtime.step_plan import StepPlan, StepResult
from tests.runtime.fake_model import fake_logprob, fold, kv_of
from tests.runtime.scheduler_rig import BOTH, Rig, prompt


def samples_of(plans: list[StepPlan], rid_row: int) -> list[int]:
    """num_samples of the decode entries of one row."""
    found = []
    for plan in plans:
        for index in range(plan.num_decode):
            if plan.rows[index] == rid_row:
                found.append(int(plan.num_samples[index]))
    return found


@BOTH
@pytest.mark.parametrize("luck", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("samples", [2, 8])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_tokens_are_those_of_one_a_step(
    page_size: int, samples: int, luck: float, overlap: bool
) -> None:
    ids = [prompt(n) for n in (9, 21, 40, 2)]
    outputs = []
    for most in (1, samples):
        rig = Rig(page_size=page_size, pages=400 // page_size, samples=most, overlap=overlap)
        rig.engine.luck = luck
        for i, text in enumerate(ids):
            rig.submit(str(i), text, max_new_tokens=30, seed=i, temperature=1.0, n=2)
        rig.run()
        rig.verify_all()
        outputs.append([rig.streams[key].ids for key in sorted(rig.streams)])
    assert outputs[0] == outputs[1]


def test_lucky_drafts_save_steps() -> None:
    steps = []
    for samples in (1, 4):
        rig = Rig(samples=samples)
        rig.engine.luck = 1.0
        rig.submit("a", prompt(10), max_new_tokens=41, ignore_eos=True)
        rig.run()
        steps.append(len(rig.engine.steps))
    assert steps == [41, 11]


def test_no_entry_samples_beyond_the_end_and_none_is_planned_on_an_upper_bound() -> None:
    rig = Rig(samples=8)
    rig.engine.luck = 0.0
    plans = rig.record_plans()
    rig.submit("a", prompt(10), max_new_tokens=12, ignore_eos=True)
    rig.step()
    row = rig.request("a").row
    rig.run()
    # One token comes with the prompt, 8 may come with the first decode step, and while that one is
    # in flight only 3 are left. The request then waits for the result: 1 came, 7 more may.
    assert samples_of(plans, row)[:3] == [8, 3, 7]
    for plan in plans:
        assert plan.kv_len.max() < 10 + 12
    rig.verify_all()


def test_a_row_with_penalties_samples_one_token_a_step() -> None:
    rig = Rig(samples=8)
    plans = rig.record_plans()
    rig.submit("p", prompt(10), max_new_tokens=20, ignore_eos=True, frequency_penalty=0.5)
    rig.submit("q", prompt(10), max_new_tokens=20, ignore_eos=True)
    rig.step()
    rows = {rid: rig.request(rid).row for rid in "pq"}
    rig.run()
    assert set(samples_of(plans, rows["p"])) == {1}
    assert max(samples_of(plans, rows["q"])) == 8
    rig.verify_all()


@BOTH
def test_a_stop_id_in_the_middle_drops_what_comes_after_it(overlap: bool) -> None:
    rig = Rig(samples=8, overlap=overlap, page_size=1, pages=200)
    rig.engine.luck = 1.0
    stop = list(range(3, 97, 5))
    rig.submit("a", prompt(10), max_new_tokens=100, ignore_eos=True, stop_token_ids=stop)
    rig.run()
    stream = rig.streams["a", 0]
    assert stream.finish.matched == stream.ids[-1] in stop
    counters = rig.scheduler.counters
    assert counters.generation_tokens_total == len(stream.ids)
    sampled = 1 + sum(accepted for accepted, _ in rig.engine.counts)
    assert counters.dropped_tokens_total == sampled - len(stream.ids)
    # The tree has the tokens up to the stop, and not the stop itself.
    text = np.concatenate([rig.prompt_of("a"), stream.ids]).astype(np.int32)
    assert rig.life.cache.match_length(text) == len(text) - 1
    rig.verify_all()


def test_tokens_accepted_together_travel_together() -> None:
    rig = Rig(samples=4)
    rig.engine.luck = 1.0
    rig.submit("a", prompt(10), max_new_tokens=13, ignore_eos=True)
    rig.run()
    assert rig.streams["a", 0].deltas == 1 + 3
    rig.verify_all()


@BOTH
def test_every_accepted_token_is_scored_once(overlap: bool) -> None:
    rig = Rig(samples=5, overlap=overlap)
    ids = prompt(12)
    rig.submit("a", ids, max_new_tokens=30, return_logprob=True, top_logprobs=2, ignore_eos=True)
    rig.run()
    stream = rig.streams["a", 0]
    scored = np.concatenate([unpack_ids(part.ids) for part in stream.logprobs])
    assert scored.tolist() == stream.ids
    values = np.concatenate([np.frombuffer(part.logprobs, "<f4") for part in stream.logprobs])
    kv = kv_of(np.concatenate([ids, stream.ids]))
    want = [fake_logprob(fold(kv[: 12 + i]), token) for i, token in enumerate(stream.ids)]
    np.testing.assert_array_equal(values, np.float32(want))
    rig.verify_all()


def test_pages_that_rejected_drafts_left_serve_the_next_tokens() -> None:
    rig = Rig(samples=8, page_size=2, overlap=False)
    rig.engine.luck = 0.0
    rig.submit("a", prompt(10), max_new_tokens=30, ignore_eos=True)
    rig.step()
    rig.step()
    request = rig.request("a")
    assert (request.computed_len, request.num_ids, request.reserved_len) == (11, 12, 18)
    assert request.num_pages == 9
    rig.step()
    assert (request.computed_len, request.reserved_len, request.num_pages) == (12, 19, 10)
    rig.run()
    rig.verify_all()


# Pages ----------------------------------------------------------------------------------------


def running(life: Lifecycle, tokens: int, new: int, seq: int) -> Request:
    """A request whose `tokens` are computed, with just the pages of them."""
    message = Generate(
        rid=str(seq), input_ids=pack_ids(range(tokens)), sampling=SamplingParams(max_new_tokens=new)
    )
    request = Request(
        message,
        choice=0,
        seq=seq,
        arrival=0.0,
        seed=0,
        max_total_len=tokens + new,
        stop_ids=frozenset(),
    )
    life.enqueue(request)
    life.admit(request, life.cache.match(request.ids[:0]))
    life.extend(np.array([request.row]), np.array([life.allocator.pages_for(tokens)]))
    request.computed_len = tokens
    request.reserved_len = tokens
    return request


def stream(life: Lifecycle, tokens: int, new: int, seq: int) -> Request:
    """A request that decodes."""
    request = running(life, tokens, new, seq)
    life.start_decoding(request)
    request.total_len = tokens + 1
    return request


def prefilling(life: Lifecycle, tokens: int, total: int, seq: int) -> Request:
    """A request with `total` tokens, of which `tokens` are computed."""
    request = running(life, tokens, 50, seq)
    request.total_len = total
    return request


def life_of(pages: int) -> Lifecycle:
    return Lifecycle(
        num_pages=pages, page_size=4, max_rows=8, max_len=100, eviction="lru", sharing=True
    )


def plan(life: Lifecycle, budget: int = 100) -> Decision:
    return plan_step(
        life, lambda: life.waiting, free_rows=8, token_budget=budget, max_samples=8, ratio=0.0
    )


@pytest.mark.parametrize(
    ("free", "first", "second"),
    [(4, 8, 8), (3, 8, 4), (2, 4, 4), (1, None, None), (0, None, None)],
)
def test_drafts_give_way_before_anybody_is_retracted(
    free: int, first: int | None, second: int | None
) -> None:
    """Two streams whose pages are full: a page each is a must, a second one is for drafts."""
    life = life_of(4 + free)
    for seq in range(2):
        stream(life, tokens=8, new=50, seq=seq)
    decision = plan(life)
    assert decision.shortage == (first is None)
    assert decision.decode.num_samples.tolist() == [n for n in (first, second) if n]


def test_drafts_use_the_rest_of_a_page_and_stop_at_the_end() -> None:
    life = life_of(6)
    for seq, (tokens, new) in enumerate([(6, 50), (7, 50), (5, 3)]):
        stream(life, tokens=tokens, new=new, seq=seq)
    assert life.allocator.num_free == 0
    assert plan(life).decode.num_samples.tolist() == [2, 1, 2]


def test_prompts_take_pages_before_drafts_do() -> None:
    life = life_of(8)
    stream(life, tokens=7, new=50, seq=0)
    prefilling(life, tokens=8, total=30, seq=1)
    decision = plan(life)
    (entry,) = decision.chunks
    assert entry.end - entry.start == 16  # all four pages
    assert decision.decode.num_samples.tolist() == [1]


def test_drafts_do_not_count_in_the_token_budget() -> None:
    life = life_of(40)
    stream(life, tokens=8, new=50, seq=0)
    prefilling(life, tokens=8, total=30, seq=1)
    decision = plan(life, budget=6)
    assert decision.decode.num_samples.tolist() == [8]
    assert [entry.end - entry.start for entry in decision.chunks] == [5]


# Results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["zero", "too many", "missing", "ids"])
def test_a_result_that_does_not_fit_is_a_violation(damage: str) -> None:
    rig = Rig(samples=4)
    rig.submit("a", prompt(10), max_new_tokens=30, ignore_eos=True)
    rig.step()
    rig.step()
    rig.engine.run_until(1)
    result: StepResult = rig.engine.results[1]
    assert result.counts.tolist()[0] in range(1, 5)
    match damage:
        case "zero":
            result.counts[0] = 0
        case "too many":
            result.counts[0] = 5
        case "missing":
            result.counts = result.counts[:0]
        case "ids":
            result.ids = result.ids[:-1]
    with pytest.raises(InvariantViolation, match="I7"):
        rig.run()


def test_nan_after_a_rejected_draft_means_nothing() -> None:
    rig = Rig(samples=4, overlap=False)
    rig.engine.luck = 0.0
    rig.submit("a", prompt(10), max_new_tokens=9, ignore_eos=True)
    rig.step()
    calls: list[int] = []

    def nan_behind_the_first(step: int, row: int) -> bool:
        calls.append(step)
        return calls.count(step) > 1

    rig.engine.nan_rows = nan_behind_the_first
    rig.run()
    assert len(calls) > len(set(calls))
    rig.verify_all()
    assert not rig.failed


@BOTH
def test_nan_of_an_accepted_token_fails_the_request(overlap: bool) -> None:
    rig = Rig(samples=4, overlap=overlap)
    rig.engine.luck = 1.0
    rig.submit("a", prompt(10), max_new_tokens=40, ignore_eos=True)
    rig.step()
    rig.step()
    rig.engine.nan_rows = lambda step, row: True
    rig.run()
    assert rig.failed["a"].code == "numerical_error"
    rig.verify_rest()
