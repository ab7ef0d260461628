"""JsonValue: where a JSON value ends in a text that comes piece by piece."""

_CLOSES = {"{": "}", "[": "]"}
_OF_ATOMS = frozenset("0123456789+-.,:eE \t\r\ntrufalsnTFN")  # outside of strings; Python's too


class JsonValue:
    """Follows one JSON object or array to its end. `is_closed`: its last bracket has come;
    `is_broken`: what came cannot be a part of it.

    Only brackets and strings are checked: whether it is valid JSON is for its reader to say."""

    def __init__(self) -> None:
        self._open: list[str] = []  # the brackets that are awaited
        self._in_string = False
        self._escaped = False  # the next character of a string stands for itself
        self.is_closed = False
        self.is_broken = False

    def follow(self, text: str, at: int) -> int:
        """The end of the part of `text[at:]` that belongs to the value."""
        while at < len(text) and not (self.is_closed or self.is_broken):
            at = self._string(text, at) if self._in_string else self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        """From inside a string to behind its end."""
        if self._escaped:
            self._escaped = False
            at += 1
        end = _find(text, '"', at)
        while (slash := text.find("\\", at, end)) >= 0:
            at = slash + 2
            if at > len(text):
                self._escaped = True
                return len(text)
            if at > end:  # this quotation mark does not end the string
                end = _find(text, '"', at)
        if end == len(text):
            return end
        self._in_string = False
        return end + 1

    def _structure(self, text: str, at: int) -> int:
        """From outside of strings to the next string, or to the end of the value."""
        for position in range(at, len(text)):
            char = text[position]
            if char in _OF_ATOMS:
                continue
            if char == '"':
                self._in_string = True
                return position + 1
            if char in _CLOSES:
                self._open.append(_CLOSES[char])
            elif self._open and char == self._open[-1]:
                self._open.pop()
                if not self._open:
                    self.is_closed = True
                    return position + 1
            else:
                self.is_broken = True
                return position
        return len(text)


def _find(text: str, char: str, at: int) -> int:
    found = text.find(char, at)
    return len(text) if found < 0 else found
