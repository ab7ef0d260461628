"""The API process of `radix serve`: HTTP on a socket that the supervisor has bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from .. import hf
from ..errors import EXIT_INTERNAL, EngineDeadError, RequestError
from ..model_config import ModelConfig
from .api import create_app, uvicorn_options
from .child import Child, run_child
from .ipc import AsyncLink
from .tokenizer_manager import TokenizerManager

_CONNECT_SECONDS = 60.0
_WARM_UP_SECONDS = 600.0
_CLOSE_SECONDS = 1  # that open connections have to take their last bytes


class ApiProcess:
    """Connects the application, the links and the supervisor's commands."""

    def __init__(self, child: Child) -> None:
        self._child, args = child, child.args
        model_dir = Path(args.model_path or "")
        receiver, self._sender = child.connect()
        self._link = AsyncLink(receiver, self._sender)
        self._manager = TokenizerManager(
            args,
            ModelConfig.from_dir(model_dir, args.json_model_override_args),
            hf.load_tokenizer(args.tokenizer_path or model_dir, args.chat_template),
            self._link,
            generation=hf.load_generation_config(model_dir),
        )
        app = create_app(args, self._manager, health=child.heartbeats.stale)
        # Its lines about itself would only repeat the supervisor's.
        options = uvicorn_options(args) | {"timeout_graceful_shutdown": _CLOSE_SECONDS, "log_level": "warning"}
        self._server = uvicorn.Server(uvicorn.Config(app, **options))
        # The supervisor decides when to stop.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]

    async def run(self) -> None:
        """Until the server has closed or a task has failed."""
        assert self._child.launch.listen_fd is not None
        listener = socket.socket(fileno=self._child.launch.listen_fd)
        work = (self._server.serve([listener]), self._beat(), self._obey(), self._receive())
        tasks = [asyncio.ensure_future(part) for part in work]
        self._child.report("ready")
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()

    async def _beat(self) -> None:
        while True:
            self._child.beat()
            await asyncio.sleep(1.0)

    async def _obey(self) -> None:
        """The supervisor's commands: `ready INFO`, then `stop` or `fail REASON`."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            command, _, rest = line.decode().rstrip("\n").partition(" ")
            if command == "ready":
                await self._open(msgspec.json.decode(rest))
                continue
            error = RequestError(500, "engine_dead", f"the engine has died: {rest}")
            if command == "stop":
                error = RequestError(503, "not_ready", "the server is shutting down", retry_after=1)
            self._manager.fail_all(error)
            self._server.should_exit = True
        os._exit(EXIT_INTERNAL)  # the supervisor has gone

    async def _open(self, info: dict[str, Any]) -> None:
        """All processes are there: a token to warm up, then requests are taken."""
        self._sender.wait_connected(_CONNECT_SECONDS)
        if not self._child.args.skip_server_warmup:
            try:
                await asyncio.wait_for(self._manager.one_token(), _WARM_UP_SECONDS)
            except RequestError as error:
                raise EngineDeadError(f"the warm-up request failed: {error.message}") from error
        self._manager.set_ready(info)
        self._child.report("serving")

    async def _receive(self) -> None:
        while True:
            for message in await self._link.receive():
                self._manager.handle(message)


def main(child: Child) -> None:
    uvloop.run(ApiProcess(child).run())


if __name__ == "__main__":
    run_child(main)
