"""How this program starts its other processes, and what the process list shows of them."""

# The title is written over the process's own command line, as PostgreSQL does. The package
# `setproctitle` does the same in C with support for systems that this program does not run on; on
# Linux it takes the few lines below, so there is no dependency for it.

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

DUMP_SIGNAL = signal.SIGUSR1  # prints the stacks of all threads

# Neither `-m` nor a plain `-c` would do: both look for modules in the current directory first,
# which may be a downloaded model's, and PYTHONSAFEPATH is unknown to Python 3.10.
_START = "; ".join(
    [
        "import sys",
        "sys.path[:] = [path for path in sys.path if path]",
        "import signal",
        # Ctrl-C reaches the whole group, from the first import on: who started it decides.
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "import faulthandler",
        "faulthandler.enable()",
        f"faulthandler.register({DUMP_SIGNAL:d})",
        "from radix_runtime.spawn import run",
        "run(module=sys.argv[1], title=sys.argv[2])",
    ]
)

# From <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
# Fields of /proc/self/stat, counted from the one after the name in parentheses.
_STAT_ARG_START = 45
_STAT_ARG_END = 46


def start_process(module: str, title: str, **options: Any) -> subprocess.Popen[bytes]:
    """Runs `main()` of a module in a new process, which looks for modules where this one does. The
    process list shows `title`; `options` are Popen's. Standard input is a pipe. It ignores
    SIGINT."""
    environment = dict(os.environ)
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", _START, module, title],
        stdin=subprocess.PIPE,
        env=environment,
        **options,
    )


def run(module: str, title: str) -> NoReturn:
    """What a process of `start_process` does: exits with what `main()` of the module returns."""
    set_title(title)
    sys.exit(import_module(module).main())


def leave(code: int) -> NoReturn:
    """Ends this process at once. The interpreter's own end would take a tenth of a second, and wait
    for threads of libraries that are still at work."""
    logging.shutdown()
    with contextlib.suppress(OSError):  # a full disk, a closed pipe
        sys.stdout.flush()
    os._exit(code)


def signal_name(number: int) -> str:
    """Of a signal that has ended a process."""
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have none
        return f"signal {number}"


def die_with_parent() -> None:
    """Has this process killed when the thread that started it ends. Who calls it looks afterwards
    whether its parent is still there."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def set_title(title: str) -> None:
    """Makes `ps` show `title` in place of the command line of this process; it is cut to the length
    of that one. `top` and `ps -e` show its first 15 bytes."""
    name = title.encode()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start = int(stat[_STAT_ARG_START])
    size = int(stat[_STAT_ARG_END]) - start
    if size < 2:  # a sandbox that does not say where it is
        return
    # By a last byte that is not 0 the kernel knows a title, which ends at its first 0.
    shown = name[: size - 2]
    ctypes.memmove(start, shown.ljust(size - 1, b"\0") + b" ", size)
