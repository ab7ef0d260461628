"""Lists of layers in the configuration of a checkpoint."""

import re
from collections.abc import Iterable

from ..errors import ConfigError


class NameList:
    """Layers by their whole names, by components of these that stand together (`lm_head`,
    `layers.0.mlp`), of which `*` may stand for any part (`layers.*.mlp`), or by a regular
    expression behind `re:`, matched from the start. `name in` a list: whether a layer is on it.

    Lists may have hundreds of entries and models ten thousands of layers: entries without a
    pattern are not looked at one by one. Raises ConfigError for what is no regular expression.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self._plain: set[str] = set()
        self._parts: list[re.Pattern[str]] = []
        self._starts: list[re.Pattern[str]] = []
        for entry in entries:
            if entry.startswith("re:"):
                self._starts.append(_compiled(entry.removeprefix("re:")))
            elif "*" in entry:
                components = re.escape(f".{entry.strip('.')}.").replace(r"\*", ".*")
                self._parts.append(re.compile(components))
            else:
                self._plain.add(entry.strip("."))

    def __contains__(self, name: str) -> bool:
        if self._plain and any(part in self._plain for part in _together(name)):
            return True
        framed = f".{name}."
        if any(pattern.search(framed) for pattern in self._parts):
            return True
        return any(pattern.match(name) for pattern in self._starts)


def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise ConfigError(
            f"quantization_config: {expression!r} is no regular expression: {error}"
        ) from None


def _together(name: str) -> Iterable[str]:
    """Every run of components of a name."""
    components = name.split(".")
    for begin in range(len(components)):
        for end in range(begin + 1, len(components) + 1):
            yield ".".join(components[begin:end])
