"""`radix bench offline` (an Engine in this process) and `radix bench serve` (a running server)."""

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from ..config import DEFAULT_PORT
from .figures import figures, machine
from .flags import add_model_argument, add_server_flags, check_sampling
from .workload import add_workload_arguments, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two modes and their flags."""
    modes = parser.add_subparsers(dest="mode", required=True, metavar="offline|serve")
    offline = modes.add_parser("offline", help="an Engine in this process")
    add_model_argument(offline)
    add_server_flags(offline, engine_only=True)
    serve = modes.add_parser("serve", help="a running server, over HTTP")
    _add_client_arguments(serve)
    for mode in (offline, serve):
        add_workload_arguments(mode)
        mode.add_argument("--json", metavar="FILE", help="write the figures there")


def _add_client_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=f"http://127.0.0.1:{DEFAULT_PORT}",
        help="its address (default: %(default)s)",
    )
    parser.add_argument("--api-key", help="its key")
    parser.add_argument(
        "--request-rate", type=positive(float), help="requests a second; default: all at once"
    )
    parser.add_argument(
        "--max-concurrency", type=positive(int), help="open requests; default: no limit"
    )
    parser.add_argument(
        "--vocab-size",
        type=positive(int),
        default=1000,
        help="ids of prompts (default: %(default)s)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Measures, prints the figures and writes them; 1 if any request failed."""
    check_sampling({"temperature": namespace.temperature})
    # `bench_offline` loads torch, which a benchmark of a server must not: it shares the machine.
    mode = import_module(f"radix_runtime.cli.bench_{namespace.mode}")
    facts, records = mode.measure(namespace)
    result = {"mode": namespace.mode, **facts, "machine": machine(), **figures(records)}
    errors = {record.error for record in records if record.error is not None}
    if errors:
        result["errors"] = sorted(errors)[:3]
    _print_figures(result)
    if namespace.json is not None:
        Path(namespace.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["failed"] == 0 else 1


def _print_figures(result: dict[str, Any]) -> None:
    for name, value in result.items():
        if isinstance(value, dict):
            text = " ".join(f"{key} {_short(part)}" for key, part in value.items())
        else:
            text = _short(value)
        print(f"{name:<27} {text}")


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
