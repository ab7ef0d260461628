"""Every invariant is broken on purpose and must be caught by name. `test_invariants_bugs.py` breaks
the code that keeps them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from radix_runtime.errors import InvariantViolation
from radix_runtime.memory.radix_node import Node
from radix_runtime.scheduler.request import State
from radix_runtime.scheduler.rows import Flag
from tests.runtime.check_content import check_content
from tests.runtime.scheduler_rig import Rig

RNG = np.random.default_rng()


def prompt(n: int) -> np.ndarray:
    return RNG.integers(3, 97, n)


def busy(**options: object) -> Rig:
    """One request decodes on a cached prefix, one is in its prefill, one waits; a step is in
    flight and the invariants hold."""
    rig = Rig(rows=2, chunk=16, pages=128, **options)
    ids = prompt(21)
    rig.submit("warm", ids, max_new_tokens=1)
    rig.run()
    rig.submit("decodes", np.concatenate([ids, prompt(5)]), max_new_tokens=60, ignore_eos=True)
    for _ in range(5):
        rig.step()
    rig.submit("prefills", prompt(60), max_new_tokens=60)
    rig.submit("waits", prompt(10), max_new_tokens=6)
    rig.step()
    rig.step()
    rig.scheduler.check()
    return rig


def break_i1_lost(rig: Rig) -> None:
    rig.life.allocator.alloc(1)


def break_i1_shared(rig: Rig) -> None:
    """A private page is also in the free list."""
    request = rig.request("decodes")
    rig.life.allocator.free(rig.life.table.pages(request.row, request.num_pages)[-1:].copy())


def break_i1_range(rig: Rig) -> None:
    request = rig.request("decodes")
    rig.life.table.pages(request.row, request.num_pages)[-1] = 10_000


def break_i3_counter(rig: Rig) -> None:
    rig.life.cache.evictable_pages += 1


def break_i3_total(rig: Rig) -> None:
    rig.life.cache.total_pages -= 1


def break_i3_lock(rig: Rig) -> None:
    node = rig.request("decodes").node
    node.lock_count += 1
    while node.parent is not rig.life.cache.root:
        node = node.parent
        node.lock_count += 1


def break_i3_key(rig: Rig) -> None:
    node = next(rig.life.cache.nodes())
    node.key = node.key.copy()
    node.key[0] += 1


def break_i3_parent(rig: Rig) -> None:
    stranger = Node(parent=None, edge=None, key=prompt(0), pages=prompt(0))
    rig.request("decodes").node.parent = stranger


def break_i3_heap(rig: Rig) -> None:
    rig.abort("")
    rig.run()
    rig.life.cache._heap.clear()


def break_i4_lengths(rig: Rig) -> None:
    request = rig.request("decodes")
    request.computed_len = request.total_len + 1


def break_i4_pages(rig: Rig) -> None:
    rig.request("prefills").computed_len -= 4


def break_i4_alignment(rig: Rig) -> None:
    rig.request("decodes").cached_len += 1


def break_i4_prefix(rig: Rig) -> None:
    """The row does not hold the tree's pages, in the tree's order."""
    request = rig.request("decodes")
    pages = rig.life.table.pages(request.row, 2)
    pages[:] = pages[::-1].copy()


def break_i4_unseen(rig: Rig) -> None:
    """A token that no step in flight samples."""
    rig.request("decodes").total_len += 1
    rig.request("decodes").computed_len += 1


def break_i4_computed(rig: Rig) -> None:
    """Of a stream all but the last token are computed."""
    rig.request("decodes").computed_len -= 1


def break_i4_reserved(rig: Rig) -> None:
    rig.request("decodes").reserved_len += 4


def break_i4_launched(rig: Rig) -> None:
    """Rejected drafts sink the length, never below what was launched."""
    request = rig.request("decodes")
    request.reserved_len = request.computed_len - 1
    request.num_pages = rig.life.allocator.pages_for(request.reserved_len)
    step = rig.scheduler.in_flight[-1]
    rig.life.deferred.append((step.plan.step_id, step.page_sets[0][request.num_pages :]))


def break_i5_state(rig: Rig) -> None:
    rig.request("waits").state = State.DECODE


def break_i5_twice(rig: Rig) -> None:
    rig.life.hold(rig.request("waits"), Future())


def break_i5_decoding(rig: Rig) -> None:
    rig.life.rows.stop_decoding(rig.request("decodes").row)


def break_i5_prompt(rig: Rig) -> None:
    del rig.life.prompts[rig.request("prefills")]


def break_i5_holder(rig: Rig) -> None:
    rig.life.rows.requests[rig.request("decodes").row] = rig.request("prefills")


def break_i5_mark(rig: Rig) -> None:
    rig.life.rows.flags[rig.request("decodes").row] |= Flag.ENDED


def break_i5_queue(rig: Rig) -> None:
    rig.life.waiting.num_tokens += 1


def break_i5_lost(rig: Rig) -> None:
    rig.life.waiting.clear()


def break_i5_row(rig: Rig) -> None:
    rig.life.table.free_rows.append(rig.request("decodes").row)


def break_i6_cursor(rig: Rig) -> None:
    rig.request("decodes").sent += 5


def break_i8_size(rig: Rig) -> None:
    rig.request("decodes").max_total_len = 10**6


def break_i9_count(rig: Rig) -> None:
    rig.scheduler.counters.num_requests_total += 1


def break_i9_empty(rig: Rig) -> None:
    rig.scheduler.live._choices["ghost"] = []


def break_i10_page(rig: Rig) -> None:
    """A page of a step in flight goes to the request that waits."""
    request = rig.request("prefills")
    pages = rig.life.table.pages(request.row, request.num_pages)
    pages[-1] = rig.life.allocator.alloc(1)[0]
    step = rig.scheduler.in_flight[-1]
    rig.life.allocator.free(step.page_sets[-1][-1:])


def break_i10_row(rig: Rig) -> None:
    rig.request("decodes").last_step = 0


def break_i10_pending(rig: Rig) -> None:
    rig.life.deferred.append((0, rig.life.allocator.alloc(1)))


def break_i2_lock(rig: Rig) -> None:
    rig.abort("")
    rig.run()
    node = next(rig.life.cache.nodes())
    rig.life.cache.lock(node)
    # The lock count itself is I3; at idle the count of what it holds is looked at on its own.
    node.lock_count = 0


def break_i2_private(rig: Rig) -> None:
    rig.abort("")
    rig.run()
    rig.life.deferred.append((10**9, rig.life.allocator.alloc(2)))


BREAKS = [(f, f.__name__.split("_")[1].upper()) for n, f in globals().items() if n[:6] == "break_"]


@pytest.mark.parametrize(("damage", "name"), BREAKS, ids=lambda x: getattr(x, "__name__", x)[6:])
def test_a_damaged_state_is_named(damage: Callable[[Rig], None], name: str) -> None:
    rig = busy(poison=False)
    damage(rig)
    with pytest.raises(InvariantViolation) as caught:
        rig.scheduler.check()
    # What holds pages back at idle shows in the tree's own counters first.
    assert caught.value.name == ("I3" if damage is break_i2_lock else name)


def test_idle_locks_and_rows_are_seen_at_idle() -> None:
    from radix_runtime.scheduler.invariants import check_idle, page_owners

    rig = busy()
    rig.abort("")
    rig.run()
    life = rig.life
    check_idle(life, page_owners(life))
    life.cache.lock(next(life.cache.nodes()))
    with pytest.raises(InvariantViolation, match="I2"):
        check_idle(life, page_owners(life))
    life.cache.unlock(next(life.cache.nodes()))
    life.table.alloc()
    with pytest.raises(InvariantViolation, match="I2"):
        check_idle(life, page_owners(life))


def test_a_sampled_id_outside_the_vocabulary_is_a_violation() -> None:
    rig = Rig()
    rig.submit("a", prompt(5), max_new_tokens=9, ignore_eos=True)
    rig.step()
    rig.engine.run_until(0)
    rig.engine.results[0].ids[0] = rig.engine.vocab_size
    with pytest.raises(InvariantViolation, match="I7"):
        rig.run()


def test_an_allocation_that_fails_at_launch_is_a_violation() -> None:
    rig = Rig(pages=8)
    with pytest.raises(InvariantViolation, match="I8"):
        rig.life.take_pages(9)


@pytest.mark.parametrize("start", list(State))
def test_only_the_listed_transitions_exist(start: State) -> None:
    legal = {
        State.PENDING: {State.WAITING, State.DONE},
        State.WAITING: {State.PREFILL, State.DONE},
        State.PREFILL: {State.DECODE, State.WAITING, State.DRAINING},
        State.DECODE: {State.WAITING, State.DRAINING},
        State.DRAINING: {State.DONE},
        State.DONE: set(),
    }
    rig = busy()
    request = rig.request("waits")
    for target in State:
        request.state = start
        if target in legal[start]:
            request.move(target)
        else:
            with pytest.raises(InvariantViolation, match="I5"):
                request.move(target)


def test_the_check_is_linear_and_quick_at_a_million_pages() -> None:
    """No timing: it must simply touch each page a bounded number of times."""
    rig = Rig(pages=1_000_000, page_size=1, context=4096, check="idle", poison=False)
    rig.submit("a", prompt(3000), max_new_tokens=2)
    rig.run()
    rig.scheduler.check()


def test_kv_that_is_not_its_tokens_is_seen() -> None:
    rig = busy()
    check_content(rig.engine, rig.life.cache)
    node = next(rig.life.cache.nodes())
    rig.engine.poison(node.pages[-1:])
    with pytest.raises(AssertionError, match="I13"):
        check_content(rig.engine, rig.life.cache)
