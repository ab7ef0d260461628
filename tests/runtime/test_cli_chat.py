"""`radix chat` and the client that it shares with `radix bench serve`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radix_runtime.cli import main
from radix_runtime.cli.client import Client
from radix_runtime.errors import RequestError
from tests.runtime.api_stack import MODEL, Stack
from tests.runtime.command import SMALL, radix
from tests.runtime.server_process import environment


def test_the_client_reads_answers_to_their_end_and_keeps_the_connection() -> None:
    text = "a\u2028b\u2029c\x85d"

    async def ask(url: str) -> list[str]:
        async with Client(url) as client:
            answers = []
            for _ in range(3):
                body = {"prompt": text, "echo": True, "max_tokens": 1}
                chunks = [chunk async for chunk in client.chunks("/v1/completions", body)]
                answers.append("".join(c["text"] for chunk in chunks for c in chunk["choices"]))
            with pytest.raises(RequestError, match="max_tokens"):
                await anext(client.chunks("/v1/completions", {"prompt": "a", "max_tokens": -1}))
            return answers

    connections: list[object] = []
    made = HttpToolsProtocol.connection_made

    def noted(protocol: HttpToolsProtocol, transport: asyncio.Transport) -> None:
        connections.append(protocol)
        made(protocol, transport)

    with pytest.MonkeyPatch.context() as patch, Stack() as stack:
        patch.setattr(HttpToolsProtocol, "connection_made", noted)
        assert all(answer.startswith(text) for answer in asyncio.run(ask(stack.url)))
    assert len(connections) == 1


def test_chat_in_process() -> None:
    stdin = "Hello\n/help\n/reset\n\nHello\n/exit\nnever asked\n"
    result = radix("chat", "--temperature", "0", "--max-new-tokens", "5", *SMALL, stdin=stdin)
    assert result.returncode == 0, result.stderr
    before, _, after = result.stdout.partition("/reset")
    assert before.strip() and after.strip().splitlines()[-1] == before.strip().splitlines()[0]


class Terminal:
    """The command on a terminal of its own; `screen` is what it has shown."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "radix_runtime.cli", *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment("/tmp"), "TERM": "dumb"},  # no escape sequences
            start_new_session=True,
        )
        os.close(slave)
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        deadline = time.monotonic() + 60
        while self.screen.count(text) < times:
            assert time.monotonic() < deadline, self.screen
            if select.select([self._master], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # it has ended
                    self.screen += os.read(self._master, 1 << 16).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_chat_greets_and_shows_what_is_typed_once() -> None:
    """What is typed while an answer comes waits for the next prompt, and is not shown before."""
    with Stack(delay=0.02, pages=256) as stack:
        terminal = Terminal(["chat", "--url", stack.url, "--max-new-tokens", "60"])
        try:
            terminal.wait_for("> ")
            assert f"{MODEL} at {stack.url}" in terminal.screen and "/help" in terminal.screen
            terminal.type("Hello\r")
            deadline = time.monotonic() + 30
            while stack.manager.counts.accepted == 0:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            terminal.type("typed ahead\r")
            terminal.wait_for("> ", times=3)
            assert stack.manager.counts.accepted == 2
            assert terminal.screen.count("typed ahead") == 1
            assert "> typed ahead" in terminal.screen
            terminal.type("/exit\r")
            assert terminal.process.wait(20) == 0
        finally:
            terminal.close()


def test_chat_with_a_model_says_what_runs() -> None:
    terminal = Terminal(["chat", *SMALL])
    try:
        terminal.wait_for("> ")
        assert "radix-demo in bfloat16 on cpu, 1 threads; context 2048 tokens" in terminal.screen
        terminal.type("/help\r")
        terminal.wait_for("forget the conversation")
    finally:
        terminal.close()


def test_a_client_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from radix_runtime.cli import main\n"
        "assert main(['chat', '--url', 'http://127.0.0.1:9']) == 0; print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        input="",
        capture_output=True,
        text=True,
        timeout=60,
        env=environment("/tmp"),
        check=False,
    )
    assert done.stdout.endswith("False\n"), done.stderr


def test_chat_refuses_what_would_do_nothing_with_a_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flags, name in ((["--page-size", "4"], "--page-size"), (["/a/model"], "--model-path")):
        assert main(["chat", "--url", "http://127.0.0.1:9", *flags]) == 78
        assert capsys.readouterr().err == f"radix: error: {name} does nothing with --url\n"
    assert main(["chat", "--server-key", "k"]) == 78 and "--server-key" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8:surrogateescape", "ascii"])
def test_chat_survives_bytes_and_characters_that_the_terminal_lacks(encoding: str) -> None:
    with Stack() as stack:
        argv = ["chat", "--url", stack.url, "--max-new-tokens", "30"]
        command = [sys.executable, "-m", "radix_runtime.cli", *argv]
        env = {**environment("/tmp"), "PYTHONIOENCODING": encoding}
        result = subprocess.run(
            command,
            input=b"caf\xff\nHello\n",
            capture_output=True,
            timeout=60,
            env=env,
            check=False,
        )
        assert result.returncode == 0 and not result.stderr, result.stderr
        assert result.stdout.count(b"\n") >= 2 and stack.manager.counts.ok == 2
