"""Workers of the CPU pool: bound to CPUs of their own where asked and where no other process has
taken them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress

import pytest

from tests.child import IMPORT_PATH
from tests.marks import needs_cpu_library

CPUS = sorted(os.sched_getaffinity(0))

pytestmark = [
    needs_cpu_library,
    pytest.mark.skipif(len(CPUS) < 2, reason="one CPU"),
    pytest.mark.serial,  # the claims are the machine's
]

# Prints the CPUs that each thread of the pool may run on.
CHILD = """
import os, sys
import torch
import radix_kernels as rk
x = torch.zeros(4096, 2048)
before = set(os.listdir("/proc/self/task"))  # torch's threads too
for pin in map(int, sys.argv[1:]):
    rk.set_num_threads(2, pin=bool(pin))
    rk.silu_and_mul(x)
    workers = set(os.listdir("/proc/self/task")) - before
    print([sorted(os.sched_getaffinity(int(worker))) for worker in workers])
"""


def run(*pins: int) -> list[list[list[int]]]:
    command = [sys.executable, "-c", CHILD, *map(str, pins)]
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    return [eval(line) for line in done.stdout.splitlines()]


def claim(cpu: int) -> socket.socket:
    """As another engine would; OSError when one has."""
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claimed.bind(f"\0radix-kernels-cpu-{cpu}")
    except OSError:
        claimed.close()
        raise
    return claimed


def test_a_bound_worker_has_a_cpu_and_gives_it_back() -> None:
    try:
        for cpu in CPUS:
            claim(cpu).close()
    except OSError:
        pytest.skip("another engine on this machine has claimed CPUs")
    bound, free, again = run(1, 0, 1)
    assert bound == again == [[CPUS[1]]]  # the first is the caller's
    assert free == [CPUS]
    for cpu in CPUS:
        claim(cpu).close()


def test_nobody_is_bound_where_others_have_taken_the_cpus() -> None:
    with ExitStack() as others:
        for cpu in CPUS[1:]:
            with suppress(OSError):  # a real engine has it: as well
                others.enter_context(claim(cpu))
        assert run(1) == [[CPUS]]


@pytest.mark.skipif(len(CPUS) < 3, reason="two CPUs")
def test_a_second_engine_takes_other_cpus() -> None:
    with ExitStack() as others:
        try:
            others.enter_context(claim(CPUS[1]))
        except OSError:
            pytest.skip("another engine on this machine has claimed CPUs")
        assert run(1) == [[[CPUS[2]]]]
