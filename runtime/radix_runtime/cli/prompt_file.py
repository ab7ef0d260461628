"""The input of `radix generate`: a prompt a line, or JSONL."""

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
    """The lines of a file that are not blank. Raises ConfigError, which names the line."""
    try:
        # Lines end at newlines alone: `splitlines` would cut at U+2028 and others, too.
        texts = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    lines = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        if path.suffix != ".jsonl":
            lines.append(Line(prompt=text))
            continue
        try:
            lines.append(_parse(text))
        except (msgspec.DecodeError, RequestError, ConfigError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
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
