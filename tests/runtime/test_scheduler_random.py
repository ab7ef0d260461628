"""Random requests (`random_traffic.py`) over page sizes, budgets and policies, with overlap and
without.

Some thousands of them on one token a step and with drafts, or with RADIX_TEST_FULL=1 ten thousand
of each."""

from __future__ import annotations

import os
import random

import pytest

from tests.runtime.random_traffic import check_coverage, check_end, drive, traffic_of

FULL = bool(os.environ.get("RADIX_TEST_FULL"))
TOTAL = 10_000 if FULL else 2_400
TOTAL_DRAFTS = 10_000 if FULL else 1_200
SETTINGS = [
    {"page_size": 1, "pages": 160, "chunk": 16},
    {"page_size": 4, "pages": 48, "chunk": 24, "schedule_policy": "lpm"},
    {"page_size": 16, "pages": 14, "chunk": -1, "overlap": False},
    {"page_size": 64, "pages": 5, "chunk": 32, "context": 250},
    {"page_size": 3, "pages": 60, "chunk": 9, "radix_eviction_policy": "lfu"},
    {"page_size": 4, "pages": 40, "chunk": 32, "disable_radix_cache": True},
    {"page_size": 2, "pages": 90, "chunk": 40, "overlap": False, "radix_eviction_policy": "fifo"},
    {"page_size": 8, "pages": 24, "chunk": 20, "lazy": False, "schedule_policy": "lpm"},
]


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_random_requests(index: int) -> None:
    traffic = traffic_of(random.SystemRandom().getrandbits(32), **SETTINGS[index])
    drive(traffic, TOTAL // len(SETTINGS))
    check_end(traffic)
    check_coverage(traffic)


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_random_requests_with_drafts(index: int) -> None:
    """Steps accept 1 to 8 tokens a row; the tokens are those of one a step."""
    seed = random.SystemRandom().getrandbits(32)
    traffic = traffic_of(seed, samples=8, **SETTINGS[index])
    drive(traffic, TOTAL_DRAFTS // len(SETTINGS))
    check_end(traffic)
    counts = traffic.rig.engine.counts
    assert {accepted for accepted, _ in counts} >= {1, 2, 8}
    assert {sampled for _, sampled in counts} >= {1, 8}
