"""Who may call what. Every route that is not listed as public needs a key when one is set."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from enum import Enum
from hashlib import sha256
from pathlib import Path

from ..config import ServerArgs
from ..errors import ConfigError, RequestError

Access = Enum("Access", "PUBLIC CLIENT ADMIN")


class Auth:
    """Keys are kept as digests and compared in constant time, all of them each time."""

    def __init__(self, args: ServerArgs, routes: Mapping[str, Access]) -> None:
        given = [args.api_key, *_keys_of_file(args.api_key_file)], [args.admin_api_key]
        self._keys = [[sha256(key.encode()).digest() for key in keys if key is not None] for keys in given]
        self._routes = dict(routes)

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the caller may do what only an admin may (also elsewhere than on admin routes). `path` is
        scope["path"], never a rebuilt URL. Raises RequestError 401 or 403."""
        access = self._routes.get(path, Access.CLIENT)
        if access is Access.PUBLIC:
            return False
        clients, admins = self._keys
        digest = _bearer(headers)
        # Sums, so that no comparison is left out.
        is_admin = sum(hmac.compare_digest(digest, key) for key in admins) > 0
        is_client = sum(hmac.compare_digest(digest, key) for key in clients) > 0 or is_admin
        for_admins = access is Access.ADMIN and bool(admins)
        if (clients or for_admins) and not is_client:
            raise RequestError(401, "invalid_api_key", "a valid API key is needed")
        if for_admins and not is_admin:
            raise RequestError(403, "admin_key_required", "this needs the admin key")
        return is_admin or not admins


def _keys_of_file(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {error}") from error
    if not (keys := [line.strip() for line in lines if line.strip()]):
        raise ConfigError(f"--api-key-file: {path} holds no key")
    return keys


def _bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The digest of the one key that was sent, else b""."""
    values = [value for name, value in headers if name == b"authorization"]
    scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return sha256(key).digest() if scheme.lower() == b"bearer" and key else b""
