"""The process of an arm as its parent sees it: asked stage by stage, ended when it is too slow."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .contender import Arm, EngineSizes
from .stages import Figures, Stage

ROOT = Path(__file__).resolve().parents[2]
ERROR_BYTES = 3000  # of the end of standard error that a failure shows


class Failed(Exception):
    """The process has ended, or was ended because it took too long."""


class Child:
    """A process with a session of its own, so that its own children end with it. A subclass starts
    `_process` with `_errors` as its standard error."""

    _process: subprocess.Popen[Any]

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()

    def _end(self) -> str:
        """Why the process has ended: its status and the end of its standard error."""
        self.kill()
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - ERROR_BYTES))
        text = self._errors.read().decode(errors="replace").strip()
        return f"ended with {self._process.returncode}: {text}"

    def kill(self) -> None:
        """Ends the process and what it has started, at once."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


class ArmProcess(Child):
    """Asked stage by stage over its standard input and output."""

    def __init__(self, arm: Arm, folder: Path, sizes: EngineSizes) -> None:
        order = {
            "arm": asdict(arm),
            "folder": str(folder),
            "sizes": asdict(sizes),
            "started": time.time(),
        }
        super().__init__()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu_runtime.worker", json.dumps(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def facts(self, limit: float) -> Figures:
        """What the engine says when it is loaded. Raises Failed."""
        return self._answer(limit)

    def run(self, stage: Stage) -> Figures:
        """The figures of a stage, or its `error`. Raises Failed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(stage)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._end()) from None
        return self._answer(stage.limit)

    def close(self) -> None:
        """Ends the process, kindly for some seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=15)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, limit: float) -> Figures:
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            self.kill()
            raise Failed(f"more than {limit:.0f} s") from None
        if not line:
            raise Failed(self._end())
        answer: dict[str, Any] = json.loads(line)
        return answer
