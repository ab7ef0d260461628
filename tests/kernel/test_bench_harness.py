"""Input sets of a bench: larger than the caches together, or the row says so."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import harness
from bench.kernels.families.pointwise import pointwise
from bench.kernels.harness import Case, input_sets, measure

CPU = torch.device("cpu")

pytestmark = pytest.mark.cpu_only


def case(size: int) -> Case:
    make = lambda: (torch.ones(size // 4),)  # noqa: E731
    return Case("op", "shape", torch.float32, size, size, make, {"radix": torch.Tensor.sum})


def test_sets_rotate_until_they_leave_the_cache(monkeypatch):
    assert len(input_sets(case(1 << 18), CPU)) * (1 << 18) > harness.ROTATED_BYTES
    assert harness.MAX_SETS["cpu"] * (1 << 14) > 32 << 20  # small rows, in the L3 of most CPUs
    monkeypatch.setattr(harness, "MAX_SETS", {"cpu": 3})
    sets = input_sets(case(1 << 16), CPU)
    assert len(sets) == 3 and len({x.data_ptr() for (x,) in sets}) == 3


@pytest.mark.parametrize("cache", [1 << 10, 1 << 20])
def test_a_row_in_cache_says_so(cache, monkeypatch):
    monkeypatch.setattr(harness, "MAX_SETS", {"cpu": 4})
    monkeypatch.setattr(harness, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(harness, "last_level_cache", lambda: cache)
    assert measure(case(1 << 12), CPU).in_cache == (cache == 1 << 20)


def test_stores_go_to_slots_that_no_other_set_has():
    store = next(c for c in pointwise(CPU, torch.bfloat16) if c.op == "fused_qk_norm_rope_store")
    slots = torch.cat([store.make_inputs()[-1] for _ in range(1000)])
    assert len(slots.unique()) == 1000
