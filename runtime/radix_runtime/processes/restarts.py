"""The restart policy: how often a process may die, and the notices that its peers get."""

import time
from collections import defaultdict, deque

from ..messages import ProcessDown, ProcessUp
from .ipc import Announcer, LinkError, Node, ProcessChange

MAX_DEATHS = 5  # a process that dies so often within DEATH_WINDOW is given up
DEATH_WINDOW = 60.0  # seconds


class Restarts:
    """Counts the deaths of restartable processes and notifies their peers. `generations` is the
    number of restarts of each, shared with `node`, the supervisor's. Both methods raise LinkError
    if a peer that is not restartable takes no messages."""

    def __init__(self, node: Node, generations: dict[str, int]) -> None:
        self.generations = generations
        self._topology = node.topology
        self._announcer = Announcer(node)
        self._deaths: defaultdict[str, deque[float]] = defaultdict(deque)

    def died(self, process: str, listeners: set[str]) -> bool:
        """Counts a death and sends ProcessDown to those peers that are in `listeners`. Whether the
        process is to be restarted, as its next generation."""
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
        """A new generation is ready: sends ProcessUp to those peers that are in `listeners`, and
        the same about restarted peers to the new one: they may have changed while it started."""
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
