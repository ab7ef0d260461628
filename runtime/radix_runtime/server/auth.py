"""Who may call what. Every route that is not listed as public needs a key when one is set."""

import hmac
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from hashlib import sha256
from pathlib import Path

from ..config import ServerArgs
from ..errors import ConfigError, RequestError


class Access(Enum):
    """Who may call a route."""

    PUBLIC = auto()  # everybody
    CLIENT = auto()  # holders of a key, if one is set
    ADMIN = auto()  # holders of the admin key, if one is set; else as CLIENT


class Auth:
    """The keys, kept as digests and compared in constant time, all of them each time. Raises
    ConfigError on an unreadable key file."""

    def __init__(self, args: ServerArgs, routes: Mapping[str, Access]) -> None:
        client_keys = _keys_of_file(args.api_key_file)
        if args.api_key is not None:
            client_keys.append(args.api_key)
        self._clients = [_digest(key.encode()) for key in client_keys]
        self._admins: list[bytes] = []
        if args.admin_api_key is not None:
            self._admins.append(_digest(args.admin_api_key.encode()))
        self._routes = dict(routes)

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the caller may do what only an admin may. `path` is scope["path"], never that of
        a rebuilt URL. Raises RequestError 401 or 403."""
        access = self._routes.get(path, Access.CLIENT)
        if access is Access.PUBLIC:
            return False
        key = _bearer(headers)
        digest = b"" if key is None else _digest(key)
        is_admin = _is_among(digest, self._admins)
        is_client = _is_among(digest, self._clients) or is_admin
        admins_only = access is Access.ADMIN and bool(self._admins)
        if (self._clients or admins_only) and not is_client:
            raise RequestError(
                status=401, code="invalid_api_key", message="a valid API key is needed"
            )
        if admins_only and not is_admin:
            raise RequestError(
                status=403, code="admin_key_required", message="this needs the admin key"
            )
        return is_admin or not self._admins


def _keys_of_file(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {error}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"--api-key-file: {path} holds no key")
    return keys


def _bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key that was sent; None unless it is exactly one."""
    sent = [value for name, value in headers if name == b"authorization"]
    if len(sent) != 1:
        return None
    scheme, _, key = sent[0].partition(b" ")
    return key if scheme.lower() == b"bearer" and key else None


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _is_among(digest: bytes, known: list[bytes]) -> bool:
    found = False
    for other in known:  # no comparison is left out
        if hmac.compare_digest(digest, other):
            found = True
    return found
