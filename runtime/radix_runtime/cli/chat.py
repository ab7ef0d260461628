"""`radix chat`: a conversation in the terminal, with a server or a model in this process."""

import argparse
import asyncio
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

from prompt_toolkit import PromptSession

from ..config import flag_name
from ..errors import ConfigError, RequestError
from ..hub import DEMO_MODEL_NAME
from .client import Client
from .flags import (
    add_model_argument,
    add_sampling_flags,
    add_server_flags,
    engine_args,
    sampling_of,
)

_COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system message",
    "/exit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}
_HELP = "\n".join(f"{name:<14}{meaning}" for name, meaning in _COMMANDS.items())
_LOCAL_FLAGS = 3  # their place in what tcgetattr gives

Messages = list[dict[str, str]]
Show = Callable[[str], None]


class Model(Protocol):
    """Who answers."""

    def introduction(self) -> str:
        """What it is and where it runs, in a line. Raises RequestError."""

    def reply(self, messages: Messages, show: Show) -> None:
        """Gives the answer to `show` piece by piece. Raises RequestError."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `radix chat`."""
    add_model_argument(parser)
    parser.add_argument("--url", help="talk to this server instead of loading a model")
    parser.add_argument("--server-key", metavar="KEY", help="key of that server")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(parser)
    add_server_flags(parser, engine_only=True)


def run(namespace: argparse.Namespace) -> int:
    """Talks until the user leaves."""
    sampling = sampling_of(namespace)
    settings = engine_args(namespace)
    if namespace.url is not None and settings:
        first = next(iter(settings))
        raise ConfigError(f"{flag_name(first)} does nothing with --url")
    if namespace.url is None and namespace.server_key is not None:
        raise ConfigError("--server-key does nothing without --url")
    for stream in (sys.stdin, sys.stdout):  # bytes or characters that the terminal cannot show
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    with _no_echo():
        if namespace.url is not None:
            server = _Server(namespace.url, key=namespace.server_key, sampling=sampling)
            _converse(server, namespace.system)
        else:
            _talk_to_an_engine(settings, sampling, namespace.system)
    return 0


def _talk_to_an_engine(
    settings: dict[str, Any], sampling: dict[str, Any], system: str | None
) -> None:
    # It loads torch, which a client does not need.
    with import_module("radix_runtime.offline").Engine(**settings) as engine:
        if engine.tokenizer is None or engine.tokenizer.chat_template is None:
            lacks = "tokenizer" if engine.tokenizer is None else "chat template (--chat-template)"
            raise ConfigError(f"this model has no {lacks}, so there is no way to talk to it")
        _converse(_Local(engine, settings=settings, sampling=sampling), system)


class _Local:
    """An Engine in this process."""

    def __init__(self, engine: Any, settings: dict[str, Any], sampling: dict[str, Any]) -> None:
        self._engine = engine
        self._name = settings.get("model_path") or DEMO_MODEL_NAME
        self._params = {"max_new_tokens": None, **sampling}

    def introduction(self) -> str:
        info = self._engine.get_server_info()
        threads = f", {info['num_threads']} threads" if info["num_threads"] else ""
        context = f"context {info['max_context']} tokens"
        return f"{self._name} in {info['dtype']} on {info['device']}{threads}; {context}"

    def reply(self, messages: Messages, show: Show) -> None:
        prompt = self._engine.tokenizer.apply_chat_template(messages)
        shown = 0
        try:
            for output in self._engine.stream(input_ids=prompt, sampling_params=self._params):
                show(output["text"][shown:])
                shown = len(output["text"])
        except ValueError as error:  # what cannot be asked, as a conversation that is too long
            raise RequestError(400, "invalid_value", message=str(error)) from None


class _Server:
    """A server of OpenAI's API."""

    def __init__(self, url: str, key: str | None, sampling: dict[str, Any]) -> None:
        self._url = url
        self._key = key
        self._sampling = dict(sampling)
        if "max_new_tokens" in sampling:  # the one that has another name there
            self._sampling["max_tokens"] = self._sampling.pop("max_new_tokens")

    def introduction(self) -> str:
        return f"{asyncio.run(self._model())} at {self._url}"

    async def _model(self) -> str:
        async with Client(self._url, self._key) as client:
            return await client.model()

    def reply(self, messages: Messages, show: Show) -> None:
        asyncio.run(self._ask({"messages": messages, **self._sampling}, show))

    async def _ask(self, body: dict[str, Any], show: Show) -> None:
        async with Client(self._url, self._key) as client:
            async for chunk in client.chunks("/v1/chat/completions", body):
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    # Reasoning is shown, and not a part of the conversation.
                    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                    print(thought, end="", flush=True)
                    show(delta.get("content") or "")


def _converse(model: Model, system: str | None) -> None:
    read = _line_reader()
    if sys.stdin.isatty():
        print(model.introduction())
        print("/help shows the commands")
    messages: Messages = []
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            return
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return
        if command == "/reset":
            messages = []
        elif command == "/system":
            messages = []
            system = rest or None
        elif command.startswith("/"):
            print(_HELP)
        elif line:
            opening = [{"role": "system", "content": system}] if system else []
            question = {"role": "user", "content": line}
            answer = _answer(model, [*opening, *messages, question])
            if answer:
                messages += [question, {"role": "assistant", "content": answer}]


def _line_reader() -> Callable[[], str]:
    """Reads a line: with editing and history in a terminal, else as it is."""
    if not sys.stdin.isatty():
        return input
    session: PromptSession[str] = PromptSession()
    return lambda: session.prompt("> ")


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keeps a terminal from showing what is typed while a model loads or answers: the next prompt,
    which shows its line itself, will. Ctrl-C still works."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = list(before)
    silent[_LOCAL_FLAGS] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _answer(model: Model, messages: Messages) -> str:
    """Shows the answer and returns it, as far as it came before Ctrl-C; "" after an error."""
    pieces: list[str] = []

    def show(text: str) -> None:
        pieces.append(text)
        print(text, end="", flush=True)

    try:
        model.reply(messages, show)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except RequestError as error:
        print(f"error: {error.message}")
        return ""
    return "".join(pieces)
