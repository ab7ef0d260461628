"""`radix serve`: checks what can be checked without a model, then runs the supervisor."""

from __future__ import annotations

import argparse
import ipaddress
import logging

from .. import hf
from ..config import ServerArgs
from ..log import setup_logging
from ..model_config import ModelConfig
from ..server.supervisor import Supervisor, bind_port
from .flags import add_model_argument, add_server_flags, explain, server_args

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_server_flags(parser)
    parser.add_argument("--explain-config", action="store_true", help="print every setting and exit")


def run(namespace: argparse.Namespace) -> int:
    args = server_args(namespace)
    if namespace.explain_config:
        print(explain(args))
        return 0
    setup_logging("radix", args.log_level)
    log.info("settings (* = not the default):\n%s", explain(args))
    _warn_if_open(args)
    listener = bind_port(args.host, args.port)
    try:
        resolve_model(args)
        config = ModelConfig.from_dir(args.model_path or "", args.json_model_override_args)
        config.check_tp(args.tp_size)
        return Supervisor(args, listener).run()
    finally:
        listener.close()


def resolve_model(args: ServerArgs) -> None:
    """Makes the paths local, so that nothing looks at the network later; clients keep the name
    that was given. Raises ConfigError."""
    if args.served_model_name is None:
        args.served_model_name = args.model_path or hf.DEMO_MODEL_NAME
    weights = args.load_format != "dummy"
    args.model_path = str(hf.resolve_model_path(args.model_path, weights=weights))
    if args.tokenizer_path is not None:
        args.tokenizer_path = str(hf.resolve_model_path(args.tokenizer_path, weights=False))


def _warn_if_open(args: ServerArgs) -> None:
    try:
        local = ipaddress.ip_address(args.host).is_loopback
    except ValueError:
        local = args.host == "localhost"
    if not local and args.api_key is None and args.api_key_file is None:
        log.warning("ANYBODY WHO REACHES %s:%d CAN USE THIS SERVER: set --api-key-file", args.host, args.port)
