"""The command `radix`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import EXIT_CONFIG, EXIT_INTERNAL, ConfigError, EngineDeadError, RequestError
from .flags import Parser

# A command's module is imported when it is used: `serve` must not load torch, `generate` does.
COMMANDS = {
    "serve": "serve a model over HTTP (OpenAI-compatible)",
    "chat": "talk to a model in the terminal",
    "generate": "complete a file of prompts",
    "bench": "measure throughput and latency, offline or of a server",
    "doctor": "show versions and hardware, and what is wrong with them",
    "version": "print the version",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the process's exit code. 78: the configuration cannot work."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if name in ("version", "--version"):
            print(f"radix {__version__}")
            return 0
        if name not in COMMANDS:
            if name not in ("-h", "--help"):
                raise ConfigError(f"unknown command {name!r}; there are {', '.join(COMMANDS)}")
            print(
                "usage: radix COMMAND ...\n",
                *(f"  {name:<10}{help}" for name, help in COMMANDS.items()),
                sep="\n",
            )
            return 0
        command = import_module(f"{__name__}.{name}")
        parser = Parser(prog=f"radix {name}", description=COMMANDS[name])
        command.add_arguments(parser)
        return int(command.run(parser.parse_args(arguments)))
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        sys.stderr.close()
        return 0
    except (
        ConfigError,
        EngineDeadError,
        RequestError,
        OSError,
    ) as error:  # OSError: a file that cannot be written
        print(f"radix: error: {error}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_INTERNAL
    except KeyboardInterrupt:
        return 130
