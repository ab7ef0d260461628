"""Which web pages may call a server that asks for no key."""

# A page of any site can point its own name at 127.0.0.1 ("DNS rebinding") and would then be of the
# same origin as this server. Its requests still name the site, in Host.

import ipaddress
from collections.abc import Iterable

from ..config import ServerArgs
from ..errors import RequestError, refusal


class HostRules:
    """Refuses calls by names that this server is not known by, and those of foreign pages. With a
    key there is nothing to refuse: a page has none."""

    def __init__(self, args: ServerArgs) -> None:
        self._hosts = {"localhost", args.host.lower(), *_listed(args.allowed_hosts)}
        self._origins = set(_listed(args.allowed_origins))
        # A name under which a cluster knows the server is none that it could know; but a program of
        # the cluster sends no Origin, as pages do.
        self._only_pages = not _is_loopback(args.host)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises RequestError 403, or 400 without a Host."""
        found = {name: value for name, value in headers if name in (b"host", b"origin")}
        if b"host" not in found:
            raise refusal("invalid_http", "the Host header is missing")
        host = found[b"host"].decode("latin-1").lower()
        origin = found.get(b"origin", b"").decode("latin-1").lower()
        if (origin or not self._only_pages) and not self._is_known(host):
            raise _forbidden(
                "host_not_allowed",
                "this server is not known by this Host (--allowed-hosts)",
            )
        if origin and not self._is_welcome(origin, host):
            raise _forbidden(
                "origin_not_allowed", "pages of this origin may not call (--allowed-origins)"
            )

    def _is_known(self, host: str) -> bool:
        name = _without_port(host)
        return "*" in self._hosts or name in self._hosts or _is_address(name)

    def _is_welcome(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        return origin.partition("://")[2] == host


def _listed(names: str | None) -> list[str]:
    return [name.strip().lower() for name in (names or "").split(",") if name.strip()]


def _without_port(host: str) -> str:
    if host.startswith("["):  # IPv6
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _forbidden(code: str, message: str) -> RequestError:
    return RequestError(status=403, code=code, message=message)
