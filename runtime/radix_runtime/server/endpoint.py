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
from .tokenizer_manager import TokenizerManager

Work = Coroutine[Any, Any, None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route; the first of `paths` is its name in metrics.

    `handler` takes the HttpCall, and the decoded body if `body` is a type. `watch`: it runs for
    long, so it is cancelled when the client goes away, and a body is refused while the engine is
    not ready. `generates`: its calls wait for the engine, and are refused when too much does.
    `most_bytes` of a body, where it takes no text; None: as many as the server takes of any."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    access: Access
    handler: Callable[..., Work]
    body: type[msgspec.Struct] | None = None
    watch: bool = False
    generates: bool = False
    most_bytes: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this route. Raises RequestError."""
        call: HttpCall = scope[CALL]
        call.route = self.paths[0]
        if self.generates:
            drain = call.manager.drain
            drain.require_admitting()
            drain.open_call()
            try:
                await self._generate(call, receive)
            finally:
                drain.close_call()
        elif self.body is None:
            await self._run(self.handler(call), receive, call.manager)
        else:
            body = await self._decode(call, await self._read(call))
            await self._run(self.handler(call, body), receive, call.manager)

    async def _generate(self, call: HttpCall, receive: Receive) -> None:
        """A call that is refused before its body is read where too many wait. What has not arrived
        whole holds no place among them."""
        call.manager.require_ready()
        admission = call.manager.admission
        admission.check(call.caller.key)
        data = await self._read(call)
        with admission.enter(len(data), call.caller.key) as call.place:
            body = await self._decode(call, data)
            del data
            await self._run(self.handler(call, body), receive, call.manager)

    async def _run(self, work: Work, receive: Receive, manager: TokenizerManager) -> None:
        if self.watch:
            await _while_connected(receive, work, manager)
        else:
            await work

    async def _read(self, call: HttpCall) -> bytes:
        limit = call.manager.args.max_body_size
        data = await call.incoming.read(min(limit, self.most_bytes or limit))
        if self.watch:
            call.manager.require_ready()
        return data

    async def _decode(self, call: HttpCall, data: bytes) -> msgspec.Struct:
        manager = call.manager
        assert self.body is not None
        body, call.warnings = await call.bodies.decode(
            self.body,
            data,
            lenient=manager.args.allow_unknown_fields,
            rules=manager.rules,
        )
        manager.check_model(getattr(body, "model", None))
        return body


async def _while_connected(receive: Receive, handler: Work, manager: TokenizerManager) -> None:
    """Runs the handler to its end. On a disconnect it is cancelled and ClientDisconnect raised; at
    the end of the engine, if it has submitted nothing yet, the error of that."""
    work = asyncio.create_task(handler)
    manager.unsubmitted.add(work)

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
        if work.cancelled() and manager.dead is not None:
            raise manager.dead from None
        raise
    finally:
        manager.unsubmitted.discard(work)
        watcher.cancel()
