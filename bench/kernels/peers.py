"""Libraries that a family may compare with on a GPU beyond torch: asked for with `--peers`, used
where installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from .harness import Contender

_enabled = False


def enable() -> None:
    """From now on `load` imports. Their ops take tensors of a GPU alone: for a run on the CPU leave
    it be."""
    global _enabled
    _enabled = True


def disable() -> None:
    """From now on `load` gives None."""
    global _enabled
    _enabled = False


@cache
def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a peer that cannot start is no peer, whatever it raises
        reason = str(error).partition("\n")[0]
        print(f"no peer {name}: {type(error).__name__}: {reason}")
        return None


def load(name: str) -> Any:
    """The module; None without `--peers` or where it cannot be imported, which is reported once."""
    return _imported(name) if _enabled else None


def planned(plan: Callable[[], Contender]) -> Contender:
    """The contender that `plan` gives at the first call: what a library raises there costs it the
    row, not the run."""
    plan = cache(plan)
    return lambda *inputs: plan()(*inputs)
