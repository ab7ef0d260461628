"""How this program starts its other processes."""

import os
import signal
import subprocess
import sys
from typing import Any

DUMP_SIGNAL = signal.SIGUSR1  # prints the stacks of all threads

# Neither `-m` nor a plain `-c` would do: both look for modules in the current directory first,
# which may be a downloaded model's, and PYTHONSAFEPATH is unknown to Python 3.10.
_START = (
    "import sys; sys.path[:] = filter(None, sys.path); import faulthandler, importlib; faulthandler.enable(); "
    f"faulthandler.register({DUMP_SIGNAL:d}); sys.exit(importlib.import_module(sys.argv[1]).main())"
)


def start_process(module: str, *name: str, **options: Any) -> subprocess.Popen[bytes]:
    """Runs `main()` of a module that this process finds too; the process list shows `name`.
    `options` are Popen's."""
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.Popen(
        [sys.executable, "-c", _START, module, *name], stdin=subprocess.PIPE, env=env, **options
    )
