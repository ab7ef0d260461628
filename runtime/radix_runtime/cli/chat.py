"""`radix chat`: a conversation in the terminal, with a server or a model in this process."""

import argparse
import asyncio
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

from prompt_toolkit import PromptSession

from ..config import flag_name
from ..errors import ConfigError, RequestError
from .client import Client
from .flags import (
    add_model_argument,
    add_sampling_flags,
    add_server_flags,
    engine_args,
    sampling_of,
)

_HELP = "/reset  forget the conversation\n/system TEXT  set the system message\n/exit  leave"

Messages = list[dict[str, str]]
Show = Callable[[str], None]
Reply = Callable[[Messages, Show], None]  # shows the answer piece by piece; raises RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--url", help="talk to this server instead of loading a model")
    parser.add_argument("--server-key", metavar="KEY", help="key of that server")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(parser)
    add_server_flags(parser, engine_only=True)


def run(namespace: argparse.Namespace) -> int:
    sampling, settings, remote = (
        sampling_of(namespace),
        engine_args(namespace),
        namespace.url is not None,
    )
    if remote and settings:
        raise ConfigError(f"{flag_name(next(iter(settings)))} does nothing with --url")
    if not remote and namespace.server_key is not None:
        raise ConfigError("--server-key does nothing without --url")
    for stream in (
        sys.stdin,
        sys.stdout,
    ):  # what the terminal's encoding lacks is no reason to leave
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    # It loads torch, which a client does not need.
    with (
        nullcontext()
        if remote
        else import_module("radix_runtime.offline").Engine(**settings) as engine
    ):
        reply: Reply = partial(_ask_server, namespace.url, namespace.server_key, sampling)
        if engine is not None:
            if engine.tokenizer is None:
                raise ConfigError("this model has no tokenizer, so there is no way to talk to it")
            reply = partial(_ask_engine, engine, engine.tokenizer.apply_chat_template, sampling)
        # Plain lines without a terminal.
        _converse(
            reply,
            namespace.system,
            partial(PromptSession().prompt, "> ") if sys.stdin.isatty() else input,
        )
    return 0


def _ask_engine(
    engine: Any,
    template: Callable[[Messages], list[int]],
    sampling: dict[str, Any],
    messages: Messages,
    show: Show,
) -> None:
    shown = 0
    try:
        params = {"max_new_tokens": None, **sampling}
        for output in engine.stream(input_ids=template(messages), sampling_params=params):
            show(output["text"][shown:])
            shown = len(output["text"])
    except ValueError as error:  # what cannot be asked, as a conversation that is too long
        raise RequestError(400, "invalid_value", str(error)) from None


def _ask_server(
    url: str, key: str | None, sampling: dict[str, Any], messages: Messages, show: Show
) -> None:
    # The others have their names in OpenAI's API.
    body = {
        "messages": messages,
        **{name.replace("max_new", "max"): value for name, value in sampling.items()},
    }

    async def ask() -> None:
        async with Client(url, key) as client:
            async for chunk in client.chunks("/v1/chat/completions", body):
                for choice in chunk["choices"]:
                    show(choice["delta"].get("content") or "")

    asyncio.run(ask())


def _converse(reply: Reply, system: str | None, read: Callable[[], str]) -> None:
    messages: Messages = []
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            return
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return
        if command in ("/reset", "/system"):
            messages, system = [], rest or None if command == "/system" else system
        elif command.startswith("/"):
            print(_HELP)
        elif line:
            opening = [{"role": "system", "content": system}] if system else []
            question = {"role": "user", "content": line}
            if answer := _answer(reply, [*opening, *messages, question]):
                messages += [question, {"role": "assistant", "content": answer}]


# What was said, if only until Ctrl-C; nothing after an error.
def _answer(reply: Reply, messages: Messages) -> str:
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        print(text, end="", flush=True)

    try:
        reply(messages, show)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except RequestError as error:
        print(f"error: {error.message}")
        return ""
    return "".join(pieces)
