"""Work of a call that takes long is done in slices, between which the event loop has its turn."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

SLICE_SECONDS = 0.001  # without a pause: what a token of another stream may wait
SLICE_BYTES = 256 << 10


async def in_slices(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces, joined as far as they take about a millisecond to make; after each slice the
    event loop has its turn. The last slice may be empty."""
    part = bytearray()
    end = time.perf_counter() + SLICE_SECONDS
    for piece in pieces:
        part += piece
        if len(part) >= SLICE_BYTES or time.perf_counter() >= end:
            yield bytes(part)
            part.clear()
            await asyncio.sleep(0)
            end = time.perf_counter() + SLICE_SECONDS
    yield bytes(part)


async def in_turns(steps: Iterator[object]) -> None:
    """Takes steps that together may take long; now and then the event loop has its turn."""
    async for _ in in_slices(b"" for _ in steps):
        pass
