"""The cover of a test's combinations leaves out no pair of values."""

from __future__ import annotations

import itertools
from unittest.mock import Mock

import pytest

from tests.kernel.combinations import pair_cover, parametrize

pytestmark = pytest.mark.cpu_only
VALUES = [["a", "b"], [1, 2, 3, 4, 5], [0.5, 1.5, 2.5], [None, "x"]]


def test_any_two_values_meet():
    cover = pair_cover(VALUES)
    for (i, first), (j, second) in itertools.combinations(enumerate(VALUES), 2):
        met = {(each[i], each[j]) for each in cover}
        assert met == set(itertools.product(first, second))


def test_a_cover_is_small_and_the_same_every_time():
    cover = pair_cover(VALUES)
    assert len(cover) == len(set(cover)) <= 18  # of 60; 15 is the least
    assert cover == pair_cover(VALUES)


def test_a_cover_of_two_parameters_is_their_product():
    assert sorted(pair_cover(VALUES[1:3])) == sorted(itertools.product(*VALUES[1:3]))


@pytest.mark.parametrize(
    ("device", "full", "whole"),
    [("cpu", "", False), ("cpu", "1", True), ("cuda", "", True)],
    ids=["CPU", "RADIX_TEST_FULL", "GPU"],
)
def test_where_all_combinations_run(device, full, whole, monkeypatch):
    monkeypatch.setenv("RADIX_TEST_FULL", full)
    mark = pytest.mark.combinations(letter=VALUES[0], number=VALUES[1], share=VALUES[2]).mark
    metafunc = Mock()
    metafunc.definition.get_closest_marker.side_effect = {"combinations": mark}.get
    metafunc.config.getoption.side_effect = {"--device": device}.__getitem__
    parametrize(metafunc)
    (names, chosen), _ = metafunc.parametrize.call_args
    assert names == ["letter", "number", "share"]
    assert (sorted(chosen) == sorted(itertools.product(*VALUES[:3]))) == whole


def test_a_test_without_the_mark_is_left_alone():
    metafunc = Mock()
    metafunc.definition.get_closest_marker.return_value = None
    parametrize(metafunc)
    metafunc.parametrize.assert_not_called()
