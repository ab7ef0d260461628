"""Registry: names to factories, ours and those that other packages add through entry points."""

from importlib.metadata import entry_points
from typing import Generic, TypeVar

from .errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """`kind` is the word of the error message; an entry point of `group` is loaded when its name is
    first asked for."""

    def __init__(self, kind: str, group: str, items: dict[str, T]) -> None:
        self.kind, self.group, self._items = kind, group, dict(items)

    def names(self) -> list[str]:
        return [*self._items, *(e.name for e in entry_points(group=self.group))]

    def get(self, name: str) -> T:
        """Raises ConfigError, listing what there is, for an unknown name."""
        if name not in self._items:
            for entry in entry_points(group=self.group, name=name):
                self._items[name] = entry.load()
        if name not in self._items:
            raise ConfigError(
                f"{self.kind} {name!r} is unknown; there are: {', '.join(self.names())}"
            )
        return self._items[name]
