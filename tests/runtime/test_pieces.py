"""Pieces of a call's choices: which are delivered at once, and in which order they come."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_runtime.messages import Message, TextBatch, TextDelta
from radix_runtime.server.submission import Submission
from tests.runtime.manager_rig import build, delta, is_empty, prompt, run, submit


class Client:
    """What of three choices was shown. `at_once`: whether a text is taken when it is offered."""

    def __init__(self) -> None:
        self.shown = [""] * 3
        self.at_once: dict[str, bool] = {}

    def deliver(self, choice: int, piece: TextDelta) -> bool:
        assert self.shown[choice]  # it is not the first
        if piece.finish is not None or not self.at_once[piece.text]:
            return False
        self.shown[choice] += piece.text
        return True

    async def read(self, submission: Submission) -> None:
        while batch := await submission.next_batch():
            for choice, piece in batch.items():
                self.shown[choice] += piece.text
            await asyncio.sleep(0)


@settings(max_examples=60, deadline=None)
@given(
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=6), max_size=8),
    pauses=st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_pieces_keep_their_order_whoever_delivers_them(
    rounds: list[list[tuple[int, bool]]], pauses: list[int]
) -> None:
    """In each round pieces of some of three choices come together; some may be sent at once."""

    async def work() -> None:
        manager, _ = build()
        client = Client()
        with submit(manager, [prompt(n=3)], "a") as submission:
            submission.deliver = client.deliver
            reader = asyncio.create_task(client.read(submission))
            expected = [""] * 3
            texts = map(chr, itertools.count(0x4E00))
            for pieces, pause in zip(rounds, pauses, strict=False):
                messages: list[Message] = []
                for choice, quick in pieces:
                    text = next(texts)
                    client.at_once[text] = quick
                    expected[choice] += text
                    messages.append(TextBatch([delta("a", choice, 5, text=text)]))
                await manager.handle_all(messages)
                for _ in range(pause):
                    await asyncio.sleep(0)
            for choice in range(3):
                expected[choice] += "."
                manager.handle(TextBatch([delta("a", choice, 6, text=".", end="stop")]))
            await reader
        assert client.shown == expected
        assert is_empty(manager) and manager.counts.ok == 1

    run(work)


def test_of_pieces_that_come_together_one_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others become one, so that a process which has fallen behind sends fewer events; also if
    the event loop has its turn in between."""
    monkeypatch.setattr("radix_runtime.server.tokenizer_manager._SLICE_SECONDS", 0.0)

    async def work() -> None:
        manager, _ = build()
        delivered = []

        def deliver(choice: int, piece: TextDelta) -> bool:
            delivered.append(piece.text)
            return True

        with submit(manager, [prompt()], "a") as submission:
            submission.deliver = deliver
            manager.handle(TextBatch([delta("a", 0, 1, text="a")]))
            assert [piece.text for piece in (await submission.next_batch()).values()] == ["a"]
            reader = asyncio.create_task(submission.next_batch())
            await asyncio.sleep(0)
            pieces = [delta("a", 0, i, text=text) for i, text in enumerate("bcde")]
            await manager.handle_all([TextBatch(pieces[:2]), TextBatch(pieces[2:])])
            assert delivered == ["b"]
            assert [piece.text for piece in (await reader).values()] == ["cde"]

    run(work)


def test_many_messages_leave_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radix_runtime.server.tokenizer_manager._SLICE_SECONDS", 0.0)

    async def work() -> None:
        manager, _ = build()
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        with submit(manager, [prompt()], "a"):
            task = asyncio.create_task(other())
            await manager.handle_all([TextBatch([delta("a", 0, i)]) for i in range(20)])
            task.cancel()
        assert turns >= 19

    run(work)
