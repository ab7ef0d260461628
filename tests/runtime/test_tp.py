"""Tensor parallelism over processes: what happens when one of them dies, and who is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from radix_runtime import Engine, SamplingParams, distributed, ops
from radix_runtime.distributed import core_share
from radix_runtime.engine import executor, worker_group
from radix_runtime.errors import ConfigError, EngineDeadError
from tests.child import IMPORT_PATH
from tests.runtime.parity import case, engine
from tests.runtime.rank_rig import use_on_all_ranks

torch.set_num_threads(1)

LIMIT = 20.0  # seconds in which a death must show; the collectives alone would wait for 60


def tp_engine(ranks=2, **changes):
    return engine(case("qwen2_bias").folder, tp_size=ranks, num_threads=2, **changes)


def gone(pid):
    """Dead; a zombie that nobody has reaped counts."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition):
    deadline = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def open_files():
    return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                  if os.path.islink(f"/proc/self/fd/{fd}"))  # fmt: skip


def test_a_killed_worker_ends_a_running_request():
    with tp_engine() as e:
        [pid] = [w.pid for w in e.executor.workers]
        stream = e.stream(
            input_ids=[3, 4, 5], sampling_params=SamplingParams(max_new_tokens=200, ignore_eos=True)
        )
        next(stream)
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(pid {pid}\) was killed by SIGKILL"):
            list(stream)
        assert time.monotonic() - start < LIMIT
        with pytest.raises(EngineDeadError, match="rank 1"):
            e.generate(input_ids=[3])
    assert gone(pid)


def test_a_killed_worker_is_reported_while_idle():
    """The server has no step to fail then; it is told."""
    from radix_runtime.engine.executor import create_executor

    c = case("qwen2_bias")
    with tp_engine() as e:  # for its resolved settings only
        args, config = e.args, e.config
    reasons = []
    executor = create_executor(args, config, reasons.append)
    [pid] = [w.pid for w in executor.workers]
    os.kill(pid, signal.SIGTERM)
    assert wait_until(lambda: reasons)
    assert type(reasons[0]) is EngineDeadError
    assert f"rank 1 (pid {pid}) was killed by SIGTERM" in str(reasons[0])
    executor.close()
    assert len(reasons) == 1 and c.folder.exists()


@pytest.mark.serial
def test_stopped_workers_do_not_keep_the_engine_from_ending(monkeypatch):
    """All of them together no longer than one."""
    monkeypatch.setattr(worker_group, "_EXIT_SECONDS", 4.0)
    monkeypatch.setattr(worker_group, "_STOPPED_LOOKS", 1000)  # or they would be dead before
    e = tp_engine(ranks=4)
    pids = [w.pid for w in e.executor.workers]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    e.shutdown()
    assert time.monotonic() - start < 11 and all(gone(pid) for pid in pids)


def test_a_worker_ends_without_the_interpreters_end(monkeypatch, tmp_path):
    """Which takes half a second with torch: four ranks on two cores were too late for the
    supervisor, and were killed."""
    use_on_all_ranks(["lingers"], monkeypatch, tmp_path)
    e = tp_engine()
    e.shutdown()
    assert [w.returncode for w in e.executor.workers] == [0]


@pytest.mark.serial  # threads and files of this process, which earlier tests may still close
def test_nothing_is_left_after_a_shutdown():
    tp_engine().shutdown()  # what is loaded on first use
    before = open_files()
    threads = threading.active_count()
    e = tp_engine()
    [pid] = [w.pid for w in e.executor.workers]
    e.generate(input_ids=[3, 4], sampling_params={"max_new_tokens": 3})
    e.shutdown()
    assert gone(pid)
    assert open_files() == before and threading.active_count() == threads


