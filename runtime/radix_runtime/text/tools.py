"""Tools of a request: what clients declare, which of them may be called, and what is wrong."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from ..errors import RequestError, refusal
from .field_names import CHAT_NAMES, FieldNames

MAX_TOOLS = 128
JSON_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_MAX_DEPTH = 4  # of anyOf in anyOf
_NAME = re.compile(r"[\w-]{1,64}")


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call. `parameters` is a JSON schema of an object. `strict`: the
    arguments must obey it. `None` means left out."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool as /v1/chat/completions and chat templates have it."""

    nested: ClassVar[Mapping[str, type]] = {"function": FunctionSpec}
    type: str
    function: FunctionSpec


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    `tools` are those that the model is told of. `mode`: it may call them or must. `forced` is the
    name of the only one that it may call. `is_parallel`: it may call several at once."""

    tools: Sequence[ToolSpec]
    mode: Literal["auto", "required"]
    forced: str | None = None
    is_parallel: bool = True

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schema of the parameters of each tool, by its name."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    @property
    def has_strict(self) -> bool:
        """Whether the arguments of some tool must obey its schema."""
        return any(tool.function.strict for tool in self.tools)

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        shown = []
        for tool in self.tools:
            function: dict[str, Any] = {"name": tool.function.name}
            if tool.function.description is not None:
                function["description"] = tool.function.description
            function["parameters"] = tool.function.parameters or _NO_PARAMETERS
            shown.append({"type": "function", "function": function})
        return shown


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def tool_use(
    tools: Sequence[ToolSpec] | None,
    choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool | None = None,
    names: FieldNames = CHAT_NAMES,
) -> ToolUse | None:
    """What a request says about tools; None if the model is to call none. `choice` is that of
    OpenAI's chat: `none`, `auto`, `required`, a function or `allowed_tools`. `names`: see there.
    Raises RequestError `invalid_tool`, and `unsupported_parameter` for a tool that is no
    function."""
    given = list(tools or [])
    _check_tools(given, names)
    mode, allowed, forced = _read_choice(choice)
    known = {tool.function.name for tool in given}
    for name in [*(allowed or []), *([forced] if forced else [])]:
        if name not in known:
            raise _invalid(f"tool_choice names {name[:64]!r}, which is not among the tools")
    if mode == "required" and not given:
        raise _invalid("tool_choice needs tools")
    if mode == "none" or not given:
        return None
    if allowed is not None:
        given = [tool for tool in given if tool.function.name in allowed]
    return ToolUse(
        tools=given,
        mode="required" if mode == "required" else "auto",
        forced=forced,
        is_parallel=parallel is not False and forced is None,
    )


def _read_choice(
    choice: str | Mapping[str, Any] | None,
) -> tuple[str, list[str] | None, str | None]:
    """The mode, the names of the tools that are allowed (None: all), and the only one that may be
    called."""
    if choice is None:
        return "auto", None, None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise _invalid("tool_choice must be none, auto, required or an object")
        return choice, None, None
    if choice.get("type") == "function":
        return "required", None, _function_name(choice)
    if choice.get("type") != "allowed_tools":
        raise _invalid("tool_choice.type must be function or allowed_tools")
    allowed = choice.get("allowed_tools", choice)
    if not isinstance(allowed, Mapping) or not isinstance(allowed.get("tools"), list):
        raise _invalid("allowed_tools needs a mode and tools")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise _invalid("the mode of allowed_tools must be auto or required")
    if not allowed["tools"]:
        raise _invalid("allowed_tools names no tool")
    return mode, [_function_name(tool) for tool in allowed["tools"]], None


def _function_name(value: Any) -> str:
    """The name in {"type": "function", "function": {"name": ...}}, or beside the type."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _invalid("a function of tool_choice needs a name")
    return name


def _check_tools(tools: Sequence[ToolSpec], names: FieldNames) -> None:
    if len(tools) > MAX_TOOLS:
        raise _invalid(f"there may be {MAX_TOOLS} tools, got {len(tools)}", "tools")
    known = set()
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.type != "function":
            message = f"{where}: only tools of type function are supported"
            raise refusal("unsupported_parameter", message, f"{where}.type")
        name = tool.function.name
        if not _NAME.fullmatch(name):
            message = f"{where}: a name has 1 to 64 letters, digits, _ and -"
            raise _invalid(message, f"{where}.{names.tool_name}")
        if name in known:
            raise _invalid(f"{where}: there is another tool {name}", f"{where}.{names.tool_name}")
        known.add(name)
        _check_parameters(tool.function.parameters or {}, f"{where}.{names.tool_parameters}")


def _check_parameters(schema: Mapping[str, Any], where: str) -> None:
    """The outermost part of the schema; the rest matters only where it constrains the answer."""
    if schema.get("type", "object") != "object":
        raise _invalid(f"{where}: must be the schema of an object", f"{where}.type")
    if not isinstance(schema.get("properties", {}), Mapping):
        raise _invalid(f"{where}.properties: must be an object", f"{where}.properties")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _invalid(f"{where}.required: must be a list of names", f"{where}.required")


def _invalid(message: str, param: str = "tool_choice") -> RequestError:
    return refusal("invalid_tool", message, param)


def json_types(schema: Any, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows, by what it says first; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(kind for kind in given if isinstance(kind, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(JSON_TYPES.get(type(value), "") for value in schema["enum"])
    found: frozenset[str] = frozenset()
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        if isinstance(branches, list):
            for branch in branches:
                found |= json_types(branch, depth + 1)
    return found
