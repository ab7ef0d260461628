"""Which tests run side by side, and which by themselves: the stages of `make test`.

Most tests depend neither on each other nor on time; they run in two processes, each file in one of
them. A test is `serial` when it starts the runtime's server in processes, measures time, CPU or
memory, or claims something that the machine has once. Every test of a module that takes anything
from one of SERIAL_HELPERS is, without saying so. Tests marked `builds` take compilers minutes;
they are a stage of CI (`make test-builds`).
"""

from __future__ import annotations

import pytest

SERIAL_HELPERS = {"tests.runtime.server_process", "tests.runtime.loop_monitor"}
# They take longest and begin first, so that both processes end together.
LONGEST = (
    "test_isa.py",
    "test_families.py",
    "test_memcheck.py",
    "test_checkpoint_formats.py",
    "test_bits.py",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "serial: runs with no other test beside it")
    config.addinivalue_line(
        "markers", "builds(*backends): compiles a library, or needs the wheels of these backends"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if " at 0x" in item.name:
            raise pytest.UsageError(
                f"{item.nodeid}: its name is another in every process, give ids"
            )
        if _takes_from(item, SERIAL_HELPERS):
            item.add_marker(pytest.mark.serial)
    items.sort(key=lambda item: _place(item.path.name))


def _takes_from(item: pytest.Item, helpers: set[str]) -> bool:
    names = vars(getattr(item, "module", None) or item).values()
    return any(getattr(value, "__module__", None) in helpers for value in names)


def _place(file: str) -> int:
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)
