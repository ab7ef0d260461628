from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radix_runtime.errors import InvariantViolation
from radix_runtime.memory.page_allocator import PageAllocator
from radix_runtime.memory.radix_cache import RadixCache
from radix_runtime.memory.radix_check import check_tree
from radix_runtime.memory.radix_node import Node


class Cache(RadixCache):
    """A cache with the allocator that gets its victims."""

    def __init__(self, allocator: PageAllocator, **options: object) -> None:
        super().__init__(allocator.page_size, **options)
        self.allocator = allocator

    def free(self, victims: np.ndarray) -> int:
        self.allocator.free(victims)
        return len(victims)


def build(pages: int = 64, page_size: int = 1, **options: object) -> tuple[PageAllocator, Cache]:
    allocator = PageAllocator(pages, page_size)
    return allocator, Cache(allocator, **options)


def add(cache: Cache, ids: list[int], key: str | None = None) -> list[int]:
    """Inserts `ids` with fresh pages; frees the duplicates as a caller must."""
    whole = len(ids) // cache.page_size * cache.page_size
    pages = cache.allocator.alloc(whole // cache.page_size)
    cached, duplicates = cache.insert(np.array(ids[:whole], np.int32), pages, key)
    cache.allocator.free(duplicates)
    check_tree(cache)
    return cached.pages.tolist()


def length(cache: Cache, ids: list[int], key: str | None = None) -> int:
    return cache.match_length(np.array(ids, np.int32), key)


def test_match_returns_the_pages_that_were_inserted() -> None:
    _, cache = build(page_size=2)
    pages = add(cache, [1, 2, 3, 4, 5, 6])
    match = cache.match(np.array([1, 2, 3, 4, 9, 9], np.int32))
    assert (match.length, match.pages.tolist()) == (4, pages[:2])
    assert length(cache, [1, 2, 3]) == 2  # whole pages only
    assert length(cache, [1, 9, 3, 4]) == 0 and length(cache, []) == 0
    check_tree(cache)


def test_insert_names_canonical_and_duplicate_pages() -> None:
    allocator, cache = build(page_size=2)
    first = add(cache, [1, 2, 3, 4])
    own = allocator.alloc(3)
    cached, duplicates = cache.insert(np.array([1, 2, 3, 4, 5, 6], np.int32), own)
    assert (cached.length, cached.pages.tolist()) == (6, [*first, own[2]])
    assert duplicates.tolist() == own[:2].tolist()
    # A prefix that came from the tree is no duplicate of itself.
    again, duplicates = cache.insert(np.array([1, 2, 3, 4, 5, 6], np.int32), cached.pages)
    assert len(duplicates) == 0 and again.node is cached.node


def test_extra_keys_are_separate_trees_for_every_prefix() -> None:
    _, cache = build()
    add(cache, [1, 2, 3], "a")
    add(cache, [1, 2, 4], "b")
    add(cache, [1, 9])
    assert length(cache, [1, 2, 3], "a") == 3
    assert length(cache, [1, 2, 3], "b") == 2
    assert length(cache, [1, 2, 3]) == 1
    assert length(cache, [1, 2, 3], "c") == 0


def test_a_lock_survives_a_split_and_keeps_the_path() -> None:
    allocator, cache = build(pages=8)
    add(cache, [1, 2, 3, 4])
    node = cache.match(np.array([1, 2, 3, 4], np.int32)).node
    cache.lock(node)
    add(cache, [1, 2, 8])
    assert node.lock_count == 1 and node.parent is not None and node.parent.lock_count == 1
    assert cache.evictable_pages == 1
    assert cache.free(cache.evict(100)) == 1 and length(cache, [1, 2, 3, 4]) == 4
    cache.unlock(node)
    check_tree(cache)
    assert cache.free(cache.evict(100)) == 4 and allocator.num_free == 8
    assert cache.num_nodes == 0 and not cache.root.children


def test_eviction_takes_only_the_tail_it_needs() -> None:
    allocator, cache = build(pages=10, page_size=2)
    add(cache, list(range(12)))
    assert cache.free(cache.evict(2)) == 2 and length(cache, list(range(12))) == 8
    assert allocator.num_free == 6
    check_tree(cache)


@pytest.mark.parametrize(
    ("eviction", "order"), [("lru", [2, 3, 1]), ("lfu", [2, 1, 3]), ("fifo", [1, 2, 3])]
)
def test_eviction_order(eviction: str, order: list[int]) -> None:
    _, cache = build(eviction=eviction)
    for i in (1, 2, 3):
        add(cache, [i, i])
    for i in (1, 3, 3, 1, 3, 1):  # 1 was used last, 3 and 1 equally often
        node = cache.match(np.array([i, i], np.int32)).node
        cache.lock(node)
        cache.record_use(node)
        cache.unlock(node)
    if eviction == "lfu":
        cache.record_use(cache.match(np.array([3, 3], np.int32)).node)
    gone = []
    for _ in range(3):
        cache.free(cache.evict(2))
        gone += [i for i in (1, 2, 3) if i not in gone and length(cache, [i, i]) == 0]
        check_tree(cache)
    assert gone == order


def test_the_heap_does_not_grow_with_use() -> None:
    _, cache = build()
    add(cache, [1, 2])
    node = cache.match(np.array([1, 2], np.int32)).node
    for _ in range(1000):
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._heap) == 1


