"""DeferredStream: keeps the thread that launches steps from waiting for masks."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class DeferredStream:
    """Wraps a stream whose `submit` runs work on the caller's thread, as a GPU's does.

    Work that waits for another thread, and all work behind it, is submitted to the stream by a
    thread of its own, so the caller never waits. The order of the work is that of `submit`."""

    def __init__(self, stream: Executor) -> None:
        self._stream = stream
        self._thread = ThreadPoolExecutor(1, "radix-masks")
        self._last: Future[Any] | None = None  # handed to the thread

    def submit(self, work: Callable[..., T], *args: Any, waits: bool = False) -> Future[T]:
        """`waits`: the work may wait for another thread."""
        behind = self._last is not None and not self._last.done()
        if not waits and not behind:
            return self._stream.submit(work, *args)
        submitted = self._thread.submit(self._stream.submit, work, *args)
        self._last = submitted
        return _DeferredFuture(submitted)

    def shutdown(self) -> None:
        """Waits for all work."""
        self._thread.shutdown()
        self._stream.shutdown()


class _DeferredFuture(Future[T]):
    """The future of work that the stream gets later."""

    def __init__(self, submitted: Future[Future[T]]) -> None:
        super().__init__()
        self._submitted = submitted

    def done(self) -> bool:
        if not self._submitted.done():
            return False
        return self._submitted.exception() is not None or self._submitted.result().done()

    def result(self, timeout: float | None = None) -> T:
        return self._submitted.result(timeout).result(timeout)
