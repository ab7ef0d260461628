"""Signals held back for the length of a block."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def exits_on_signals() -> Iterator[None]:
    """SIGTERM and SIGINT end the program with code 0 until the block ends or sets other handlers;
    in the main thread only."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(0)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds back Ctrl-C and the timer's SIGALRM, whose handlers may raise, until the block ends."""
    with held(signal.SIGINT), held(signal.SIGALRM):
        yield


@contextmanager
def held(number: signal.Signals) -> Iterator[None]:
    """Lets the first signal of this number wait for the end of the block, then calls its handler.

    A second one is handled at once, in case the block hangs. Does nothing outside of the main
    thread, where no handler runs, and for a signal that has no handler in Python. One signal number
    a block: whatever a handler raises, every handler is restored.
    """
    handler = signal.getsignal(number)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if pending:
            handler(signum, frame)
        pending[:] = [(signum, frame)]

    try:
        signal.signal(number, note)
        yield
    finally:
        signal.signal(number, handler)
        if pending:
            handler(*pending[0])
