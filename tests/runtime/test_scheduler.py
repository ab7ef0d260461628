"""The scheduler on the fake engine: sharing, aborts, ends of streams."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from radix_runtime.scheduler import policy
from tests.runtime.scheduler_rig import BOTH, PAGES, RNG, Rig, Stream, prompt

# Acceptance: shared prefixes ------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_equal_prompts_in_one_step_then_a_stranger(page_size: int, overlap: bool) -> None:
    rig = Rig(page_size=page_size, pages=256 // page_size, overlap=overlap)
    ids = prompt(21)
    for rid in "ab":
        rig.submit(rid, ids, max_new_tokens=12)
    rig.step()
    rig.submit("c", prompt(40), max_new_tokens=12)
    rig.run()
    rig.verify_all()


class Blind(set):  # type: ignore[type-arg]
    """Deduplication looks here for the pages that others compute, and finds none."""

    def __contains__(self, key: object) -> bool:
        return False


@BOTH
@pytest.mark.parametrize("chunk", [64, 10])
def test_duplicates_computed_side_by_side_become_one_copy(
    chunk: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_pages_being_computed", lambda life: Blind())
    rig = Rig(page_size=4, pages=64, overlap=overlap, chunk=chunk)
    ids = prompt(24)
    for rid in "abc":
        rig.submit(rid, ids, max_new_tokens=8, ignore_eos=True)
    rig.run()
    if chunk == 64:  # two of the three fit into the first step
        assert rig.scheduler.counters.prefill_tokens_total >= 48
    assert rig.life.cache.total_pages == (24 + 7) // 4
    rig.verify_all()


@PAGES
@BOTH
def test_sixty_four_requests_share_a_prefix(page_size: int, overlap: bool) -> None:
    rig = Rig(
        page_size=page_size, pages=64 * 1024 // page_size, rows=64, context=1024, overlap=overlap,
        chunk=2048,
    )  # fmt: skip
    shared = prompt(512)
    for i in range(64):
        rig.submit(str(i), np.concatenate([shared, [10 + i], prompt(7)]), max_new_tokens=4)
    rig.run()
    assert rig.scheduler.counters.prefill_tokens_total == 512 + 64 * 8
    assert sum(s.cached_tokens for s in rig.streams.values()) == 63 * 512
    rig.verify_all()


def test_a_chunked_prompt_is_followed_page_by_page() -> None:
    rig = Rig(chunk=8, pages=256)
    ids = prompt(64)
    rig.submit("a", ids, max_new_tokens=2)
    rig.submit("b", np.concatenate([ids, [5, 6]]), max_new_tokens=2)
    rig.run()
    assert rig.scheduler.counters.prefill_tokens_total == 64 + 2
    assert rig.scheduler.counters.dedup_waits_total > 0
    rig.verify_all()


def test_a_waiter_goes_on_alone_when_its_leader_is_aborted() -> None:
    rig = Rig(chunk=8)
    ids = prompt(40)
    rig.submit("a", ids, max_new_tokens=2)
    rig.submit("b", ids, max_new_tokens=5)
    rig.step()
    rig.abort("a")
    rig.run()
    rig.verify_all()
    assert rig.streams["a", 0].finish.type == "abort"


def test_extra_key_keeps_tenants_apart() -> None:
    rig = Rig()
    ids = prompt(30)
    for rid, key in (("a", None), ("b", "x"), ("c", "y"), ("d", "x")):
        rig.submit(rid, ids, max_new_tokens=3, extra_key=key)
        rig.run()
    assert [rig.streams[r, 0].cached_tokens for r in "abcd"] == [0, 0, 0, 28]
    rig.verify_all()


@BOTH
def test_choices_start_from_the_tree(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.submit("a", prompt(30), n=4, seed=5, temperature=1.0, max_new_tokens=10)
    rig.run()
    assert rig.scheduler.counters.prefill_tokens_total == 30 + 3 * 2  # the tail of a page of 4
    counters = rig.scheduler.counters  # each prompt token is computed or comes from the cache
    assert (
        counters.prompt_tokens_total
        == 4 * 30
        == counters.prefill_tokens_total + counters.cached_tokens_total
    )
    assert len({tuple(rig.streams["a", c].ids) for c in range(4)}) > 1
    rig.verify_all()


def test_without_radix_cache_nothing_is_shared() -> None:
    rig = Rig(disable_radix_cache=True, pages=128)
    ids = prompt(30)
    for rid in "abc":
        rig.submit(rid, ids, max_new_tokens=6)
    rig.run()
    assert rig.scheduler.counters.prefill_tokens_total == 90
    rig.verify_all()


# Acceptance: abort everywhere -----------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_abort_at_every_step(page_size: int, cached: bool, overlap: bool) -> None:
    ids = prompt(21)
    for at in itertools.count():
        rig = Rig(page_size=page_size, chunk=8, overlap=overlap)
        if cached:
            rig.submit("before", ids, max_new_tokens=1)
            rig.run()
        rig.submit("a", np.concatenate([ids, ids[:9]]), max_new_tokens=8, ignore_eos=True)
        rig.submit("other", prompt(9), max_new_tokens=12)
        for _ in range(at):
            rig.step()
        ended = rig.streams.get(("a", 0)) and rig.streams["a", 0].finish
        rig.abort("a")
        rig.abort("a")  # idempotent, in the same batch and later
        rig.step()
        rig.abort("a")
        rig.abort("nobody")
        rig.run()
        rig.verify_all()
        if ended:
            assert at > 8
            return
        assert rig.streams["a", 0].finish.type == "abort"


def test_abort_all_reaches_waiting_running_and_draining() -> None:
    rig = Rig(rows=2)
    for i in range(6):
        rig.submit(str(i), prompt(20), max_new_tokens=20, n=2, ignore_eos=True)
    for _ in range(3):
        rig.step()
    rig.abort("")
    rig.run()
    assert all(s.finish.type == "abort" for s in rig.streams.values())
    assert len(rig.streams) == 12
    rig.verify_all()


def test_pages_of_an_aborted_stream_are_back_within_two_steps() -> None:
    rig = Rig()
    rig.submit("a", prompt(40), max_new_tokens=100, ignore_eos=True)
    for _ in range(6):
        rig.step()
    rig.abort("a")
    rig.step()
    rig.step()
    assert len(rig.life.table.free_rows) == rig.life.table.max_rows
    assert rig.scheduler.stats()["num_used_tokens"] == 0


# Acceptance: the end of a stream --------------------------------------------------------------


def test_eos_under_overlap_gives_one_last_message() -> None:
    while True:  # a prompt whose answer ends by EOS before its length
        rig = Rig()
        rig.submit("a", prompt(9), max_new_tokens=200)
        rig.run()
        if rig.streams["a", 0].finish.type == "stop":
            break
    assert rig.streams["a", 0].ids[-1] in rig.eos
    assert rig.scheduler.counters.dropped_tokens_total == 1
    assert not rig.scheduler.live
    rig.verify_all()


@BOTH
def test_stop_ids_min_tokens_and_ignore_eos(overlap: bool) -> None:
    rig = Rig(overlap=overlap, rows=32, pages=512)
    stop = list(range(30, 60))
    for i in range(16):
        rig.submit(f"s{i}", prompt(7), max_new_tokens=40, stop_token_ids=stop)
        rig.submit(f"m{i}", prompt(7), max_new_tokens=40, stop_token_ids=stop, min_new_tokens=9)
        rig.submit(f"i{i}", prompt(7), max_new_tokens=40, ignore_eos=True)
    rig.run()
    rig.verify_all()
    assert all(len(rig.streams[f"m{i}", 0].ids) > 9 for i in range(16))
    assert all(len(rig.streams[f"i{i}", 0].ids) == 40 for i in range(16))
    ended = [rig.streams[f"s{i}", 0].finish for i in range(16)]
    assert any(reason.matched in stop for reason in ended)


def test_the_same_tokens_and_usage_over_every_setting() -> None:
    prompts = [prompt(int(n)) for n in RNG.integers(1, 60, 12)]
    prompts += [np.concatenate([prompts[0], p[:20]]) for p in prompts[:6]]
    seen: dict[int, list[list[int]]] = {}
    for page, chunk, overlap, cache, lazy in itertools.product(
        (1, 4, 64), (7, -1), (True, False), (True, False), (True, False)
    ):
        rig = Rig(
            page_size=page, pages=1024 // page, chunk=chunk, overlap=overlap, lazy=lazy,
            disable_radix_cache=not cache,
        )  # fmt: skip
        for i, ids in enumerate(prompts):
            rig.submit(str(i), ids, max_new_tokens=15, stream=bool(i % 2))
        rig.run()
        rig.verify_all()
        outputs = [rig.streams[str(i), 0].ids for i in range(len(prompts))]
        assert seen.setdefault(0, outputs) == outputs


@pytest.mark.parametrize("page_size", [1, 4])
def test_cached_tokens_do_not_depend_on_overlap(page_size: int) -> None:
    ids = prompt(19)
    counts = []
    for overlap in (True, False):
        rig = Rig(page_size=page_size, overlap=overlap, pages=256)
        for turn in range(4):  # each turn takes the whole answer of the one before as its prefix
            rig.submit(str(turn), ids, max_new_tokens=30)
            rig.run()
            ids = np.concatenate([ids, rig.streams[str(turn), 0].ids, [7]])
        ids = ids[:19]
        counts.append([rig.streams[str(t), 0].cached_tokens for t in range(4)])
        rig.verify_all()
    assert counts[0] == counts[1] and counts[0][-1] > 19


@BOTH
def test_text_stop_saves_work_and_sends_nothing_more(overlap: bool) -> None:
    rig = Rig(overlap=overlap, page_size=1, pages=256)
    ids = prompt(10)
    rig.submit("a", ids, max_new_tokens=100, ignore_eos=True, stop=["x"], n=2, seed=3)
    rig.submit("b", prompt(10), max_new_tokens=100, ignore_eos=True, stop=["x"])
    while len(rig.streams.get(("b", 0), Stream()).ids) < 9:
        rig.step()
    rig.text_stop("a", 0, 5)
    whole = rig.request("b").ids.copy()
    rig.text_stop("b", 0, 6)
    rig.run()
    assert len(rig.streams["a", 0].ids) < 12 and len(rig.streams["a", 1].ids) == 100
    assert rig.scheduler.counters.num_finished_requests_total == 3
    # What came after the stop is not kept, however late the stop was found.
    assert rig.life.cache.match_length(whole) == 10 + 6 - 1
    counters = rig.scheduler.counters
    assert counters.generation_tokens_total == 5 + 6 + 100 and counters.dropped_tokens_total > 2
    rig.verify_all()


def test_tokens_without_a_reader_travel_in_blocks() -> None:
    rig = Rig(page_size=16)
    rig.submit("a", prompt(5), max_new_tokens=150, ignore_eos=True, stream=False)
    rig.submit("b", prompt(5), max_new_tokens=150, ignore_eos=True, stream=False, stop=["x"])
    rig.run()
    assert rig.streams["a", 0].deltas == 4  # the first token, 64, 64, the rest
    assert rig.streams["b", 0].deltas == 150
    rig.verify_all()


def test_prefill_only_and_open_end() -> None:
    rig = Rig(pages=16, context=256, chunk=8)  # 64 tokens of KV
    rig.submit("none", prompt(20), max_new_tokens=0)
    rig.submit("open", prompt(20), max_new_tokens=None, ignore_eos=True)
    rig.run()
    assert rig.streams["none", 0].ids == [] and rig.streams["none", 0].finish.type == "length"
    assert len(rig.streams["open", 0].ids) == 44
    rig.verify_all()
