"""Metadata: typed access to the values of a GGUF file's header, with errors that name file and
key."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ConfigError
from .header import GgufFile


class Metadata:
    """The values of one architecture, `llama.block_count` by the name `block_count`; `unread` are
    those that nobody has asked for."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = str(self._required("general.architecture"))
        self._asked: set[str] = set()

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; an array that has one for each layer must have the same for all. None
        for `default`: there must be one. Raises ConfigError."""
        value = self._find(name)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, value, "a positive integer")
        return value

    def count(self, name: str, default: int) -> int:
        """An integer of 0 or more, `default` where there is none. Raises ConfigError."""
        value = self._find(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, value, "an integer of 0 or more")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean, `default` where there is none. Raises ConfigError."""
        value = self._find(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "a boolean")
        return value

    def flags(self, name: str, count: int) -> list[bool]:
        """`count` booleans. Raises ConfigError."""
        value = self._find(name)
        is_array = isinstance(value, np.ndarray) and value.dtype == bool
        if not is_array or len(value) != count:
            raise self._wrong(name, value, f"an array of {count} booleans")
        return [bool(each) for each in value]

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; None for `default`: there must be one. Raises ConfigError."""
        value = self._find(name)
        if value is None and default is not None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not np.isfinite(value):
            raise self._wrong(name, value, "a number")
        return float(value)

    def text(self, name: str) -> str | None:
        """A string, None where there is none. Raises ConfigError."""
        value = self._find(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def given(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The numbers that the file has among `names`, by what each is to be called."""
        return {new: self.number(name) for name, new in names.items() if self.has(name)}

    def has(self, name: str) -> bool:
        """Whether the file has a value of this name."""
        return f"{self.architecture}.{name}" in self._file.metadata

    def ignore(self, *names: str) -> None:
        """These change nothing."""
        self._asked.update(f"{self.architecture}.{name}" for name in names)

    def unread(self) -> dict[str, Any]:
        """The architecture's other values, by their full names."""
        prefix = f"{self.architecture}."
        keys = (key for key in self._file.metadata if key.startswith(prefix))
        return {key: self._file.metadata[key] for key in keys if key not in self._asked}

    def _find(self, name: str) -> Any:
        key = f"{self.architecture}.{name}"
        self._asked.add(key)
        return self._file.metadata.get(key)

    def _required(self, key: str) -> Any:
        if key not in self._file.metadata:
            raise ConfigError(f"{self._file.path}: metadata key {key!r} is missing")
        return self._file.metadata[key]

    def _wrong(self, name: str, value: Any, expected: str) -> ConfigError:
        key = f"{self.architecture}.{name}"
        if value is None:
            return ConfigError(f"{self._file.path}: metadata key {key!r} is missing")
        text = repr(value)[:60]
        return ConfigError(
            f"{self._file.path}: metadata key {key!r} is {text}, expected {expected}"
        )
