"""Random requests on models that keep more than full pages, and on a host tier: recurrent states
with snapshots, a window, copies in the plan, each alone and together, with drafts or without.

The tokens are those of the oracle, which knows no cache. Some hundreds, or ten thousand with
RADIX_TEST_FULL=1."""

from __future__ import annotations

import os
import random

import pytest

from tests.runtime.fake_model import FakeModel
from tests.runtime.random_traffic import check_coverage, check_end, drive, traffic_of

FULL = bool(os.environ.get("RADIX_TEST_FULL"))
TOTAL = 10_000 if FULL else 1_600
WINDOW = FakeModel(window=11)
RECURRENT = FakeModel(recurrent=True)
BOTH = FakeModel(window=6, recurrent=True)
SETTINGS = {
    "window": {"model": WINDOW, "page_size": 4, "pages": 48, "group_sizes": (30, 0)},
    "window in small pages": {
        "model": WINDOW,
        "page_size": 1,
        "pages": 160,
        "group_sizes": (90, 0),
    },
    "recurrent": {"model": RECURRENT, "page_size": 4, "pages": 48, "group_sizes": (0, 12)},
    "host": {"page_size": 4, "pages": 40, "host_pages": 30},
    "window and host": {
        "model": WINDOW,
        "page_size": 2,
        "pages": 80,
        "group_sizes": (200, 0),
        "host_pages": 60,
        "schedule_policy": "lpm",
    },
    "recurrent and host": {
        "model": RECURRENT,
        "page_size": 4,
        "pages": 40,
        "group_sizes": (0, 40),
        "host_pages": 30,
        "overlap": False,
    },
    "window and recurrent": {
        "model": BOTH,
        "page_size": 3,
        "pages": 60,
        "group_sizes": (40, 20),
        "radix_eviction_policy": "lfu",
        "lazy": False,
    },
    "all": {
        "model": BOTH,
        "page_size": 4,
        "pages": 40,
        "group_sizes": (120, 60),
        "host_pages": 40,
    },
}


CASES = [(name, samples) for name in SETTINGS for samples in (1, 4)]
QUICK = CASES[::4] + CASES[3::4]  # each of the settings, without drafts or with them


def test_borders_of_snapshots_are_numbers_of_python() -> None:
    """Where a chunk's end was numpy's, the plan could not be sent."""
    settings = SETTINGS["window and recurrent"]
    drive(traffic_of(208133971, samples=1, chunk=24, **settings), TOTAL // len(CASES))


@pytest.mark.parametrize(("name", "samples"), CASES if FULL else QUICK)
def test_random_requests(name: str, samples: int) -> None:
    seed = random.SystemRandom().getrandbits(32)
    traffic = traffic_of(seed, samples=samples, chunk=24, **SETTINGS[name])
    drive(traffic, TOTAL // len(CASES))
    check_end(traffic)
    rig = traffic.rig
    if rig.life.host is not None:
        copied = rig.life.host.loaded_pages_total + rig.life.host.stored_pages_total
        assert rig.engine.num_copies == copied
    if FULL:
        check_coverage(traffic)
        assert rig.scheduler.counters.cached_tokens_total > 0
        assert rig.life.host is None or rig.life.host.loaded_pages_total > 0


@pytest.mark.parametrize(
    ("page_size", "window", "span", "samples"),
    [(4, 11, 5, 1), (1, 7, 11, 4), (1, 1, 5, 1), (16, 5, 2, 4)],
)
def test_the_smallest_pool_of_a_window_serves_everyone(
    page_size: int, window: int, span: int, samples: int
) -> None:
    """It holds the window of one request and its next tokens: the others wait or are retracted."""
    seed = random.SystemRandom().getrandbits(32)
    traffic = traffic_of(
        seed, samples=samples, model=FakeModel(window=window), page_size=page_size,
        pages=192 // page_size, chunk=24, group_sizes=(span, 0),
    )  # fmt: skip
    assert traffic.rig.life.windows[0].span == span
    drive(traffic, 40)
    traffic.rig.verify_rest()
