"""Invariants of the other cache groups (I11) and of the host tier (I12): damaged states are named,
and bugs put into the code are caught by random traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from radix_runtime.errors import InvariantViolation
from radix_runtime.memory import radix_cache
from radix_runtime.memory.handle_pool import HandlePool
from radix_runtime.memory.host_tier import HostTier
from radix_runtime.memory.radix_cache import RadixCache
from radix_runtime.memory.radix_node import Node
from radix_runtime.memory.row_snapshots import RowSnapshots
from radix_runtime.memory.window_pages import WindowPages
from radix_runtime.scheduler.lifecycle import Lifecycle
from tests.runtime.fake_model import FakeModel
from tests.runtime.random_traffic import drive, traffic_of
from tests.runtime.scheduler_rig import Rig, prompt

MODEL = FakeModel(window=9, recurrent=True)


def busy(**options: object) -> Rig:
    """One request decodes on a cached prefix, one is in its prefill; some cached prefixes are on
    the host; a step is in flight and the invariants hold."""
    rig = Rig(
        rows=4, pages=30, chunk=16, model=MODEL, group_sizes=(60, 30), host_pages=20, samples=2,
        **options,
    )  # fmt: skip
    ids = prompt(21)
    for i in range(5):
        rig.submit(str(i), prompt(20), max_new_tokens=4, ignore_eos=True)
        rig.run()
    rig.submit("warm", ids, max_new_tokens=1)
    rig.run()
    rig.submit("decodes", np.concatenate([ids, prompt(7)]), max_new_tokens=20, ignore_eos=True)
    for _ in range(6):
        rig.step()
    rig.submit("prefills", prompt(40), max_new_tokens=10)
    rig.step()
    rig.step()
    rig.scheduler.check()
    assert rig.life.host is not None and rig.life.host.nodes
    assert rig.request("decodes").cached_tokens > 0
    return rig


def window_of(rig: Rig) -> WindowPages:
    return rig.life.windows[0]


def snapshots_of(rig: Rig) -> RowSnapshots:
    return rig.life.snapshots[0]


def some_tree_page(rig: Rig) -> tuple[Node, int, int]:
    """(node, offset, page) of the window group in the tree."""
    for node in rig.life.cache.nodes():
        for offset, page in enumerate(node.handles[0].tolist()):
            if page >= 0:
                return node, offset, page
    raise AssertionError("the tree has no page of the window")


def break_i11_lost(rig: Rig) -> None:
    window_of(rig).pool.allocator.alloc(1)


def break_i11_page_of_nobody(rig: Rig) -> None:
    node, offset, _ = some_tree_page(rig)
    node.handles[0][offset] = -1


def break_i11_page_of_two(rig: Rig) -> None:
    request = rig.request("prefills")
    window = window_of(rig)
    window.pages_of(request.row)[-1] = some_tree_page(rig)[2]


def break_i11_uses(rig: Rig) -> None:
    pool = window_of(rig).pool
    pool.uses[np.flatnonzero(pool.uses)[0]] += 1


def break_i11_unused(rig: Rig) -> None:
    """A page that can go is not among those that can."""
    window_of(rig).pool._unused.popitem()


def break_i11_other_node(rig: Rig) -> None:
    _, _, page = some_tree_page(rig)
    window_of(rig).pool._node[page] = rig.life.cache.root


def break_i11_first(rig: Rig) -> None:
    """The next token looks at a page that the row has given back."""
    window = window_of(rig)
    row = rig.request("decodes").row
    while window.held(row) > 1:
        window.pool.release(window.pages_of(row)[:1])
        window.first[row] += 1


def break_i11_end(rig: Rig) -> None:
    window = window_of(rig)
    row = rig.request("decodes").row
    window.extend(row, window.pool.take(1))


def break_i11_free_row(rig: Rig) -> None:
    window = window_of(rig)
    window.extend(rig.life.table.free_rows[0], window.pool.take(1))


def break_i11_unlocked(rig: Rig) -> None:
    """A row uses a page below a node that can be evicted."""
    node = next(n for n in rig.life.cache.nodes() if n.lock_count == 0 and n.handles[0].max() >= 0)
    window = window_of(rig)
    pages = node.handles[0][node.handles[0] >= 0][:1]
    window.pool.use(pages)
    row = rig.life.table.alloc()
    rig.life.table.free(row)
    window.extend(row, pages)


def break_i11_snapshot_lost(rig: Rig) -> None:
    snapshots_of(rig).pool.take(1)


def break_i11_snapshot_row(rig: Rig) -> None:
    snapshots_of(rig)._own[rig.life.table.free_rows[0]] = {}


def break_i11_snapshot_planned(rig: Rig) -> None:
    snapshots_of(rig).plan()


def break_i11_handles(rig: Rig) -> None:
    node = next(rig.life.cache.nodes())
    node.handles = (node.handles[0], node.handles[1][:-1])


def break_i12_lost(rig: Rig) -> None:
    rig.life.host.allocator.alloc(1)


def break_i12_node(rig: Rig) -> None:
    rig.life.host.nodes.popitem()


def break_i12_mark(rig: Rig) -> None:
    node = next(iter(rig.life.host.nodes))
    node.pages = node.pages.copy()
    node.pages[:] = rig.life.host.allocator.free_pages()[0]


def break_i12_copy(rig: Rig) -> None:
    rig.life.host._copies.append(np.zeros((3, 1), np.int32))


def break_i12_below(rig: Rig) -> None:
    """A node on the device hangs from one on the host."""
    host = next(iter(rig.life.host.nodes))
    child = next(n for n in rig.life.cache.nodes() if not n.on_host and n.parent.parent is None)
    del rig.life.cache.root.children[child.edge]
    rig.life.cache.root.num_device_children -= 1
    child.parent = host
    child.edge = child.edge[1]
    host.children[child.edge] = child
    host.num_device_children += 1
    # The locks on the way are as they must be.
    for node in host.path():
        node.lock_count += child.lock_count


BREAKS = [(f, f.__name__.split("_")[1].upper()) for n, f in globals().items() if n[:6] == "break_"]


@pytest.mark.parametrize(("damage", "name"), BREAKS, ids=lambda x: getattr(x, "__name__", x)[6:])
def test_a_damaged_state_is_named(damage: Callable[[Rig], None], name: str) -> None:
    rig = busy(poison=False)
    damage(rig)
    with pytest.raises(InvariantViolation) as caught:
        rig.scheduler.check()
    assert caught.value.name == name


def test_a_locked_node_on_the_host_is_seen() -> None:
    from radix_runtime.scheduler.group_invariants import check_host

    rig = busy()
    node = next(iter(rig.life.host.nodes))
    rig.life.cache.lock(node)
    with pytest.raises(InvariantViolation, match="I12"):
        check_host(rig.life)


def test_content_of_every_group_is_compared() -> None:
    from tests.runtime.check_content import check_content

    def host(rig: Rig) -> None:
        rig.engine.host_kv[:] = 1

    def window(rig: Rig) -> None:
        rig.engine.window_kv[:] = 1

    def snapshot(rig: Rig) -> None:
        rig.engine.snapshots = [1] * len(rig.engine.snapshots)

    for damage in (host, window, snapshot):
        rig = busy()
        check_content(rig.engine, rig.life.cache)
        damage(rig)
        with pytest.raises(AssertionError, match="I13"):
            check_content(rig.engine, rig.life.cache)


# Bugs -----------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def bug_the_match_is_not_cut(patch: Patch) -> None:
    patch.setattr(radix_cache, "usable_parts", lambda parts, groups: parts)


def bug_the_window_is_a_token_short(patch: Patch) -> None:
    first_page = WindowPages.first_page
    patch.setattr(WindowPages, "first_page", lambda self, length: first_page(self, length + 1))


def bug_the_window_of_a_match_is_a_page_short(patch: Patch) -> None:
    def usable(self: WindowPages, handles: np.ndarray) -> np.ndarray:
        return np.concatenate([[True], handles >= 0])

    patch.setattr(WindowPages, "usable", usable)


def bug_pages_go_by_the_upper_bound(patch: Patch) -> None:
    """Rejected drafts count as committed."""
    trim = Lifecycle.trim
    patch.setattr(Lifecycle, "trim", lambda self, r, committed: trim(self, r, r.reserved_len))


def bug_users_are_not_counted(patch: Patch) -> None:
    patch.setattr(HandlePool, "use", lambda self, handles: None)


def bug_pages_of_the_tree_are_freed(patch: Patch) -> None:
    patch.setattr(HandlePool, "release", lambda self, handles: self.allocator.free(handles))


def bug_a_split_forgets_whose_handles_they_are(patch: Patch) -> None:
    patch.setattr(HandlePool, "split", lambda self, upper: None)


def bug_handles_of_a_cut_node_leak(patch: Patch) -> None:
    patch.setattr(HandlePool, "forget", lambda self, handles: None)


def bug_a_row_keeps_its_pages(patch: Patch) -> None:
    patch.setattr(WindowPages, "release", lambda self, row: None)


def bug_every_planned_snapshot_counts(patch: Patch) -> None:
    settle = RowSnapshots.settle

    def careless(self: RowSnapshots, row: int, position: int, slot: int, taken: bool) -> None:
        settle(self, row, position, slot, taken=True)

    patch.setattr(RowSnapshots, "settle", careless)


def bug_snapshots_hang_a_page_too_low(patch: Patch) -> None:
    settle = RowSnapshots.settle

    def late(self: RowSnapshots, row: int, position: int, slot: int, taken: bool) -> None:
        settle(self, row, position + self.page_size, slot, taken)

    patch.setattr(RowSnapshots, "settle", late)


def bug_a_state_is_not_restored(patch: Patch) -> None:
    patch.setattr(RowSnapshots, "take_restores", lambda self: self._restores.clear() or [])


def bug_copies_are_forgotten(patch: Patch) -> None:
    def none(self: HostTier) -> np.ndarray:
        self._copies.clear()
        return np.zeros((3, 0), np.int32)

    patch.setattr(HostTier, "take_copies", none)


def bug_copies_come_back_before_they_went(patch: Patch) -> None:
    take = HostTier.take_copies
    patch.setattr(HostTier, "take_copies", lambda self: take(self)[:, ::-1])


def bug_pages_on_the_host_are_not_freed(patch: Patch) -> None:
    def drop(self: HostTier, node: Node) -> None:
        del self.nodes[node]

    patch.setattr(HostTier, "drop", drop)


def bug_what_was_computed_again_stays_on_the_host(patch: Patch) -> None:
    patch.setattr(RadixCache, "_replace_on_host", lambda self, parts, pages: None)


def bug_a_loaded_node_is_not_counted(patch: Patch) -> None:
    patch.setattr(RadixCache, "_arrived", lambda self, node: None)


def bug_locked_nodes_leave_the_host(patch: Patch) -> None:
    """What a request of this step is about to load makes room for what it evicts."""

    def make_room(self: RadixCache, num_pages: int) -> bool:
        for node in list(self.host.nodes):
            if self.host.allocator.num_free >= num_pages:
                break
            if node.parent is not None and not node.children:
                self._drop_from_host(node)
        return self.host.allocator.num_free >= num_pages

    patch.setattr(RadixCache, "_make_host_room", make_room)


BUGS = [f for n, f in globals().items() if n[:4] == "bug_"]
CAUGHT = (InvariantViolation, AssertionError, ValueError, IndexError, KeyError)


def run_traffic() -> Iterator[None]:
    """Enough to meet every path, in several sizes."""
    for seed in range(3):
        traffic = traffic_of(
            seed, model=MODEL, page_size=4, pages=34, chunk=24, group_sizes=(60, 40),
            host_pages=24, samples=3,
        )  # fmt: skip
        drive(traffic, 120)
        traffic.rig.verify_rest()
        yield


@pytest.mark.parametrize("bug", BUGS, ids=lambda f: f.__name__[4:])
def test_a_bug_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises(CAUGHT):
        for _ in run_traffic():
            pass


def test_the_same_traffic_without_a_bug_passes() -> None:
    assert len(list(run_traffic())) == 3
