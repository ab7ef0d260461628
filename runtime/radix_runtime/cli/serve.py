"""`radix serve`: checks what can be checked without a model, then runs the supervisor."""

import argparse
import ipaddress
import logging
import os
import socket
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from ..config import SECRETS, ServerArgs
from ..hub import DEMO_MODEL_NAME, served_name
from ..log import setup_logging
from ..prepare import Prepared, prepare_model
from ..processes.child import Info
from ..processes.supervisor import Supervisor
from ..server.auth import Auth
from ..server.listener import bind_port
from ..spawn import leave
from ..start_log import pool_warning, served_lines
from ..text.answer_format import find_format
from ..text.tokenizer import served_tokenizer
from .flags import add_model_argument, add_server_flags, changed, explain, server_args

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `radix serve`."""
    add_model_argument(parser)
    add_server_flags(parser)
    parser.add_argument(
        "--explain-config", action="store_true", help="print every setting and exit"
    )


def run(namespace: argparse.Namespace) -> int:
    """Serves until a signal or a death ends the server; its exit code."""
    args = server_args(namespace)
    _take_keys_from_environment(args)
    if namespace.explain_config:
        print(explain(args, _resolved(args)))
        return 0
    setup_logging("radix", args.log_level)
    log.info("settings: %s", changed(args) or "all defaults")
    log.debug("all settings (* = not the default):\n%s", explain(args))
    with closing(bind_port(args.host, args.port)) as listener:
        _warn_if_open(args, listener)
        if args.served_model_name is None:
            args.served_model_name = served_name(args.model_path)
        prepared = prepare_model(args)

        def announce(url: str, info: Info) -> None:
            _announce(prepared, url, info)

        leave(Supervisor(prepared.args, listener=listener, on_serving=announce).run())


def _take_keys_from_environment(args: ServerArgs) -> None:
    """Keys on a command line can be read by every user of the machine."""
    for name in SECRETS:
        if getattr(args, name) is None:
            setattr(args, name, os.environ.get(f"RADIX_{name.upper()}"))
    args.validate()


def _resolved(args: ServerArgs) -> dict[str, Any]:
    """The settings that are decided at start, with their values, after the checks of a start that
    need no weights; of weights that are here already the headers are read. Raises ConfigError."""
    prepared = prepare_model(args, fetch=False)
    Auth(args, routes={})  # whether its files of keys can be read
    # It loads torch, which a server's first process does not need.
    build = import_module("radix_runtime.engine.planned_model").PlannedModel
    folder = None if prepared.size is None else Path(prepared.args.model_path or "")
    planned = build(prepared.config, prepared.args, folder)
    planned.check()
    facts: dict[str, Any] = planned.settings
    tokenizer = served_tokenizer(prepared.args, prepared.config.vocab_size)
    if tokenizer is None:
        return facts
    return {**facts, **find_format(args, tokenizer).facts()}


def _announce(prepared: Prepared, url: str, info: Info) -> None:
    """Logs what is served, and what of it may surprise."""
    args = prepared.args
    lines = served_lines(
        args.served_model_name or DEMO_MODEL_NAME,
        url,
        config=prepared.config,
        size=prepared.size,
        quantization=args.quantization,
        takes_text=not args.skip_tokenizer_init,
        info=info,
    )
    for line in lines:
        log.info("%s", line)
    if args.api_processes > 1:
        log.info("%d API processes share the port", args.api_processes)
    if args.skip_tokenizer_init:
        log.info("no tokenizer: token ids only, by /generate with input_ids")
    elif not info["has_chat_template"]:
        log.warning(
            "this model has no chat template: /v1/chat/completions refuses, /v1/completions works; "
            "--chat-template gives it one"
        )
    warning = pool_warning(int(info["max_total_num_tokens"] or 0), int(info["max_context"] or 0))
    if warning is not None:
        log.warning("%s", warning)


def _warn_if_open(args: ServerArgs, listener: socket.socket) -> None:
    address = listener.getsockname()[0]
    has_key = args.api_key is not None or args.api_key_file is not None
    if not has_key and not ipaddress.ip_address(address).is_loopback:
        log.warning(
            "ANYBODY WHO REACHES %s:%d CAN USE THIS SERVER: set --api-key-file",
            args.host,
            args.port,
        )
