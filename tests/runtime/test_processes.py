"""Every process of ours looks for modules where its parent does, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from radix_runtime.config import ServerArgs
from radix_runtime.engine.executor import TPExecutor
from radix_runtime.processes.child import Launch
from radix_runtime.processes.child_process import ChildProcess
from radix_runtime.processes.heartbeat import Heartbeats
from radix_runtime.processes.roles import ROLES, Topology
from radix_runtime.spawn import DUMP_SIGNAL, start_process

# A few of the modules that our processes import, as a downloaded folder may hold them.
TRAPS = ("uvicorn", "queue", "random", "faulthandler", "importlib", "msgspec", "torch")


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory has our dependencies' names in it."""
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text(
            "import pathlib\npathlib.Path('SPRUNG').touch()\nraise SystemExit(99)\n"
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


@pytest.mark.parametrize("module", ["processes.child", "engine.worker"])
def test_the_current_directory_is_not_searched(trapped: Path, module: str) -> None:
    process = start_process(f"radix_runtime.{module}", title="radix: test", stderr=subprocess.PIPE)
    # No line on its standard input: it ends, or trips over that.
    _, log = process.communicate(timeout=60)
    assert not (trapped / "SPRUNG").exists(), log
    assert process.returncode not in (0, 99) and b"No module named" not in log


@pytest.mark.parametrize("role", ["api", "detokenizer", "scheduler"])
def test_the_supervisor_starts_its_children_so(trapped: Path, role: str) -> None:
    heartbeats = Heartbeats(Topology(ROLES).everybody())
    args = ServerArgs(model_path="/no/such/model")
    child = ChildProcess(
        Launch(
            process=f"{role}/0",
            roles=list(ROLES),
            args=args,
            directory=str(trapped),
            token=b"token",
            parent=os.getpid(),
            heartbeat_fd=heartbeats.descriptor,
        ),
        label=role,
    )
    try:
        report = os.read(child.status, 1 << 16)
    finally:
        child.close()
    assert b"/no/such/model" in report, "it has come to its own work"
    assert not (trapped / "SPRUNG").exists()


def test_the_executor_starts_its_workers_so(trapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(
        "radix_runtime.engine.worker_group.start_process",
        lambda module, **_: started.append(module),
    )
    with pytest.raises((AttributeError, AssertionError)):  # there is no process behind it
        TPExecutor(
            args=ServerArgs(tp_size=2, device="cpu"),
            config=None,  # type: ignore[arg-type]
            on_death=lambda reason: None,
        )
    assert started == ["radix_runtime.engine.worker"]


def test_an_interrupt_while_a_process_imports_is_not_its_own(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole group. A rank that was still importing died of it, with a
    traceback, whatever the program made of it."""
    (tmp_path / "early.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\ndef main():\n    return 7\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        process = start_process("early", title="radix: early", stderr=subprocess.PIPE)
    assert process.communicate()[1] == b"" and process.returncode == 7


def test_stacks_can_be_asked_for_from_the_first_import_on(tmp_path: Path) -> None:
    """A worker that hangs where no handler of its own was ever set."""
    (tmp_path / "sleeper.py").write_text(
        "import time\ndef main():\n    print('up', flush=True)\n    time.sleep(60)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        process = start_process(
            "sleeper", title="radix: sleeper", stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    assert process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline() == b"up\n"
        assert Path(f"/proc/{process.pid}/cmdline").read_bytes() == b"radix: sleeper\0"
        assert Path(f"/proc/{process.pid}/comm").read_text() == "radix: sleeper\n"
        process.send_signal(DUMP_SIGNAL)
        assert b"most recent call first" in process.stderr.readline()
        time.sleep(0.1)
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
