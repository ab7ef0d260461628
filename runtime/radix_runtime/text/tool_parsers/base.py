"""What the parsers of tool calls share: from content to a call and back."""

import secrets
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from ..json_value import JsonValue
from ..machine import Machine, MarkerSearch, NeedMore, NotACall, Reader
from .form import CallForm

_MAX_NAME = 128


class CallHead(NamedTuple):
    """The beginning of a call. `call_id`: the id that the model gave it. Without arguments
    (`has_arguments`) they are an empty object."""

    name: str
    call_id: str | None = None
    has_arguments: bool = True


class ToolParser(Machine):
    """Finds the calls of one model family in its text.

    `tools` are the JSON schemas of the parameters, by the name of the tool. `openings`: what begins
    the calls of an answer, with `newline` and the newline before it. `markers`: texts that may be
    special tokens of the tokenizer and must not be hidden from the parser. `form`: how calls are
    written, None where no grammar is known to force them.

    Text is content until an opening is followed by the whole beginning of a call (`_first_head`);
    otherwise the opening is content. From then on it is a call, whatever comes. What follows a call
    is a further one (`_next_head`), the end of a section (`_section_end`), or content."""

    form: ClassVar[CallForm | None] = None
    openings: ClassVar[tuple[str, ...]]
    newline: ClassVar[bool] = False
    markers: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def form_for(cls, template: str) -> CallForm | None:
        """The form of a model with this chat template."""
        return cls.form

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._tools = tools
        self._search = MarkerSearch(self.openings, newline=self.newline)

    # What a family says -------------------------------------------------------------------

    @abstractmethod
    def _first_head(self, reader: Reader) -> CallHead:
        """Reads from an opening to the arguments of its first call. Raises NotACall, NeedMore."""

    def _next_head(self, reader: Reader) -> CallHead:
        """Reads from the end of a call to the arguments of the next. Raises NotACall, NeedMore."""
        reader.space()
        return self._first_head(reader)

    def _section_end(self, reader: Reader) -> None:
        """Reads what ends the calls that one opening began. Raises NotACall, NeedMore."""
        raise NotACall

    @abstractmethod
    def _arguments(self) -> bool:
        """The state that reads arguments; it goes on to `_tail`."""

    def _call_end(self, reader: Reader) -> None:
        """Reads what ends one call, as far as it is there. Raises NeedMore."""

    def _opened(self, name: str) -> None:
        """A call of the tool `name` has begun."""

    def new_id(self) -> str:
        """An id for a call that the model gave none."""
        return f"call_{secrets.token_hex(12)}"

    # States -------------------------------------------------------------------------------

    def _begin(self) -> bool:
        self._state = self._content
        return True

    def _content(self) -> bool:
        found = self._search.find(self._text, self._at)
        if found is None:
            end = len(self._text) if self._is_whole else self._search.held(self._text, self._at)
            self._emit("content", end=end)
            return False
        self._emit("content", end=found[0])
        self._state = self._opening
        return True

    def _opening(self) -> bool:
        try:
            self._begin_call(Reader(self._text, self._at, is_whole=self._is_whole), is_first=True)
        except NeedMore:
            return False
        except NotACall:
            found = self._search.find(self._text, self._at)
            assert found is not None
            self._emit("content", end=found[1])
            self._state = self._content
        return True

    def _between(self) -> bool:
        try:
            self._begin_call(Reader(self._text, self._at, is_whole=self._is_whole), is_first=False)
        except NeedMore:
            return False
        except NotACall:
            self._state = self._after
        return True

    def _after(self) -> bool:
        for read in (self._section_end, _trailing_space):
            try:
                self._read(read)
            except NeedMore:
                return False
            except NotACall:
                pass
        self._state = self._content
        return True

    def _begin_call(self, reader: Reader, *, is_first: bool) -> None:
        if is_first and self.newline:
            reader.has("\n")
        call = self._first_head(reader) if is_first else self._next_head(reader)
        self._emit("call", call.name, end=reader.at, call_id=call.call_id)
        self._state = self._arguments
        self._opened(call.name)
        if not call.has_arguments:
            self._emit("arguments", "{}", end=reader.at)
            self._state = self._tail

    def _tail(self) -> bool:
        """The state behind arguments."""
        try:
            self._read(self._call_end)
        except NeedMore:
            return False
        self._state = self._between
        return True


class JsonCalls(ToolParser):
    """Calls whose arguments are written as a JSON object, which is passed on as it stands."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._value = JsonValue()

    def _arguments(self) -> bool:
        end = self._value.follow(self._text, self._at)
        self._emit("arguments", end=end)
        if not (self._value.is_closed or self._value.is_broken):
            return False
        self._value = JsonValue()
        self._state = self._tail
        return True


def _trailing_space(reader: Reader) -> None:
    """Reads whitespace that ends the answer."""
    reader.space()
    reader.end()


def require_name(name: str) -> str:
    """`name` if it can be that of a tool. Raises NotACall."""
    if not 0 < len(name) <= _MAX_NAME or not all(c.isalnum() or c in "_-.:/" for c in name):
        raise NotACall
    return name


def object_head(reader: Reader, *, arguments: tuple[str, ...]) -> CallHead:
    """Reads a JSON object {"name": ..., "arguments": {...}} up to the arguments, whose key is one
    of `arguments`. Other members may stand before them if they are strings. Raises NotACall,
    NeedMore."""
    reader.word("{")
    members: dict[str, str] = {}
    while True:
        reader.space()
        key = reader.string()
        reader.space()
        reader.word(":")
        reader.space()
        if key in arguments:
            break
        members[key] = reader.string()
        reader.space()
        if reader.peek() == "}":  # the arguments have been left out
            break
        reader.word(",")
    name = require_name(members.get("name", ""))
    has_arguments = reader.peek() == "{"
    if not has_arguments:
        reader.has("null")
        if reader.peek() not in ",} \n":
            raise NotACall
    return CallHead(name=name, call_id=members.get("id"), has_arguments=has_arguments)


def object_end(reader: Reader) -> None:
    """Reads the rest of the object behind its arguments: string members and its bracket, as far as
    they are there. Raises NeedMore."""
    start = reader.at
    try:
        reader.space()
        while reader.has(","):
            reader.space()
            reader.string()
            reader.space()
            reader.word(":")
            reader.space()
            reader.string()
            reader.space()
        reader.word("}")
    except NotACall:
        reader.at = start


def optional(reader: Reader, word: str) -> bool:
    """Whether `word` follows, whitespace before it aside; if so both are skipped. Raises
    NeedMore."""
    start = reader.at
    try:
        reader.space()
        reader.word(word)
    except NotACall:
        reader.at = start
        return False
    return True
