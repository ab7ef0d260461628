"""`radix generate`: completes a file of prompts with a model in this process."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track

from ..errors import ConfigError, RequestError
from ..offline import Engine
from ..server.protocol import TokenizeBody, decode_body, template_messages
from .flags import add_sampling_flags, add_server_flags, engine_args, sampling_of


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of JSONL input: one of `prompt`, `messages` (as the chat route takes them) and
    `input_ids`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None
    sampling_params: dict[str, Any] = {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a prompt a line, or .jsonl with objects: prompt | messages | input_ids, and sampling_params"
    parser.add_argument("input", metavar="FILE", help=what)
    parser.add_argument("-o", "--output", metavar="FILE", help="JSONL; default: standard output")
    parser.add_argument("--chat", action="store_true", help="prompts are messages of a user")
    add_sampling_flags(parser)
    add_server_flags(parser, engine_only=True)


def run(namespace: argparse.Namespace) -> int:
    lines, sampling = read_lines(Path(namespace.input)), sampling_of(namespace)
    with Engine(**engine_args(namespace)) as engine:
        prompts = [_ids(engine, line, namespace.chat) for line in lines]
        params = [{**sampling, **line.sampling_params} for line in lines]
        done, written = dict[int, dict[str, Any]](), 0
        try:
            stream = engine.stream(input_ids=prompts, sampling_params=params) if prompts else ()
            finished = (
                output for output in stream if output["meta_info"]["finish_reason"] is not None
            )
            # Standard output, too, gets UTF-8 whatever the locale.
            with open(
                namespace.output or 1, "w", encoding="utf-8", closefd=bool(namespace.output)
            ) as out:
                try:
                    for output in track(
                        finished, "prompts", len(prompts), console=Console(stderr=True)
                    ):
                        done[output["index"]] = output
                        while (
                            written in done
                        ):  # in the order of the file, as early as that order allows
                            out.write(_record(written, done.pop(written)))
                            written += 1
                finally:  # also what was complete when an interrupt came
                    out.writelines(_record(index, done[index]) for index in sorted(done))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return 0


def _record(index: int, output: dict[str, Any]) -> str:
    names = ("finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens")
    record = {
        "index": index,
        "text": output["text"],
        **{name: output["meta_info"][name] for name in names},
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


def read_lines(path: Path) -> list[Line]:
    try:
        texts = [
            (n, text)
            for n, text in enumerate(path.read_text("utf-8-sig").split("\n"), 1)
            if text.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if path.suffix != ".jsonl":
        return [Line(prompt=text) for _, text in texts]
    lines = []
    for number, text in texts:
        try:
            line = msgspec.json.decode(text, type=Line)
            if line.messages is not None:
                body, _ = decode_body(
                    TokenizeBody, msgspec.json.encode({"messages": line.messages}), False, {}
                )
                line.messages = template_messages(body.messages or [])
        except (msgspec.DecodeError, RequestError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        if sum(x is not None for x in (line.prompt, line.messages, line.input_ids)) != 1:
            raise ConfigError(f"{path}, line {number}: one of prompt, messages, input_ids is due")
        if line.sampling_params.get("n") not in (None, 1):
            raise ConfigError(
                f"{path}, line {number}: n must be 1, a record a line; repeat the line instead"
            )
        lines.append(line)
    return lines


def _ids(engine: Engine, line: Line, chat: bool) -> list[int]:
    if line.input_ids is not None:
        return line.input_ids
    if engine.tokenizer is None:
        raise ConfigError("this model has no tokenizer: give input_ids")
    if line.prompt is not None and not chat:
        return engine.tokenizer.encode(line.prompt)
    return engine.tokenizer.apply_chat_template(
        line.messages or [{"role": "user", "content": line.prompt}]
    )
