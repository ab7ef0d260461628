"""The error of an op that was given something else in place of a tensor."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from ._ops import OPS

_MODULES = {op.name: f"{__package__}.{op.module}" for op in OPS}


def not_a_tensor(x: Any) -> TypeError:
    """A TypeError that names the op that was called and which of its arguments x is.

    Both are looked for in the calls under way, and only here: naming every argument up front would
    slow down correct calls.
    """
    wanted = "expected a tensor (torch or any DLPack type)"
    kind = type(x).__name__
    message = f"{wanted}, got {kind}"
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        op = frame.f_code.co_name
        if frame.f_globals.get("__name__") == _MODULES.get(op):
            name = _argument(frame, x)
            if name is not None:
                message = f"{op}: {name} is {kind}, {wanted}"  # an op may call another
    return TypeError(message)


def _argument(frame: FrameType, x: Any) -> str | None:
    """The first argument of the call that is x."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return next((name for name in names if frame.f_locals.get(name) is x), None)
