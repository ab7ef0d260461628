"""How the bytes of a body become one of protocol.py's or an error that names the field."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ..errors import RequestError, refusal
from ..sampling_params import SamplingParams
from ..suggestions import did_you_mean
from ..text.conversation import TextPart
from .json_scan import check_shape
from .unbuilt import HARMLESS, UNBUILT

_MAX_NAME = 64  # characters of a client's name that come back
_MAX_JSON_ERROR = 200  # characters
_MAX_WARNINGS = 10
_MAX_HARMLESS = 64 << 10  # characters of a field that does nothing,
_MAX_HARMLESS_PARTS = 1024  # and values in it
_IGNORED = "; a server with --allow-unknown-fields ignores it"
_EXPLAINED = 16 << 10  # only small bodies are parsed a second time to name a bad number

B = TypeVar("B", bound=msgspec.Struct)


def decode_body(
    kind: type[B], data: bytes, lenient: bool, defaults: Mapping[str, Any]
) -> tuple[B, list[str]]:
    """The body and its warnings. `lenient`: unknown fields give a warning instead of an error.
    `defaults`: sampling parameters that hold where the body leaves them out. Raises RequestError
    400."""
    check_shape(data)
    return decode_checked(kind, data, lenient, defaults)


def decode_checked(
    kind: type[B], data: bytes, lenient: bool, defaults: Mapping[str, Any]
) -> tuple[B, list[str]]:
    """`decode_body` of a JSON text that `check_shape` has passed."""
    raw = _parse(data)
    if not isinstance(raw, dict):
        raise refusal("invalid_type", "the body must be a JSON object")
    sieve = _Sieve(lenient, defaults)
    try:
        kept = sieve.sift(kind, raw, "")
        return msgspec.convert(kept, kind, str_keys=True), sieve.warnings
    except msgspec.ValidationError as error:
        raise _explain_type(str(error)) from None


def parse_json(data: bytes) -> Any:
    """The value of a JSON text. Raises RequestError: `invalid_type` for a number that is none (NaN,
    1e999), else `invalid_json`, as for a shape that `check_shape` refuses."""
    check_shape(data)
    return _parse(data)


def _parse(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explain_json(data, error) from None


class _Sieve:
    """Takes out of a raw body what is null, harmless, neutral or (`lenient`) unknown. A wrong type
    is left for msgspec to refuse."""

    def __init__(self, lenient: bool, defaults: Mapping[str, Any]) -> None:
        self._lenient = lenient
        self._defaults = defaults
        self.warnings: list[str] = []

    def sift(self, kind: type, raw: Any, path: str) -> Any:
        """What is kept of `raw`, which stands at `path`. Raises RequestError."""
        if isinstance(raw, list):
            return [self.sift(kind, item, f"{path}[{i}]") for i, item in enumerate(raw)]
        if not isinstance(raw, dict):
            return raw
        if kind is TextPart and raw.get("type") != "text":
            return raw  # refused by its type
        kept: dict[str, Any] = {}
        if issubclass(kind, SamplingParams):
            kept.update(self._defaults)
        built = kind.__struct_encode_fields__  # type: ignore[attr-defined]
        # Fields that hold such objects themselves (one, or a list of them).
        nested: Mapping[str, type] = getattr(kind, "nested", {})
        for name, value in raw.items():
            where = name[:_MAX_NAME]
            if path:
                where = f"{path}.{where}"
            if name not in built:
                if value is not None:  # clients that send whole objects fill them with nulls
                    self._check_foreign(name, value, where, built)
            elif value is not None:
                inner = nested.get(name)
                kept[name] = value if inner is None else self.sift(inner, value, where)
        return kept

    def _check_foreign(self, name: str, value: Any, where: str, built: Sequence[str]) -> None:
        """Raises RequestError unless a field that is not one of `built` may be left out."""
        if name in HARMLESS:
            _check_harmless(value, where)
            return
        unbuilt = UNBUILT.get(name)
        if unbuilt is not None:
            if not unbuilt.passes(value):
                message = f"{where} is not supported: {unbuilt.why}"
                raise refusal("unsupported_parameter", message, where)
        elif not self._lenient:
            hint = did_you_mean(name, built) or _IGNORED
            raise refusal("unknown_parameter", f"unknown parameter {where}{hint}", where)
        elif len(self.warnings) < _MAX_WARNINGS:
            self.warnings.append(f"unknown parameter {where} was ignored")


def _check_harmless(value: Any, where: str) -> None:
    """Raises RequestError if a field that does nothing is larger than anything it is for."""
    if _is_large(value):
        raise refusal("invalid_value", f"{where} is too large", where)


def _is_large(value: Any) -> bool:
    """Whether a value has many parts, or one of them is a long text."""
    open_parts = [value]
    seen = 0
    while open_parts:
        part = open_parts.pop()
        seen += 1
        if seen > _MAX_HARMLESS_PARTS or (isinstance(part, str) and len(part) > _MAX_HARMLESS):
            return True
        if isinstance(part, dict):
            open_parts += [*part, *part.values()]
        elif isinstance(part, list):
            open_parts += part
    return False


_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]*)`")


def _explain_type(text: str) -> RequestError:
    """msgspec's sentence as ours. One without "got" tells of a bound, not of a type."""
    at = _AT.search(text)
    path = at[1] if at else ""
    missing = _MISSING.search(text)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return refusal("missing_field", f"{param} is required", param)
    what = text[: at.start()] if at else text
    what = what[:200]
    code = "invalid_type"
    if what == "Expected `array` of length >= 1":
        code = "empty_input"
    elif what.startswith("Invalid enum") or (what.startswith("Expected") and ", got" not in what):
        code = "invalid_value"
    return refusal(code, f"{path}: {what[:1].lower()}{what[1:]}", path or None)


def _explain_json(data: bytes, error: Exception) -> RequestError:
    """Why JSON of a shape that has been checked was refused: a number that is none, or what the
    decoder says."""
    if len(data) <= _EXPLAINED:
        with suppress(ValueError):
            path = _path_of_bad_number(json.loads(data))
            if path is not None:
                return refusal("invalid_type", f"{path}: not a finite number", path)
    reason = str(error).removeprefix("JSON is malformed: ")
    if isinstance(error, UnicodeDecodeError):
        reason = "it is not UTF-8"
    return refusal("invalid_json", f"the body is not valid JSON: {reason}"[:_MAX_JSON_ERROR])


def _path_of_bad_number(value: Any) -> str | None:
    """The path (its first characters) of a number in a small JSON value that is not finite."""
    open_parts = [("", value)]
    while open_parts:
        path, part = open_parts.pop()
        if isinstance(part, float) and not math.isfinite(part):
            return path
        if isinstance(part, dict):
            for key, child in part.items():
                where = f"{path}.{key}".removeprefix(".")
                open_parts.append((where[:_MAX_NAME], child))
        elif isinstance(part, list):
            for i, child in enumerate(part):
                open_parts.append((f"{path}[{i}]"[:_MAX_NAME], child))
    return None
