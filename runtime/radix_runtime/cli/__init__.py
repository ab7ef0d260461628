"""The command `radix`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import EXIT_CONFIG, EXIT_INTERNAL, ConfigError, EngineDeadError, RequestError
from ..signals import exits_on_signals
from .flags import Parser

# A command's module is imported when it is used: `serve` must not load torch, `generate` does.
COMMANDS = {
    "serve": "serve a model over HTTP (OpenAI-compatible)",
    "chat": "talk to a model in the terminal",
    "generate": "complete a prompt or a file of prompts",
    "bench": "measure throughput and latency, offline or of a server",
    "doctor": "show versions and hardware, and what is wrong with them",
    "version": "print the version",
}
_INTERRUPTED = 130  # as a shell reports a process that SIGINT has ended


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code of the process; `argv` defaults to sys.argv.

    EXIT_CONFIG where the configuration cannot work, EXIT_INTERNAL where the work failed: both with
    one line on stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        sys.stderr.close()
        return 0
    except ConfigError as error:
        print(f"radix: error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except (EngineDeadError, RequestError, OSError) as error:  # a file that cannot be written
        print(f"radix: error: {error}", file=sys.stderr)
        return EXIT_INTERNAL
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print("usage: radix COMMAND ...\n")
        for command, description in COMMANDS.items():
            print(f"  {command:<10}{description}")
        return 0
    if name in ("version", "--version"):
        print(f"radix {__version__}")
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}; there are {', '.join(COMMANDS)}")
    if name == "serve":  # a server that is stopped while it starts has not failed
        with exits_on_signals():
            return _run_command(name, arguments[1:])
    return _run_command(name, arguments[1:])


def _run_command(name: str, arguments: list[str]) -> int:
    module = import_module(f"{__name__}.{name}")
    parser = Parser(prog=f"radix {name}", description=COMMANDS[name])
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)))
