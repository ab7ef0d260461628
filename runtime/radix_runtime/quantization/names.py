"""Lists of layers in the configuration of a checkpoint."""

import re
from collections.abc import Iterable


def is_listed(name: str, entries: Iterable[str]) -> bool:
    """Whether a layer is on a list: by its whole name, by components of it that stand together
    (`lm_head`, `layers.0.mlp`), of which `*` may stand for any part (`layers.*.mlp`), or by a
    regular expression behind `re:`, matched from the start."""
    return any(_matches(name, entry) for entry in entries)


def _matches(name: str, entry: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    components = f".{entry.strip('.')}."
    if "*" not in entry:
        return components in f".{name}."
    return re.search(re.escape(components).replace(r"\*", ".*"), f".{name}.") is not None
