"""Gate: the outermost layer of the application. Limits, keys, and every failure as an answer."""

import logging
import time

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import RequestError
from .auth import Auth
from .body_decoder import BodyDecoder
from .hosts import HostRules
from .http_call import CLIENT_GONE, HttpCall
from .tokenizer_manager import TokenizerManager

CALL = "radix.call"  # where the scope has the HttpCall

log = logging.getLogger(__name__)


class Gate:
    """ASGI middleware around all routes. Whatever goes wrong becomes the error object; details go
    to the log only."""

    def __init__(
        self, app: ASGIApp, manager: TokenizerManager, bodies: BodyDecoder, auth: Auth
    ) -> None:
        self._app = app
        self._manager = manager
        self._bodies = bodies
        self._auth = auth
        self._hosts = HostRules(manager.args)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: checks headers and key, then calls the inner application."""
        call = HttpCall(
            scope=scope, receive=receive, send=send, manager=self._manager, bodies=self._bodies
        )
        scope[CALL] = call
        try:
            call.check_headers()
            call.caller = self._auth.check(scope["path"], scope["headers"])
            if self._auth.is_open:
                self._hosts.check(scope["headers"])
            await self._app(scope, receive, call.send)
        except ClientDisconnect:
            call.status = CLIENT_GONE
        except RequestError as error:
            await call.fail(error)
        except Exception:
            log.exception("request %s failed", call.id)
            await call.fail(
                RequestError(status=500, code="internal_error", message="internal error")
            )
        finally:
            self._manager.metrics.count_call(call.route or "other", call.status)
            if self._manager.args.log_requests:
                _log_call(call)


def _log_call(call: HttpCall) -> None:
    """A line without any text of the client's; of a call that reached no route a part of its path,
    escaped."""
    log.info(
        "%s %s %s %d %.0f ms",
        call.id,
        call.method,
        call.route or ascii(call.scope["path"][:64]),
        call.status,
        1000 * (time.perf_counter() - call.started),
    )
