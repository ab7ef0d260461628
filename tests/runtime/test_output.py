"""What the scheduler sends: deltas, their batches, and the size of a message."""

from __future__ import annotations

import itertools

import pytest

from radix_runtime.messages import (
    MOST_DELTAS,
    Logprobs,
    Message,
    TokenBatch,
    TokenDelta,
    batches,
    encode,
)
from radix_runtime.sampling_params import MAX_STOP_LENGTH
from tests.runtime.scheduler_rig import Rig, prompt


def test_a_message_stays_within_the_limit_of_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """All choices of many long requests that never started end in one step: their prompts do not
    travel with them."""
    rig = Rig(pages=20_000, context=70_000, check="off", max_queued_requests=1000)
    ids, sent = prompt(65_000), []
    deliver = rig.outbox.send
    monkeypatch.setattr(
        rig.outbox, "send", lambda message: (sent.append(encode(message)), deliver(message))
    )
    for i in range(17):
        rig.submit(
            str(i), ids, max_new_tokens=5, n=16, logit_bias=dict.fromkeys(range(1, 97), -1.0)
        )
    rig.abort("")
    rig.run()
    assert len(rig.streams) == 17 * 16 and all(
        s.finish.type == "abort" for s in rig.streams.values()
    )
    assert len(sent) > 1 and max(map(len, sent)) < 2 << 20


def test_batches_are_cut_in_order() -> None:
    """By their number, and so that no two have prompt logprobs."""
    n = MOST_DELTAS
    deltas = [TokenDelta(rid=str(i), choice=0, ids=b"") for i in range(2 * n + 10)]
    for i in (0, 1, 5):
        deltas[i].prompt_logprobs = Logprobs()
    cut = [[int(delta.rid) for delta in batch] for batch in batches(deltas)]
    assert [(batch[0], batch[-1]) for batch in cut] == [
        (0, 0),
        (1, 1),
        (2, 5),
        (6, n + 5),
        (n + 6, 2 * n + 5),
        (2 * n + 6, 2 * n + 9),
    ]
    assert list(itertools.chain(*cut)) == list(range(2 * n + 10))
    assert [len(batch) for batch in batches(deltas[6 : 6 + n])] == [n] and list(batches([])) == []


def test_no_delta_is_larger_than_a_message_counts_on() -> None:
    """The first one with everything that a request may carry, and the tokens that are sent
    together."""
    rig, sent = Rig(pages=200, context=700), []
    deliver = rig.outbox.send

    def send(message: Message, instance: int = 0) -> None:
        sent.append(encode(message))
        deliver(message, instance)

    rig.outbox.send = send
    stop = [chr(0x10FFFF) * (MAX_STOP_LENGTH - 1) + chr(0x10000 + i) for i in range(32)]
    rig.submit(
        "a", prompt(600), stream=False, max_new_tokens=80, ignore_eos=True,
        stop=stop, stop_token_ids=[1] * 1024, logit_bias=dict.fromkeys(range(97), -0.1),
        return_logprob=True, top_logprobs=20,
    )  # fmt: skip
    rig.run()
    others = (
        14 * 1024 + 64 * rig.engine.vocab_size
    )  # 1024 biases of large ids; the text of 64 tokens
    assert max(map(len, sent)) + others < 128 << 10


def test_tokens_of_streams_travel_together_and_before_the_deltas_of_their_step() -> None:
    """No token of a stream comes before its first delta or after its last, as the rig asserts."""
    rig = Rig(rows=8)
    sent: list[TokenBatch] = []
    deliver = rig.outbox.send

    def send(message: Message, instance: int = 0) -> None:
        sent.append(message)
        deliver(message, instance)

    rig.outbox.send = send
    for i in range(6):
        rig.submit(str(i), prompt(5), max_new_tokens=10 + i, ignore_eos=True)
    rig.run()
    rig.verify_all()
    columns = [list(batch.tokens) for batch in sent if batch.tokens is not None]
    assert len(sent) <= rig.scheduler.counters.steps_total  # all of a step in one message
    # Each row's first and last token are deltas of their own.
    assert [len(tokens) for tokens in columns] == [6] * 8 + [5, 4, 3, 2, 1]
    assert sum(len(batch.deltas) for batch in sent) == 12


@pytest.mark.parametrize("samples", [1, 5])
def test_tokens_that_nobody_waits_for_travel_in_blocks(samples: int) -> None:
    """Beside streams, whose tokens come one step after the other."""
    rig = Rig(pages=200, context=400, samples=samples)
    for rid, stream in (("whole", False), ("stream", True)):
        rig.submit(rid, prompt(5), max_new_tokens=200, ignore_eos=True, stream=stream)
    rig.run()
    rig.verify_all()
    assert 4 <= rig.streams["whole", 0].deltas <= 5  # the first token, blocks of 64, the end
    assert rig.streams["stream", 0].deltas > 199 // samples


def test_steps_that_complete_together_are_sent_in_their_order() -> None:
    """A retraction waits for all steps in flight: a stream's tokens of two steps go out at once."""
    rig = Rig()
    rig.submit("a", prompt(5), max_new_tokens=30, ignore_eos=True)
    for _ in range(4):
        rig.step()
    assert rig.scheduler.in_flight
    rig.scheduler.retract_youngest()
    rig.run()
    rig.verify_all()


def test_prompt_logprobs_beyond_a_message_are_refused() -> None:
    rig = Rig(pages=1000, context=3000, max_message=2 * 8 * 3 * 1000)
    for rid, start in (("fits", 1000), ("one more", 999)):
        rig.submit(
            rid,
            prompt(2000),
            max_new_tokens=1,
            return_logprob=True,
            logprob_start=start,
            top_logprobs=2,
        )
    rig.run()
    assert (
        set(rig.failed) == {"one more"}
        and "logprobs of 1001 prompt tokens" in rig.failed["one more"].message
    )
    rig.verify_all()
