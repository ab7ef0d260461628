"""An API process of `radix serve`: HTTP on a socket that the supervisor has bound."""

import asyncio
import contextlib
import gc
import os
import socket
import sys
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from ..errors import EXIT_INTERNAL, ConfigError, RequestError
from ..grammar.service import Grammars
from ..model_config import ModelConfig
from ..server.api import create_app, http_server
from ..server.auth import counted_keys, keys_digest
from ..server.shared_numbers import SharedNumbers
from ..server.tokenizer_manager import TokenizerManager
from ..text.generation_config import eos_token_ids, sampling_defaults
from ..text.tokenizer import served_tokenizer
from .child import Child, Launch
from .ipc import AsyncLink, Sender

_BEAT_SECONDS = 1.0  # between two heartbeats
_WARM_UP_TIMEOUT = 600.0  # seconds for the first token
_SWITCH_SECONDS = 0.0005  # that a thread which tokenizes or copies may keep the event loop waiting


def serve(child: Child) -> None:
    """Runs until the supervisor asks this process to stop."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    uvloop.run(_serve(child))


async def _serve(child: Child) -> None:
    args = child.args
    model_dir = Path(args.model_path or "")
    numbers = _shared_numbers(child)
    receiver, sender = child.connect()
    link = AsyncLink(receiver, sender)
    model = ModelConfig.from_dir(model_dir, args.json_model_override_args)
    tokenizer = served_tokenizer(args, model.vocab_size)
    grammars = Grammars(
        args,
        tokenizer,
        vocab_size=model.vocab_size,
        eos_ids=eos_token_ids(model_dir, tokenizer),
    )
    manager = TokenizerManager(
        args=args,
        model=model,
        tokenizer=tokenizer,
        link=link,
        defaults=sampling_defaults(args, model_dir),
        grammars=grammars,
        numbers=numbers,
    )
    with contextlib.suppress(RequestError):  # answers cannot be constrained
        grammars.start_compilers()
    manager.health = child.heartbeats.stale
    manager.text.start()
    app = create_app(manager)
    _check_keys(child.launch)
    server = http_server(app, args.max_connections, numbers)
    # The supervisor decides when to stop.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    assert child.launch.listen_fd is not None
    listener = socket.socket(fileno=child.launch.listen_fd)
    tasks = [
        asyncio.ensure_future(server.serve([listener])),
        asyncio.ensure_future(_beat(child)),
        asyncio.ensure_future(_receive(link, manager)),
        asyncio.ensure_future(_obey(child, manager, sender, server)),
    ]
    gc.collect()
    gc.freeze()  # what is there by now stays: no collection while serving looks at it again
    format = manager.format.facts()
    child.report("ready", info={"has_chat_template": manager.has_chat_template, **format})
    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    app.state.bodies.close()
    manager.text.close()
    grammars.close()
    for task in ended:
        task.result()


def _shared_numbers(child: Child) -> SharedNumbers:
    """What this process shares with others of its role."""
    launch = child.launch
    return SharedNumbers(
        child.role.instances,
        int(child.process.rpartition("/")[2]),
        keys=launch.keys,
        descriptor=launch.numbers_fd,
    )


def _check_keys(launch: Launch) -> None:
    """Called when this process has read its keys. Raises ConfigError if they may not be those of
    the others: a key would be good for some connections only."""
    is_same = keys_digest(launch.args) == launch.keys_digest
    if not is_same or counted_keys(launch.args) != launch.keys:
        raise ConfigError("a key file has changed while the server started")


async def _beat(child: Child) -> None:
    while True:
        child.beat()
        await asyncio.sleep(_BEAT_SECONDS)


async def _receive(link: AsyncLink, manager: TokenizerManager) -> None:
    while True:
        await manager.handle_all(await link.receive())


async def _obey(
    child: Child, manager: TokenizerManager, sender: Sender, server: uvicorn.Server
) -> None:
    """The supervisor's commands: `ready INFO`, then perhaps `drain`, then `stop` or `fail
    REASON`."""
    background = set()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command, _, rest = line.decode().rstrip("\n").partition(" ")
        if command == "ready":  # all processes are there
            sender.wait_connected()
            if not child.args.skip_server_warmup:
                await asyncio.wait_for(manager.one_token(), _WARM_UP_TIMEOUT)
            manager.set_ready(msgspec.json.decode(rest))
            child.report("serving")
        elif command == "drain":
            manager.drain.begin(for_good=True)
            background.add(asyncio.create_task(_report_drained(child, manager)))
        elif command == "stop":
            manager.fail_all(
                RequestError(
                    status=503,
                    code="not_ready",
                    message="the server is shutting down",
                    retry_after=1,
                )
            )
            server.should_exit = True
        else:
            manager.fail_all(
                RequestError(status=500, code="engine_dead", message=f"the engine has died: {rest}")
            )
            server.should_exit = True
    os._exit(EXIT_INTERNAL)  # the supervisor has gone


async def _report_drained(child: Child, manager: TokenizerManager) -> None:
    await manager.drain.finished()
    child.report("drained")
