"""`radix serve` over HTTP as a contender: what it is slower than the engine by is the cost of the
server."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from radix_runtime import __version__
from radix_runtime.cli.client import Client
from radix_runtime.hub import DEMO_MODEL_DIR

from .contender import Serving

_READY = re.compile(r"ready: (http://\S+)")


class Model(Serving):
    """Streams: every token is an event of its own. The demo model's tokenizer stands in for the
    missing one."""

    def __init__(self, folder: Path, weights: str, threads: int) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.vocabulary = min(self.vocabulary, config["vocab_size"])
        options = {
            "--tokenizer": str(DEMO_MODEL_DIR),
            "--device": "cpu",
            "--dtype": "bfloat16",
            "--load-format": "dummy",
            "--port": "0",
            "--num-threads": str(threads),
            "--max-total-tokens": "16384",
            "--max-running-requests": "32",
        }
        if weights != "bf16":
            options["--quantization"] = weights
        command = [sys.executable, "-m", "radix_runtime.cli", "serve", str(folder)]
        for flag, value in options.items():
            command += [flag, value]
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self._url = self._wait_ready()
        self.version = __version__
        self.weight_bytes = 0

    def _wait_ready(self) -> str:
        while self._process.poll() is None:
            if match := _READY.search(Path(self._log.name).read_text()):
                return match[1]
            time.sleep(0.2)
        raise RuntimeError(Path(self._log.name).read_text()[-1000:])

    def generate(self, prompts: list[list[int]], count: int) -> float:
        return asyncio.run(self._stream_all(prompts, count))

    async def _stream_all(self, prompts: list[list[int]], count: int) -> float:
        async with Client(self._url) as client:
            await client.model()  # the connection
            start = time.perf_counter()
            await asyncio.gather(*(self._stream(client, prompt, count) for prompt in prompts))
            return time.perf_counter() - start

    async def _stream(self, client: Client, prompt: list[int], count: int) -> None:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        async for _ in client.chunks("/v1/completions", body):
            pass

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
