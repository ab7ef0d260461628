"""The input of `radix generate`: a prompt a line, or JSONL."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, RequestError
from ..text.conversation import read_messages


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of JSONL input: one of `prompt`, `messages` (as the chat route takes them) and
    `input_ids`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] = {}


def read_lines(path: Path) -> list[Line]:
    """The lines of a file that are not blank; JSONL if it is called so. Raises ConfigError, which
    names the line."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return _lines(text, str(path), is_jsonl=path.suffix == ".jsonl")


def read_standard_input() -> list[Line]:
    """The lines of standard input that are not blank; JSONL if the first begins as an object does.
    Raises ConfigError."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read standard input: {error}") from error
    return _lines(text, "standard input", is_jsonl=text.lstrip().startswith("{"))


def _lines(content: str, source: str, *, is_jsonl: bool) -> list[Line]:
    lines = []
    # Lines end at newlines alone: `splitlines` would cut at U+2028 and others, too.
    for number, text in enumerate(content.split("\n"), start=1):
        if not text.strip():
            continue
        if not is_jsonl:
            lines.append(Line(prompt=text))
            continue
        try:
            lines.append(_parse(text))
        except (msgspec.DecodeError, RequestError, ConfigError) as error:
            raise ConfigError(f"{source}, line {number}: {error}") from error
    return lines


def _parse(text: str) -> Line:
    line = msgspec.json.decode(text, type=Line)
    if line.messages is not None:
        line.messages = read_messages(line.messages)
    sources = (line.prompt, line.messages, line.input_ids)
    if len([source for source in sources if source is not None]) != 1:
        raise ConfigError("one of prompt, messages, input_ids is due")
    if line.sampling_params.get("n") not in (None, 1):
        raise ConfigError("n must be 1, a record a line; repeat the line instead")
    return line
