"""A sample of `python -m tests.torture --only neighbours`: bad inputs beside a stream.

It has no clock but the CPU time of the loop's callbacks; the table of docs/reliability.md has what
the stream's tokens wait for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from radix_runtime.server import chat_renderer, logprob_bound
from tests.runtime.api_stack import CONTEXT, LONG, Stack, events, in_background
from tests.runtime.loop_monitor import LoopHeld
from tests.runtime.server_process import Server
from tests.torture.bad_inputs import CHAT, TEMPLATE, BadInput, answer_of, bad_inputs, chat

INPUTS = bad_inputs(CONTEXT)
TRIES = 3  # on a busy machine the clock of a thread also counts interrupts


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    file = tmp_path_factory.mktemp("template") / "t.jinja"
    file.write_text(TEMPLATE)
    with Stack(chat_template=str(file), pages=256, delay=0.005, monitored=True) as stack:
        for _ in range(2):  # what only the first request costs is no request's fault
            httpx.post(stack.url + CHAT, json=chat("hello"), timeout=60).raise_for_status()
        yield stack


def refused(stack: Stack, bad: BadInput) -> None:
    received = answer_of(stack.port, bad.raw(f"localhost:{stack.port}"))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % bad.status), received[:500]
    assert json.loads(body)["error"]["code"] == bad.code
    assert len(body) < 1000


@pytest.mark.parametrize("bad", INPUTS, ids=[bad.name for bad in INPUTS])
def test_a_bad_input_beside_a_stream(
    served: Stack, monkeypatch: pytest.MonkeyPatch, bad: BadInput
) -> None:
    monkeypatch.setattr(logprob_bound, "MAX_LOGPROBS", 1 << 18)
    if bad.kills_template:
        monkeypatch.setattr(chat_renderer, "SECONDS", 0.5)
    for left in reversed(range(TRIES)):
        body = {**LONG, "max_tokens": 100, "stream": True}
        url = f"{served.url}/v1/completions"
        thread, stream = in_background(lambda: httpx.post(url, json=body, timeout=60).text)  # noqa: B023
        served.wait(lambda: served.manager.counts.open == 1)
        served.on_loop(served.monitor.reset)
        refused(served, bad)
        try:
            served.monitor.check()
            break
        except LoopHeld:
            if left == 0:
                raise
        finally:
            thread.join(60)
            tokens = [choice for event in events(stream[0]) for choice in event["choices"]]
            assert tokens[-1]["finish_reason"] == "length"
            if bad.kills_template:  # three in a row, and it would be given up
                after = httpx.post(served.url + CHAT, json=chat("hello"), timeout=60)
                assert after.status_code == 200
    served.check_idle()


def test_a_server_refuses_them_all_and_leaves_nothing(tmp_path: Path) -> None:
    """As processes, of which some end on the way."""
    file = tmp_path / "t.jinja"
    file.write_text(TEMPLATE)
    with Server("--chat-template", str(file)) as server:
        port = int(server.url.rpartition(":")[2])
        for bad in bad_inputs(2048):
            answer = answer_of(port, bad.raw(f"localhost:{port}"))
            assert answer.startswith(b"HTTP/1.1 %d " % bad.status), answer[:500]
            assert bad.code.encode() in answer
        server.note_family()  # with the forks that have come since
        assert any("template" in " ".join(p.cmdline()) for p in server.family)
        httpx.post(server.url + CHAT, json=chat("hello"), timeout=60).raise_for_status()
        server.process.terminate()
        assert server.wait_exit(30) == 0
        server.assert_nothing_left()
