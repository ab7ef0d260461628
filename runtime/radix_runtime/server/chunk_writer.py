"""ChunkWriter: more of a streamed answer, written at once instead of by a task that waits."""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CHUNKS = "radix.chunks"  # where the scope of a call has its ChunkWriter


class ChunkWriter:
    """The body of one answer, below ASGI. `send` of the call must have begun it and must end it."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow

    @property
    def takes_more(self) -> bool:
        """Whether the client is there and reads, so that nobody need wait for it."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            self._flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        """Sends bytes, of which there is at least one, while `takes_more`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
