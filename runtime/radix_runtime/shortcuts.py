"""Shortcuts: a method or flag that gives what a class's main method gives, by a faster way.

`LinearMethod.argmax` is one of `LinearMethod.apply`: the largest output without all of them. One
that a base class wrote for its own main method knows nothing of an override of that method."""

from collections.abc import Iterable


def reset_shortcuts(cls: type, root: type, method: str, shortcuts: Iterable[str]) -> None:
    """For `root.__init_subclass__`: `cls` gets back `root`'s form of each shortcut that it would
    inherit from further away than `method`."""
    for shortcut in shortcuts:
        if _distance(cls, method) < _distance(cls, shortcut):
            setattr(cls, shortcut, vars(root)[shortcut])


def _distance(cls: type, name: str) -> int:
    """How many classes up the method resolution order of `cls` the name is defined."""
    return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))
