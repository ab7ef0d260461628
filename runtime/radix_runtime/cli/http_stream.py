"""HTTP/1.1 answers and server-sent events, read from bytes in whatever pieces they come.

Reads no more of them than a load generator needs, and does no I/O: a general client takes ten times
the CPU for a stream of small events.
"""

from collections.abc import Mapping
from types import MappingProxyType

_HEAD_END = b"\r\n\r\n"
_MAX_HEAD = 64 << 10  # bytes


class HttpAnswer:
    """One answer on a connection. `status` is 0 until its head has come; `is_complete` when its
    body has. Raises ValueError, from `feed`, on what is no HTTP."""

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self.keeps_alive = True
        self._unread = b""  # of a head or of the line before a chunk
        self._is_chunked = False
        self._left = 0  # bytes until the end of the body, or of a chunk with its line end
        self._ends_with_connection = False
        self._is_past_chunks = False  # what follows are trailers

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of the connection; the piece of the body that they hold."""
        if self._unread:
            data = self._unread + data
            self._unread = b""
        if self.status == 0:
            end = data.find(_HEAD_END)
            if end < 0:
                if len(data) > _MAX_HEAD:
                    raise ValueError("the head of the answer does not end")
                self._unread = data
                return b""
            self._read_head(data[:end])
            data = data[end + len(_HEAD_END) :]
            if self.status == 0:  # it was only a word on the way, as 100 Continue
                return self.feed(data)
        if self._is_chunked:
            return self._read_chunks(data)
        if self._ends_with_connection:
            return data
        self._left -= len(data)
        self.is_complete = self._left <= 0
        return data

    def end(self) -> None:
        """The connection was closed. Raises ValueError in the middle of an answer."""
        if not self._ends_with_connection and not self.is_complete:
            raise ValueError("the connection was closed in the middle of an answer")
        self.is_complete = True

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise ValueError(f"no HTTP answer: {first[:40]!r}")
        status = int(rest[:3])
        if status < 200:
            return
        self.status = status
        headers = _headers(lines)
        self.keeps_alive = headers.get(b"connection", b"").lower() != b"close"
        if headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
            self._is_chunked = True
        elif b"content-length" in headers:
            self._left = int(headers[b"content-length"])
            self.is_complete = self._left == 0
        else:
            self._ends_with_connection = True
            self.keeps_alive = False

    def _read_chunks(self, data: bytes) -> bytes:
        parts = []
        at = 0
        while at < len(data) and not self.is_complete:
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                line_end = min(2, self._left)
                self._left -= len(piece)
                line_end -= min(2, self._left)  # bytes of the chunk's line end in this piece
                parts.append(piece[: len(piece) - line_end])
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._unread = data[at:]
                break
            line = data[at:end]
            at = end + 2
            if self._is_past_chunks:
                self.is_complete = not line
                continue
            size = int(line.partition(b";")[0], 16)
            self._is_past_chunks = size == 0
            if size:
                self._left = size + 2
        return b"".join(parts)


def _headers(lines: list[bytes]) -> Mapping[bytes, bytes]:
    fields = {}
    for line in lines:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip()
    return MappingProxyType(fields)


class EventReader:
    """The data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, body: bytes) -> list[bytes]:
        """Takes the next piece of a body; the data of the events that end in it."""
        text = self._rest + body
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        return [_data(event) for event in events if b"data:" in event]


def _data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
