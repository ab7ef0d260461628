"""python -m bench.grammar maskbench --data DIR"""

import argparse
from pathlib import Path

from radix_runtime.hub import DEMO_MODEL_DIR

from . import maskbench


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.grammar", description=__doc__)
    modes = parser.add_subparsers(required=True)
    mode = modes.add_parser("maskbench", help="schemas of guidance-ai/jsonschemabench")
    mode.add_argument("--data", type=Path, required=True, help="its folder of JSON files")
    mode.add_argument("--tokenizer", default=str(DEMO_MODEL_DIR), help="folder of a tokenizer")
    mode.add_argument("--every", type=int, default=1, help="take each n-th file")
    mode.add_argument("--jobs", type=int, default=2, help="processes")
    mode.add_argument("--backend", default="llguidance", help="a registered grammar backend")
    mode.add_argument("--refused", action="store_true", help="list the reasons of refusals")
    maskbench.run(parser.parse_args())


if __name__ == "__main__":
    main()
