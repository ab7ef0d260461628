"""CallForm: how a family writes calls, for grammars that force it to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a family writes calls; texts may have {name}, and `key` {key}.

    `section` begins and `section_end` ends all calls, `separator` is between two; `call` and
    `call_end` are around the arguments of one. `number`, a regular expression, and `call_rest` may
    follow `call`. With `value_end` an argument is `key`, its value and `value_end`; `before_end` is
    between a value that is no text and `value_end`. Without, the arguments are a JSON object.

    `opening` is the beginning of `section`, or of `call`, that tells free text from calls. Without
    one, an answer is either calls or free text, which begins with `free`, or not with a brace."""

    opening: str
    call: str
    call_end: str
    section: str = ""
    section_end: str = ""
    separator: str = ""
    number: str = ""
    call_rest: str = ""
    key: str = ""
    value_end: str = ""
    before_end: str = ""
    free: str = ""
