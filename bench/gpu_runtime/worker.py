"""The process of one arm: loads the engine, then runs the stages that it reads, one a line of JSON.

Answers go to what was standard output when it began; what an engine prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from .contender import Arm, EngineSizes, load
from .stages import Stage


def main() -> None:
    order = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(figures: dict[str, Any]) -> None:
        answers.write(json.dumps(figures) + "\n")
        answers.flush()

    begun = time.time()
    model = load(Arm(**order["arm"]), Path(order["folder"]), EngineSizes(**order["sizes"]))
    loaded = time.time()
    model.generate([[1, 2, 3]], [1], 0.0)
    now = time.time()
    answer(
        {
            "version": model.version,
            "python_s": begun - order["started"],
            "engine_s": loaded - begun,
            "first_token_s": now - order["started"],
            "memory_gib": model.memory(),
            "parts_gib": model.parts(),
        }
    )
    for line in sys.stdin:
        stage = Stage(**json.loads(line))
        try:
            answer({**stage.run(model), "memory_gib": model.memory()})
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
