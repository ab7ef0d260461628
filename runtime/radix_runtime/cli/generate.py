"""`radix generate`: completes a prompt, or a file of them, with a model in this process."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from ..errors import ConfigError
from ..offline import Engine
from ..progress import with_progress
from .flags import add_sampling_flags, add_server_flags, engine_args, sampling_of
from .output_file import output_file
from .prompt_file import Line, read_lines, read_standard_input

_INPUT_HELP = (
    "a file with a prompt a line, or .jsonl with objects: prompt | messages | input_ids, and "
    "sampling_params; - reads standard input; a text with a space in it, and no file, is a prompt"
)
_CHAT_HINT = "this is a chat model, which was given plain text: --chat asks it as a user would"
_STANDARD_OUTPUT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `radix generate`."""
    parser.add_argument("input", nargs="?", metavar="FILE", help=_INPUT_HELP)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="complete this, and print the text")
    what = "JSONL; default: standard output"
    parser.add_argument("-o", "--output", type=output_file, metavar="FILE", help=what)
    parser.add_argument("--chat", action="store_true", help="prompts are messages of a user")
    add_sampling_flags(parser)
    add_server_flags(parser, engine_only=True)


def run(namespace: argparse.Namespace) -> int:
    """Writes a JSON record for every prompt, in the order of the file; of a prompt on the command
    line, without an output file, the text alone."""
    lines, is_plain = _read(namespace)
    sampling = sampling_of(namespace)
    with Engine(**engine_args(namespace)) as engine:
        prompts = [_ids(engine, line, namespace.chat) for line in lines]
        params = [{**sampling, **line.sampling_params} for line in lines]
        try:
            # Checks every prompt, so that an old output is kept if one of them is refused.
            stream = engine.stream(input_ids=prompts, sampling_params=params) if prompts else ()
            with _open_output(namespace.output) as out:
                if is_plain:
                    _write_text(out, stream)
                else:
                    _write_records(out, stream, len(prompts))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not namespace.chat and _is_chat_model(engine) and any(line.prompt for line in lines):
            print(f"radix: {_CHAT_HINT}", file=sys.stderr)
    return 0


def _read(namespace: argparse.Namespace) -> tuple[list[Line], bool]:
    """What is to be completed, and whether it is a prompt whose text alone is wanted."""
    if (namespace.input is None) == (namespace.prompt is None):
        raise ConfigError("give a file, - or a prompt; see radix generate --help")
    prompt = namespace.prompt
    if namespace.input is not None:
        path = Path(namespace.input)
        if namespace.input == "-":
            return read_standard_input(), False
        if " " not in namespace.input or path.exists():
            return read_lines(path), False
        prompt = namespace.input
    return [Line(prompt=prompt)], namespace.output is None


def _is_chat_model(engine: Engine) -> bool:
    return engine.tokenizer is not None and engine.tokenizer.chat_template is not None


def _open_output(path: Path | None) -> TextIO:
    """The output file, or standard output: UTF-8 whatever the locale."""
    file = _STANDARD_OUTPUT if path is None else path
    return open(file, "w", encoding="utf-8", closefd=path is not None)


def _write_text(out: TextIO, stream: Iterable[dict[str, Any]]) -> None:
    """Writes the text of the only prompt as it comes."""
    shown = 0
    for output in stream:
        out.write(output["text"][shown:])
        out.flush()
        shown = len(output["text"])
    out.write("\n")


def _write_records(out: TextIO, stream: Iterable[dict[str, Any]], count: int) -> None:
    """Writes every finished output, in the order of the prompts and as early as that allows.

    When it is interrupted, what was complete by then is written too.
    """
    finished = (output for output in stream if output["meta_info"]["finish_reason"] is not None)
    waiting: dict[int, dict[str, Any]] = {}
    written = 0
    try:
        for output in with_progress(finished, "prompts", count):
            waiting[output["index"]] = output
            while written in waiting:
                out.write(_record(written, waiting.pop(written)))
                written += 1
    finally:
        out.writelines(_record(index, waiting[index]) for index in sorted(waiting))


def _record(index: int, output: dict[str, Any]) -> str:
    info = output["meta_info"]
    record = {
        "index": index,
        "text": output["text"],
        "finish_reason": info["finish_reason"],
        "prompt_tokens": info["prompt_tokens"],
        "completion_tokens": info["completion_tokens"],
        "cached_tokens": info["cached_tokens"],
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


def _ids(engine: Engine, line: Line, chat: bool) -> list[int]:
    if line.input_ids is not None:
        return line.input_ids
    if engine.tokenizer is None:
        raise ConfigError("this model has no tokenizer: give input_ids")
    if line.messages is not None:
        return engine.tokenizer.apply_chat_template(line.messages)
    assert line.prompt is not None  # a line has one of the three
    if chat:
        return engine.tokenizer.apply_chat_template([{"role": "user", "content": line.prompt}])
    return engine.tokenizer.encode(line.prompt)
