"""EventTemplate: a server-sent event of which only one text changes from one to the next."""

import secrets
from collections.abc import Callable
from typing import Any

from .http_call import event
from .json_pieces import to_json


class EventTemplate:
    """The bytes of `event(value_of(text))` for any text, without making that value each time."""

    def __init__(self, value_of: Callable[[str], Any]) -> None:
        mark = secrets.token_hex(16)  # which stands nowhere else in the event
        self._before, self._after = event(value_of(mark)).split(to_json(mark))

    def event(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + to_json(text) + self._after
