"""A route: from a call that has passed the gate to its handler, with the body decoded."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from .auth import Access
from .gate import CALL
from .http_call import HttpCall

Work = Coroutine[Any, Any, None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route; the first of `paths` is its name in metrics.

    `handler` takes the HttpCall, and the decoded body if `body` is a type. `watch`: it runs for
    long, so it is cancelled when the client goes away, and a body is refused while the engine is
    not ready."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    access: Access
    handler: Callable[..., Work]
    body: type[msgspec.Struct] | None = None
    watch: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this route. Raises RequestError."""
        call: HttpCall = scope[CALL]
        call.route = self.paths[0]
        if self.body is None:
            work = self.handler(call)
        else:
            work = self.handler(call, await self._read_body(call, self.body))
        if self.watch:
            await _while_connected(receive, work)
        else:
            await work

    async def _read_body(self, call: HttpCall, kind: type[msgspec.Struct]) -> msgspec.Struct:
        manager = call.manager
        data = await call.read_body(manager.args.max_body_size)
        if self.watch:
            manager.require_ready()
        body, call.warnings = await call.bodies.decode(
            kind,
            data,
            lenient=manager.args.allow_unknown_fields,
            defaults=manager.sampling_defaults,
        )
        manager.check_model(getattr(body, "model", None))
        return body


async def _while_connected(receive: Receive, handler: Work) -> None:
    """Runs the handler to its end. On a disconnect it is cancelled and ClientDisconnect raised."""
    work = asyncio.create_task(handler)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        if watcher.done():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
