"""The scheduler on the fake engine: memory pressure, logprobs, faults, the loop, order."""

from __future__ import annotations

import numpy as np
import pytest

from radix_runtime.errors import EngineDeadError
from radix_runtime.messages import unpack_ids
from radix_runtime.scheduler.request import State
from tests.runtime.fake_model import fake_logprob, fold, kv_of
from tests.runtime.scheduler_rig import BOTH, PAGES, RNG, Rig, prompt

# Memory pressure ------------------------------------------------------------------------------


@BOTH
@PAGES
def test_random_load_never_overcommits(page_size: int, overlap: bool) -> None:
    rig = Rig(
        page_size=page_size, pages=256 // page_size, rows=8, overlap=overlap, chunk=24,
        schedule_conservativeness=0.0,
    )  # fmt: skip
    for i in range(40):
        room = int(RNG.integers(2, 200))
        ids = prompt(int(RNG.integers(1, room)))
        rig.submit(str(i), ids, max_new_tokens=room - len(ids), ignore_eos=bool(i % 3))
    rig.run()
    assert not rig.failed
    rig.verify_all()


@BOTH
def test_retraction_resumes_where_it_stopped(overlap: bool) -> None:
    rig = Rig(pages=24, page_size=4, overlap=overlap, schedule_conservativeness=0.0)
    for i in range(4):
        rig.submit(
            str(i), prompt(12), max_new_tokens=60, ignore_eos=True, temperature=1.0, seed=i,
            return_logprob=True,
        )  # fmt: skip
    rig.run()
    assert rig.scheduler.counters.num_retractions_total > 0
    assert all(s.cached_tokens == 0 for s in rig.streams.values())
    for i in range(4):
        ids = np.concatenate([lp_ids(lp) for lp in rig.streams[str(i), 0].logprobs])
        assert ids.tolist() == rig.streams[str(i), 0].ids  # each scored once
    rig.verify_all()


def lp_ids(logprobs: object) -> np.ndarray:
    return unpack_ids(logprobs.ids)


def test_unseeded_requests_keep_their_seed_over_retraction() -> None:
    rig = Rig()
    rig.submit("a", prompt(12), max_new_tokens=30, ignore_eos=True, temperature=1.0)
    for _ in range(8):
        rig.step()
    seed = rig.request("a").seed
    rig.scheduler.retract_youngest()
    assert rig.request("a").state is State.WAITING and rig.request("a").num_output > 0
    rig.run()
    assert rig.engine.sampling[0].seed % 2**64 == seed
    assert len(rig.streams["a", 0].ids) == 30
    rig.verify_rest()


@BOTH
def test_the_youngest_is_retracted_and_the_oldest_never(overlap: bool) -> None:
    rig = Rig(pages=24, page_size=4, overlap=overlap, schedule_conservativeness=0.0)
    for i in range(4):
        rig.submit(str(i), prompt(12), max_new_tokens=60, ignore_eos=True)
    for _ in range(4):
        rig.step()
    rig.scheduler.retract_youngest()
    assert [r.rid for r in rig.life.waiting] == ["3"]
    requests = [rig.request(str(i)) for i in range(4)]
    rig.run()
    assert requests[0].retractions == 0 and requests[3].retractions > 1
    rig.verify_all()


def test_what_a_readmitted_request_computes_is_waited_for() -> None:
    rig = Rig(chunk=20)  # its second chunk leaves room for the other request
    rig.submit("a", prompt(12), max_new_tokens=40, ignore_eos=True)
    while rig.scheduler.counters.generation_tokens_total < 20:
        rig.step()
    rig.scheduler.retract_youngest()
    rig.life.reset_cache()
    ids = rig.request("a").ids.copy()
    before = rig.scheduler.counters.prefill_tokens_total
    rig.submit("b", ids, max_new_tokens=3)
    rig.run()
    assert rig.scheduler.counters.prefill_tokens_total - before < len(ids) + 6
    rig.verify_all()


@BOTH
def test_forced_retraction_at_every_step(overlap: bool) -> None:
    for every in (1, 2, 3, 7):
        rig = Rig(overlap=overlap, chunk=16)
        for i in range(5):
            rig.submit(str(i), prompt(20), max_new_tokens=12, seed=i, temperature=1.0, n=2)
        for at in range(2000):
            if (every > 1 and at % every == 0) or (every == 1 and at % 2):
                rig.scheduler.retract_youngest()
            if not rig.step() and not rig.scheduler.live:
                break
        rig.verify_all()


# Long prompts beside streams ------------------------------------------------------------------


