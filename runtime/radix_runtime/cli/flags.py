"""Command-line flags, generated from ServerArgs: one definition for help, types and aliases."""

from __future__ import annotations

import argparse
import difflib
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from ..config import SECRETS, ServerArgs, flag_name
from ..errors import EXIT_CONFIG, ConfigError
from ..log import setup_logging

_GROUPS = ("model", "engine", "scheduler", "server")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there are some."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """No abbreviations; an unknown flag is an error that names the nearest known one; errors take
    one line and exit code 78."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(**kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return found

    def _unknown(self, unknown: Sequence[str]) -> str:
        flag = next((text for text in unknown if text.startswith("-")), None)
        if flag is None:
            return f"unexpected argument {unknown[0]!r}"
        name = flag.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "")

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(EXIT_CONFIG)


def add_server_flags(parser: argparse.ArgumentParser, groups: Iterable[str] = _GROUPS) -> None:
    """All fields of ServerArgs of these groups, under their flag names and aliases."""
    types = typing.get_type_hints(ServerArgs)
    sections = {group: parser.add_argument_group(group) for group in groups}
    for field in fields(ServerArgs):
        section = sections.get(field.metadata["group"])
        if section is None:
            continue
        names = [flag_name(field.name), *field.metadata["aliases"]]
        help = field.metadata["help"].replace("%", "%%")
        if types[field.name] is bool:
            section.add_argument(*names, dest=field.name, action="store_true", help=help)
            continue
        kind = _value_type(types[field.name])
        section.add_argument(
            *names,
            dest=field.name,
            type=kind,
            default=field.default,
            choices=field.metadata.get("choices"),
            metavar=None if "choices" in field.metadata else kind.__name__.upper(),
            help=help,
        )


def _value_type(annotation: Any) -> type:
    """int of `int | None`."""
    return next(t for t in typing.get_args(annotation) or (annotation,) if t is not type(None))


def server_args(namespace: argparse.Namespace) -> ServerArgs:
    """Raises ConfigError. `model`, the positional argument, is another way to say --model-path."""
    known = {f.name for f in fields(ServerArgs)}
    args = ServerArgs(**{k: v for k, v in vars(namespace).items() if k in known})
    model = getattr(namespace, "model", None)
    if model is not None:
        if args.model_path not in (None, model):
            raise ConfigError("the model is given twice: as an argument and by --model-path")
        args.model_path = model
    args.validate()
    return args


E = TypeVar("E")


def engine_of(engine: Callable[..., E], namespace: argparse.Namespace) -> E:
    """An Engine of the flags that were given; its own defaults hold for the rest."""
    setup_logging("radix", "warning")
    args = server_args(namespace)
    given = {
        f.name: value
        for f in fields(ServerArgs)
        if (value := getattr(args, f.name)) != f.default and f.name != "model_path"
    }
    return engine(args.model_path, **given)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="directory or hub name; none: the demo model")


def explain(args: ServerArgs) -> str:
    """Every setting with its value, those that differ from the default marked."""
    lines = []
    for field in fields(ServerArgs):
        value = getattr(args, field.name)
        if field.name in SECRETS and value is not None:
            value = "***"
        mark = " " if getattr(args, field.name) == field.default else "*"
        lines.append(f"{mark} {flag_name(field.name):<30} {'-' if value is None else value}")
    return "\n".join(lines)
