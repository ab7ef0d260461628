"""Whether a process has been stopped (SIGSTOP), as the kernel tells."""

from pathlib import Path

_STOPPED = ("T", "t")  # by a signal, by a debugger


def is_stopped(pid: int) -> bool:
    """Whether this process or one that it has started is stopped. False once it has gone."""
    folder = Path(f"/proc/{pid}")
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        children = [path.read_text().split() for path in folder.glob("task/*/children")]
    except OSError:
        return False
    if state in _STOPPED:
        return True
    return any(is_stopped(int(child)) for some in children for child in some)
