"""Runs every part for its share of the time and prints the tables; exit status 1 if a promise of
docs/serving.md did not hold."""

from __future__ import annotations

import argparse
import sys

from tests.torture.fuzz import fuzz
from tests.torture.kills import kills, signals, stops
from tests.torture.neighbours import neighbours
from tests.torture.storm import storm


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="altogether, about")
    parser.add_argument(
        "--only",
        choices=("kills", "stops", "signals", "storm", "fuzz", "neighbours"),
        help="one part alone",
    )
    flags = parser.parse_args()
    parts = {
        "kills": (kills, 0.40),
        "stops": (stops, 0.10),
        "signals": (signals, 0.15),
        "storm": (storm, 0.15),
        "fuzz": (fuzz, 0.10),
        "neighbours": (neighbours, 0.10),
    }
    broken: list[str] = []
    for name, (part, share) in parts.items():
        if flags.only not in (None, name):
            continue
        seconds = 60 * flags.minutes * (share if flags.only is None else 1.0)
        print(f"\n### {name}\n", flush=True)
        broken += part(seconds)
    print("\n" + "\n".join(broken or ["every promise held"]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
