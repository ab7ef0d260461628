"""Faults of the machine: a full disk or a closed pipe under the log, a device that fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from tests.runtime.server_process import START_LIMIT, environment
from tests.runtime.test_drain import free_port


def serve_logging_to(output: int, port: int) -> subprocess.Popen[bytes]:
    directory = tempfile.mkdtemp(prefix="rt-")
    flags = ["--port", str(port), "--num-threads", "1", "--max-total-tokens", "8192"]
    return subprocess.Popen(
        [sys.executable, "-m", "radix_runtime.cli", "serve", *flags, "--log-requests"],
        stdout=output,
        stderr=output,
        env=environment(directory),
    )


@pytest.mark.parametrize("kind", ["full disk", "closed pipe"])
def test_a_log_that_cannot_be_written_stops_nothing(kind: str) -> None:
    if kind == "full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = serve_logging_to(output, port)
    os.close(output)
    try:
        deadline = time.monotonic() + START_LIMIT
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        for _ in range(3):
            body = {"prompt": "a", "max_tokens": 3}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


# What the devices of an engine raise, as far as a CPU has it too.
_FAULTS = {
    "device": "RuntimeError('CUDA error: an illegal memory access was encountered')",
    "memory": "MemoryError()",
}
_SAID = {
    "device": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "memory": "not enough memory on cpu for a step",
}
_COMMAND = """
import sys
from radix_runtime.engine import model_runner
original = model_runner.ModelRunner.forward
calls = [0]
def failing(self, *args, **kwargs):
    calls[0] += 1
    if calls[0] > 60:
        raise {fault}
    return original(self, *args, **kwargs)
model_runner.ModelRunner.forward = failing
"""


@pytest.mark.parametrize("fault", sorted(_FAULTS))
def test_a_step_that_fails_ends_the_instance_loudly(fault: str, tmp_path: Path) -> None:
    """Open requests get their error, the exit code is 70, the log says what it was, nothing is
    left. The fault is put into the scheduler process by a module that it loads at its start."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'radix_runtime.processes.scheduler':\n"
        "            sys.meta_path.remove(self)\n"
        f"            exec({_COMMAND.format(fault=_FAULTS[fault])!r}, {{}})\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    port = free_port()
    log = tmp_path / "log"
    runtime_dir = tempfile.mkdtemp(prefix="rt-")
    variables = environment(runtime_dir)
    variables["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{variables['PYTHONPATH']}"
    flags = ["--port", str(port), "--num-threads", "1", "--max-total-tokens", "8192"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "radix_runtime.cli", "serve", *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
        )
    try:
        deadline = time.monotonic() + START_LIMIT
        while not re.search(r"ready: ", log.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_dead")
        assert process.wait(30) == 70
        text = log.read_text()
        assert _SAID[fault] in text
        assert os.listdir(runtime_dir) == []
    finally:
        process.kill()
        process.wait()
