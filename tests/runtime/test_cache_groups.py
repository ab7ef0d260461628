"""Cached state beside the full pages: pages of a window, snapshots of a state, the host tier."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_runtime.cache_spec import FullPagesSpec, GroupSpec, RowSnapshotsSpec, WindowPagesSpec
from radix_runtime.errors import InvariantViolation
from radix_runtime.memory.cache_groups import make_groups
from radix_runtime.memory.handle_pool import HandlePool
from radix_runtime.memory.host_tier import HostTier
from radix_runtime.memory.page_allocator import PageAllocator
from radix_runtime.memory.radix_cache import RadixCache
from radix_runtime.memory.radix_check import check_tree
from radix_runtime.memory.row_snapshots import RowSnapshots
from radix_runtime.memory.window_pages import WindowPages
from tests.runtime.fake_model import FakeModel
from tests.runtime.scheduler_rig import BOTH, Rig, prompt

FULL = FullPagesSpec()


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def window_pages(window: int = 6, page_size: int = 2, num_pages: int = 12) -> WindowPages:
    return WindowPages(
        WindowPagesSpec(num_pages=num_pages, window=window),
        0,
        page_size=page_size,
        max_rows=3,
        max_pages=20,
        max_samples=1,
    )


# What a model may declare ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((), "full pages"),
        ((WindowPagesSpec(num_pages=9, window=4),), "full pages"),
        ((FULL, FULL), "one group"),
        ((FULL, WindowPagesSpec(num_pages=4, window=6)), "a window of 6 tokens needs 6 pages"),
    ],
)
def test_groups_that_cannot_work_are_refused(specs: tuple[GroupSpec, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_groups(specs, page_size=2, max_rows=2, max_pages=20, max_samples=1)


def test_groups_come_in_the_order_of_their_specs() -> None:
    specs = (FULL, RowSnapshotsSpec(num_slots=3), WindowPagesSpec(num_pages=20, window=4))
    groups = make_groups(specs, page_size=2, max_rows=2, max_pages=20, max_samples=1)
    assert [type(group) for group in groups] == [RowSnapshots, WindowPages]
    assert [group.pool.index for group in groups] == [0, 1]
    assert make_groups((FULL,), page_size=2, max_rows=2, max_pages=20, max_samples=1) == []


# Where a prefix can be used -------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 12), st.lists(st.booleans(), max_size=10))
def test_a_window_needs_the_pages_that_the_next_token_looks_at(
    page_size: int, window: int, present: list[bool]
) -> None:
    group = window_pages(window=window, page_size=page_size, num_pages=40)
    handles = np.where(present, np.arange(len(present)), -1).astype(np.int32)
    usable = group.usable(handles)
    assert len(usable) == len(present) + 1
    for pages in range(len(present) + 1):
        position = pages * page_size  # of the next token
        seen = range(max(0, position - window + 1), position)
        assert usable[pages] == all(present[token // page_size] for token in seen)


def test_a_state_needs_a_snapshot_just_where_the_prefix_ends() -> None:
    group = RowSnapshots(RowSnapshotsSpec(num_slots=4), 0, page_size=2)
    assert group.usable(i32(-1, 3, -1)).tolist() == [True, False, True, False]
    assert group.usable(i32()).tolist() == [True]


def test_a_match_ends_where_every_group_can_go_on() -> None:
    specs = (FULL, WindowPagesSpec(num_pages=20, window=3), RowSnapshotsSpec(num_slots=9))
    groups = make_groups(specs, page_size=2, max_rows=2, max_pages=20, max_samples=1)
    cache = RadixCache(2, groups=groups)
    ids = np.arange(12, dtype=np.int32)
    cache.insert(ids, np.arange(6, dtype=np.int32))
    (node,) = cache.nodes()
    assert cache.match_length(ids) == 0
    for page in (0, 1, 2, 4):
        groups[0].pool.enter(int(groups[0].pool.take(1)[0]), node, page, uses=0)
    for page in (0, 2, 3):
        groups[1].pool.enter(int(groups[1].pool.take(1)[0]), node, page, uses=0)
    assert cache.match_length(ids) == 6  # page 3 has a snapshot, and no page of the window
    version = cache.version
    match = cache.match(ids)
    assert (match.length, match.num_pages, match.pages.tolist()) == (6, 3, [0, 1, 2])
    assert [handles.tolist() for handles in match.handles] == [[0, 1, 2], [0, -1, 1]]
    assert match.node.parent is cache.root and len(match.node.children) == 1
    check_tree(cache)
    for group in groups:
        group.pool.check(set(cache.nodes()), i32())
    groups[1].pool.take(groups[1].pool.available)  # evicts every snapshot
    assert cache.match_length(ids) == 0 and cache.version != version


# Handles --------------------------------------------------------------------------------------


def test_unused_handles_of_the_tree_go_in_the_order_of_their_last_use() -> None:
    pool = HandlePool(0, 4)
    cache = RadixCache(1, groups=[RowSnapshots(RowSnapshotsSpec(num_slots=4), 0, page_size=1)])
    cache.insert(i32(1, 2, 3, 4), i32(0, 1, 2, 3))
    (node,) = cache.nodes()
    for page, handle in enumerate(pool.take(4).tolist()):
        pool.enter(handle, node, page, uses=0)
    assert pool.available == 4
    pool.use(i32(0))
    pool.touch(1)
    assert pool.available == 3
    assert pool.take(2).tolist() == [3, 2] and node.handles[0].tolist() == [0, 1, -1, -1]
    assert pool.evictions == 2
    with pytest.raises(InvariantViolation, match="I8"):
        pool.take(2)  # the other one is in use
    pool.release(i32(0))
    with pytest.raises(InvariantViolation, match="I11"):
        pool.release(i32(0))


def test_a_cut_node_gives_its_handles_back_and_must_not_have_used_ones() -> None:
    groups = make_groups(
        (FULL, RowSnapshotsSpec(num_slots=4)), page_size=1, max_rows=1, max_pages=9, max_samples=1
    )
    pool = groups[0].pool
    cache = RadixCache(1, groups=groups)
    cache.insert(i32(1, 2, 3), i32(0, 1, 2))
    (node,) = cache.nodes()
    for page in (0, 2):
        pool.enter(int(pool.take(1)[0]), node, page, uses=0)
    assert cache.evict(1).tolist() == [2] and pool.allocator.num_free == 3
    pool.use(node.handles[0][:1])
    with pytest.raises(InvariantViolation, match="I11"):
        cache.evict(2)


def test_pages_that_fall_out_of_the_window_are_given_back() -> None:
    group = window_pages(window=5, page_size=2, num_pages=12)
    group.admit(0, i32())
    group.extend(0, group.pool.take(6))
    assert group.held(0) == 6
    for committed, first in ((4, 0), (5, 0), (6, 1), (7, 1), (8, 2), (12, 4)):
        group.trim(0, committed)
        assert group.first[0] == first
    assert group.pool.allocator.num_free == 12 - 2
    group.release(0)
    assert group.pool.allocator.num_free == 12
    assert group.table.take_changes().shape == (3, 0)  # nobody needs to hear of them


def test_only_the_newest_snapshot_of_a_row_is_kept_and_late_ones_go() -> None:
    group = RowSnapshots(RowSnapshotsSpec(num_slots=3), 0, page_size=2)
    group.admit(1, i32())
    slots = [group.plan() for _ in range(3)]
    assert group.plan() is None  # none is left: the step goes on without
    group.settle(1, 2, slots[0], taken=True)
    group.settle(1, 4, slots[1], taken=True)
    group.settle(1, 6, slots[2], taken=False)
    group.trim(1, 5)
    assert group.private().tolist() == [slots[1]] and group.pool.allocator.num_free == 2
    late = group.plan()
    group.release(1)
    group.settle(1, 8, late, taken=True)  # the row has gone
    assert group.pool.allocator.num_free == 3


# The host -------------------------------------------------------------------------------------


def hosted(pages: int = 6, **options: object) -> tuple[PageAllocator, RadixCache, HostTier]:
    host = HostTier(pages)
    return PageAllocator(20, 1), RadixCache(1, host=host, **options), host


def add(cache: RadixCache, allocator: PageAllocator, ids: list[int]) -> list[int]:
    pages = allocator.alloc(len(ids))
    _, duplicates = cache.insert(np.array(ids, np.int32), pages)
    allocator.free(duplicates)
    check_tree(cache)
    return pages.tolist()


def test_victims_go_to_the_host_and_come_back_by_copies_in_order() -> None:
    allocator, cache, host = hosted()
    first = add(cache, allocator, [1, 2, 3])
    assert cache.evict(2).tolist() == first[1:]
    check_tree(cache)
    match = cache.match(i32(1, 2, 3, 9))
    assert (match.length, match.num_pages, match.pages.tolist()) == (3, 3, first[:1])
    assert (cache.total_pages, cache.num_nodes) == (1, 2)
    assert cache.evict(1).tolist() == first[:1] and cache.total_pages == 0
    cache.lock(match.node)
    upper, lower = reversed(list(match.node.path()))
    cache.load(upper, i32(11))
    cache.load(lower, i32(12, 13))
    check_tree(cache)
    assert cache.match(i32(1, 2, 3)).pages.tolist() == [11, 12, 13]
    assert host.take_copies().tolist() == [
        [*first[1:], *first[:1], 2, 0, 1],
        [0, 1, 2, 11, 12, 13],
        [1, 1, 1, 0, 0, 0],
    ]
    assert host.take_copies().shape == (3, 0) and host.allocator.num_free == 6
    assert (cache.evictable_pages, cache.total_pages) == (0, 3)


def test_the_host_drops_what_came_first_and_never_a_parent_before_its_children() -> None:
    allocator, cache, host = hosted(pages=4)
    add(cache, allocator, [1, 2, 3, 4])
    cache.evict(1)
    cache.evict(3)
    assert [len(node.pages) for node in host.nodes] == [1, 3]
    add(cache, allocator, [7, 8])
    cache.evict(2)  # makes room: the leaf [4] goes first, then its parent
    check_tree(cache)
    assert cache.match_length(i32(1, 2, 3, 4)) == 0 and cache.match_length(i32(7, 8)) == 2
    assert len(host.nodes) == 1


def test_what_the_host_has_no_room_for_is_gone_and_all_below_it() -> None:
    allocator, cache, host = hosted(pages=2)
    add(cache, allocator, [1, 2, 3, 4, 5])
    assert len(cache.evict(2)) == 2 and cache.match_length(i32(1, 2, 3, 4, 5)) == 5
    assert len(cache.evict(3)) == 3  # more than the host has at all
    check_tree(cache)
    assert cache.num_nodes == 0 and host.allocator.num_free == 2


def test_a_locked_node_on_the_host_stays_until_it_is_loaded() -> None:
    allocator, cache, _ = hosted(pages=2)
    add(cache, allocator, [1, 2])
    cache.evict(2)
    node = cache.match(i32(1, 2)).node
    cache.lock(node)
    add(cache, allocator, [7, 8])
    assert len(cache.evict(2)) == 2  # no room is made
    assert cache.match_length(i32(7, 8)) == 0 and cache.match_length(i32(1, 2)) == 2
    cache.load(node, i32(15, 16))
    cache.unlock(node)
    check_tree(cache)
    assert cache.evictable_pages == 2


def test_who_computes_a_prefix_again_brings_it_back_without_a_copy() -> None:
    allocator, cache, host = hosted()
    add(cache, allocator, [1, 2, 3])
    cache.evict(3)
    host.take_copies()
    again = allocator.alloc(2)
    cached, duplicates = cache.insert(i32(1, 2), again)
    assert cached.pages.tolist() == again.tolist() and not len(duplicates)
    assert host.take_copies().shape == (3, 0) and host.allocator.num_free == 5
    assert cache.match(i32(1, 2, 3)).pages.tolist() == again.tolist()
    check_tree(cache)


def test_bad_kv_never_goes_to_the_host_and_reset_forgets_it() -> None:
    allocator, cache, host = hosted()
    add(cache, allocator, [1, 2, 3])
    cache.evict(1)
    node = cache.match(i32(1, 2)).node
    assert len(cache.prune(node)) == 2
    assert cache.num_nodes == 0 and host.allocator.num_free == 6
    add(cache, allocator, [4, 5])
    cache.evict(1)
    assert len(cache.reset()) == 1
    assert cache.num_nodes == 0 and host.allocator.num_free == 6
    check_tree(cache)


# A scheduler on them --------------------------------------------------------------------------


@BOTH
def test_a_long_stream_holds_no_more_than_its_window(overlap: bool) -> None:
    rig = Rig(model=FakeModel(window=9), pages=60, group_sizes=(8, 0), overlap=overlap)
    rig.submit("a", prompt(6), max_new_tokens=150, ignore_eos=True)
    held = []
    while rig.step():
        held.append(rig.life.windows[0].held(0))
    assert 3 <= max(held) <= 5
    rig.verify_all()


@BOTH
def test_a_prompt_longer_than_the_pool_of_its_window_is_served(overlap: bool) -> None:
    rig = Rig(model=FakeModel(window=8), pages=60, chunk=100, group_sizes=(9, 0), overlap=overlap)
    for i in range(3):
        rig.submit(str(i), prompt(120), max_new_tokens=10, ignore_eos=True)
    rig.run()
    rig.verify_all()


@pytest.mark.parametrize("model", [FakeModel(window=5), FakeModel(recurrent=True)])
def test_the_same_prompt_and_the_next_turn_are_found(model: FakeModel) -> None:
    rig = Rig(model=model, pages=200)
    ids = prompt(30)
    cached = []
    for turn in range(3):
        for copy in range(2):
            rid = f"{turn}.{copy}"
            rig.submit(rid, ids, max_new_tokens=14, ignore_eos=True)
            rig.run()
            cached.append(rig.streams[rid, 0].cached_tokens)
        ids = np.concatenate([ids, rig.streams[f"{turn}.0", 0].ids, [7]])
    # All of a prompt but its last two tokens; of the answer what is in full pages.
    assert cached == [0, 28, 40, 40, 56, 56]
    rig.verify_all()


def test_a_prefix_on_the_host_is_loaded_by_the_plan_that_admits() -> None:
    rig = Rig(pages=16, host_pages=40, chunk=64)
    plans = rig.record_plans()
    ids = prompt(40)
    rig.submit("first", ids, max_new_tokens=2)
    rig.run()
    rig.submit("other", prompt(50), max_new_tokens=2)
    rig.run()
    assert rig.life.cache.match(ids.astype(np.int32)).num_pages == 10
    before = len(plans)
    rig.submit("again", ids, max_new_tokens=2)
    rig.submit("and again", np.concatenate([ids, prompt(5)]), max_new_tokens=2)
    rig.run()
    assert rig.streams["again", 0].cached_tokens == 36
    assert rig.streams["and again", 0].cached_tokens == 40
    plan = plans[before]
    assert (plan.copy_to_host == 0).any() and (plan.copy_to_host == 1).any()  # others made room
    loaded = sum(int((plan.copy_to_host == 0).sum()) for plan in plans)
    stats = rig.scheduler.stats()
    assert loaded == stats["host_loaded_pages_total"]
    stored = sum(int((plan.copy_to_host == 1).sum()) for plan in plans)
    assert stored == stats["host_stored_pages_total"]
    assert stats["host_used_pages"] == stored - loaded  # nothing was dropped or computed again
    rig.verify_all()


def test_what_no_plan_uses_costs_nothing_on_the_wire() -> None:
    rig = Rig()
    plans = rig.record_plans()
    rig.submit("a", prompt(10), max_new_tokens=3)
    rig.run()
    for plan in plans:
        assert not plan.window_pages and not plan.restores and not plan.snapshots
        assert len(plan.copy_source) == len(plan.copy_target) == len(plan.copy_to_host) == 0
