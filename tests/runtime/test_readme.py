"""The snippets of README.md print what their comments say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.runtime.server_process import Server, environment

README = (Path(__file__).parents[2] / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) == 2


@pytest.mark.parametrize("code", SNIPPETS, ids=["engine", "kernel"])
def test_python(code: str, tmp_path: Path) -> None:
    """Each `print(...)  # text` prints that text."""
    expected = re.findall(r"print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert expected and len(expected) == code.count("print(")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment("/tmp"),
        check=False,
    )
    assert done.stdout.splitlines() == expected, done.stderr


def test_curl() -> None:
    """The call to the demo model, as it stands but for the port; the answer that the text names."""
    command = re.search(r"^curl (.*?)^```", README, re.MULTILINE | re.DOTALL)
    answer = re.search(r"The answer of the demo model,.*?is `(.*?)`", README, re.DOTALL)
    assert command is not None and answer is not None
    url, _, header, _, body = shlex.split(command[1])
    with Server() as server:
        path = url.removeprefix("http://127.0.0.1:30000")
        reply = httpx.post(
            server.url + path, content=body, headers=[tuple(header.split(": "))], timeout=60
        )
        server.process.terminate()
        assert server.wait_exit(30) == 0
    assert json.loads(reply.content)["choices"][0]["message"]["content"] == answer[1]
