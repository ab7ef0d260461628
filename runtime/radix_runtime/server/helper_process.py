"""HelperProcess: a child that answers one question at a time, and can be killed in the middle."""

import struct
import subprocess
import threading
from typing import IO

from ..spawn import start_process

_LENGTHS = struct.Struct("<QQ")  # of a frame's head and its data


class HelperDied(RuntimeError):
    """The process has ended while it was asked. `was_killed`: because it took too long."""

    def __init__(self, title: str, code: int, was_killed: bool) -> None:
        how = "was killed: it took too long" if was_killed else f"has ended: {code}"
        super().__init__(f"the process {title} {how}")
        self.was_killed = was_killed


class HelperProcess:
    """Runs `main()` of a module, which reads frames from standard input and answers each on
    standard output. The first question starts it, and after a death the next one. Questions are
    asked by one thread at a time, which waits without the GIL.

    `hello`, if there is one, is the first frame of each new process; it has `start_seconds` to
    answer that. `process` is None while there is none."""

    def __init__(
        self, module: str, title: str, hello: bytes = b"", start_seconds: float = 30.0
    ) -> None:
        self._module = module
        self._title = title
        self._hello = hello
        self._start_seconds = start_seconds
        self._is_closed = False
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it unless it runs. Raises HelperDied."""
        if self.process is not None or self._is_closed:
            return
        self.process = start_process(self._module, self._title, stdout=subprocess.PIPE)
        if self._hello:
            self._exchange(self._hello, b"", self._start_seconds)

    def ask(self, head: bytes, data: bytes, seconds: float) -> tuple[bytes, bytes]:
        """The frame that answers this one. Raises HelperDied; after `seconds` the process is
        killed."""
        self.start()
        return self._exchange(head, data, seconds)

    def close(self) -> None:
        """Ends the process for good; a question that is under way fails."""
        self._is_closed = True
        process = self.process
        if process is not None:
            process.kill()

    def _exchange(self, head: bytes, data: bytes, seconds: float) -> tuple[bytes, bytes]:
        process = self.process
        if process is None:
            raise HelperDied(self._title, 0, was_killed=False)
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        watchdog = threading.Timer(seconds, kill)
        watchdog.start()
        try:
            write_frame(process.stdin, head, data)
            return read_frame(process.stdout)
        except (OSError, EOFError):
            self.process = None
            process.kill()
            code = process.wait()
            _close(process.stdin)
            process.stdout.close()
            raise HelperDied(self._title, code, was_killed=late.is_set()) from None
        finally:
            watchdog.cancel()


def _close(stream: IO[bytes]) -> None:
    try:
        stream.close()
    except OSError:  # what it still held cannot be written any more
        pass


def write_frame(stream: IO[bytes], head: bytes, data: bytes) -> None:
    """Sends one frame through a pipe. Raises OSError."""
    stream.write(_LENGTHS.pack(len(head), len(data)))
    stream.write(head)
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[bytes, bytes]:
    """Head and data of the next frame of a pipe. Raises EOFError at its end."""
    lengths = _read(stream, _LENGTHS.size)
    head_size, data_size = _LENGTHS.unpack(lengths)
    return _read(stream, head_size), _read(stream, data_size)


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
