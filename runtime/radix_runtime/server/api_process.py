"""The API process of `radix serve`: HTTP on a socket that the supervisor has bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
import zmq

from .. import hf
from ..errors import EXIT_INTERNAL, EngineDeadError, RequestError
from ..messages import Generate, RequestFailed, TextBatch, pack_ids
from ..model_config import ModelConfig
from ..sampling_params import SamplingParams
from .api import create_app, uvicorn_options
from .child import Child, Report, run_child
from .ipc import API, AsyncLink, Receiver, Sender
from .tokenizer_manager import TokenizerManager

_CONNECT_SECONDS = 60.0
_WARM_UP_SECONDS = 600.0
_CLOSE_SECONDS = 1  # that open connections have to take their last bytes


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the supervisor decides when to stop


class ApiProcess:
    """Connects the application, the links and the supervisor's commands."""

    def __init__(self, child: Child) -> None:
        self._child = child
        args = child.args
        model_dir = Path(args.model_path or "")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        receiver = Receiver(context, child.directory, API, child.token)
        self._sender = Sender(context, child.directory, API, child.token)
        self._link = AsyncLink(receiver, self._sender)
        self._manager = TokenizerManager(
            args,
            ModelConfig.from_dir(model_dir, args.json_model_override_args),
            hf.load_tokenizer(args.tokenizer_path or model_dir, args.chat_template),
            self._link,
            generation=hf.load_generation_config(model_dir),
        )
        app = create_app(args, self._manager, health=self._health)
        options = uvicorn_options(args)
        # Its lines about itself would only repeat the supervisor's.
        options.update(timeout_graceful_shutdown=_CLOSE_SECONDS, log_level="warning")
        self._server = _Server(uvicorn.Config(app, **options))

    def _health(self) -> str | None:
        stale = self._child.heartbeats.stale()
        return None if stale is None else f"the {stale} process is silent"

    async def run(self) -> None:
        """Until `stop` or `fail`. Raises what breaks a link."""
        assert self._child.listen_fd is not None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._spawn(self._server.serve([socket.socket(fileno=self._child.listen_fd)]))
        self._spawn(self._beat())
        self._spawn(self._obey())
        self._child.report(Report("ready"))
        await self._over
        self._manager.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` beside the rest; its end, or its exception, ends `run`."""

        def ended(task: asyncio.Task[None]) -> None:
            if self._over.done() or task.cancelled():
                return
            error = task.exception()
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        self._tasks.append(task)

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
            elif command == "stop":
                self._close(RequestError(503, "not_ready", "the server is shutting down", retry_after=1))
            else:
                self._close(RequestError(500, "engine_dead", f"the engine has died: {rest}"))
        os._exit(EXIT_INTERNAL)  # the supervisor has gone

    async def _open(self, info: dict[str, Any]) -> None:
        """All processes are there: one token to warm up, then requests are taken."""
        self._sender.wait_connected(_CONNECT_SECONDS)
        if not self._child.args.skip_server_warmup:
            await asyncio.wait_for(self._warm_up(), _WARM_UP_SECONDS)
        self._spawn(self._receive())
        self._manager.set_ready(info)
        self._child.report(Report("serving"))

    async def _warm_up(self) -> None:
        """Raises EngineDeadError when the engine gives no token."""
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        self._link.send(Generate("warm-up", pack_ids([0]), sampling))
        while True:
            for message in await self._link.receive():
                if isinstance(message, RequestFailed):
                    raise EngineDeadError(f"the warm-up request failed: {message.message}")
                if isinstance(message, TextBatch) and message.deltas[-1].finish is not None:
                    return

    async def _receive(self) -> None:
        while True:
            for message in await self._link.receive():
                self._manager.handle(message)

    def _close(self, error: RequestError) -> None:
        """Every open request ends with `error`; then the server goes."""
        self._manager.fail_all(error)
        self._server.should_exit = True


def main(child: Child) -> None:
    uvloop.run(ApiProcess(child).run())


if __name__ == "__main__":
    run_child(main)
