"""Who may call what. Every route that is not listed as public needs a key when one is set."""

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    METRICS = auto()  # holders of the key for it or the admin's, if the former is set; else PUBLIC


@dataclass(frozen=True, slots=True)
class Caller:
    """Who has called. `key` tells the holders of different keys apart and reveals none of them; "":
    no key. `is_admin`: may do what only an admin may, as everybody where no admin key is set;
    `is_operator`: holds that key."""

    key: str = ""
    is_admin: bool = False
    is_operator: bool = False


def counted_keys(args: ServerArgs) -> list[str]:
    """The keys (Caller.key) whose requests all API processes count together. Raises ConfigError on
    an unreadable key file."""
    if args.max_requests_per_key is None or args.api_processes == 1:
        return []
    clients, admins, _ = _all_digests(args)
    return sorted({_name(digest) for digest in clients + admins})


def keys_digest(args: ServerArgs) -> str:
    """A digest of all keys, by which API processes know that they have the same ones; "" where
    there is one process. Raises ConfigError on an unreadable key file."""
    if args.api_processes == 1:
        return ""
    digest = sha256()
    for known in _all_digests(args):
        digest.update(b"".join(known) + b";")
    return digest.hexdigest()


def _all_digests(args: ServerArgs) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Of the keys of clients, of admins and of scrapers. Raises ConfigError."""
    return (
        _digests("--api-key-file", args.api_key_file, args.api_key),
        _digests("--admin-api-key-file", args.admin_api_key_file, args.admin_api_key),
        _digests("--metrics-api-key", None, args.metrics_api_key),
    )


class Auth:
    """The keys, kept as digests and compared in constant time, all of them each time. Raises
    ConfigError on an unreadable key file."""

    def __init__(self, args: ServerArgs, routes: Mapping[str, Access]) -> None:
        self._clients, self._admins, self._scrapers = _all_digests(args)
        self._routes = dict(routes)
        self.is_open = not self._clients

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Who calls. `path` is scope["path"], never that of a rebuilt URL. Raises RequestError 401
        or 403."""
        access = self._routes.get(path, Access.CLIENT)
        if access is Access.PUBLIC or (access is Access.METRICS and not self._scrapers):
            return Caller()
        key = _sent_key(headers)
        digest = b"" if key is None else _digest(key)
        is_admin = _is_among(digest, self._admins)
        is_client = _is_among(digest, self._clients)
        is_scraper = _is_among(digest, self._scrapers)
        if access is Access.METRICS:
            if not (is_scraper or is_admin):
                raise _unknown_key()
            return Caller(is_admin=is_admin, is_operator=is_admin)
        admins_only = access is Access.ADMIN and bool(self._admins)
        if (self._clients or admins_only) and not (is_client or is_admin):
            raise _unknown_key()
        if admins_only and not is_admin:
            raise RequestError(
                status=403, code="admin_key_required", message="this needs the admin key"
            )
        known = is_client or is_admin
        return Caller(
            key=_name(digest) if known else "",
            is_admin=is_admin or not self._admins,
            is_operator=is_admin,
        )


def _unknown_key() -> RequestError:
    return RequestError(status=401, code="invalid_api_key", message="a valid API key is needed")


def _digests(flag: str, path: str | None, key: str | None) -> list[bytes]:
    """Of the keys in a file, and of one that was given beside it."""
    keys = [] if path is None else _keys_of_file(flag, path)
    if key is not None:
        keys.append(key)
    return [_digest(key.encode()) for key in keys]


def _keys_of_file(flag: str, path: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag}: {error}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{flag}: {path} holds no key")
    return keys


def _sent_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key that was sent, as a bearer token or as `x-api-key`; None unless it is exactly one."""
    sent = [(name, value) for name, value in headers if name in (b"authorization", b"x-api-key")]
    if len(sent) != 1:
        return None
    name, key = sent[0]
    if name == b"authorization":
        scheme, _, key = key.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
    return key or None


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _name(digest: bytes) -> str:
    """A name for a key that does not reveal it: its digest's digest."""
    return sha256(digest).hexdigest()[:16]


def _is_among(digest: bytes, known: list[bytes]) -> bool:
    found = False
    for other in known:  # no comparison is left out
        if hmac.compare_digest(digest, other):
            found = True
    return found
