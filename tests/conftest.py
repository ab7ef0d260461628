"""Which tests run side by side, which by themselves, and which only in `make test-full`.

Most tests depend neither on each other nor on time; they run in two processes, each file in one of
them, those of real servers too, whose limits are far beyond what a busy machine takes. A test is
`serial` when it measures time, CPU or memory, when a limit of seconds is part of what it tests, or
when it claims something that the machine has once. Every test of a module that takes anything from
one of SERIAL_HELPERS is, without saying so. Tests marked `builds` take compilers minutes, or need
tools that few machines have; they are a stage of CI (`make test-builds`).
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests import covers

SERIAL_HELPERS = {"tests.runtime.loop_monitor"}
# They take longest and begin first, so that both processes end together.
LONGEST = (
    "test_isa.py",
    "test_families.py",
    "test_checkpoint_formats.py",
    "test_bits.py",
    "test_kills.py",
    "test_server_process.py",
    "test_drain.py",
)
# The -m of the stages of few tests, as the Makefile has them -> the mark of these tests. With any
# other expression every file is imported.
STAGES = {"serial and not builds": "serial", "builds": "builds"}
# A mark -> what is in the text of every file with a test of that mark.
MARKED_BY = {
    "serial": ("mark.serial", *(helper.rpartition(".")[2] for helper in SERIAL_HELPERS)),
    "builds": ("mark.builds",),
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "serial: runs with no other test beside it")
    config.addinivalue_line(
        "markers", "builds(*backends): compiles a library, or needs the wheels of these backends"
    )
    config.addinivalue_line("markers", "cpu_only: says what holds on the CPU, or in numpy, alone")
    config.addinivalue_line(
        "markers", 'cover("pairs" or "values"): which parameter sets run (tests/covers.py)'
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A stage of few tests does not import the files that have none: that takes half a minute."""
    mark = STAGES.get(config.option.markexpr)
    if mark is None or not collection_path.match("test_*.py"):
        return None
    return None if _names_any(collection_path, MARKED_BY[mark]) else True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    for item in items:
        if " at 0x" in item.name:
            raise pytest.UsageError(
                f"{item.nodeid}: its name is another in every process, give ids"
            )
        if _takes_from(item, SERIAL_HELPERS):
            item.add_marker(pytest.mark.serial)
        _check_words(item)
    items.sort(key=lambda item: _place(item.path.name))
    yield  # what -m and -k deselect
    _leave_to_full(config, items)


def _leave_to_full(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the parameter sets that only `make test-full` runs."""
    if config.getoption("--cover", default=None):
        return  # tests/kernel/conftest.py has chosen
    kept = covers.chosen(items, config.getoption("--device", default="cpu"))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _takes_from(item: pytest.Item, helpers: set[str]) -> bool:
    names = vars(getattr(item, "module", None) or item).values()
    return any(getattr(value, "__module__", None) in helpers for value in names)


def _check_words(item: pytest.Item) -> None:
    """pytest_ignore_collect would miss a test whose file does not name what marks it."""
    for mark, words in MARKED_BY.items():
        if item.get_closest_marker(mark) and not _names_any(item.path, words):
            raise pytest.UsageError(f"{item.nodeid} is {mark}, and its file names none of {words}")


def _names_any(path: Path, words: tuple[str, ...]) -> bool:
    text = path.read_text()
    return any(word in text for word in words)


def _place(file: str) -> int:
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)
