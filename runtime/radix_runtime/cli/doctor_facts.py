"""What `radix doctor` reports: rows of a table, and problems with their remedies."""

from collections.abc import Iterator
from typing import NamedTuple


class Problem(NamedTuple):
    """What is wrong with an installation or a model on it, and how to mend it, if `what` does not
    say."""

    what: str
    remedy: str


Facts = Iterator[tuple[str, object] | Problem]  # rows of the table (name, value), and problems
