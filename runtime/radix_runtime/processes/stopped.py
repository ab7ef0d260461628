"""A process and those that it has started, as the kernel tells of them."""

from collections.abc import Iterator
from pathlib import Path

_STOPPED = ("T", "t")  # by a signal, by a debugger


def is_stopped(pid: int) -> bool:
    """Whether this process or one of those that it has started has been stopped (SIGSTOP). False
    once it has gone."""
    return any(_state(each) in _STOPPED for each in family(pid))


def family(pid: int) -> Iterator[int]:
    """The process, those that it has started, and those that they have."""
    yield pid
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}").glob("task/*/children")]
    except OSError:  # it has gone
        return
    for children in lists:
        for child in children.split():
            yield from family(int(child))


def _state(pid: int) -> str:
    """A letter; empty once the process has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
