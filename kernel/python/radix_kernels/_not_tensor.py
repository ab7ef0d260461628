"""The error of an op that was given something else in place of a tensor."""

from __future__ import annotations

import sys
from typing import Any

from ._ops import OPS

_MODULES = {op.name: f"{__package__}.{op.module}" for op in OPS}


def not_a_tensor(x: Any) -> TypeError:
    """A TypeError that names the op under way and which of its arguments x is.

    Both are looked for in the calls under way, and only here: what names each argument beforehand
    would cost the calls that are right.
    """
    wanted = "expected a tensor (torch or any DLPack type)"
    kind = type(x).__name__
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if frame.f_globals.get("__name__") != _MODULES.get(code.co_name, ""):
            continue
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            if frame.f_locals.get(name) is x:
                return TypeError(f"{code.co_name}: {name} is {kind}, {wanted}")
    return TypeError(f"{wanted}, got {kind}")