@BOTH
def test_a_long_prompt_does_not_stop_the_streams(overlap: bool) -> None:
    rig = Rig(rows=8, pages=1024, context=2048, chunk=32, overlap=overlap)
    for i in range(4):
        rig.submit(f"s{i}", prompt(8), max_new_tokens=120, ignore_eos=True)
    for _ in range(8):
        rig.step()
    rig.submit("long", prompt(1500), max_new_tokens=1)
    lengths = [len(rig.streams[f"s{i}", 0].ids) for i in range(4)]
    while ("long", 0) not in rig.streams:
        rig.step()
        now = [len(rig.streams[f"s{i}", 0].ids) for i in range(4)]
        if rig.scheduler.live.keys() >= {"s0", "s1", "s2", "s3"}:
            assert all(b - a == 1 for a, b in zip(lengths, now, strict=True))
        lengths = now
    assert max(tokens for _, _, tokens in rig.engine.steps) <= 32
    assert any(0 < decode < rows for decode, rows, _ in rig.engine.steps)  # mixed steps
    rig.run()
    rig.verify_all()


# Logprobs -------------------------------------------------------------------------------------


def expected_prompt_logprobs(ids: np.ndarray, start: int) -> list[float]:
    kv = kv_of(ids)
    scores = [fake_logprob(fold(kv[:p]), int(ids[p])) for p in range(max(start, 1), len(ids))]
    return ([float("nan")] if start == 0 else []) + scores


@BOTH
@pytest.mark.parametrize("chunk", [7, -1])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("start", [0, 1, 13, 39, 40])
def test_prompt_logprobs_over_chunks_and_cached_prefixes(
    start: int, page_size: int, chunk: int, overlap: bool
) -> None:
    rig = Rig(overlap=overlap, chunk=chunk, page_size=page_size, pages=256)
    ids = prompt(40)
    rig.submit("warm", ids, max_new_tokens=1)
    rig.run()
    rig.submit(
        "a", ids, max_new_tokens=5, n=2, seed=1, temperature=1.0, ignore_eos=True,
        logprob_start=start, top_logprobs=3, return_logprob=True,
    )  # fmt: skip
    if chunk > 0:
        rig.step()
        rig.step()
        rig.scheduler.retract_youngest()  # scored once all the same
        rig.scheduler.retract_youngest()
    rig.run()
    stream = rig.streams["a", 0]
    if start == 40:
        assert stream.prompt_logprobs == []
    else:
        (got,) = stream.prompt_logprobs
        assert unpack_ids(got.ids).tolist() == ids[start:].tolist()
        values = np.frombuffer(got.logprobs, "<f4")
        np.testing.assert_array_equal(values, np.float32(expected_prompt_logprobs(ids, start)))
        assert got.top_n == 3 and len(got.top_ids) == 4 * 3 * len(values)
    assert rig.streams["a", 1].prompt_logprobs == []  # the prompt counts once
    assert stream.cached_tokens <= max(start - 1, 0)
    values = np.concatenate([np.frombuffer(lp.logprobs, "<f4") for lp in stream.logprobs])
    kv = kv_of(np.concatenate([ids, stream.ids]))
    want = [fake_logprob(fold(kv[: 40 + i]), t) for i, t in enumerate(stream.ids)]
    np.testing.assert_array_equal(values, np.float32(want))
    rig.verify_all()


def test_prompt_logprobs_come_in_blocks() -> None:
    rig = Rig(pages=700, context=2700, chunk=-1)
    plans = rig.record_plans()
    ids = prompt(2500)
    rig.submit("a", ids, max_new_tokens=0, logprob_start=0)
    rig.run()
    spans = [span for plan in plans for span in plan.logprob_spans]
    assert [len(unpack_ids(span.targets)) for span in spans] == [1024, 1024, 451]
    (got,) = rig.streams["a", 0].prompt_logprobs
    assert len(got.ids) == 4 * 2500
    values = np.frombuffer(got.logprobs, "<f4")
    np.testing.assert_array_equal(values, np.float32(expected_prompt_logprobs(ids, 0)))


@BOTH
def test_prefill_only_waits_for_its_last_chunk(overlap: bool) -> None:
    rig = Rig(chunk=8, overlap=overlap)
    ids = prompt(21)
    rig.submit("a", ids, max_new_tokens=0, logprob_start=0)
    rig.run()
    (got,) = rig.streams["a", 0].prompt_logprobs
    values = np.frombuffer(got.logprobs, "<f4")
    np.testing.assert_array_equal(values, np.float32(expected_prompt_logprobs(ids, 0)))
    assert rig.streams["a", 0].deltas == 1
    rig.verify_all()


# Faults ---------------------------------------------------------------------------------------


