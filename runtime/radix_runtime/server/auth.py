"""Who may call what. Every route that is not listed as public needs a key when one is set."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from enum import Enum
from hashlib import sha256
from pathlib import Path

from ..config import ServerArgs
from ..errors import ConfigError, RequestError


class Access(Enum):
    PUBLIC = "public"
    CLIENT = "client"
    ADMIN = "admin"


class Auth:
    """Keys are kept as digests and compared in constant time, all of them each time."""

    def __init__(self, args: ServerArgs, routes: Mapping[str, Access]) -> None:
        keys = [args.api_key] if args.api_key is not None else []
        keys += _keys_of_file(args.api_key_file)
        self._clients = [_digest(key.encode()) for key in keys]
        admin = args.admin_api_key
        self._admins = [] if admin is None else [_digest(admin.encode())]
        self._routes = dict(routes)

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the caller may do what only an admin may (also elsewhere than on admin routes).
        `path` is scope["path"], never a rebuilt URL. Raises RequestError 401 or 403."""
        access = self._routes.get(path, Access.CLIENT)
        if access is Access.PUBLIC:
            return False
        digest = _bearer(headers)
        is_admin = _among(digest, self._admins)
        is_client = is_admin or _among(digest, self._clients)
        if access is Access.CLIENT:
            if self._clients and not is_client:
                raise _unauthorised()
        elif self._admins:
            if not is_admin:
                raise _forbidden() if is_client else _unauthorised()
        elif self._clients and not is_client:
            raise _unauthorised()
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
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    return _digest(key) if scheme.lower() == b"bearer" and key else None


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _among(digest: bytes | None, known: list[bytes]) -> bool:
    if digest is None:
        return False
    found = False
    for other in known:
        found |= hmac.compare_digest(digest, other)
    return found


def _unauthorised() -> RequestError:
    return RequestError(401, "invalid_api_key", "a valid API key is needed")


def _forbidden() -> RequestError:
    return RequestError(403, "admin_key_required", "this needs the admin key")
