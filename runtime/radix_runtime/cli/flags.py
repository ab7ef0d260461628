"""Command-line flags, generated from ServerArgs: one definition for help, types and aliases."""

import argparse
import difflib
import typing
from dataclasses import Field, fields
from itertools import groupby
from typing import Any, NoReturn

from ..config import SECRETS, ServerArgs, flag_name
from ..errors import ConfigError
from ..log import setup_logging
from ..sampling_params import SamplingParams


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, that suggests the nearest flag for an unknown one and raises
    ConfigError."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown arguments here, and not in `parse_args`: argparse calls this one for the
        parser of a mode too, which knows the mode's flags."""
        found, unknown = super().parse_known_args(args, namespace)
        flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        if flags:
            near = difflib.get_close_matches(flags[0], self._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unknown flag {flags[0]}{hint}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError, where argparse would exit."""
        raise ConfigError(message)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The positional argument MODEL, another way to say --model-path."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="directory or hub name; none: the demo model"
    )


def add_server_flags(parser: argparse.ArgumentParser, *, engine_only: bool = False) -> None:
    """All fields of ServerArgs, under their flag names and aliases; `engine_only` leaves out the
    server's own."""
    types = typing.get_type_hints(ServerArgs)
    for group, members in groupby(fields(ServerArgs), lambda field: field.metadata["group"]):
        if group == "server" and engine_only:
            continue
        section = parser.add_argument_group(group)
        for field in members:
            _add_flag(section, field, types[field.name])


def _add_flag(section: argparse._ArgumentGroup, field: Field[Any], annotation: Any) -> None:
    """The flag of one field: its type is the annotation's, int of `int | None`."""
    names = [flag_name(field.name), *field.metadata["aliases"]]
    help = field.metadata["help"].replace("%", "%%")
    members = typing.get_args(annotation)
    kind = members[0] if members else annotation
    if kind is bool:
        section.add_argument(*names, action="store_true", help=help)
        return
    choices = field.metadata.get("choices")
    if field.default is not None:
        help += " (default: %(default)s)"
    section.add_argument(
        *names,
        type=kind,
        default=field.default,
        choices=choices,
        metavar=None if choices else kind.__name__.upper(),
        help=help,
    )


_SAMPLING = {"temperature": float, "top_p": float, "max_new_tokens": int}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The sampling parameters that `sampling_of` reads."""
    group = parser.add_argument_group("sampling (default: the model's)")
    for name, kind in _SAMPLING.items():
        group.add_argument(flag_name(name), type=kind)


def sampling_of(namespace: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given. Raises ConfigError on a value out of range."""
    values = {name: getattr(namespace, name) for name in _SAMPLING}
    given = {name: value for name, value in values.items() if value is not None}
    check_sampling(given)
    return given


def check_sampling(given: dict[str, Any]) -> None:
    """Raises ConfigError on a value out of range: now, not after a model was loaded."""
    names = {name: flag_name(name) for name in given}
    for _, message in SamplingParams(**given).violations(vocab_size=1, max_n=1, names=names):
        raise ConfigError(message)


def server_args(namespace: argparse.Namespace) -> ServerArgs:
    """The settings, checked; flags that the command lacks have their defaults. Raises
    ConfigError."""
    given = vars(namespace)
    args = ServerArgs(**{f.name: given[f.name] for f in fields(ServerArgs) if f.name in given})
    model = given.get("model")
    if model is not None:
        if args.model_path not in (None, model):
            raise ConfigError("the model is given twice: as an argument and by --model-path")
        args.model_path = model
    args.validate()
    return args


def engine_args(namespace: argparse.Namespace) -> dict[str, Any]:
    """Arguments of an Engine: the flags that were given; its own defaults hold for the rest."""
    setup_logging("radix", "warning")
    args = server_args(namespace)
    settings = {field.name: getattr(args, field.name) for field in fields(ServerArgs)}
    return {f.name: settings[f.name] for f in fields(ServerArgs) if settings[f.name] != f.default}


def explain(args: ServerArgs) -> str:
    """A line a setting, marked with * where it is not the default; keys are hidden."""
    lines = []
    for field in fields(ServerArgs):
        value = getattr(args, field.name)
        mark = " " if value == field.default else "*"
        if value is None:
            value = "-"
        elif field.name in SECRETS:
            value = "***"
        lines.append(f"{mark} {flag_name(field.name):<30} {value}")
    return "\n".join(lines)
