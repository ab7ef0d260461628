"""The monitor itself: what it must see, and what it must not count."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from tests.runtime.loop_monitor import LoopHeld, LoopMonitor


def burn(seconds: float) -> None:
    """Uses the CPU on this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_busy_callback_is_found_and_named() -> None:
    async def main() -> LoopMonitor:
        async def slow_handler() -> None:
            await asyncio.sleep(0)
            burn(0.03)

        with LoopMonitor(asyncio.get_running_loop()) as monitor:
            await asyncio.create_task(slow_handler())
            await asyncio.sleep(0)
        return monitor

    monitor = asyncio.run(main())
    assert monitor.worst.cpu >= 0.03
    assert "slow_handler" in monitor.worst.what
    with pytest.raises(LoopHeld, match="slow_handler"):
        monitor.check()


def test_sleeping_and_other_threads_do_not_count() -> None:
    async def main() -> LoopMonitor:
        with LoopMonitor(asyncio.get_running_loop()) as monitor:
            other = threading.Thread(target=burn, args=(0.05,))
            other.start()
            asyncio.get_running_loop().call_soon(time.sleep, 0.05)
            await asyncio.sleep(0.08)
            other.join()
            await asyncio.sleep(0)
        return monitor

    monitor = asyncio.run(main())
    monitor.check()
    assert monitor.longest_wall >= 0.05


def test_the_collector_counts() -> None:
    """A cycle that is collected inside of a callback is part of its time."""

    async def main() -> LoopMonitor:
        kept = [[[]] for _ in range(300_000)]
        with LoopMonitor(asyncio.get_running_loop()) as monitor:
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(gc.collect)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert kept
        return monitor

    monitor = asyncio.run(main())
    assert 0 < monitor.collector <= monitor.worst.cpu


def test_an_unused_monitor_does_not_pass() -> None:
    loop = asyncio.new_event_loop()
    with LoopMonitor(loop) as monitor:
        pass
    loop.close()
    with pytest.raises(AssertionError, match="no callback"):
        monitor.check()
