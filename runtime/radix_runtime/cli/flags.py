"""Command-line flags, generated from ServerArgs: one definition for help, types and aliases."""

import argparse
import difflib
import typing
from dataclasses import fields
from itertools import groupby
from typing import Any, NoReturn

from ..config import SECRETS, ServerArgs, flag_name
from ..errors import ConfigError
from ..log import setup_logging
from ..sampling_params import SamplingParams


class Parser(argparse.ArgumentParser):
    """No abbreviations; an unknown flag is told the nearest known one; errors are the operator's,
    as all others."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    # What `parse_args` calls, of a mode's parser too: each knows its own flags.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if flag := next((text.partition("=")[0] for text in unknown if text.startswith("-")), None):
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            self.error(f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else ""))
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
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
            choices = field.metadata.get("choices")
            kind, *_ = typing.get_args(types[field.name]) or (
                types[field.name],
            )  # int of `int | None`
            options: dict[str, Any] = {"action": "store_true"}
            if kind is not bool:
                metavar = None if choices else kind.__name__.upper()
                options = {
                    "type": kind,
                    "default": field.default,
                    "choices": choices,
                    "metavar": metavar,
                }
            default = " (default: %(default)s)" if options.get("default") is not None else ""
            help = field.metadata["help"].replace("%", "%%") + default
            section.add_argument(
                flag_name(field.name), *field.metadata["aliases"], help=help, **options
            )


_SAMPLING = {"temperature": float, "top_p": float, "max_new_tokens": int}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the model's)")
    for name, kind in _SAMPLING.items():
        group.add_argument(flag_name(name), type=kind)


def sampling_of(namespace: argparse.Namespace) -> dict[str, Any]:
    return check_sampling(
        {name: value for name in _SAMPLING if (value := getattr(namespace, name)) is not None}
    )


def check_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """`given`. Raises ConfigError on a value out of range: now, not after a model was loaded."""
    for name, message in SamplingParams(**given).violations(vocab_size=1, max_n=1):
        raise ConfigError(message.replace(name, flag_name(name)))
    return given


def server_args(namespace: argparse.Namespace) -> ServerArgs:
    """Raises ConfigError. `model`, the positional argument, is another way to say --model-path."""
    args = ServerArgs(
        **{f.name: getattr(namespace, f.name) for f in fields(ServerArgs) if f.name in namespace}
    )
    if (model := getattr(namespace, "model", None)) is not None:
        if args.model_path not in (None, model):
            raise ConfigError("the model is given twice: as an argument and by --model-path")
        args.model_path = model
    args.validate()
    return args


def engine_args(namespace: argparse.Namespace) -> dict[str, Any]:
    """Arguments of an Engine: the flags that were given; its own defaults hold for the rest."""
    setup_logging("radix", "warning")
    args = server_args(namespace)
    return {
        f.name: value for f in fields(ServerArgs) if (value := getattr(args, f.name)) != f.default
    }


def explain(args: ServerArgs) -> str:
    lines = []
    for field in fields(ServerArgs):
        value = getattr(args, field.name)
        mark = " " if value == field.default else "*"
        shown = "-" if value is None else "***" if field.name in SECRETS else value
        lines.append(f"{mark} {flag_name(field.name):<30} {shown}")
    return "\n".join(lines)
