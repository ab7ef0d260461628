"""`radix serve` as a user meets it: start, answers, mistakes, silence when idle."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from radix_runtime.hub import DEMO_MODEL_DIR
from tests.runtime.command import radix
from tests.runtime.family_models import random_model
from tests.runtime.server_process import Server, environment
from tests.runtime.tiny_models import save

MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--disable-overlap-schedule", "--check-invariants", "step") as server:
        yield server
        server.process.terminate()
        assert server.wait_exit(30) == 0
        server.assert_nothing_left()


def test_the_start_says_what_is_served(server: Server) -> None:
    """The settings that were given, the model, the machine, the URL, and a call that works."""
    log = server.log()
    assert re.search(r"radix: settings: .*--disable-overlap-schedule", log)
    assert "--page-size" not in log  # a default
    assert re.search(r"serving radix-demo: Qwen3ForCausalLM, 5\.\d M parameters, bfloat16", log)
    assert re.search(r"on cpu \(\w+, 1 threads\), attention paged, weights 1\d\.?\d* MB, ", log)
    assert "= 32768 tokens in pages of 16, context 2048" in log and "WARNING" not in log
    command = re.search(r"try: (curl .*)", log)
    assert command is not None
    url, _, header, _, body = shlex.split(command[1])[1:6]
    answer = httpx.post(url, content=body, headers=[header.split(": ", 1)])
    assert answer.status_code == 200 and answer.json()["model"] == "radix-demo"


def test_settings_are_told_as_they_were_resolved(server: Server) -> None:
    info = httpx.get(f"{server.url}/server_info").json()
    wanted = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "device": "cpu",
        "num_threads": 1,
        "attention_backend": "paged",
        "max_running_requests": 64,
        "chunked_prefill_size": 512,
        "context_length": 2048,
    }
    assert {name: info[name] for name in wanted} == wanted
    assert "--dtype" not in info["launch_command"]
    explained = radix("serve", "--explain-config", "--num-threads", "1").stdout
    shown = dict(line[2:].split() for line in explained.splitlines())
    flags = {f"--{name.replace('_', '-')}": str(value) for name, value in wanted.items()}
    assert {flag: shown[flag] for flag in flags} == flags


def test_prompt_logprobs_of_a_model(server: Server) -> None:
    """The ranks are those of the values, on both routes."""
    completion = {"prompt": "What is 17 + 25?", "max_tokens": 0, "prompt_logprobs": 20}
    answer = httpx.post(f"{server.url}/v1/completions", json=completion).json()
    chat = {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 20}
    given = httpx.post(f"{server.url}/v1/chat/completions", json=chat).json()
    for entries in (answer["choices"][0]["prompt_logprobs"], given["prompt_logprobs"]):
        assert entries[0] is None and len(entries) > 5
        for entry in entries[1:]:
            own = next(iter(entry.values()))
            likeliest = sorted(entry.values(), key=lambda one: one["rank"])
            values = [one["logprob"] for one in likeliest]
            assert values == sorted(values, reverse=True) and values[0] <= 0
            assert [one["rank"] for one in likeliest[:20]] == list(range(1, 21))
            assert (own["rank"] > 20) == (len(entry) == 21)
        assert any(next(iter(entry.values()))["rank"] == 1 for entry in entries[1:])


def test_openai_client(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    kwargs = {"model": "radix-demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**kwargs)
    text = ""
    reasons = []
    usage = None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**kwargs, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == whole.choices[0].message.content
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason]
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens


def test_a_stop_string_cuts_text_and_usage(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    kwargs = {"model": "radix-demo", "prompt": "Once upon a time", "temperature": 0}
    whole = client.completions.create(**kwargs, max_tokens=40, extra_body={"ignore_eos": True})
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    cut = client.completions.create(
        **kwargs, max_tokens=40, stop=stop, extra_body={"ignore_eos": True}
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 40


def test_the_private_directory_is_private(server: Server) -> None:
    (directory,) = Path(server.runtime_dir).iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {p.name for p in directory.iterdir()} == {
        "api.0.sock",
        "scheduler.0.sock",
        "detokenizer.0.sock",
    }


def test_the_process_list_says_who_is_who(server: Server) -> None:
    titles = [" ".join(process.cmdline()) for process in server.family]
    for title in ("radix: api", "radix: scheduler", "radix: detokenizer"):
        assert titles.count(title) == 1
    assert not any(" -c " in title and "rmtree" not in title for title in titles), titles


def test_light_processes_load_no_torch(server: Server) -> None:
    for role in ("supervisor", "radix: api", "radix: detokenizer"):
        maps = {Path(m.path).name for m in server.find(role).memory_maps()}
        assert not any(name.startswith("libtorch") for name in maps), role
    assert "libtorch_cpu.so" in {
        Path(m.path).name for m in server.find("radix: scheduler").memory_maps()
    }


def without_load(text: str) -> list[str]:
    """The lines of a log, but for those about the load, which come every few seconds."""
    return [line for line in text.splitlines() if "scheduler: running" not in line]


def test_mistakes_of_clients_are_answered_and_not_logged(server: Server) -> None:
    before = without_load(server.log())
    port = int(server.url.rpartition(":")[2])
    upgrade = b"GET /%s HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, close\r\n"
    upgrade += b"upgrade: %s\r\n%s\r\n"
    socket_key = b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    for data, status in (
        (upgrade % (b"v1/realtime", b"websocket", socket_key), b"400"),
        (upgrade % (b"health", b"h2c", b""), b"200"),  # as Java's client offers in every request
        (b"\x16\x03\x01 no HTTP\r\n\r\n", b"400"),
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(data)
            assert connection.makefile("rb").readline().split()[1] == status
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert without_load(server.log()) == before


def test_second_instance_on_the_same_port(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    error = _refused("--port", port)
    assert f"port {port}" in error
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_port_is_taken_before_anything_else_is_done() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "in use" in _refused("/no/such/model", "--port", str(taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["/no/such/model"], "/no/such/model"),
        (["--tp-size", "3"], "--tp-size 3"),
        (["--max-total-tokens", str(10**12)], "--max-total-tokens"),
        (["--port", "70000"], "70000"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--attention-backend", "nonsense"], "nonsense"),
        (["--schedule-policy", "nonsense"], "nonsense"),
        (["--trust-remote-code"], "no code of a model's directory is ever run"),
        (["--chat-template", "/no/such/file"], "chat template"),
        (["--context-length", "100000"], "context"),
        (["--api-key-file", "/no/such/keys"], "key"),
    ],
)
def test_a_mistake_of_the_operator_is_one_line_and_78(flags: list[str], text: str) -> None:
    assert text in _refused("--port", "0", *flags)


def test_a_broken_checkpoint_is_one_line_and_78(tmp_path: Path) -> None:
    for file in DEMO_MODEL_DIR.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "safetensors" in _refused(str(tmp_path), "--port", "0")


@pytest.mark.parametrize("layer", ["mlp.experts.4", "self_attn"])
def test_what_ranks_find_is_one_line_and_78(layer: str, tmp_path: Path) -> None:
    """Of five experts of a width that two ranks do not divide the last is rank 1's alone; of
    attention each rank has a part."""
    save(random_model("qwen3_moe_odd_width"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if f"layers.1.{layer}." in key and "proj" in key)
    tensors[name] = tensors[name].to(torch.int32)
    save_file(tensors, file, metadata={"format": "pt"})
    flags = ["--tp-size", "2", "--num-threads", "2", "--skip-tokenizer-init", "--device", "cpu"]
    said = _refused(str(tmp_path), "--port", "0", *flags)
    assert f"{name} holds int32, expected float32" in said


def _refused(*flags: str) -> str:
    """The one line on which `radix serve` refuses to start."""
    with tempfile.TemporaryDirectory(prefix="rt-") as runtime_dir:
        result = subprocess.run(
            [sys.executable, "-m", "radix_runtime.cli", "serve", "--log-level", "error", *flags],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(runtime_dir),
            check=False,
        )
        assert result.returncode == 78, result.stderr
        errors = [line for line in result.stderr.splitlines() if "Warning" not in line]
        assert len(errors) == 1 and errors[0].startswith("radix: error: "), result.stderr
        deadline = time.monotonic() + 30
        while os.listdir(runtime_dir):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    return errors[0]


def test_not_ready_while_loading_and_a_warning_for_an_open_host() -> None:
    with Server("--host", "0.0.0.0", wait=False) as server:
        server.wait_for("ANYBODY WHO REACHES")
        ports: set[int] = set()
        deadline = time.monotonic() + 60
        while not ports:
            assert time.monotonic() < deadline
            ports = _listening(psutil.Process(server.process.pid))
        (port,) = ports
        answers = set()
        while "ready: http" not in server.log():
            assert time.monotonic() < deadline + 60
            answers.add(httpx.get(f"http://127.0.0.1:{port}/ready", timeout=60).status_code)
        assert answers == {503} or answers == {503, 200}
        server.note_family()


def _listening(supervisor: psutil.Process) -> set[int]:
    """Ports of the instance: the supervisor's at first, the API process's later."""
    ports = set()
    for process in (supervisor, *supervisor.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            found = process.net_connections("tcp")
            ports |= {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}
    return ports


def test_clients_that_leave_are_aborted() -> None:
    with Server() as server:
        body = {"prompt": "abc", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        for _ in range(4):
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        deadline = time.monotonic() + 30
        while _stats(server)["num_running_reqs"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for stream in (True, False):
            short = {**body, "max_tokens": 4, "stream": stream}
            assert httpx.post(f"{server.url}/v1/completions", json=short, timeout=60).is_success


def _stats(server: Server) -> dict[str, float]:
    info = json.loads(httpx.get(f"{server.url}/get_server_info").content)
    stats: dict[str, float] = info["internal_states"][0]
    return stats


def test_a_profile_of_the_running_server(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    with Server("--profile-dir", str(folder)) as server:
        again = httpx.post(f"{server.url}/stop_profile", json={}).json()["error"]
        assert again["code"] == "engine_command_failed" and "not profiling" in again["message"]
        (file,) = httpx.post(f"{server.url}/start_profile", json={}).json()["files"]
        body = {"prompt": "Hello", "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success
        stopped = httpx.post(f"{server.url}/stop_profile", json={}, timeout=60)
        assert stopped.json() == {"success": True, "files": [file]}
    assert Path(file).parent == folder
    assert json.loads(Path(file).read_text())["traceEvents"]
