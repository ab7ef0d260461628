"""What a rank does for an EngineCommand, and how it answers."""

import logging

import msgspec

from ..errors import EngineCommandError
from ..step_plan import EngineCommand, Profile
from .model_runner import ModelRunner
from .profiler import Profiler

logger = logging.getLogger(__name__)


class CommandReply(msgspec.Struct, forbid_unknown_fields=True):
    """A rank's answer to a command. `error` is None for one that succeeded."""

    rank: int
    text: str = ""
    error: str | None = None


def execute(runner: ModelRunner, command: EngineCommand, rank: int) -> CommandReply:
    """Runs `command` on this rank. What fails is in the reply: the rank goes on serving."""
    try:
        return CommandReply(rank=rank, text=_execute(runner, command))
    except Exception as error:
        logger.warning("%r failed", command, exc_info=True)
        return CommandReply(rank=rank, error=f"{type(error).__name__}: {error}")


def _execute(runner: ModelRunner, command: EngineCommand) -> str:
    match command:
        case Profile():
            return _profile(runner.profiler, command)


def _profile(profiler: Profiler, command: Profile) -> str:
    if command.action == "start":
        return str(profiler.start(command.directory))
    return str(profiler.stop())


def texts(replies: list[CommandReply]) -> list[str]:
    """The replies' texts, in the order of ranks. Raises the error of the first rank that failed."""
    for reply in replies:
        if reply.error is not None:
            raise EngineCommandError(reply.rank, reply.error)
    return [reply.text for reply in replies]
