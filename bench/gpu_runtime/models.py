"""The models that GPU benches name on the command line."""

import argparse
from pathlib import Path

from .process import ROOT

MODELS = ROOT / "bench/serving/models"


def model_folder(text: str) -> Path:
    """The folder of a model: a path, or a name in `MODELS`. Of argparse; raises its error."""
    for folder in (Path(text), MODELS / text):
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise argparse.ArgumentTypeError(f"neither {text} nor {MODELS / text} has a config.json")
