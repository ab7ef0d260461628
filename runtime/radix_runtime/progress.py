"""Progress bars: one style for every command and call, on stderr and on terminals only."""

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

T = TypeVar("T")


def progress_bar(what: str, total: int, *, hidden: bool = False) -> tqdm:
    """A bar that its user advances; nothing where stderr is no terminal, or if `hidden`."""
    return tqdm(desc=what, total=total, disable=True if hidden else None)


def with_progress(items: Iterable[T], what: str, total: int, *, hidden: bool = False) -> tqdm:
    """The items, with a bar that counts them."""
    return tqdm(items, desc=what, total=total, disable=True if hidden else None)
