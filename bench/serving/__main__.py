"""`python -m bench.serving COMMAND ...`: the commands have files of their names."""

from __future__ import annotations

import sys


def main() -> None:
    from . import cpu, greedy, load, one_call, perplexity, profile

    commands = {
        "cpu": cpu.main,
        "greedy": greedy.main,
        "load": load.main,
        "one_call": one_call.main,
        "perplexity": perplexity.main,
        "profile": profile.main,
    }
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(f"usage: python -m bench.serving {'|'.join(commands)} ... (--help)")
    commands[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    main()
