"""What a model keeps of each request between steps, as its engine declares it: groups of cached
state, each with memory of its own.

The scheduler owns that memory (`memory/cache_groups.py`); a StepPlan tells the engine which of it
each row uses."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FullPagesSpec:
    """KV of every token, `Executor.num_pages` pages of it. It comes first in every model: its pages
    are the nodes of the prefix cache. Where no layer attends to all tokens its pages have no
    bytes."""


@dataclass(frozen=True)
class WindowPagesSpec:
    """KV of the last `window` tokens, the present one included, in pages of the same number of
    tokens as the full ones. Pages are given back as they fall out of the window."""

    num_pages: int
    window: int


@dataclass(frozen=True)
class RowSnapshotsSpec:
    """A state for each row, which every token changes: `num_slots` snapshots of it can be kept,
    taken where a page ends. A row that is new starts from the state before the first token."""

    num_slots: int


GroupSpec = FullPagesSpec | WindowPagesSpec | RowSnapshotsSpec
ONLY_FULL_PAGES: tuple[GroupSpec, ...] = (FullPagesSpec(),)
