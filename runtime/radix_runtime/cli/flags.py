"""Command-line flags, generated from ServerArgs: one definition for help, types and aliases."""

import argparse
import typing
from collections.abc import Mapping
from dataclasses import Field, fields
from importlib import import_module
from itertools import groupby
from types import MappingProxyType
from typing import Any, NoReturn

from ..config import SECRETS, ServerArgs, flag_name
from ..errors import ConfigError
from ..log import setup_logging
from ..sampling_params import SamplingParams
from ..suggestions import did_you_mean

# Flags of other servers that ask for what happens anyway.
_ALWAYS = {
    "enable-prefix-caching": "prefixes are shared unless --disable-radix-cache",
    "enable-chunked-prefill": "long prompts are always computed in chunks",
}
_ALWAYS_OF_SERVERS = {
    "enable-metrics": "/metrics is always there",
    "enable-auto-tool-choice": "tools are called as the model likes by default",
    "disable-log-requests": "requests are logged with --log-requests only",
    "no-enable-log-requests": "requests are logged with --log-requests only",
}
ALWAYS = {**_ALWAYS, **_ALWAYS_OF_SERVERS}
# Flags of other servers that are known and not built.
_LORA = "adapters are not loaded yet"
_SPECULATION = "there is no speculative decoding yet"
_UNBUILT_FLAGS = {
    "trust-remote-code": (
        "no code of a model's directory is ever run; an architecture that is not supported can be "
        "added by an installed package (entry point radix.models)"
    ),
    "enable-lora": _LORA,
    "lora-modules": _LORA,
    "lora-paths": _LORA,
    "speculative-config": _SPECULATION,
    "speculative-algorithm": _SPECULATION,
    "data-parallel-size": "there is one replica; start several servers",
    "dp-size": "there is one replica; start several servers",
    "pipeline-parallel-size": "there is no pipeline parallelism; see --tp-size",
    "pp-size": "there is no pipeline parallelism; see --tp-size",
    "enforce-eager": "see --disable-cuda-graph",
    "generation-config": "see --sampling-defaults",
    "no-enable-prefix-caching": "see --disable-radix-cache",
    "no-enable-chunked-prefill": "see --chunked-prefill-size -1",
}

_CONFIG = "--config"


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations, that suggests the nearest flag for an unknown one, reads
    the file of --config and raises ConfigError."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown arguments here, and not in `parse_args`: argparse calls this one for the
        parser of a mode too, which knows the mode's flags. What a file of flags says takes the
        place of the defaults."""
        found, unknown = super().parse_known_args(args, namespace)
        if _CONFIG in self._option_string_actions and found.config is not None:
            # It loads a parser of YAML, which most starts do not need.
            module = import_module("radix_runtime.cli.config_file")
            given = module.read_config_file(found.config, self)
            is_model_of_file = getattr(found, "model_path", None) is None
            self.set_defaults(**given)
            found, unknown = super().parse_known_args(args, namespace)
            found.model_of_file = given.get("model_path") if is_model_of_file else None
        flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        if flags:
            names = [option.lstrip("-") for option in self._option_string_actions]
            name = flags[0].lstrip("-")
            self.error(unknown_name(name, names, prefix=flags[0].removesuffix(name)))
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError, where argparse would exit."""
        raise ConfigError(message)


_OPPOSITES = {"enable": "disable-", "disable": "enable-"}


def unknown_name(name: str, known: list[str], *, kind: str = "flag", prefix: str = "--") -> str:
    """What is said of a flag or key that is not `known`: why there is no such thing, or what was
    meant. Names have no dashes before them; `prefix` is shown there."""
    reason = _UNBUILT_FLAGS.get(name.replace("_", "-"))
    if reason is not None:
        return f"{prefix}{name}: {reason}"
    opposite = _OPPOSITES.get(name.replace("_", "-").partition("-")[0])
    names = [other for other in known if opposite is None or not other.startswith(opposite)]
    hint = did_you_mean(name, names, "--" if prefix else "")
    return f"unknown {kind} {prefix}{name}{hint}"


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The positional argument MODEL, another way to say --model-path."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="directory or hub name; none: the demo model"
    )


def add_server_flags(parser: argparse.ArgumentParser, *, engine_only: bool = False) -> None:
    """All fields of ServerArgs, under their flag names and aliases, and --config, a file of flags
    (see `Parser`); `engine_only` leaves out the server's own."""
    parser.add_argument(
        _CONFIG, metavar="FILE", help="YAML or JSON with flags; what stands beside it goes first"
    )
    types = typing.get_type_hints(ServerArgs)
    for group, members in groupby(fields(ServerArgs), lambda field: field.metadata["group"]):
        if group == "server" and engine_only:
            continue
        section = parser.add_argument_group(group)
        for field in members:
            _add_flag(section, field, types[field.name])
        accepted = {"scheduler": _ALWAYS, "server": _ALWAYS_OF_SERVERS}.get(group, {})
        for name, help in accepted.items():
            section.add_argument(f"--{name}", action="store_true", help=f"accepted: {help}")


def _add_flag(section: argparse._ArgumentGroup, field: Field[Any], annotation: Any) -> None:
    """The flag of one field: its type is the annotation's, int of `int | None` and, with one value
    or more, of `list[int] | None`."""
    names = [flag_name(field.name), *field.metadata["aliases"]]
    help = field.metadata["help"].replace("%", "%%")
    members = typing.get_args(annotation)
    kind = members[0] if members else annotation
    if kind is bool:
        section.add_argument(*names, action="store_true", help=help)
        return
    options: dict[str, Any] = {}
    if typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
        options["nargs"] = "+"
    choices = field.metadata.get("choices")
    if field.default is not None:
        help += " (default: %(default)s)"
    section.add_argument(
        *names,
        type=kind,  # `ServerArgs.validate` knows the choices
        default=field.default,
        metavar=f"{{{','.join(choices)}}}" if choices else kind.__name__.upper(),
        help=help,
        **options,
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
        if args.model_path not in (None, model, given.get("model_of_file")):
            raise ConfigError("the model is given twice: as an argument and by --model-path")
        args.model_path = model
    if given.get("enable_prefix_caching") and args.disable_radix_cache:
        raise ConfigError("--enable-prefix-caching and --disable-radix-cache exclude each other")
    args.validate()
    return args


def engine_args(namespace: argparse.Namespace) -> dict[str, Any]:
    """Arguments of an Engine: the flags that were given; its own defaults hold for the rest."""
    setup_logging("radix", "warning")
    args = server_args(namespace)
    settings = {field.name: getattr(args, field.name) for field in fields(ServerArgs)}
    return {f.name: settings[f.name] for f in fields(ServerArgs) if settings[f.name] != f.default}


def explain(args: ServerArgs, resolved: Mapping[str, Any] = MappingProxyType({})) -> str:
    """A line a setting, marked with * where it is not the default; keys are hidden. `resolved`:
    the values of settings that are decided at start, which stand for themselves."""
    lines = []
    for field in fields(ServerArgs):
        value = getattr(args, field.name)
        mark = " " if value == field.default else "*"
        shown = _shown(field.name, resolved.get(field.name, value))
        lines.append(f"{mark} {flag_name(field.name):<30} {shown}")
    return "\n".join(lines)


def changed(args: ServerArgs) -> str:
    """The settings that are not the default, on one line; keys are hidden."""
    words = []
    for field in fields(ServerArgs):
        value = getattr(args, field.name)
        if value != field.default:
            words.append(flag_name(field.name))
            if value is not True:
                words.append(_shown(field.name, value))
    return " ".join(words)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return "***" if name in SECRETS else str(value)
