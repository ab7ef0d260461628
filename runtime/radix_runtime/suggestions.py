"""What may have been meant by a name that there is not."""

from collections.abc import Iterable
from difflib import get_close_matches

_NEAR = 0.75  # how much of the letters must agree, as `difflib` counts
_LONGEST = 64  # letters of a name that are looked at, since the time grows with their square


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence about an unknown `name`: which of the `known` was meant, with `prefix`
    before it; "" where none is near."""
    near = get_close_matches(name[:_LONGEST], list(known), n=1, cutoff=_NEAR)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
