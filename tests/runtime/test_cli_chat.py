"""`radix chat` and the client that it shares with `radix bench serve`."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from radix_runtime.cli import main
from radix_runtime.cli.client import Client
from radix_runtime.errors import RequestError
from tests.runtime.api_stack import Stack
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
    made = H11Protocol.connection_made

    def noted(protocol: H11Protocol, transport: asyncio.Transport) -> None:
        connections.append(protocol)
        made(protocol, transport)

    with pytest.MonkeyPatch.context() as patch, Stack() as stack:
        patch.setattr(H11Protocol, "connection_made", noted)
        assert all(answer.startswith(text) for answer in asyncio.run(ask(stack.url)))
    assert len(connections) == 1


def test_chat_in_process() -> None:
    stdin = "Hello\n/help\n/reset\n\nHello\n/exit\nnever asked\n"
    result = radix("chat", "--temperature", "0", "--max-new-tokens", "5", *SMALL, stdin=stdin)
    assert result.returncode == 0, result.stderr
    before, _, after = result.stdout.partition("/reset")
    assert before.strip() and after.strip().splitlines()[-1] == before.strip().splitlines()[0]


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
