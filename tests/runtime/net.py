"""Links between processes, all of them in one process."""

from __future__ import annotations

import secrets
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from radix_runtime.messages import Generate, pack_ids
from radix_runtime.processes import ipc
from radix_runtime.processes.roles import Topology, serving_roles
from radix_runtime.sampling_params import SamplingParams

TOKEN = secrets.token_bytes(ipc.TOKEN_BYTES)
API = "api/0"
SCHEDULER = "scheduler/0"
DETOKENIZER = "detokenizer/0"


class Net:
    """The links of some processes, in one directory. All that it made is closed with it."""

    def __init__(self, directory: Path, api_processes: int) -> None:
        self.directory = directory
        self.topology = Topology(serving_roles(api_processes))
        self.generations: dict[str, int] = {}
        self.open: list[ipc.Receiver | ipc.Sender] = []

    def node(self, process: str, token: bytes = TOKEN) -> ipc.Node:
        return ipc.Node(
            process=process,
            topology=self.topology,
            directory=self.directory,
            token=token,
            generations=dict(self.generations),
        )

    def receiver(self, process: str, sender: ipc.Sender | None = None) -> ipc.Receiver:
        """`sender`: of the same process."""
        follow = None if sender is None else sender.follow
        receiver = ipc.Receiver(self.node(process), on_change=follow)
        self.open.append(receiver)
        return receiver

    def sender(self, process: str, token: bytes = TOKEN) -> ipc.Sender:
        sender = ipc.Sender(self.node(process, token))
        self.open.append(sender)
        return sender

    def frame(self, sender: str, sequence: int, body: bytes) -> bytes:
        """A frame of processes that were never restarted."""
        number = self.topology.everybody().index(sender)
        return struct.pack("<32sHIIQ", TOKEN, number, 0, 0, sequence) + body

    def raw(self, target: str) -> zmq.Socket[bytes]:
        socket = zmq.Context.instance().socket(zmq.PUSH)
        socket.linger = 0
        socket.connect(ipc.endpoint(self.directory, target))
        return socket


@contextmanager
def open_net(api_processes: int = 1) -> Iterator[Net]:
    """In a directory of its own."""
    directory = Path(tempfile.mkdtemp(prefix="radix-test-"))
    yield Net(directory, api_processes)
    zmq.Context.instance().destroy(linger=0)
    shutil.rmtree(directory)


def generate(i: int, n: int = 3) -> Generate:
    sampling = SamplingParams(stop=["é"], seed=i)
    return Generate(rid=f"r{i}", input_ids=pack_ids(range(n)), sampling=sampling)


def take(receiver: ipc.Receiver, count: int) -> list[object]:
    got: list[object] = []
    while len(got) < count:
        assert receiver.wait(5.0), f"only {len(got)} of {count} messages came"
        got += receiver.receive()
    return got