@BOTH
def test_a_row_of_nan_fails_alone_and_is_not_shared(overlap: bool) -> None:
    rig = Rig(overlap=overlap, chunk=8)
    ids = prompt(20)
    bad: list[int] = []
    rig.engine.nan_rows = lambda step, row: row in bad
    rig.submit("bad", ids, max_new_tokens=50, ignore_eos=True)
    rig.submit("good", prompt(20), max_new_tokens=30)
    for _ in range(12):
        rig.step()
    assert len(rig.streams["bad", 0].ids) > 2
    bad.append(rig.request("bad").row)
    while "bad" not in rig.failed:
        rig.step()
    bad.clear()
    failure = rig.failed["bad"]
    assert (failure.status, failure.code) == (500, "numerical_error")
    rig.run()
    assert rig.life.cache.match_length(ids.astype(np.int32)) == 0
    rig.verify("good")
    rig.verify_rest()


def test_nan_on_the_first_token_fails_every_choice() -> None:
    rig = Rig()
    rig.engine.nan_rows = lambda step, row: True
    rig.submit("a", prompt(20), max_new_tokens=5, n=3, seed=1)
    rig.run()
    assert rig.failed["a"].status == 500 and rig.life.cache.total_pages == 0
    assert rig.scheduler.counters.num_failed_requests_total == 3
    rig.verify_rest()


def test_a_dead_engine_ends_the_loop() -> None:
    rig = Rig()
    rig.submit("a", prompt(20), max_new_tokens=5)
    rig.engine.run_until = lambda step_id: (_ for _ in ()).throw(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        rig.scheduler.run(lambda: False)


# The loop -------------------------------------------------------------------------------------


def test_an_idle_scheduler_sleeps_and_checks_itself_once() -> None:
    rig = Rig(check="idle")
    rig.submit("a", prompt(20), max_new_tokens=5)
    waits: list[float | None] = []
    checks, beats = [], []
    rig.inbox.wait = lambda timeout: (waits.append(timeout), False)[1]
    rig.scheduler.heartbeat = lambda: beats.append(1)
    check = rig.scheduler.check
    rig.scheduler.check = lambda: (checks.append(1), check())[1]
    rig.scheduler.run(lambda: len(waits) >= 5)
    assert waits == [0.1, 1.0, 1.0, 1.0, 1.0] and len(checks) == 1
    assert len(beats) > 5
    assert rig.scheduler.step_in_flight_since is None


def test_the_age_of_a_step_in_flight_is_visible() -> None:
    rig = Rig()
    rig.submit("a", prompt(20), max_new_tokens=5)
    rig.step()
    assert rig.scheduler.step_in_flight_since == 100.0


def test_overlap_launches_before_it_waits() -> None:
    rig = Rig(overlap=True)
    rig.submit("a", prompt(5), max_new_tokens=10, ignore_eos=True)
    rig.step()
    assert len(rig.scheduler.in_flight) == 1 and not rig.engine.results
    rig.step()
    assert len(rig.scheduler.in_flight) == 1
    assert rig.request("a").total_len == rig.request("a").num_ids + 1
    rig = Rig(overlap=False)
    rig.submit("a", prompt(5), max_new_tokens=10, ignore_eos=True)
    rig.step()
    assert not rig.scheduler.in_flight and len(rig.streams["a", 0].ids) == 1


# Order ----------------------------------------------------------------------------------------


def test_lpm_prefers_the_cached_and_never_starves_the_rest() -> None:
    rig = Rig(rows=1, schedule_policy="lpm", schedule_age_bound=5.0, max_queued_requests=1000)
    hot = prompt(40)
    rig.submit("warm", hot, max_new_tokens=1)
    rig.run()
    rig.submit("first", np.concatenate([hot, prompt(1)]), max_new_tokens=4, ignore_eos=True)
    rig.step()
    rig.submit("cold", prompt(40), max_new_tokens=4, ignore_eos=True)
    born, count = rig.clock.now, 0
    while ("cold", 0) not in rig.streams:
        rig.submit(f"hot{count}", np.concatenate([hot, prompt(2)]), max_new_tokens=4)
        rig.step()
        rig.clock.now += 0.1
        count += 1
        assert count < 1000
    waited = rig.clock.now - born
    assert 5.0 <= waited < 6.5  # the bound and what was running then
    assert ("hot0", 0) in rig.streams
    rig.abort("")
    rig.run()
    rig.verify_rest()


def test_fcfs_keeps_the_order() -> None:
    rig = Rig(rows=1)
    order: list[str] = []
    for i in range(5):
        rig.submit(str(i), prompt(10), max_new_tokens=2, ignore_eos=True)
    while rig.step():
        order += [rid for rid, _ in rig.streams if rid not in order]
    assert order == list("01234")
