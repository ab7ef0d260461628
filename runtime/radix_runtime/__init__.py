"""Radix: a lean LLM inference runtime on the radix-kernels wheel."""

from typing import TYPE_CHECKING, Any

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .offline import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the API and detokenizer processes import this package, without torch.
    if name == "Engine":
        from .offline import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
