"""`python -m bench.serving cpu|greedy|profile ...`: see the files of these names."""

from __future__ import annotations

import sys


def main() -> None:
    from . import cpu, greedy, profile

    commands = {"cpu": cpu.main, "greedy": greedy.main, "profile": profile.main}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(f"usage: python -m bench.serving {'|'.join(commands)} ... (--help)")
    commands[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    main()
