"""`radix generate`: completes a file of prompts with a model in this process."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from ..engine_api import Engine
from ..errors import ConfigError
from .chat import add_sampling_arguments, sampling_of
from .flags import add_server_flags, engine_of


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of JSONL input: one of `prompt`, `messages` and `input_ids`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] = {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="FILE", help="a prompt a line, or .jsonl with objects: "
                        "prompt | messages | input_ids, and sampling_params")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", help="JSONL; default: standard output")
    parser.add_argument("--chat", action="store_true", help="prompts are messages of a user")
    add_sampling_arguments(parser)
    add_server_flags(parser, ("model", "engine", "scheduler"))


def run(namespace: argparse.Namespace) -> int:
    lines = read_lines(Path(namespace.input))
    with ExitStack() as stack:
        engine = stack.enter_context(engine_of(Engine, namespace))
        prompts = [_ids(engine, line, namespace.chat) for line in lines]
        defaults = sampling_of(namespace)
        params = [{**defaults, **line.sampling_params} for line in lines]
        out = sys.stdout
        if namespace.output is not None:
            out = stack.enter_context(open(namespace.output, "w", encoding="utf-8"))
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        task = progress.add_task("prompts", total=len(prompts))
        for index, output in _in_order(engine, prompts, params, lambda: progress.advance(task)):
            out.write(json.dumps(_record(index, output), ensure_ascii=False) + "\n")
    return 0


def read_lines(path: Path) -> list[Line]:
    """Raises ConfigError that names the line."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if path.suffix != ".jsonl":
        return [Line(prompt=text) for text in texts if text.strip()]
    lines = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=Line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if sum(x is not None for x in (line.prompt, line.messages, line.input_ids)) != 1:
            raise ConfigError(f"{path}, line {number}: one of prompt, messages, input_ids is due")
        lines.append(line)
    return lines


def _ids(engine: Engine, line: Line, chat: bool) -> list[int]:
    if line.input_ids is not None:
        return line.input_ids
    if engine.tokenizer is None:
        raise ConfigError("this model has no tokenizer: give input_ids")
    messages = line.messages
    if messages is None and chat:
        messages = [{"role": "user", "content": line.prompt}]
    if messages is not None:
        return engine.tokenizer.apply_chat_template(messages)
    return engine.tokenizer.encode(line.prompt or "")


def _in_order(engine: Engine, prompts: Any, params: Any, advance: Any) -> Any:
    """(index, output) of each prompt in the order of the file, as early as that order allows."""
    done: dict[int, dict[str, Any]] = {}
    following = 0
    try:
        for output in engine.stream(input_ids=prompts, sampling_params=params) if prompts else ():
            if output["meta_info"]["finish_reason"] is None:
                continue
            done[output["index"]] = output
            advance()
            while following in done:
                yield following, done.pop(following)
                following += 1
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _record(index: int, output: dict[str, Any]) -> dict[str, Any]:
    info = output["meta_info"]
    names = ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens")
    return {"index": index, "text": output["text"], **{n: info[n] for n in names}}
