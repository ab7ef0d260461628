"""Registry: names of implementations, our own and those that other packages add as entry points."""

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from .errors import ConfigError

T = TypeVar("T")


def check_name(kind: str, group: str, ours: Iterable[str], name: str) -> None:
    """Raises ConfigError, with all names, unless `name` is one of `ours` or of the entry points of
    `group`. Loads nothing."""
    known = [*ours, *(entry.name for entry in entry_points(group=group))]
    if name not in known:
        raise ConfigError(f"{kind} {name!r} is unknown; there are: {', '.join(known)}")


class Registry(Generic[T]):
    """Implementations by name: `items`, and the entry points of `group`.

    `kind` names what is registered in error messages. An entry point is loaded when its name is
    first asked for.
    """

    def __init__(self, kind: str, group: str, items: dict[str, T]) -> None:
        self.kind = kind
        self.group = group
        self._items = dict(items)

    def names(self) -> list[str]:
        """The names of all implementations, loaded or not."""
        plugins = [entry.name for entry in entry_points(group=self.group)]
        return list(dict.fromkeys([*self._items, *plugins]))

    def get(self, name: str) -> T:
        """The implementation of that name. Raises ConfigError, with all names, if there is none."""
        if name not in self._items:
            for entry in entry_points(group=self.group, name=name):
                self._items[name] = entry.load()
        if name not in self._items:
            check_name(self.kind, self.group, self._items, name)
        return self._items[name]
