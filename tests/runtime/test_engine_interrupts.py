"""Engine: Ctrl-C and timeouts that raise."""

from __future__ import annotations

import random
import signal

import pytest
import torch

from radix_runtime import Engine
from radix_runtime.errors import EngineDeadError

torch.set_num_threads(1)


@pytest.fixture
def interrupts():
    """Python's own handler, which a shell's background job has not."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_interrupts_cut_no_step_in_two():
    """Ctrl-C, or a timeout that raises, ends the call that it hits; the engine stays as it was."""
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    times = random.Random(0)
    hits = 0
    try:
        with Engine(max_total_tokens=4096, page_size=4) as e:
            want = e.generate("Tell me a story", params)["output_ids"]
            for i in range(60):
                try:
                    signal.setitimer(signal.ITIMER_REAL, times.uniform(0.0002, 0.02))
                    for _ in e.stream(["Tell me a story", f"Why {i}"], params):
                        pass
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    hits += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert hits > 5 and signal.getsignal(signal.SIGALRM) is signal.default_int_handler
            assert e.generate("Tell me a story", params)["output_ids"] == want
            e._scheduler.check()
            assert e.flush_cache()
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_an_interrupt_waits_for_its_step_and_a_second_one_does_not(monkeypatch, interrupts):
    with Engine(max_total_tokens=4096) as e:
        step = e._scheduler.step
        made = []

        def interrupted(times):
            def one():
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
                made.append(step())
                return made[-1]

            return one

        monkeypatch.setattr(e._scheduler, "step", interrupted(1))
        with pytest.raises(KeyboardInterrupt):
            e.generate("Hello", {"max_new_tokens": 4})
        assert made == [True]
        monkeypatch.setattr(e._scheduler, "step", step)
        assert e.flush_cache() and e.generate("Hello", {"max_new_tokens": 4})
        monkeypatch.setattr(e._scheduler, "step", interrupted(2))
        with pytest.raises(KeyboardInterrupt):
            e.generate("Hello", {"max_new_tokens": 4})
        monkeypatch.setattr(e._scheduler, "step", step)
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            e.generate("Hello", {"max_new_tokens": 4})
