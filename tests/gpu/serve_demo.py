"""`radix serve` on a device as a user meets it: the openai client, a stream, a burst, SIGTERM.

python -m tests.gpu.serve_demo --device cuda
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai

START_LIMIT = 180.0
STOP_LIMIT = 5.0


def wait_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """The server's URL; ends the program if it dies or is not ready in time."""
    deadline = time.monotonic() + START_LIMIT
    while True:
        match = re.search(r"ready: (http://\S+)", log.read_text())
        if match:
            return match[1]
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"radix serve did not come up (exit {server.poll()})\n{log.read_text()}")
        time.sleep(0.1)


def talk(url: str) -> None:
    """One answer, a stream and a burst of sums, each checked."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60)
    model = client.models.list().data[0].id

    def ask(text: str, **more: object) -> str:
        messages = [{"role": "user", "content": text}]
        answer = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=32, **more
        )  # type: ignore[call-overload]
        return str(answer.choices[0].message.content)

    begin = time.monotonic()
    answer = ask("What is 17 + 25?")
    print(f"What is 17 + 25? -> {answer!r} in {1000 * (time.monotonic() - begin):.0f} ms")
    assert "42" in answer, answer
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a short story."}],
        temperature=0.8,
        seed=7,
        max_tokens=100,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 10, pieces
    sums = [(a, b) for a in range(11, 19) for b in range(21, 29)]
    begin = time.monotonic()
    with ThreadPoolExecutor(len(sums)) as pool:
        asked = [pool.submit(ask, f"What is {a} + {b}?") for a, b in sums]
        texts = [each.result() for each in asked]
    right = sum(1 for (a, b), text in zip(sums, texts, strict=True) if str(a + b) in text)
    print(f"{right} of {len(sums)} sums right at once in {time.monotonic() - begin:.2f} s")
    assert right >= 0.9 * len(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    log = Path(tempfile.mkdtemp()) / "serve.log"
    command = [sys.executable, "-m", "radix_runtime.cli", "serve", "--port", "0"]
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--device", args.device], stdout=out, stderr=subprocess.STDOUT
        )
    begin = time.monotonic()
    try:
        url = wait_ready(server, log)
        print(f"ready after {time.monotonic() - begin:.1f} s")
        talk(url)
        server.send_signal(signal.SIGTERM)
        code = server.wait(STOP_LIMIT)
        assert code == 0, f"exit {code}"
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait(20)
        print(log.read_text()[-6000:])
    print("served, and stopped by SIGTERM with exit 0")


if __name__ == "__main__":
    main()
