"""TokenizerManager and Submission alone, with a link that records what is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_runtime.config import ServerArgs
from radix_runtime.errors import RequestError
from radix_runtime.messages import (
    Abort,
    Control,
    ControlError,
    ControlReply,
    FinishReason,
    Generate,
    Logprobs,
    RequestFailed,
    TextBatch,
    TextStop,
    pack_body,
    pack_ids,
    unpack_body,
)
from radix_runtime.sampling_params import Limits, SamplingParams
from radix_runtime.server.auth import Caller
from radix_runtime.server.submission import Submission
from radix_runtime.text.generation_config import sampling_defaults
from tests.runtime.manager_rig import (
    DEAD,
    TOKENIZER,
    build,
    delta,
    failure,
    is_empty,
    prompt,
    run,
    submit,
)


def test_batches_merge_while_nobody_reads() -> None:
    async def work() -> None:
        manager, _ = build()
        with submit(manager, [prompt(n=2)], "a") as submission:
            for i in range(3):
                manager.handle(TextBatch([delta("a", 0, i), delta("a", 1, 10 + i, text="y")]))
            batch = await submission.next_batch()
            assert {c: d.text for c, d in batch.items()} == {0: "xxx", 1: "yyy"}
            assert batch[1].ids == pack_ids([10, 11, 12])
            reader = asyncio.create_task(submission.next_batch())
            await asyncio.sleep(0)
            manager.handle(TextBatch([delta("a", 0, 3, end="length")]))
            assert set(await reader) == {0}
            manager.handle(TextBatch([delta("a", 1, 13, end="stop")]))
            assert (await submission.next_batch())[1].finish == FinishReason("stop")
            assert await submission.next_batch() == {}
        assert is_empty(manager) and manager.counts.ok == 1

    run(work)


def test_merged_logprobs_keep_their_order() -> None:
    def part(*ids: int) -> Logprobs:
        values = np.asarray(ids, "<f4").tobytes()
        return Logprobs(
            ids=pack_ids(ids),
            logprobs=values,
            top_n=1,
            top_ids=pack_ids(ids),
            top_logprobs=values,
        )

    async def work() -> None:
        manager, _ = build()
        with submit(manager, [prompt()], "a") as submission:
            for ids, end in (((1,), None), ((2, 3), None), ((4,), "length")):
                piece = delta("a", 0, *ids, end=end)
                piece.logprobs = part(*ids)
                manager.handle(TextBatch([piece]))
            whole = (await submission.collect())[0]
        assert whole.logprobs == part(1, 2, 3, 4)

    run(work)


def test_leaving_early_aborts_once_and_only_what_runs() -> None:
    async def work() -> None:
        manager, link = build()
        with submit(manager, [prompt(), prompt()], "a") as submission:
            assert [r.rid for r in submission.requests] == link.rids(Generate) == ["a-0", "a-1"]
            manager.handle(TextBatch([delta("a-0", 0, 1, end="stop")]))
        manager.close(submission)
        assert link.rids(Abort) == ["a-1"]
        assert (manager.counts.ok, manager.counts.aborted) == (1, 1) and is_empty(manager)
        # What was still under way is ignored.
        manager.handle(TextBatch([delta("a-1", 0, 1, end="abort")]))
        manager.handle(failure("a-1"))
        assert is_empty(manager)

    run(work)


def test_a_failed_request_ends_its_call() -> None:
    async def work() -> None:
        manager, link = build()
        with submit(manager, [prompt(), prompt()], "a") as submission:
            manager.handle(TextBatch([delta("a-1", 0, 1)]))
            failed = RequestFailed(
                rid="a-0", status=503, code="engine_overloaded", message="full", retry_after=3
            )
            manager.handle(failed)
            assert set(await submission.next_batch()) == {1}  # what came before it
            with pytest.raises(RequestError) as caught:
                await submission.next_batch()
        assert (caught.value.status, caught.value.retry_after) == (503, 3)
        assert caught.value.type == "overloaded_error"
        assert link.rids(Abort) == ["a-1"]
        assert (manager.counts.refused, manager.counts.aborted) == (1, 1) and is_empty(manager)

    run(work)


def test_a_link_that_is_full_leaves_nothing_behind() -> None:
    async def work() -> None:
        manager, link = build()
        link.refuse_after = 1
        with pytest.raises(RequestError, match="full"):
            submit(manager, [prompt(), prompt()], "a")
        assert link.rids(Generate) == link.rids(Abort) == ["a-0"]
        assert is_empty(manager)

    run(work)


def test_engine_death_reaches_everybody_once() -> None:
    async def work() -> None:
        manager, _ = build()
        submissions = [submit(manager, [prompt(n=2)], f"r{i}") for i in range(3)]
        control = asyncio.create_task(manager.control("stats", dict))
        waiting = [asyncio.create_task(s.collect()) for s in submissions]
        await asyncio.sleep(0)
        manager.fail_all(DEAD)
        second = "a second reason changes nothing"
        manager.fail_all(RequestError(status=503, code="not_ready", message=second))
        for task in [*waiting, control]:
            with pytest.raises(RequestError, match="died"):
                await task
        with pytest.raises(RequestError, match="died"):
            submit(manager, [prompt()], "later")
        assert manager.counts.failed == 3 and is_empty(manager) and manager.dead

    run(work)


def test_control() -> None:
    async def work() -> None:
        manager, link = build()
        calls = [asyncio.create_task(manager.control("stats", dict[str, float])) for _ in range(2)]
        await asyncio.sleep(0)
        numbers = [m.id for m in link.sent if isinstance(m, Control)]
        assert len(set(numbers)) == 2
        for number in reversed(numbers):
            manager.handle(ControlReply(number, body=pack_body({"x": float(number)})))
        manager.handle(ControlReply(999))
        assert [(await call)["x"] for call in calls] == numbers
        with pytest.raises(RequestError) as caught:
            await manager.control("stats", dict, timeout=0.01)
        assert caught.value.status == 503 and is_empty(manager)

    run(work)


def test_a_control_has_an_argument_and_may_be_refused() -> None:
    async def work() -> None:
        manager, link = build()
        call = asyncio.create_task(manager.control("load", str, body=["adapter", 7]))
        await asyncio.sleep(0)
        (sent,) = [m for m in link.sent if isinstance(m, Control)]
        assert sent.op == "load" and unpack_body(sent.body, list) == ["adapter", 7]
        error = ControlError(status=409, code="busy", message="not now")
        manager.handle(ControlReply(sent.id, error=error))
        with pytest.raises(RequestError, match="not now") as caught:
            await call
        assert (caught.value.status, caught.value.code) == (409, "busy") and is_empty(manager)

    run(work)


def test_abort_by_request_and_by_call() -> None:
    async def work() -> None:
        manager, link = build()
        both = submit(manager, [prompt(), prompt()], "call")
        other = submit(manager, [prompt()], "other")
        abort = manager.names.abort
        assert await abort("call-1", Caller()) == 1 and await abort("call", Caller()) == 2
        assert await abort("none", Caller()) == 0
        aborted = link.rids(Abort)
        assert aborted[0] == "call-1" and sorted(aborted[1:]) == ["call-0", "call-1"]
        assert await manager.names.abort_all() == 3 and link.rids(Abort)[-1] == ""
        for rid in ("call-0", "call-1", "other"):
            manager.handle(TextBatch([delta(rid, 0, end="abort")]))
        assert [d.finish.type for d in await both.collect() if d.finish] == ["abort"] * 2
        await other.collect()
        assert manager.counts.aborted == 3 and is_empty(manager)

    run(work)


def test_wrong_messages_are_an_error() -> None:
    manager, _ = build()
    with pytest.raises(TypeError, match="TextStop"):
        manager.handle(TextStop(rid="a", choice=0, n_tokens=1))


def test_long_texts_are_refused_unread() -> None:
    async def work() -> None:
        manager, _ = build()
        encoded: list[str] = []

        def spy_encode(text: str, special: bool) -> list[int]:
            encoded.append(text)
            return TOKENIZER.encode(text, special)

        spy = SimpleNamespace(
            encode=spy_encode,
        )
        manager.text._tokenizer = spy  # type: ignore[assignment]
        longest = 128 * TOKENIZER.max_token_length
        with pytest.raises(RequestError) as caught:
            await manager.text.encode(["a" * (longest + TOKENIZER.max_token_bytes)], "prompt")
        assert caught.value.code == "context_length_exceeded" and not encoded
        assert "at least 129" in caught.value.message
        assert len(await manager.text.encode(["a", "b"], "prompt")) == 2 and encoded == ["a", "b"]

    run(work)


def test_sampling_defaults_are_the_models_if_the_operator_wants(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 40}')
    assert sampling_defaults(ServerArgs(), tmp_path) == {"temperature": 0.3, "top_k": 40}
    assert sampling_defaults(ServerArgs(sampling_defaults="openai"), tmp_path) == {}


def test_a_name_that_is_used_again_gets_nothing_of_what_was_under_way() -> None:
    async def work() -> None:
        manager, link = build()
        with submit(manager, [prompt()], "job") as first:
            again = prompt()
            with pytest.raises(RequestError, match="in use"):
                manager.submit([again], "job", {again.rid: "job"})
        again.rid = "r2"
        with manager.submit([again], "job", {"r2": "job"}) as second:
            manager.handle(TextBatch([delta("job", 0, 1, end="abort", text="of somebody else")]))
            manager.handle(failure("job"))
            manager.close(first)
            assert await manager.names.abort("job", Caller()) == 1
            assert link.rids(Abort) == ["job", "r2"]
            manager.handle(TextBatch([delta("r2", 0, 2, end="stop", text="mine")]))
            assert [d.text for d in await second.collect()] == ["mine"]
        assert is_empty(manager)

    run(work)


def test_the_token_of_a_health_probe_has_no_deadline() -> None:
    async def work() -> None:
        manager, link = build(request_timeout=0.001)
        probe = asyncio.create_task(manager.one_token())
        while not link.sent:  # its text is tokenized on a thread
            await asyncio.sleep(0.001)
        (sent,) = link.sent
        assert isinstance(sent, Generate) and sent.deadline is None
        manager.handle(TextBatch([delta(sent.rid, 0, 1, end="length")]))
        await probe

    run(work)


@given(
    length=st.integers(1, 200),
    wanted=st.none() | st.integers(0, 200),
    context=st.integers(1, 150),
    pool=st.integers(1, 150),
    clip=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_admission_is_exact(
    length: int, wanted: int | None, context: int, pool: int, clip: bool
) -> None:
    """Admitted exactly when it fits, and what is admitted never exceeds the room."""
    limits = Limits(context, 10, max_total_tokens=pool)
    room = min(context, pool)
    sampling = SamplingParams(max_new_tokens=wanted, top_k=10**30)
    lowered = wanted is None or clip
    least = 1 if lowered and wanted != 0 else wanted or 0  # new tokens
    fits = length + least <= room
    try:
        got = limits.admit([1] * length, sampling, "prompt", {}, clip)
    except RequestError as error:
        assert not fits
        exceeded = "context_length_exceeded", "kv_capacity_exceeded"
        assert error.status == 400 and error.code in exceeded
        return
    assert fits and got.max_new_tokens is not None and length + got.max_new_tokens <= room
    expected = room - length if wanted is None else wanted
    if clip:
        expected = min(expected, room - length)
    assert got.max_new_tokens == expected
    assert got.top_k == 10


@given(st.lists(st.sampled_from("nrRfca"), max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_counts_balance_whatever_happens(actions: list[str], random: Any) -> None:
    """n: new call, r/R: some delta / a last one, f: failure, c: the client leaves, a: abort."""

    async def work() -> None:
        manager, _ = build()
        calls: list[Submission] = []
        for step, action in enumerate(actions):
            open_now = sorted(manager._open)
            if action == "n":
                count = random.choice([1, 2])
                calls.append(submit(manager, [prompt() for _ in range(count)], f"c{step}"))
            elif action == "c" and calls:
                manager.close(random.choice(calls))
            elif open_now:
                rid = random.choice(open_now)
                if action in "rR":
                    end = random.choice(["stop", "abort"]) if action == "R" else None
                    manager.handle(TextBatch([delta(rid, 0, 1, end=end)]))
                elif action == "f":
                    manager.handle(failure(rid))
                else:
                    await manager.names.abort(rid, Caller())
            counts = manager.counts
            done = counts.ok + counts.aborted + counts.failed + counts.refused
            assert counts.accepted == done + len(manager._open)
        for call in calls:
            manager.close(call)
        assert is_empty(manager)

    run(work)
