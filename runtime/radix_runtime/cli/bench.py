"""`radix bench offline` (an Engine in this process), `radix bench serve` (a running server), `radix
bench workload` (a file of lengths for both), `radix bench profile` (a step, part by part), `radix
bench steps` (a trace of steps), `radix bench overload` (a server of which too much is asked)."""

import argparse
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from ..config import DEFAULT_PORT
from ..errors import ConfigError
from . import bench_overload
from .figures import Objectives, figures, machine
from .flags import add_model_argument, add_server_flags, check_sampling
from .load_backends import BACKENDS
from .output_file import output_file
from .workload import add_workload_arguments, positive

_STATISTIC = re.compile(r"(mean|median|std|max|p\d+)_(\w+)_ms")
_OBJECTIVES = ("ttft", "tpot", "itl", "e2el")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The modes and their flags."""
    modes = parser.add_subparsers(
        dest="mode", required=True, metavar="offline|serve|workload|profile|steps|overload"
    )
    offline = modes.add_parser("offline", help="an Engine in this process")
    add_model_argument(offline)
    add_server_flags(offline, engine_only=True)
    serve = modes.add_parser("serve", help="a running server, over HTTP")
    _add_client_arguments(serve)
    workload = modes.add_parser("workload", help="write the lengths of a dataset to a file")
    _add_profile_arguments(modes.add_parser("profile", help="where the time of a step goes"))
    steps = modes.add_parser("steps", help="what a trace of steps says (--trace, /step_trace)")
    steps.add_argument("trace", metavar="FILE", help="the trace, in Chrome's format")
    _add_json(steps)
    overload = modes.add_parser("overload", help="a running server, of which too much is asked")
    _add_address_arguments(overload)
    bench_overload.add_arguments(overload)
    _add_json(overload)
    for mode in (offline, serve, workload):
        add_workload_arguments(mode)
    for mode in (serve, workload):
        mode.add_argument(
            "--tokenizer", help="directory or hub name; needed for conversations, not for lengths"
        )
    workload.add_argument(
        "--output",
        type=output_file,
        required=True,
        metavar="FILE",
        help="where they are written",
    )
    offline.add_argument(
        "--stream", action="store_true", help="note the time of each token, at a cost for the host"
    )
    _add_measure_arguments(offline, objectives_of_a_flag=1)
    _add_measure_arguments(serve, objectives_of_a_flag="+")


def _add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures there")


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_server_flags(parser, engine_only=True)
    group = parser.add_argument_group("profile")
    group.add_argument(
        "--rows",
        type=positive(int),
        nargs="+",
        default=[1, 64],
        help="rows of the decode steps, one table each (default: 1 64)",
    )
    group.add_argument(
        "--context",
        type=positive(int),
        default=600,
        help="tokens of each row before the first step (default: %(default)s)",
    )
    group.add_argument(
        "--steps", type=positive(int), default=50, help="how many (default: %(default)s)"
    )
    group.add_argument(
        "--keep-traces", metavar="DIR", help="keep the traces, in Chrome's format, there"
    )
    _add_json(group)


class _Merge(argparse.Action):
    """All objectives of a flag, with commas or spaces between them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        merged: Objectives = dict(getattr(namespace, self.dest) or {})
        for value in values:
            merged.update(value)
        setattr(namespace, self.dest, merged)


def _add_measure_arguments(
    parser: argparse.ArgumentParser, *, objectives_of_a_flag: int | str
) -> None:
    """`objectives_of_a_flag`: as many words, argparse's nargs; one where a positional argument may
    follow."""
    parser.add_argument(
        "--temperature", type=float, default=0.6, help="of sampling (default: %(default)s)"
    )
    parser.add_argument(
        "--slo",
        "--goodput",
        type=objectives,
        nargs=objectives_of_a_flag,
        action=_Merge,
        metavar="NAME:MS",
        help=f"goodput: requests a second that meet all of these; names: {', '.join(_OBJECTIVES)}",
    )
    _add_json(parser)


def _add_address_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        "--base-url",
        default=f"http://127.0.0.1:{DEFAULT_PORT}",
        help="its address (default: %(default)s)",
    )
    parser.add_argument("--api-key", help="its key")


def _add_client_arguments(parser: argparse.ArgumentParser) -> None:
    _add_address_arguments(parser)
    parser.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        default="openai",
        help="/v1/completions, or /generate, which needs no tokenizer (default: %(default)s)",
    )
    parser.add_argument("--served-model", help="its name; default: the first that the server lists")
    parser.add_argument(
        "--request-rate",
        type=positive(float),
        help="requests a second, at random times (Poisson); default: all at once",
    )
    parser.add_argument(
        "--max-concurrency", type=positive(int), help="open requests; default: no limit"
    )
    parser.add_argument(
        "--clients",
        type=positive(int),
        help="processes that send and read; default: one for every four cores, at most 4",
    )
    parser.add_argument(
        "--vocab-size",
        type=positive(int),
        default=1000,
        help="ids of random prompts (default: %(default)s)",
    )


def objectives(text: str) -> Objectives:
    """A parser of flags: `ttft:500,itl:30`, milliseconds by name."""
    found = {}
    for part in text.replace(" ", ",").split(","):
        name, _, limit = part.partition(":")
        if name not in _OBJECTIVES:
            names = ", ".join(_OBJECTIVES)
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME:MS with a name of {names}")
        found[name] = positive(float)(limit)
    return found


def run(namespace: argparse.Namespace) -> int:
    """Measures, prints the figures and writes them; 1 if any request failed."""
    if namespace.mode == "workload":
        import_module("radix_runtime.cli.bench_workload").write(namespace)
        return 0
    if namespace.mode == "profile":
        import_module("radix_runtime.cli.bench_profile").profile(namespace)
        return 0
    if namespace.mode == "steps":
        import_module("radix_runtime.cli.bench_steps").steps(namespace)
        return 0
    if namespace.mode == "overload":
        return _report({"mode": "overload", **bench_overload.measure(namespace)}, namespace.json)
    check_sampling({"temperature": namespace.temperature})
    if namespace.slo and namespace.mode == "offline" and not namespace.stream:
        unknown = sorted(set(namespace.slo) - {"e2el"})
        if unknown:
            raise ConfigError(f"--slo {unknown[0]} needs --stream: nobody looks at single tokens")
    # `bench_offline` loads torch, which a benchmark of a server must not: it shares the machine.
    mode = import_module(f"radix_runtime.cli.bench_{namespace.mode}")
    facts, records = mode.measure(namespace)
    result = {
        "mode": namespace.mode,
        **facts,
        "machine": machine(),
        **figures(records, namespace.slo),
    }
    errors = {record.error for record in records if record.error is not None}
    if errors:
        result["errors"] = sorted(errors)[:3]
    return _report(result, namespace.json)


def _report(result: dict[str, Any], file: Path | None) -> int:
    """Prints the figures and writes them to a file, if there is one; the exit code."""
    _print_figures(result)
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["failed"] == 0 else 1


def _print_figures(result: dict[str, Any]) -> None:
    """A line a figure; the statistics of a time share one."""
    lines: dict[str, list[str]] = {}
    for name, value in result.items():
        statistic = _STATISTIC.fullmatch(name)
        if statistic is not None:
            lines.setdefault(f"{statistic[2]}_ms", []).append(f"{statistic[1]} {_short(value)}")
        elif isinstance(value, dict):
            lines[name] = [f"{key} {_short(part)}" for key, part in value.items()]
        else:
            lines[name] = [_short(value)]
    for name, parts in lines.items():
        print(f"{name:<27} {' '.join(parts)}")


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
