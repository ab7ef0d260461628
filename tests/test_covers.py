"""What `make test` leaves to `make test-full`: no value, and of tests of ops no pair of values."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.conftest import STAGES, pytest_ignore_collect
from tests.covers import by_test, chosen, cover

VALUES = {
    "letter": ["a", "b"],
    "number": [1, 2, 3, 4, 5],
    "share": [0.5, 1.5, 2.5],
    "other": [None, "x"],
}
PRODUCT = [dict(zip(VALUES, each, strict=True)) for each in itertools.product(*VALUES.values())]


def items_of(
    sets: list[dict[str, object]],
    name: str = "wide",
    kind: str | None = None,
    folder: str = "kernel",
) -> list[Mock]:
    """The sets of a test's parameters; an empty one is a test without parameters."""
    items = []
    for number, params in enumerate(sets):
        item = Mock(nodeid=f"test_it.py::{name}[{number}]" if params else f"test_it.py::{name}")
        item.path = Path(f"tests/{folder}/test_it.py")
        item.get_closest_marker.return_value = kind and pytest.mark.cover(kind).mark
        item.callspec.params = params
        if not params:
            del item.callspec
        items.append(item)
    return items


@pytest.fixture(autouse=True)
def _not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIX_TEST_FULL", raising=False)


def meetings(items: set[Mock], size: int) -> set[tuple[tuple[str, object], ...]]:
    return {
        met for item in items for met in itertools.combinations(item.callspec.params.items(), size)
    }


@pytest.mark.parametrize(
    ("kind", "size", "most"), [("values", 1, 12), ("pairs", 2, 30), (None, 2, 30)], ids=str
)
def test_what_meets_in_all_sets_meets_in_the_chosen_ones(
    kind: str | None, size: int, most: int
) -> None:
    items = items_of(PRODUCT, kind=kind)
    kept = chosen(items, "cpu")
    assert meetings(kept, size) == meetings(set(items), size)
    assert len(kept) <= most  # of 60


def test_tests_without_products_run_whole() -> None:
    for sets in ([{}], [{"letter": each} for each in "abc"]):
        items = items_of(sets, kind="values")
        assert chosen(items, "cpu") == set(items)


def test_where_every_set_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for items in (items_of(PRODUCT, kind="all"), items_of(PRODUCT, folder="runtime")):
        assert chosen(items, "cpu") == set(items)
    items = items_of(PRODUCT)
    assert chosen(items, "cuda") == set(items) != chosen(items, "cpu")
    monkeypatch.setenv("RADIX_TEST_FULL", "1")
    assert chosen(items, "cpu") == set(items)


def test_a_cover_follows_its_seed() -> None:
    items = items_of(PRODUCT)
    covers = [cover(items, 1, seed) for seed in ("avx2", "avx2", "avx512")]
    assert covers[0] == covers[1] != covers[2]
    assert all(meetings(set(each), 1) == meetings(set(items), 1) for each in covers)


def test_the_sets_of_a_test_are_its_own() -> None:
    items = items_of(PRODUCT) + items_of([{}], name="plain")
    assert {name: len(own) for name, own in by_test(items).items()} == {
        "test_it.py::wide": len(PRODUCT),
        "test_it.py::plain": 1,
    }


@pytest.mark.parametrize(
    ("stage", "text", "ignored"),
    [
        ("serial and not builds", "@pytest.mark.serial\n", None),
        ("serial and not builds", "from tests.runtime.loop_monitor import LoopHeld\n", None),
        ("serial and not builds", "def test_a(): ...\n", True),
        ("builds", "pytestmark = pytest.mark.builds()\n", None),
        ("builds", "@pytest.mark.serial\n", True),
        ("not serial and not builds", "@pytest.mark.serial\n", None),
        ("serial or builds", "pytestmark = pytest.mark.builds()\n", None),
        ("builds or serial", "@pytest.mark.serial\n", None),
        ("", "def test_a(): ...\n", None),
    ],
)
def test_a_stage_leaves_out_the_files_without_its_tests(
    stage: str, text: str, ignored: bool | None, tmp_path: Path
) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(text)
    config = Mock()
    config.option.markexpr = stage
    assert pytest_ignore_collect(file, config) is ignored


def test_the_stages_are_those_of_the_makefile() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for stage in STAGES:
        assert f"-m {shlex.quote(stage)} " in makefile
