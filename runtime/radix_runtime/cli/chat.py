"""`radix chat`: a conversation in the terminal, with a server or a model in this process."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from prompt_toolkit import PromptSession

from ..engine_api import Engine
from ..errors import ConfigError, RequestError
from .client import Client
from .flags import add_model_argument, add_server_flags, engine_of

_HELP = "/reset  forget the conversation\n/system TEXT  set the system message\n/exit  leave"

Messages = list[dict[str, str]]
Show = Callable[[str], None]


class Backend(Protocol):
    def reply(self, messages: Messages, sampling: dict[str, Any], show: Show) -> None:
        """Shows the answer piece by piece. Raises RequestError."""
        ...


class EngineBackend:
    """A model in this process."""

    def __init__(self, engine: Engine) -> None:
        if engine.tokenizer is None:
            raise ConfigError("this model has no tokenizer, so there is no way to talk to it")
        self._engine = engine
        self._template = engine.tokenizer.apply_chat_template

    def reply(self, messages: Messages, sampling: dict[str, Any], show: Show) -> None:
        params = {"max_new_tokens": None, **sampling}
        shown = 0
        try:
            for output in self._engine.stream(input_ids=self._template(messages), sampling_params=params):
                show(output["text"][shown:])
                shown = len(output["text"])
        except ValueError as error:  # what cannot be asked, as a conversation that is too long
            raise RequestError(400, "invalid_value", str(error)) from None


class ServerBackend:
    """A server; a client for each reply, since each has an event loop of its own."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._address = (url, api_key)

    def reply(self, messages: Messages, sampling: dict[str, Any], show: Show) -> None:
        asyncio.run(self._reply(messages, sampling, show))

    async def _reply(self, messages: Messages, sampling: dict[str, Any], show: Show) -> None:
        limit = sampling.pop("max_new_tokens", None)
        body = {"messages": messages, **sampling, **({"max_tokens": limit} if limit else {})}
        async with Client(*self._address) as client:
            async for chunk in client.stream("/v1/chat/completions", body):
                for choice in chunk["choices"]:
                    show(choice["delta"].get("content") or "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--url", help="talk to this server instead of loading a model")
    parser.add_argument("--server-key", metavar="KEY", help="key of that server")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_arguments(parser)
    add_server_flags(parser, ("model", "engine", "scheduler"))


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the model's)")
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    group.add_argument("--max-new-tokens", type=int)


def sampling_of(namespace: argparse.Namespace) -> dict[str, Any]:
    names = ("temperature", "top_p", "max_new_tokens")
    return {n: v for n in names if (v := getattr(namespace, n)) is not None}


def run(namespace: argparse.Namespace) -> int:
    with ExitStack() as stack:
        if namespace.url is not None:
            backend: Backend = ServerBackend(namespace.url, namespace.server_key)
        else:
            backend = EngineBackend(stack.enter_context(engine_of(Engine, namespace)))
        _converse(backend, namespace.system, sampling_of(namespace), _reader())
    return 0


def _reader() -> Callable[[], str]:
    """Asks for a line; raises EOFError at the end. Without a terminal, plain lines."""
    if not sys.stdin.isatty():
        return input
    session: PromptSession[str] = PromptSession()
    return lambda: session.prompt("> ")


def _converse(backend: Backend, system: str | None, sampling: dict[str, Any], read: Callable[[], str]) -> None:
    messages = _opening(system)
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            return
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return
        if command in ("/reset", "/system"):
            system = rest or None if command == "/system" else system
            messages = _opening(system)
        elif command.startswith("/"):
            print(_HELP)
        elif line:
            _turn(backend, messages, line, sampling)


def _opening(system: str | None) -> Messages:
    return [] if system is None else [{"role": "system", "content": system}]


def _turn(backend: Backend, messages: Messages, line: str, sampling: dict[str, Any]) -> None:
    """One question and its answer; Ctrl-C keeps what has been said so far."""
    messages.append({"role": "user", "content": line})
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        print(text, end="", flush=True)

    try:
        backend.reply(messages, dict(sampling), show)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        messages.pop()
        print(f"error: {error.message}")
        return
    print()
    messages.append({"role": "assistant", "content": "".join(pieces)})
