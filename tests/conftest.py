"""Which tests run side by side, and which by themselves: the stages of `make test`.

Most tests depend neither on each other nor on time; they run in two processes, each file in one of
them. A test is `serial` when it starts the runtime's server in processes, measures time, CPU or
memory, or claims something that the machine has once. Every test of a module that takes anything
from `server_process` is, without saying so. Tests marked `builds` are minutes of compilers, and a
stage of CI (`make test-builds`).
"""

from __future__ import annotations

import pytest

# They take longest and begin first, so that both processes end together.
LONGEST: tuple[str, ...] = ()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "serial: runs with no other test beside it")
    config.addinivalue_line(
        "markers", "builds(*backends): compiles a library, or needs the wheels of these backends"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _starts_servers(item):
            item.add_marker(pytest.mark.serial)
    items.sort(key=lambda item: _place(item.path.name))


def _starts_servers(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    return any(
        getattr(value, "__module__", None) == "tests.runtime.server_process"
        for value in vars(module).values()
    )


def _place(file: str) -> int:
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)
