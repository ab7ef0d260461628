"""Registry: names to factories, ours and those that other packages add through entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from .errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """`kind` is the word of the error message, `group` the entry-point group (contracts by name:
    an entry point called NAME is loaded when NAME is first asked for and not ours)."""

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def add(item: T) -> T:
            if name in self._items:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._items[name] = item
            return item

        return add

    def names(self) -> list[str]:
        return [*self._items, *(e.name for e in entry_points(group=self.group))]

    def get(self, name: str) -> T:
        """Raises ConfigError, listing what there is, for an unknown name."""
        if name not in self._items:
            for entry in entry_points(group=self.group, name=name):
                self._items[name] = entry.load()
        if name not in self._items:
            raise ConfigError(
                f"{self.kind} {name!r} is unknown; there are: {', '.join(self.names()) or 'none'}"
            )
        return self._items[name]
