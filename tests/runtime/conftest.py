"""Fixtures of the runtime's tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from radix_runtime.cli import main
from tests.runtime.api_stack import Stack
from tests.runtime.command import Run

# httpx gives up after five seconds, in which a busy machine may not answer.
for _phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, 60.0)


@pytest.fixture(autouse=True)
def _poisoned_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the loader takes back becomes NaN: no weight may lie there any more."""
    module = sys.modules.get("radix_runtime.models.loaded_parameter")
    if module is None:  # no test of this file loads a model here
        return
    byte = sys.modules["torch"].uint8
    give_back = module.Staging.give_back

    def poisoned(staging: Any, memory: Any) -> None:
        memory.view(-1).view(byte).fill_(0xFF)
        give_back(staging, memory)

    monkeypatch.setattr(module.Staging, "give_back", poisoned)


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command `radix` in this process, which has loaded torch."""
    # It would keep a stream that is captured for one test only.
    monkeypatch.setattr("radix_runtime.cli.flags.setup_logging", lambda *_: None)

    def run_command(*argv: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = main(argv)
        out, error = capfd.readouterr()
        return subprocess.CompletedProcess(argv, returncode=code, stdout=out, stderr=error)

    return run_command


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A served fake engine, one a test file."""
    with Stack() as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    """A client of `stack`, which must be at rest after the test."""
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client
    stack.check_idle()


@pytest.fixture
def slow() -> Iterator[Stack]:
    """An engine whose steps take 20 ms, for a test that acts while requests run."""
    with Stack(delay=0.02, pages=256) as stack:
        yield stack
        stack.check_idle()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Of the models in family_models.py (`Checkpoints` there); each is made once."""
    # Only here: they load transformers.
    from tests.runtime.family_models import random_model
    from tests.runtime.tiny_models import save

    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            model = random_model(name)
            made[name] = save(model, tmp_path_factory.mktemp(name)), model
        return made[name]

    return make
