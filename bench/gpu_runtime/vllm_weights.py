"""A load format for vLLM, in which a model's weights are drawn as our engine draws its own.

vLLM asks its entry points for plugins in each of its processes before it loads a model there, in
those of ranks too, and a plugin may register a load format. This one is found through the metadata
of a package that is nowhere installed: a folder on the path of the processes.
"""

from __future__ import annotations

import os
from pathlib import Path

from .process import ROOT
from .random_weights import fill_parameters

LOAD_FORMAT = "like_radix"
_PACKAGE = "like_radix"
_GROUP = "vllm.general_plugins"


def register() -> None:
    """The entry point: the load format is known from now on in this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class Loader(BaseModelLoader):  # type: ignore[misc, unused-ignore]
        """Fills the parameters before any of them is repacked."""

        def download_model(self, model_config: object) -> None:
            """Nothing is to be downloaded."""

        def load_weights(self, model: object, model_config: object) -> None:
            """Of a model whose parameters have their memory."""
            fill_parameters(model)  # type: ignore[arg-type]

    register_model_loader(LOAD_FORMAT)(Loader)


def write_metadata(folder: Path) -> None:
    """The metadata of a package in `folder` whose entry point is `register`."""
    info = folder / f"{_PACKAGE}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PACKAGE}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{_GROUP}]\n{LOAD_FORMAT} = {__name__}:register\n")


def python_path(folder: Path) -> str:
    """The PYTHONPATH of processes that find the metadata in `folder`, and this module."""
    known = os.environ.get("PYTHONPATH")
    return os.pathsep.join(filter(None, [str(folder), str(ROOT), known]))
