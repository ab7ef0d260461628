"""HIP graphs on the stand-in: a stream that calls go to, and a recorder for the runtime's graphs.

The package asks torch or CuPy for the current stream of their tensors. No torch here is built for
ROCm, so the arrays say that they are CuPy's, and `streams` is what answers for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tests.gcn import arrays, library
from tests.gcn.assembly import check

T = TypeVar("T")
_NON_BLOCKING = 1  # hipStreamNonBlocking, as torch makes its streams
_THREAD_LOCAL = 1  # hipStreamCaptureModeThreadLocal, the mode of the runtime


class StreamArray(arrays.Array):
    """An array whose calls go to the current stream of `streams`."""


StreamArray.__module__ = "cupy"


class _Current:
    ptr = 0


def _empty(shape: Sequence[int], dtype: str = "float32") -> StreamArray:
    """In a pool, as what torch allocates during a capture: it lives as long as the graphs."""
    array = StreamArray(arrays.empty(shape, dtype).tensor)
    _pool.append(array)
    return array


_pool: list[StreamArray] = []


@contextlib.contextmanager
def streams() -> Iterator[ctypes.c_void_p]:
    """The stream of StreamArrays while this is open."""
    hip = library.load()
    stream = ctypes.c_void_p()
    check(hip, hip.hipStreamCreateWithFlags(ctypes.byref(stream), _NON_BLOCKING))
    cupy = types.ModuleType("cupy")
    current = _Current()
    current.ptr = stream.value or 0
    cupy.empty = _empty  # type: ignore[attr-defined]
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: current)  # type: ignore[attr-defined]
    before = sys.modules.get("cupy")
    sys.modules["cupy"] = cupy
    try:
        yield stream
    finally:
        if before is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before
        hip.hipStreamDestroy(stream)
        arrays.close_memory()
        _pool.clear()


class Recorder:
    """The runtime's GraphRecorder (radix_runtime/device.py) by HIP's own functions."""

    def __init__(self, stream: ctypes.c_void_p) -> None:
        self._stream = stream
        self._graphs: list[ctypes.c_void_p] = []

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """What replays `work`, and its result. RuntimeError where it did what HIP does not permit
        while a stream is being captured."""
        hip = library.load()
        graph = ctypes.c_void_p()
        ready = ctypes.c_void_p()
        check(hip, hip.hipStreamBeginCapture(self._stream, _THREAD_LOCAL))
        try:
            result = work()
        except BaseException:
            hip.hipStreamEndCapture(self._stream, ctypes.byref(graph))
            raise
        check(hip, hip.hipStreamEndCapture(self._stream, ctypes.byref(graph)))
        flags = ctypes.c_ulonglong(0)
        check(hip, hip.hipGraphInstantiateWithFlags(ctypes.byref(ready), graph, flags))
        check(hip, hip.hipGraphDestroy(graph))

        def replay() -> None:
            check(hip, hip.hipGraphLaunch(ready, self._stream))

        return replay, result
