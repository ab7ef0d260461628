"""An engine behind HTTP: its server in a process, and loads from `radix bench serve`.

The model's folder gets the tokenizer of the embedded demo model with a word more for each further
id of its vocabulary: every token has text, without which a stream has no event for it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radix_runtime.hub import DEMO_MODEL_DIR

from .contender import Arm, EngineSizes
from .process import ERROR_BYTES, ROOT, Child, Failed
from .stages import Figures
from .vllm_weights import LOAD_FORMAT, python_path, write_metadata

_CLIENTS = 4
_VOCABULARY = 1000  # ids of prompts: every tokenizer has as many
_RATE_SECONDS = 30.0  # how long requests come at a rate
_POLL = 0.2
_SPACE = "\u0120"  # as byte-level vocabularies write it
_RADIX = {
    "max_rows": "max-running-requests",
    "chunk": "chunked-prefill-size",
    "context": "context-length",
    "memory_share": "mem-fraction-static",
    "ranks": "tensor-parallel-size",
}
_VLLM = {
    "max_rows": "max-num-seqs",
    "chunk": "max-num-batched-tokens",
    "context": "max-model-len",
    "memory_share": "gpu-memory-utilization",
    "ranks": "tensor-parallel-size",
}


@dataclass(frozen=True)
class Load:
    """Requests to a server. `argv` are flags of `radix bench serve`; with `of_peak` they come at
    that share of the rate at which the load named `peak` was answered."""

    name: str
    limit: float
    argv: tuple[str, ...]
    of_peak: float = 0.0
    peak: str = ""


def table_loads(workload: Path, conversations: Path) -> list[Load]:
    """The rows of the speed table that are measured over HTTP."""
    lengths = ("--workload", str(conversations))
    objectives = ("--slo", "ttft:500,itl:30")
    mixed = ("--input-len", "100:1024", "--output-len", "100:300", "--num-prompts", "400")
    return [
        Load(name="serve offline", limit=90, argv=("--workload", str(workload))),
        Load(name="serve 20/s", limit=60, argv=(*mixed, "--request-rate", "20")),
        Load(name="serve ShareGPT", limit=120, argv=lengths),
        *(
            Load(
                name=f"serve ShareGPT {share:.0%}",
                limit=180,
                argv=(*lengths, *objectives),
                of_peak=share,
                peak="serve ShareGPT",
            )
            for share in (0.6, 0.8, 0.95)
        ),
    ]


class ServerProcess(Child):
    """A server of an arm, in a session of its own so that its processes end with it."""

    def __init__(self, arm: Arm, folder: Path, sizes: EngineSizes) -> None:
        super().__init__()
        self._temporary = tempfile.TemporaryDirectory()
        model = Path(self._temporary.name) / folder.name
        shutil.copytree(folder, model)
        config = json.loads((folder / "config.json").read_text())
        write_tokenizer(model, config["vocab_size"])
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if arm.engine == "vllm":
            metadata = Path(self._temporary.name) / "metadata"
            metadata.mkdir()
            write_metadata(metadata)
            environment["PYTHONPATH"] = python_path(metadata)
        self._vocabulary = min(_VOCABULARY, config["vocab_size"])
        self._port = _free_port()
        self._ready = "/ready" if arm.engine == "radix" else "/health"
        self._rates: dict[str, float] = {}
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [*_command(arm, model, sizes), "--port", str(self._port)],
            stdout=self._errors,
            stderr=self._errors,
            cwd=ROOT,
            start_new_session=True,
            env=environment,
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Of the server's first process."""
        return self._process.pid

    def facts(self, limit: float) -> Figures:
        """How long it took until requests were admitted. Raises Failed."""
        while not self._is_ready():
            if self._process.poll() is not None:
                raise Failed(self._end())
            if time.monotonic() - self._started > limit:
                raise Failed(f"more than {limit:.0f} s; {self._end()}")
            time.sleep(_POLL)
        return {"first_token_s": time.monotonic() - self._started}

    def run(self, load: Load) -> Figures:
        """The figures of `radix bench serve`, or its `error`. Raises Failed when the server has
        died."""
        file = Path(self._temporary.name) / "figures.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "radix_runtime.cli", "bench", "serve", "--url", self.url]
        options = ["--clients", str(_CLIENTS), "--vocab-size", str(self._vocabulary)]
        argv = [*command, *options, *load.argv, *self._rate(load), "--json", str(file)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=load.limit)
        except subprocess.TimeoutExpired:
            return {"error": f"more than {load.limit:.0f} s"}
        if self._process.poll() is not None:
            raise Failed(self._end())
        if not file.exists():
            return {"error": done.stderr[-ERROR_BYTES:]}
        found: dict[str, Any] = json.loads(file.read_text())
        self._rates[load.name] = found.get("request_throughput", 0.0)
        if found["failed"]:
            found["error"] = f"{found['failed']} requests failed: {found['errors']}"
        return found

    def close(self) -> None:
        """Ends it, kindly for some seconds."""
        self._process.terminate()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        self._temporary.cleanup()

    def _rate(self, load: Load) -> list[str]:
        if not load.of_peak:
            return []
        rate = load.of_peak * self._rates.get(load.peak, 0.0)
        if rate == 0.0:
            raise Failed(f"the rate of {load.peak!r} is not known")
        count = max(1, round(rate * _RATE_SECONDS))
        return ["--request-rate", f"{rate:.3f}", "--num-prompts", str(count)]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self._ready}", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of so many tokens, each with a text of its own."""
    shutil.copy(DEMO_MODEL_DIR / "tokenizer_config.json", folder)
    tokenizer = json.loads((DEMO_MODEL_DIR / "tokenizer.json").read_text())
    model = tokenizer["model"]
    vocabulary = {text: number for text, number in model["vocab"].items() if number < vocab_size}
    for number in range(len(vocabulary), vocab_size):
        vocabulary[f"{_SPACE}w{number}"] = number
    model["vocab"] = vocabulary
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in vocabulary]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _command(arm: Arm, model: Path, sizes: EngineSizes) -> list[str]:
    if arm.engine == "radix":
        command = [sys.executable, "-m", "radix_runtime.cli", "serve", str(model)]
        names = _RADIX
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        names = _VLLM
    load_format = "dummy" if arm.engine == "radix" else LOAD_FORMAT
    flags: dict[str, Any] = {"load-format": load_format}
    flags |= {flag: getattr(sizes, field) for field, flag in names.items()}
    flags |= {field.replace("_", "-"): value for field, value in arm.settings.items()}
    for flag, value in flags.items():
        if value is True:
            command.append(f"--{flag}")
        elif isinstance(value, list):
            command += [f"--{flag}", *map(str, value)]
        elif value is not False:
            command += [f"--{flag}", str(value)]
    return command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
