"""The keyword arguments of `Engine`, as ServerArgs."""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from .config import ServerArgs, flag_name
from .errors import ConfigError
from .offline_requests import checked


def settings_of(keywords: Mapping[str, Any]) -> ServerArgs:
    """Fields under their names or under their flags' other spellings (`max_model_len`), with values
    as Python programs have them. Raises ConfigError for a value of another type, TypeError for a
    name that there is not or that was given twice."""
    types = get_type_hints(ServerArgs)
    spellings = {
        alias.strip("-").replace("-", "_"): setting.name
        for setting in fields(ServerArgs)
        for alias in setting.metadata["aliases"]
    }
    values: dict[str, Any] = {}
    for keyword, value in keywords.items():
        name = spellings.get(keyword, keyword)
        if name in values:
            raise TypeError(f"{name} was given twice, the second time as {keyword}")
        values[name] = _of_type(types[name], value, name) if name in types else value
    return ServerArgs(**values)


def _of_type(kind: Any, value: Any, name: str) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    try:
        return checked(value, kind, "")
    except ValueError as error:
        text = str(error)
        raise ConfigError(f"{flag_name(name)}: {text[:1].lower()}{text[1:]}") from None
