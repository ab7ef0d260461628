"""The listening socket of a server, and its address."""

import errno
import socket

from ..errors import ConfigError

WRITE_STALL = 30.0  # seconds that a client may read nothing, or be silent, while bytes wait for it


def check_port(flag: str, port: int) -> None:
    """Raises ConfigError for a port that there is not."""
    if port > 65535:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"{flag} must be at most 65535, got {port}")


def bind_port(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    check_port("--port", port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        listener = socket.create_server(
            address,
            family=family,
            backlog=2048,
            dualstack_ipv6=family == socket.AF_INET6,
        )
        # Connections inherit both: small writes go out at once, and the kernel ends what stalls.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_STALL * 1000))
        return listener
    except (OSError, ValueError) as error:  # ValueError: a system without IPv6
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use; choose another --port") from error
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason.partition(" (")[0]  # the rest repeats the address
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error


def url_of(listener: socket.socket) -> str:
    """The URL of the address that a socket is bound to."""
    host, port = listener.getsockname()[:2]
    if ":" in host:  # IPv6
        host = f"[{host}]"
    return f"http://{host}:{port}"
