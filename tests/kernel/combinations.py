"""`@pytest.mark.combinations(name=values, ...)`: how many combinations of a test's parameters run.

All of them on a GPU, whose kernels have borders that a size and an option meet together, and with
RADIX_TEST_FULL=1. On the CPU, where such a test is of the reference or of kernels with fewer
borders, and where AMD's machine code is executed, a cover: any two values of two parameters
meet in one test at least.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest


def parametrize(metafunc: pytest.Metafunc) -> None:
    """What the mark stands for; called by conftest's pytest_generate_tests."""
    mark = metafunc.definition.get_closest_marker("combinations")
    if mark is None:
        return
    names = list(mark.kwargs)
    values = [list(choices) for choices in mark.kwargs.values()]
    slow = metafunc.config.getoption("--device") in ("cpu", "rocm-sim")
    if slow and not os.environ.get("RADIX_TEST_FULL"):
        chosen = pair_cover(values)
    else:
        chosen = list(itertools.product(*values))
    ids = ["-".join(map(str, combination)) for combination in chosen]
    metafunc.parametrize(names, chosen, ids=ids)


def pair_cover(values: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Few combinations in which any two values of two parameters meet; the same every time.

    Each takes the combination with the most pairs that no one before it has.
    """
    combinations = list(itertools.product(*(range(len(choices)) for choices in values)))
    pairs_of = {each: set(itertools.combinations(enumerate(each), 2)) for each in combinations}
    missing = set().union(*pairs_of.values())
    cover = []
    while missing:
        best = max(combinations, key=lambda each: len(pairs_of[each] & missing))
        missing -= pairs_of[best]
        cover.append(best)
    return [
        tuple(choices[index] for choices, index in zip(values, each, strict=True)) for each in cover
    ]
