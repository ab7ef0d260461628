"""Which parameter sets of a test run where not all of them do.

`make test` runs a cover of the products of sizes, dtypes and options; `make test-full`
(RADIX_TEST_FULL=1) and tests on a GPU, whose kernels have borders that a size and an option meet
together, run all sets. `@pytest.mark.cover("pairs")`: any two values of two parameters that meet in
some set meet in one that runs. `@pytest.mark.cover("values")`, where a set takes long: every value
of every parameter is in one. Tests of ops without the mark have pairs; all others run every set.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

OPS = "kernel"  # the folder whose tests have a cover without saying so
SIZES = {"values": 1, "pairs": 2, "all": 0}


def chosen(items: Sequence[pytest.Item], device: str) -> set[pytest.Item]:
    """Those of `items` that run."""
    if device != "cpu" or os.environ.get("RADIX_TEST_FULL"):
        return set(items)
    return {
        item for name, own in by_test(items).items() for item in cover(own, _size(own[0]), name)
    }


def _size(item: pytest.Item) -> int:
    mark = item.get_closest_marker("cover")
    if mark is not None:
        return SIZES[mark.args[0]]
    return SIZES["pairs" if item.path.parent.name == OPS else "all"]


def by_test(items: Sequence[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The parameter sets of each test, by its id without them."""
    sets: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        sets[item.nodeid.partition("[")[0]].append(item)
    return sets


def cover(own: Sequence[pytest.Item], size: int, seed: str) -> list[pytest.Item]:
    """Those sets of one test in which any `size` values meet that meet in a set at all; all of them
    if it is 0. The same for a seed, mostly others for another."""
    if size == 0:
        return list(own)
    seen: set[tuple[tuple[str, str], ...]] = set()
    kept = []
    for item in random.Random(seed).sample(own, len(own)):
        met = _meetings(item, size)
        if not met or met - seen:
            kept.append(item)
        seen |= met
    return kept


def _meetings(item: pytest.Item, size: int) -> set[tuple[tuple[str, str], ...]]:
    """The combinations of `size` parameters, with what stands for their values."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return set()
    values = [(name, repr(value)) for name, value in callspec.params.items()]
    return set(itertools.combinations(values, min(size, len(values))))
