"""The API process of `radix serve`: HTTP on a socket that the supervisor has bound."""

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from ..errors import EXIT_INTERNAL, RequestError
from ..model_config import ModelConfig
from ..text.tokenizer import load_tokenizer
from .api import create_app, http_server
from .child import Child
from .generation import sampling_defaults
from .ipc import AsyncLink, Sender
from .tokenizer_manager import TokenizerManager


def serve(child: Child) -> None:
    uvloop.run(_serve(child))


async def _serve(child: Child) -> None:
    args, model_dir = child.args, Path(child.args.model_path or "")
    receiver, sender = child.connect()
    link = AsyncLink(receiver, sender)
    config = ModelConfig.from_dir(model_dir, args.json_model_override_args)
    tokenizer = load_tokenizer(args.tokenizer_path or model_dir, args.chat_template)
    manager = TokenizerManager(args, config, tokenizer, link, sampling_defaults(args, model_dir))
    manager.health = child.heartbeats.stale
    server = http_server(create_app(manager))
    # The supervisor decides when to stop.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]

    async def beat() -> None:
        while True:
            child.beat()
            await asyncio.sleep(1.0)

    async def receive() -> None:
        while True:
            for message in await link.receive():
                manager.handle(message)

    assert child.launch.listen_fd is not None
    listener = socket.socket(fileno=child.launch.listen_fd)
    work = server.serve([listener]), beat(), receive(), _obey(child, manager, sender, server)
    tasks = [asyncio.ensure_future(part) for part in work]
    child.report("ready")
    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()


# The supervisor's commands: `ready INFO`, then `stop` or `fail REASON`.
async def _obey(
    child: Child, manager: TokenizerManager, sender: Sender, server: uvicorn.Server
) -> None:
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command, _, rest = line.decode().rstrip("\n").partition(" ")
        if command == "ready":  # all processes are there
            sender.wait_connected()
            if not child.args.skip_server_warmup:
                await asyncio.wait_for(manager.one_token(), 600.0)
            manager.set_ready(msgspec.json.decode(rest))
            child.report("serving")
            continue
        error = RequestError(500, "engine_dead", f"the engine has died: {rest}")
        if command == "stop":
            error = RequestError(503, "not_ready", "the server is shutting down", retry_after=1)
        manager.fail_all(error)
        server.should_exit = True
    os._exit(EXIT_INTERNAL)  # the supervisor has gone
