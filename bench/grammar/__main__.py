"""python -m bench.grammar maskbench --data DIR | processes | ttft | offline"""

import argparse
from pathlib import Path

from radix_runtime.hub import DEMO_MODEL_DIR

from . import maskbench, processes, requests


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
    mode.set_defaults(run=maskbench.run)
    mode = modes.add_parser("processes", help="what they add to the library's work")
    mode.add_argument("--tokenizer", default=str(DEMO_MODEL_DIR), help="folder of a tokenizer")
    mode.add_argument("--rows", type=int, default=64, help="constrained answers")
    mode.add_argument("--threads", type=int, default=1, help="that compute masks")
    mode.add_argument("--compiled", type=int, default=100, help="schemas for a verdict")
    mode.add_argument("--schemas", type=int, default=1000, help="schemas to cache")
    mode.set_defaults(run=processes.run)
    mode = modes.add_parser("ttft", help="what a schema adds to the first token over HTTP")
    mode.add_argument("--requests", type=int, default=100, help="of each kind")
    mode.add_argument("flags", nargs="*", help="flags of `radix serve`, behind --")
    mode.set_defaults(run=requests.first_token)
    mode = modes.add_parser("offline", help="throughput with a schema of 30 fields and without")
    mode.add_argument("--model-path", help="the demo model if left out")
    mode.add_argument("--dtype", default="auto")
    mode.add_argument("--requests", type=int, default=64)
    mode.add_argument("--rounds", type=int, default=3)
    mode.set_defaults(run=requests.throughput)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
