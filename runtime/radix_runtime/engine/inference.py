"""inference: torch's inference mode, entered once however deep the calls lie."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def inference(work: Callable[P, T]) -> Callable[P, T]:
    """`work` in inference mode. Within a call that is in it, nothing is entered again: that takes
    longer than to see it, and a step is several such calls."""

    @wraps(work)
    def run(*args: P.args, **options: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return work(*args, **options)
        with torch.inference_mode():
            return work(*args, **options)

    return run
