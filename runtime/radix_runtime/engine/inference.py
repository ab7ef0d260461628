"""inference: torch's inference mode, entered once however deep the calls lie."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def inference(work: Callable[P, T]) -> Callable[P, T]:
    """`work` in inference mode. A call within another does not enter it again: a step is several
    such calls, and to look is cheaper."""

    @wraps(work)
    def run(*args: P.args, **options: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return work(*args, **options)
        with torch.inference_mode():
            return work(*args, **options)

    return run
