"""Snapshots of a state that every token of a row changes."""

import numpy as np

from ..cache_spec import RowSnapshotsSpec
from .handle_pool import HandlePool
from .radix_node import Node, pages_upwards


class RowSnapshots:
    """Snapshots of a state a row. The state itself lies at the row's number and needs no handle.

    A snapshot is optional: where no slot can be had none is taken. Of a row's own ones the newest
    is kept until it enters the tree."""

    def __init__(self, spec: RowSnapshotsSpec, index: int, *, page_size: int) -> None:
        self.page_size = page_size
        self.pool = HandlePool(index, spec.num_slots)
        self._own: dict[int, dict[int, int]] = {}  # row -> position -> slot
        self.planned: set[int] = set()  # slots that steps in flight write
        self._restores: list[tuple[int, int, int]] = []  # (row, slot, position)

    def usable(self, handles: np.ndarray) -> np.ndarray:
        """CacheGroup.usable."""
        return np.concatenate([[True], handles >= 0])

    def admit(self, row: int, handles: np.ndarray) -> None:
        """CacheGroup.admit."""
        self._own[row] = {}
        if len(handles):
            slot = int(handles[-1])
            self.pool.touch(slot)
            self._restores.append((row, slot, len(handles) * self.page_size))

    def take_restores(self) -> list[tuple[int, int, int]]:
        """(row, slot, position) of the rows that start from a snapshot, since the last call."""
        restores = self._restores
        self._restores = []
        return restores

    def rows(self) -> set[int]:
        """Rows between `admit` and `release`."""
        return set(self._own)

    def plan(self) -> int | None:
        """A slot for a snapshot of the step that is being built, if there is one; `settle` it."""
        if self.pool.available == 0:
            return None
        slot = int(self.pool.take(1)[0])
        self.planned.add(slot)
        return slot

    def settle(self, row: int, position: int, slot: int, taken: bool) -> None:
        """The step of a planned snapshot has completed. `taken`: it holds the row's state after
        `position` tokens, and somebody still wants it."""
        self.planned.remove(slot)
        own = self._own.get(row)
        if not taken or own is None or position in own:
            self.pool.release(np.array([slot]))
            return
        own[position] = slot

    def share(self, row: int, node: Node, num_pages: int) -> None:
        """CacheGroup.share."""
        own = self._own[row]
        wanted = [position for position in own if position <= num_pages * self.page_size]
        if not wanted:
            return
        earliest = min(wanted) // self.page_size
        for page, part, offset in pages_upwards(node, num_pages):
            if page + 1 < earliest:
                return
            slot = own.get((page + 1) * self.page_size)
            if slot is not None and part.handles[self.pool.index][offset] < 0:
                del own[(page + 1) * self.page_size]
                self.pool.enter(slot, part, offset, uses=0)

    def trim(self, row: int, committed: int) -> None:
        """CacheGroup.trim. What a row has taken is of committed tokens: the newest is kept."""
        own = self._own[row]
        for position in sorted(own)[:-1]:
            self.pool.release(np.array([own.pop(position)]))

    def release(self, row: int) -> None:
        """CacheGroup.release."""
        self.pool.release(np.array(list(self._own.pop(row).values()), np.int32))

    def private(self) -> np.ndarray:
        """CacheGroup.private."""
        own = [slot for slots in self._own.values() for slot in slots.values()]
        return np.array([*own, *self.planned], np.int32)
