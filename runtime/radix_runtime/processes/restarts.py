"""Processes that are started again when they die: how often, and what their peers are told."""

import time
from collections import defaultdict, deque

from ..messages import ProcessDown, ProcessUp
from .ipc import Announcer, LinkError, Node, ProcessChange

MAX_DEATHS = 5  # a process that dies so often within DEATH_WINDOW is given up
DEATH_WINDOW = 60.0  # seconds


class Restarts:
    """The deaths of restartable processes. `generations` says how often each was started again; it
    is that of `node`, which is the supervisor's. Methods that tell peers raise LinkError."""

    def __init__(self, node: Node, generations: dict[str, int]) -> None:
        self.generations = generations
        self._topology = node.topology
        self._announcer = Announcer(node)
        self._deaths: defaultdict[str, deque[float]] = defaultdict(deque)

    def died(self, process: str, listeners: set[str]) -> bool:
        """Counts a death and tells those of the peers that listen. Whether the process is to be
        started again, as a new generation."""
        deaths = self._deaths[process]
        deaths.append(time.monotonic())
        while deaths[0] < deaths[-1] - DEATH_WINDOW:
            deaths.popleft()
        gone = len(deaths) >= MAX_DEATHS
        if not gone:
            self.generations[process] = self.generations.get(process, 0) + 1
        self._announcer.forget(process)
        for peer in self._topology.peers(process):
            if peer in listeners:
                self._tell(peer, ProcessDown(process, gone=gone))
        return not gone

    def started(self, process: str, listeners: set[str]) -> None:
        """A new generation is ready: tells those of the peers that listen, and tells it which of
        them are not the first of their kind, since that may have changed while it started."""
        news = ProcessUp(process, self.generations[process])
        for peer in self._topology.peers(process):
            if peer not in listeners:
                continue
            self._tell(peer, news)
            if peer in self.generations:
                self._tell(process, ProcessUp(peer, self.generations[peer]))

    def _tell(self, target: str, change: ProcessChange) -> None:
        try:
            self._announcer.tell(target, change)
        except LinkError:
            if not self._topology.role(target).restartable:
                raise
            # It has just died too: its next generation learns all of this at its start.
