"""How this program starts its other processes."""

import os
import signal
import subprocess
import sys
from typing import Any

DUMP_SIGNAL = signal.SIGUSR1  # prints the stacks of all threads

# Neither `-m` nor a plain `-c` would do: both look for modules in the current directory first,
# which may be a downloaded model's, and PYTHONSAFEPATH is unknown to Python 3.10.
_START = "; ".join(
    [
        "import sys",
        "sys.path[:] = [path for path in sys.path if path]",
        "import faulthandler, importlib",
        "faulthandler.enable()",
        f"faulthandler.register({DUMP_SIGNAL:d})",
        "sys.exit(importlib.import_module(sys.argv[1]).main())",
    ]
)


def start_process(module: str, *name: str, **options: Any) -> subprocess.Popen[bytes]:
    """Runs `main()` of a module in a new process, which looks for modules where this one does. The
    process list shows `name`; `options` are Popen's. Standard input is a pipe."""
    environment = dict(os.environ)
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", _START, module, *name],
        stdin=subprocess.PIPE,
        env=environment,
        **options,
    )
