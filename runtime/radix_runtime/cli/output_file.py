"""A file that a command will write when its work is done."""

import argparse
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """A parser of flags: refuses what cannot be written before the work begins, which may take
    minutes. Leaves an old file as it is: the work may fail."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no permission to write {path}")
    return path