def test_prune_removes_a_path_up_to_what_others_use() -> None:
    allocator, cache = build()
    add(cache, [1, 2, 3, 4, 5])
    add(cache, [1, 2, 9])
    node = cache.match(np.array([1, 2, 3, 4], np.int32)).node
    below = cache.match(np.array([1, 2, 3, 4, 5], np.int32)).node
    assert cache.free(cache.prune(node)) == 0  # it has a child
    cache.lock(below)
    assert cache.free(cache.prune(below)) == 0
    cache.unlock(below)
    assert cache.free(cache.prune(below)) == 3
    assert length(cache, [1, 2, 9]) == 3 and allocator.num_free == 64 - 3
    check_tree(cache)


def test_reset_and_its_refusal() -> None:
    allocator, cache = build()
    cached = add(cache, [1, 2, 3])
    node = cache.match(np.array([1, 2], np.int32)).node
    cache.lock(node)
    with pytest.raises(RuntimeError):
        cache.reset()
    cache.unlock(node)
    assert sorted(cache.reset().tolist()) == cached
    allocator.free(np.array(cached))
    assert allocator.num_free == 64 and length(cache, [1, 2, 3]) == 0
    add(cache, [1, 2, 3])


def test_disabled_owns_nothing() -> None:
    _, cache = build(enabled=False)
    cached, duplicates = cache.insert(np.array([1, 2], np.int32), np.array([5, 6], np.int32))
    assert (cached.length, cached.node) == (0, cache.root)
    assert len(duplicates) == 0 and cache.total_pages == 0


def test_misuse_is_loud() -> None:
    _, cache = build(page_size=2)
    with pytest.raises(InvariantViolation):
        cache.insert(np.array([1, 2, 3], np.int32), np.array([1], np.int32))
    add(cache, [1, 2])
    with pytest.raises(InvariantViolation):
        cache.unlock(cache.match(np.array([1, 2], np.int32)).node)


@given(st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=12), st.integers(1, 3))
def test_match_is_the_longest_common_prefix_in_pages(texts: list[list[int]], size: int) -> None:
    _, cache = build(pages=200, page_size=size)
    seen: list[list[int]] = []
    for ids in texts:
        best = 0
        for old in seen:
            same = [a == b for a, b in zip(ids, old, strict=False)]
            common = same.index(False) if False in same else len(same)
            best = max(best, common // size * size)
        assert length(cache, ids) == best
        assert cache.match(np.array(ids, np.int32)).length == best
        add(cache, ids)
        seen.append(ids)


class CacheMachine(RuleBasedStateMachine):
    """The tree against a plain dictionary from token prefixes to pages."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator, self.cache = build(pages=24, page_size=2, eviction="lru")
        self.model: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.locked: list[tuple[Node, str | None, tuple[int, ...]]] = []

    ids = st.lists(st.integers(0, 2), max_size=10)
    key = st.sampled_from([None, "k"])

    def prefixes(self, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [ids[: i + 2] for i in range(0, len(ids) - 1, 2)]

    @rule(ids=ids, key=key)
    def insert(self, ids: list[int], key: str | None) -> None:
        whole = tuple(ids[: len(ids) // 2 * 2])
        need = len(whole) // 2
        if self.allocator.num_free < need:
            return
        pages = self.allocator.alloc(need)
        cached, duplicates = self.cache.insert(np.array(whole, np.int32), pages, key)
        known = [self.model.get((key, p)) for p in self.prefixes(whole)]
        want = [k if k is not None else int(own) for k, own in zip(known, pages, strict=True)]
        assert cached.pages.tolist() == want
        assert duplicates.tolist() == [
            int(own) for k, own in zip(known, pages, strict=True) if k is not None
        ]
        self.allocator.free(duplicates)
        self.model.update(zip([(key, p) for p in self.prefixes(whole)], want, strict=True))

    @rule(ids=ids, key=key)
    def match_and_lock(self, ids: list[int], key: str | None) -> None:
        match = self.cache.match(np.array(ids, np.int32), key)
        want = []
        for prefix in self.prefixes(tuple(ids)):
            if (key, prefix) not in self.model:
                break
            want.append(self.model[key, prefix])
        assert match.pages.tolist() == want
        self.cache.lock(match.node)
        self.locked.append((match.node, key, tuple(ids[: match.length])))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.locked) - 1))
        self.cache.unlock(self.locked.pop(index)[0])

    @rule(n=st.integers(1, 8))
    def evict(self, n: int) -> None:
        kept = {(key, p) for _, key, ids in self.locked for p in self.prefixes(ids)}
        free = len(self.model) - len(kept)
        before = {page: prefix for prefix, page in self.model.items()}
        gone = self.cache.free(self.cache.evict(n))
        assert gone == min(n, free)
        for page in self.allocator.free_pages().tolist():
            if page in before:
                assert before[page] not in kept, "a locked page was evicted"
                del self.model[before[page]]

    @invariant()
    def consistent(self) -> None:
        check_tree(self.cache)
        assert self.cache.total_pages == len(self.model)
        assert self.allocator.num_pages - self.allocator.num_free == len(self.model)
        kept = {(key, p) for _, key, ids in self.locked for p in self.prefixes(ids)}
        assert self.cache.evictable_pages == len(self.model) - len(kept)


CacheMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def test_the_version_tells_when_a_match_may_have_changed() -> None:
    _, cache = build()
    versions = [cache.version]
    for change in (
        lambda: add(cache, [1, 2, 3]),
        lambda: add(cache, [1, 2, 4]),
        lambda: cache.free(cache.evict(1)),
        lambda: cache.free(cache.reset()),
    ):
        change()
        versions.append(cache.version)
    assert len(set(versions)) == 5
    add(cache, [5])
    before = cache.version
    cache.match(np.array([5], np.int32))
    add(cache, [5])
    assert cache.version == before
