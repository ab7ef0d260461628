"""The directory of an instance's sockets."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

_JANITOR = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


@contextlib.contextmanager
def private_directory() -> Iterator[str]:
    """A new directory, mode 0700, for the sockets; removed at the end. A janitor process removes
    it when this one was killed."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    usable = (
        base is not None
        and os.access(base, os.W_OK | os.X_OK)
        and len(base) < 60  # the path of a socket has at most 107 bytes
    )
    path = tempfile.mkdtemp(prefix="radix-", dir=base if usable else "/tmp")
    janitor = [sys.executable, "-I", "-S", "-c", _JANITOR, path]
    with subprocess.Popen(janitor, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            process.kill()  # there is nothing left for it to do
