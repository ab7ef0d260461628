"""Engine: how it ends, in forks too, and what fails with it or without it."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading

import pytest
import torch

from radix_runtime import SamplingParams
from radix_runtime.errors import EngineDeadError
from tests.runtime.parity import case, engine, greedy

torch.set_num_threads(1)


def test_after_shutdown_every_call_fails():
    c = case("qwen3_tied_odd")
    e = engine(c.folder)
    assert e.generate(input_ids=[3], sampling_params={"max_new_tokens": 1})["output_ids"]
    e.shutdown()
    e.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        e.generate(input_ids=[3])


def test_a_forked_process_is_refused_and_leaves_the_engine_alone():
    """The child ends by itself, out of the `with` block: as a user's would. The lock is held when
    it is made."""
    c = case("qwen3_tied_odd")
    params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
    with engine(c.folder, tp_size=2) as e:
        [rank] = [w.pid for w in e.executor.workers]
        stream = e.stream(input_ids=[3, 4], sampling_params=params)
        next(stream)
        with e._lock:  # of a thread of the parent
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # its default action ends a child that hangs
                refused = 0
                calls = [
                    lambda: e.generate(input_ids=[3]),
                    e.flush_cache,
                    e.get_server_info,
                    lambda: list(stream),
                ]
                for call in calls:
                    try:
                        call()
                    except EngineDeadError as error:
                        if "forked" in str(error):
                            refused += 1
                e.shutdown()
                e._close()  # as the end of an interpreter would
                os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
        os.kill(rank, 0)  # the child has not ended it
        assert len(list(stream)[-1]["output_ids"]) == 4
        assert len(e.generate(input_ids=[3], sampling_params=params)["output_ids"]) == 4


def test_an_engine_that_is_forgotten_ends_its_ranks():
    e = engine(case("qwen3_tied_odd").folder, tp_size=2)
    assert e.generate(input_ids=[3], sampling_params={"max_new_tokens": 1})["output_ids"]
    [rank] = e.executor.workers
    assert rank.poll() is None
    del e
    gc.collect()
    assert rank.poll() == 0


def test_a_failing_step_kills_the_engine_with_its_reason(monkeypatch):
    c = case("qwen3_tied_odd")
    with engine(c.folder) as e:

        def broken(batch):
            raise RuntimeError("the machine is on fire")

        monkeypatch.setattr(e.executor.runner.model, "forward", broken)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="on fire"):
                e.generate(input_ids=[3, 4], sampling_params={"max_new_tokens": 4})


def test_logits_that_are_not_finite_fail_their_request_only(monkeypatch):
    """Prompts that begin with id 9 get NaN; the others' tokens are those of a clean run."""
    c = case("qwen3_tied_odd")
    clean = [[5, 6, 7], [8, 3]]
    want = [greedy(c.model, p, 6)[0] for p in clean]
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    with engine(c.folder) as e:
        runner = e.executor.runner
        forward = runner.model.forward

        def poisoned(batch):
            hidden = forward(batch)
            hidden[batch.input_ids == 9] = math.nan
            return hidden

        monkeypatch.setattr(runner.model, "forward", poisoned)
        results = {}

        def ask(name, prompt):
            try:
                results[name] = e.generate(input_ids=prompt, sampling_params=params)["output_ids"]
            except RuntimeError as error:
                results[name] = str(error)

        jobs = [("a", clean[0]), ("bad", [1, 9]), ("b", clean[1])]
        threads = [threading.Thread(target=ask, args=job) for job in jobs]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert results == {"a": want[0], "b": want[1], "bad": "the model gave no finite logits"}