_PARENT = """
import sys, threading, time
from radix_runtime import Engine

def main():
    e = Engine(sys.argv[1], tp_size=2, num_threads=2, dtype="float32", max_total_tokens=512)
    print(e.executor.workers[0].pid, flush=True)
    params = {"max_new_tokens": 100, "ignore_eos": True}
    for _ in e.stream(input_ids=[1, 2], sampling_params=params):
        print("token", flush=True)
    time.sleep(60)

if sys.argv[2] == "thread":
    t = threading.Thread(target=main, daemon=True)
    t.start()
    t.join()
else:
    main()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_no_worker_outlives_rank_0(where, tmp_path):
    """Killed in the middle of a stream, whichever thread had built the engine."""
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _PARENT, str(case("qwen2_bias").folder), where],
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": IMPORT_PATH},
    )  # fmt: skip
    pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == b"token\n"
    assert not gone(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: gone(pid))


def test_an_engine_may_be_built_on_a_thread_that_ends():
    """The workers live as long as the process, not as the thread."""
    built = []
    thread = threading.Thread(target=lambda: built.append(tp_engine()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    with built[0] as e:
        output = e.generate(input_ids=[3, 4], sampling_params={"max_new_tokens": 3})
        assert len(output["output_ids"]) >= 1


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ConfigError, match="--tp-size 3 does not divide"):
        Engine(case("qwen2_bias").folder, tp_size=3)


def test_a_worker_that_cannot_load_is_said_at_once(tmp_path):
    """The checkpoint vanishes between the two ranks' reading: here it was never there."""
    c = case("qwen2_bias")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((c.folder / name).read_bytes())
    start = time.monotonic()
    with pytest.raises((ConfigError, EngineDeadError), match="safetensors|rank 1"):
        Engine(tmp_path, tp_size=2, num_threads=2, max_total_tokens=512)
    assert time.monotonic() - start < 30
    with Engine(tmp_path, tp_size=2, num_threads=2, max_total_tokens=512, load_format="dummy") as e:
        assert e.generate(input_ids=[3], sampling_params={"max_new_tokens": 1})["output_ids"]


def test_cores_are_shared_out_disjointly(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 7, 11})
    monkeypatch.setattr(distributed, "_DEFAULT_THREADS", 5)
    assert [core_share(r, 2) for r in range(2)] == [(2, {2, 3}), (2, {5, 7})]
    assert [core_share(r, 2, 3) for r in range(2)] == [(1, {2}), (1, {3})]
    assert core_share(0, 1) == core_share(0, 1, 5) == (5, None)
    assert core_share(0, 6) == core_share(5, 6) == (1, None)
    monkeypatch.setattr(distributed, "_DEFAULT_THREADS", 4)  # a cgroup's limit
    assert core_share(0, 1) == (4, None)
    assert core_share(1, 2) == (2, None)
    assert core_share(0, 1, 5) == (5, None)
    assert not caplog.messages
    assert core_share(0, 1, 99) == (5, None) and core_share(1, 2, 99) == (2, None)
    assert caplog.messages == ["--num-threads 99 is cut to the 5 CPUs that this process may use"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_the_number_of_threads_is_the_kernel_librarys():
    """Which looks at the cgroups (tests/kernel/test_cpu_quota.py): the runtime has no second
    opinion."""
    code = """
import radix_kernels
radix_kernels.set_num_threads(1)  # as under a limit
from radix_runtime.distributed import core_share
radix_kernels.set_num_threads(2)  # as an engine does
print(core_share(0, 1))
"""
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "(1, None)\n"


def test_a_refusal_by_the_kernels_comes_before_ranks_start(monkeypatch):
    def refuse(kind):
        raise ConfigError(f"no kernels for {kind}")

    def start(args):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(ops, "check_device", refuse)
    monkeypatch.setattr(executor, "WorkerGroup", start)
    with pytest.raises(ConfigError, match="no kernels for cpu"):
        tp_engine()


def test_a_group_that_cannot_be_joined_leaves_no_rank(monkeypatch):
    groups = []

    def noted(args):
        groups.append(worker_group.WorkerGroup(args))
        return groups[-1]

    def fails(*args):
        raise OSError("no memory to share")

    monkeypatch.setattr(executor, "WorkerGroup", noted)
    monkeypatch.setattr(executor, "connect", fails)
    with pytest.raises(OSError, match="no memory to share"):
        tp_engine()
    [group] = groups
    assert all(process.returncode is not None for process in group.processes)
