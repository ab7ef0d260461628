"""A file that a command will write when its work is done."""

import argparse
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """A parser of flags: refuses what cannot be written before the work begins, which may take
    minutes. Leaves an old file as it is: the work may fail."""
    path = Path(text)
    try:
        problem = _problem(path)
    except OSError as error:  # a folder that may not be entered, a name that is too long
        problem = f"{path}: {error.strerror}"
    if problem is not None:
        raise argparse.ArgumentTypeError(problem)
    return path


def _problem(path: Path) -> str | None:
    """Why a file cannot be written. Raises OSError where even that cannot be seen."""
    if path.is_dir():
        return f"{path} is a directory"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"no permission to write {path}"
    return None
